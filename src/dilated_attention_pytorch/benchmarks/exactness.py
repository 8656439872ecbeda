"""The correctness gate: sampled rows of a large call, and all gradients through them, against the definition.

The output gradient is zero except at the sampled rows, so the gradients of all keys and values follow exactly
from those rows alone, and the expected values use nothing that a contestant computed.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import DilatedPattern, Pattern
from dilated_attention_pytorch.precision import accumulation_dtype

from .shapes import Case, Computes

NAMES = ("out", "grad_query", "grad_key", "grad_value")
_STRETCHES = 24
_CANCELLED = 0.01


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A query row of one head and one sequence."""

    batch: int
    head: int
    row: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """A contestant's errors and the bounds from rounding."""

    errors: dict[str, float]
    """Relative error of the sampled part of every result."""
    worst_elements: dict[str, float]
    """Largest elementwise error of every result, relative to the sum of the absolute values of its terms."""
    allowed: float
    allowed_of_elements: float

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


def row_counts(case: Case, row: int, kv_head: int, computes: Computes, device: torch.device) -> Tensor:
    """``c[row, t]`` for every key position t, straight from the definition: float64 ``[rows]``."""
    query, keys = torch.tensor([row], device=device), torch.arange(case.rows, device=device)
    own = _pattern_of(case, computes).for_heads([kv_head], case.kv_heads)
    return own.counts(query, keys, 1, is_causal=case.causal)[0, 0].double()


@functools.lru_cache(maxsize=4)
def _pattern_of(case: Case, computes: Computes) -> Pattern:
    return DilatedPattern([case.rows], [1]) if computes == "dense" else case.pattern


def draw_samples(case: Case) -> list[SampledRow]:
    """Rows at both ends, at the end of the shortest segment and throughout the sequence; heads in turn."""
    generator = random.Random(0)
    if case.mode == "decode":
        return [SampledRow(0, head, case.rows - 1) for head in range(case.heads)]
    shortest = min(case.segment_lengths, default=case.block_size)
    bounds = [case.rows * part // _STRETCHES for part in range(_STRETCHES + 1)]
    rows = {0, case.rows - 1, shortest - 1, shortest}
    rows |= {generator.randrange(a, b) for a, b in itertools.pairwise(bounds) if a < b}
    heads = itertools.cycle(generator.sample(range(case.heads), case.heads))
    batches = itertools.cycle(range(case.batch))
    return [SampledRow(next(batches), next(heads), row) for row in sorted(rows) if 0 <= row < case.rows]


def sampled_gradient(case: Case, samples: Sequence[SampledRow], like: Tensor) -> Tensor:
    """The output gradient: normal random at the samples, zero elsewhere."""
    grad = torch.zeros_like(like, requires_grad=False)
    generator = torch.Generator().manual_seed(1)
    for sample in samples:
        grad[sample.batch, sample.row - case.query_offset, sample.head] = torch.randn(
            case.head_dim, generator=generator
        ).to(like)
    return grad


def allowed_errors(case: Case) -> tuple[float, float]:
    """Error bounds from rounding: of a whole result, and of one element relative to the terms of its sum.

    A value is rounded to storage as a probability (or its gradient), as each group's result, and when merged: ``n + 2``
    roundings of ``u`` for n groups. They add linearly in the worst element and in quadrature over the whole result.
    In addition, in the accumulation dtype: scores of D products of magnitude up to about ``sqrt(D)``, sums over the
    keys, and in bfloat16 on the CPU a polynomial exponential (7.1e-5, see tests/support/error_budget.py).
    """
    dtype = case.torch_dtype
    storage = torch.finfo(dtype).eps / 2
    accumulation = torch.finfo(accumulation_dtype(dtype)).eps / 2
    scores = 2 * (case.head_dim + 8) * math.sqrt(case.head_dim) * accumulation
    sums = 2 * math.sqrt(case.rows) * accumulation
    exponential = 2.0**-13 if dtype == torch.bfloat16 else 4 * accumulation
    roundings = max(1, len(case.segment_lengths)) + 2
    exact = scores + sums + exponential
    return math.sqrt(roundings) * storage + exact, roundings * storage + exact


class _Tally:
    """Sums of squared errors and of squared expected values, and the worst element, of one result."""

    def __init__(self, dtype: torch.dtype) -> None:
        # Below the smallest normal number rounding errors are absolute; float16 gradients get there.
        self.smallest = torch.finfo(dtype).tiny
        self.error = self.size = self.terms = self.worst = 0.0

    def add(self, got: Tensor, expected: Tensor, terms: Tensor) -> None:
        difference = got.double() - expected
        self.error += float(difference.square().sum())
        self.size += float(expected.square().sum())
        self.terms += float(terms.square().sum())
        self.worst = max(self.worst, _nan_last(float((difference.abs() / (terms + self.smallest)).max())))

    @property
    def relative(self) -> float:
        if self.error == 0.0:
            return 0.0
        # Where terms cancel to less than a hundredth, as with a single key, only their rounding errors remain.
        size = math.sqrt(self.size) + _CANCELLED * math.sqrt(self.terms)
        return math.sqrt(self.error) / size if size else math.inf


def judge(
    case: Case,
    computes: Computes,
    samples: Sequence[SampledRow],
    operands: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    grad_out: Tensor | None = None,
    grads: Sequence[Tensor] | None = None,
) -> Verdict:
    """Compare ``out`` at the samples, and all gradients under ``grad_out``, with the dense definition.

    Args:
        case: the call.
        computes: "pattern" counts pairs by the pattern, "dense" counts every pair once.
        samples: rows to check.
        operands: query ``[B, N, H, D]``, key and value ``[B, M, G, D]``.
        out: the contestant's output, ``[B, N, H, D]``.
        grad_out: :func:`sampled_gradient` of the same samples, if gradients are checked.
        grads: the contestant's gradients of query, key and value under it.
    """
    names = NAMES if grads is not None else NAMES[:1]
    tallies = {name: _Tally(case.torch_dtype) for name in names}
    query, key, value = (tensor.detach() for tensor in operands)
    ratio = case.heads // case.kv_heads
    for batch, kv_head in itertools.product(range(case.batch), range(case.kv_heads)):
        here = [sample for sample in samples if (sample.batch, sample.head // ratio) == (batch, kv_head)]
        k, v = key[batch, :, kv_head].double(), value[batch, :, kv_head].double()
        # For each gradient: the expected value, and the sum of the absolute values of its terms.
        heads = slice(kv_head * ratio, (kv_head + 1) * ratio)
        of_query = k.new_zeros(2, case.num_queries, ratio, case.head_dim) if grads is not None else None
        of_key, of_value = (k.new_zeros(2, *k.shape) for _ in range(2)) if grads is not None else (None, None)
        for sample in here:
            row, head = sample.row - case.query_offset, sample.head
            counts = row_counts(case, sample.row, kv_head, computes, k.device)
            seen = counts.nonzero().squeeze(1)
            ks, vs, q = k[seen], v[seen], query[batch, row, head].double()
            scores = ks @ q / math.sqrt(case.head_dim) + counts[seen].log()
            p = scores.softmax(0)
            expected = p @ vs
            tallies["out"].add(out[batch, row, head].detach(), expected, p @ vs.abs())
            if grads is None:
                continue
            assert grad_out is not None
            assert of_query is not None
            assert of_key is not None
            assert of_value is not None
            g = grad_out[batch, row, head].double()
            p = p / math.sqrt(case.head_dim)
            d_scores = p * (vs @ g - g @ expected)
            terms = p * (vs.abs() @ g.abs() + g.abs() @ expected.abs())
            of_query[0, row, head - heads.start] += d_scores @ ks
            of_query[1, row, head - heads.start] += terms @ ks.abs()
            of_key[0].index_add_(0, seen, torch.outer(d_scores, q))
            of_key[1].index_add_(0, seen, torch.outer(terms, q.abs()))
            p = p * math.sqrt(case.head_dim)
            of_value[0].index_add_(0, seen, torch.outer(p, g))
            of_value[1].index_add_(0, seen, torch.outer(p, g.abs()))
        if grads is not None:
            assert of_query is not None
            assert of_key is not None
            assert of_value is not None
            tallies["grad_query"].add(grads[0][batch, :, heads], of_query[0], of_query[1])
            tallies["grad_key"].add(grads[1][batch, :, kv_head], of_key[0], of_key[1])
            tallies["grad_value"].add(grads[2][batch, :, kv_head], of_value[0], of_value[1])
    errors = {name: tally.relative for name, tally in tallies.items()}
    worst = {name: tally.worst for name, tally in tallies.items()}
    return Verdict(errors, worst, *allowed_errors(case))
