"""The side door for operators: metrics, health and status, on a listener of its own."""
