"""Rates fitted to timings, and how well a prediction ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SWEEPS = 20000
_SETTLED = 1e-10
_REWEIGHTINGS = 5
_QUADRATIC_UP_TO = 0.1


def fit_seconds(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative seconds per unit of every feature that minimise the sum of ``huber(predicted / measured - 1)``.

    Relative errors: a candidate is compared with others of its shape, so a call of a millisecond counts as much as
    one of a second. Huber's loss, quadratic up to a tenth and linear beyond, so that a call which something else on the
    machine made longer bends the others little. Not below zero: no work takes time away, and a prediction stays
    positive where nothing was measured. Solved by coordinate descent on the normal equations, which are convex, with
    weights from the solution before.

    Args:
        counts: the features of every timing, ``[timings][features]``.
        seconds: the measured times, each above 0.

    >>> [round(x, 9) for x in fit_seconds([[1.0, 10.0], [1.0, 20.0], [1.0, 40.0]], [12.0, 22.0, 42.0])]
    [2.0, 1.0]
    """
    rows = [[count / time for count in row] for row, time in zip(counts, seconds, strict=True)]
    norms = [math.sqrt(sum(value * value for value in column)) or 1.0 for column in zip(*rows, strict=True)]
    scaled = [[value / norm for value, norm in zip(row, norms, strict=True)] for row in rows]
    solution = [0.0] * len(norms)
    weights = [1.0] * len(scaled)
    for _ in range(_REWEIGHTINGS):
        solution = _least_squares(scaled, weights, solution)
        errors = [abs(sum(a * x for a, x in zip(row, solution, strict=True)) - 1) for row in scaled]
        weights = [min(1.0, _QUADRATIC_UP_TO / max(error, _SETTLED)) for error in errors]
    return tuple(value / norm for value, norm in zip(solution, norms, strict=True))


def _least_squares(rows: list[list[float]], weights: list[float], start: list[float]) -> list[float]:
    """Non-negative x that minimises ``sum weight (row . x - 1)^2``."""
    columns = list(zip(*rows, strict=True))
    weighted = [[weight * value for weight, value in zip(weights, column, strict=True)] for column in columns]
    gram = [[sum(a * b for a, b in zip(one, other, strict=True)) for other in columns] for one in weighted]
    target = [sum(column) for column in weighted]
    solution = list(start)
    for _ in range(_SWEEPS):
        moved = 0.0
        for index, row in enumerate(gram):
            if row[index] == 0.0:
                continue
            slope = sum(a * x for a, x in zip(row, solution, strict=True)) - target[index]
            new = max(0.0, solution[index] - slope / row[index])
            moved = max(moved, abs(new - solution[index]))
            solution[index] = new
        if moved < _SETTLED:
            break
    return solution


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, 1 for the same order, -1 for the opposite. Equal values share a rank.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    first, second = _ranks(one), _ranks(other)
    mean = (len(first) - 1) / 2
    product = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    squares = [sum((rank - mean) ** 2 for rank in ranks) for ranks in (first, second)]
    return product / math.sqrt(squares[0] * squares[1]) if all(squares) else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    # The mean of the places that equal values take.
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]
