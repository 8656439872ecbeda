"""The fit of rates to timings, and rank correlation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_STEPS_PER_FEATURE = 10
_SETTLED = 1e-10
_REWEIGHTINGS = 5
_QUADRATIC_UP_TO = 0.1


def fit_seconds(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative seconds per unit of every feature that minimise the sum of ``huber(predicted / measured - 1)``.

    Errors are relative, since candidates are compared within a shape: a call of a millisecond counts as much as
    one of a second. Huber's loss is quadratic up to 0.1 and linear beyond, which limits the influence of disturbed
    timings. Rates are non-negative, so that predictions stay positive outside the measured range. Solved by
    iteratively reweighted least squares.

    Args:
        counts: features of every timing, ``[timings][features]``.
        seconds: measured times, each above 0.

    >>> [round(x, 9) for x in fit_seconds([[1.0, 10.0], [1.0, 20.0], [1.0, 40.0]], [12.0, 22.0, 42.0])]
    [2.0, 1.0]
    """
    rows = torch.tensor(counts, dtype=torch.float64) / torch.tensor(seconds, dtype=torch.float64)[:, None]
    norms = rows.norm(dim=0)
    norms = norms.where(norms > 0, 1.0)
    rows = rows / norms
    weights = torch.ones(len(rows), dtype=torch.float64)
    for _ in range(_REWEIGHTINGS):
        solution = _least_squares(rows, weights)
        errors = (rows @ solution - 1).abs()
        weights = (_QUADRATIC_UP_TO / errors.clamp(min=_SETTLED)).clamp(max=1.0)
    return tuple((solution / norms).tolist())


def _least_squares(rows: Tensor, weights: Tensor) -> Tensor:
    """Non-negative x that minimises ``sum weight (row . x - 1)^2``, by the active-set method of Lawson and Hanson.

    Source: C. L. Lawson and R. J. Hanson, Solving Least Squares Problems, 1974, chapter 23.
    """
    root = weights.sqrt()
    matrix, target = rows * root[:, None], root
    solution = torch.zeros_like(rows[0])
    positive = torch.zeros_like(solution, dtype=torch.bool)
    for _ in range(_STEPS_PER_FEATURE * len(solution) + 1):
        slopes = (matrix.T @ (target - matrix @ solution)).masked_fill(positive, -math.inf)
        if slopes.max() <= _SETTLED:
            return solution
        positive[slopes.argmax()] = True
        wanted = _on(positive, matrix, target)
        while bool((wanted[positive] <= 0).any()):
            # Step towards the unconstrained solution until a component reaches zero, and fix that one at zero.
            below = positive & (wanted <= 0)
            step = (solution[below] / (solution[below] - wanted[below])).nan_to_num(0.0).min()
            solution = solution + step * (wanted - solution)
            positive &= ~(below & (solution <= _SETTLED))
            solution = solution.where(positive, 0.0)
            wanted = _on(positive, matrix, target)
        solution = wanted
    raise ArithmeticError(
        f"the fit of the rates did not converge in {_STEPS_PER_FEATURE} steps a feature: {solution.tolist()}"
    )


def _on(positive: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    """The least-squares solution restricted to the features in ``positive``, zero elsewhere."""
    solution = torch.zeros_like(matrix[0])
    solution[positive] = torch.linalg.lstsq(matrix[:, positive], target[:, None]).solution[:, 0]
    return solution


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation: 1 for the same order, -1 for the opposite. Ties share a rank.

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
    # Ties get their mean rank.
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]
