"""Idempotency-Key: one request, one run, whoever repeats it and wherever the repetition arrives."""
