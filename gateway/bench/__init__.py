"""Benchmarks of the product: how good the scheduler is, beside what others do and beside what cannot be beaten."""
