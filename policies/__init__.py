"""What to decide: pure functions over frozen values. Nothing here awaits, reads a clock or draws a random number."""
