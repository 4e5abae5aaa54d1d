"""Least squares over a few columns, none of whose weights may be negative. Normal equations, no library."""

from __future__ import annotations

from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]


def solve(matrix: Matrix, right: Sequence[float]) -> list[float]:
    """Gauss, without pivots: for positive definite matrices, which a ridge makes of any sum of squares."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for at in range(size):
        for below in range(at + 1, size):
            factor = rows[below][at] / rows[at][at]
            for column in range(at, size + 1):
                rows[below][column] -= factor * rows[at][column]
    found = [0.0] * size
    for at in reversed(range(size)):
        known = sum(rows[at][column] * found[column] for column in range(at + 1, size))
        found[at] = (rows[at][size] - known) / rows[at][at]
    return found


def nonnegative(matrix: Matrix, right: Sequence[float]) -> list[float]:
    """The same, those that would be negative held at 0, the most negative first."""
    free = list(range(len(right)))
    found: list[float] = []
    while free:
        found = solve([[matrix[i][j] for j in free] for i in free], [right[i] for i in free])
        least = min(range(len(free)), key=lambda at: found[at])
        if found[least] >= 0 or len(free) == 1:
            break
        del free[least]
    weights = [0.0] * len(right)
    for at, weight in zip(free, found, strict=True):
        weights[at] = max(0.0, weight)
    return weights
