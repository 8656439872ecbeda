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

from dilated_attention_pytorch.kernels.rounding import NAMES, Exact, Tally, Verdict, allowed_errors, exact_results
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern

from .shapes import Case, Computes

_STRETCHES = 24


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A query row of one head and one sequence."""

    batch: int
    head: int
    row: int


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
    tallies = {name: Tally(case.torch_dtype) for name in names}
    query, key, value = (tensor.detach() for tensor in operands)
    ratio, scale = case.heads // case.kv_heads, 1 / math.sqrt(case.head_dim)
    for batch, kv_head in itertools.product(range(case.batch), range(case.kv_heads)):
        here = [sample for sample in samples if (sample.batch, sample.head // ratio) == (batch, kv_head)]
        k, v = key[batch, :, kv_head].double(), value[batch, :, kv_head].double()
        heads = slice(kv_head * ratio, (kv_head + 1) * ratio)
        of_query = _zeros(k, case.num_queries, ratio, case.head_dim) if grads is not None else None
        of_keys = [_zeros(k, *k.shape) for _ in range(2)] if grads is not None else []
        for sample in here:
            row, head = sample.row - case.query_offset, sample.head
            counts = row_counts(case, sample.row, kv_head, computes, k.device)
            seen = counts.nonzero().squeeze(1)
            ks, vs, q = k[seen], v[seen], query[batch, row, head].double()[None]
            p = (scale * q @ ks.mT + counts[seen].log()).softmax(-1)
            g = None if grad_out is None else grad_out[batch, row, head].double()[None]
            exact_out, *exact_grads = exact_results(p, q, ks, vs, scale, g)
            tallies["out"].add(out[batch, row, head].detach()[None], exact_out)
            if of_query is None:
                continue
            for total, part in zip(of_query, exact_grads[0], strict=True):
                total[row, head - heads.start] += part[0]
            for totals, parts in zip(of_keys, exact_grads[1:], strict=True):
                for total, part in zip(totals, parts, strict=True):
                    total.index_add_(0, seen, part)
        if grads is not None and of_query is not None:
            tallies["grad_query"].add(grads[0][batch, :, heads], of_query)
            tallies["grad_key"].add(grads[1][batch, :, kv_head], of_keys[0])
            tallies["grad_value"].add(grads[2][batch, :, kv_head], of_keys[1])
    groups = len(case.segment_lengths)
    allowed = allowed_errors(case.torch_dtype, head_dim=case.head_dim, num_keys=case.rows, num_groups=groups)
    return Verdict.of(tallies, allowed)


def _zeros(like: Tensor, *shape: int) -> Exact:
    return Exact(like.new_zeros(shape), like.new_zeros(shape))
