"""Results compared with the definition in float64, and the errors that rounding explains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.precision import accumulation_dtype

NAMES = ("out", "grad_query", "grad_key", "grad_value")
_CANCELLED = 0.01


class Exact(NamedTuple):
    """A result by the definition, and the sums of the absolute values of the terms that it is a sum of."""

    value: Tensor
    terms: Tensor


def exact_results(
    probabilities: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, grad_out: Tensor | None
) -> list[Exact]:
    """The output of one softmax and, under ``grad_out``, the gradients of query, key and value: those of ``NAMES``.

    Probabilities are ``[..., R, K]``, query ``[..., R, D]``, key and value ``[..., K, D]``, ``grad_out`` is like the
    output ``[..., R, D]``; all are float64.
    """
    out = Exact(probabilities @ value, probabilities @ value.abs())
    if grad_out is None:
        return [out]
    p = scale * probabilities
    of_scores = p * (grad_out @ value.mT - (grad_out * out.value).sum(-1, keepdim=True))
    terms = p * (grad_out.abs() @ value.abs().mT + (grad_out * out.value).abs().sum(-1, keepdim=True))
    return [
        out,
        Exact(of_scores @ key, terms @ key.abs()),
        Exact(of_scores.mT @ query, terms.mT @ query.abs()),
        Exact(probabilities.mT @ grad_out, probabilities.mT @ grad_out.abs()),
    ]


def allowed_errors(dtype: torch.dtype, *, head_dim: int, num_keys: int, num_groups: int) -> tuple[float, float]:
    """Error bounds from rounding: of a whole result, and of one element relative to the terms of its sum.

    A value is rounded to storage as a probability (or its gradient), as each group's result, and when merged: ``n + 2``
    roundings of ``u`` for n groups. They add linearly in the worst element and in quadrature over the whole result.
    In addition, in the accumulation dtype: scores of D products of magnitude up to about ``sqrt(D)``, sums over the
    keys, and in bfloat16 on the CPU a polynomial exponential (7.1e-5, see tests/support/error_budget.py).
    """
    storage = torch.finfo(dtype).eps / 2
    accumulation = torch.finfo(accumulation_dtype(dtype)).eps / 2
    scores = 2 * (head_dim + 8) * math.sqrt(head_dim) * accumulation
    sums = 2 * math.sqrt(num_keys) * accumulation
    exponential = 2.0**-13 if dtype == torch.bfloat16 else 4 * accumulation
    roundings = max(1, num_groups) + 2
    exact = scores + sums + exponential
    return math.sqrt(roundings) * storage + exact, roundings * storage + exact


class Tally:
    """Sums of squared errors and of squared expected values, and the worst element, of one result."""

    def __init__(self, dtype: torch.dtype) -> None:
        # Below the smallest normal number rounding errors are absolute; float16 gradients get there.
        self.smallest = torch.finfo(dtype).tiny
        self.error = self.size = self.terms = self.worst = 0.0

    def add(self, got: Tensor, exact: Exact) -> None:
        """Compare a part of the result with the definition."""
        difference = got.double() - exact.value
        self.error += float(difference.square().sum())
        self.size += float(exact.value.square().sum())
        self.terms += float(exact.terms.square().sum())
        self.worst = max(self.worst, _nan_last(float((difference.abs() / (exact.terms + self.smallest)).max())))

    @property
    def relative(self) -> float:
        """Error of the result relative to its size."""
        if self.error == 0.0:
            return 0.0
        # Where terms cancel to less than a hundredth, as with a single key, only their rounding errors remain.
        size = math.sqrt(self.size) + _CANCELLED * math.sqrt(self.terms)
        return math.sqrt(self.error) / size if size else math.inf


@dataclass(frozen=True, slots=True)
class Verdict:
    """Errors of results, and the bounds from rounding."""

    errors: dict[str, float]
    """Relative error of every result, as far as it was compared."""
    worst_elements: dict[str, float]
    """Largest elementwise error of every result, relative to the sum of the absolute values of its terms."""
    allowed: float
    allowed_of_elements: float

    @classmethod
    def of(cls, tallies: dict[str, Tally], allowed: tuple[float, float]) -> Verdict:
        """The verdict on results by name."""
        errors = {name: tally.relative for name, tally in tallies.items()}
        return cls(errors, {name: tally.worst for name, tally in tallies.items()}, *allowed)

    @property
    def passes(self) -> bool:
        """Whether rounding explains every error; False for NaN."""
        as_a_whole = all(error <= self.allowed for error in self.errors.values())
        return as_a_whole and all(error <= self.allowed_of_elements for error in self.worst_elements.values())

    def describe(self) -> str:
        """The largest error, for a table."""
        name = max(self.errors, key=lambda key: _nan_last(self.errors[key]))
        element = max(self.worst_elements, key=lambda key: _nan_last(self.worst_elements[key]))
        return (
            f"{name} is off by {self.errors[name]:.1e} of its size (rounding explains {self.allowed:.1e}), "
            f"an element of {element} by {self.worst_elements[element]:.1e} of its terms "
            f"(rounding explains {self.allowed_of_elements:.1e})"
        )


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
