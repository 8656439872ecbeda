"""xPos: rotary positions with exponential decay, computed without overflow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilated_attention_pytorch.ops import attend
from dilated_attention_pytorch.patterns import DilatedPattern
from dilated_attention_pytorch.precision import cast_by_autocast, float64_device, without_autocast

_THETA = 10_000
_SHARE = 0.4
"""The first frequency decays by ``0.4 / 1.4`` over ``scale_base`` positions, the last one hardly at all."""

# Largest span of the factors of one call, in binary orders of magnitude. Half grow and half shrink, which leaves the
# rest of the dtype's range for the operands: 2**8 in float16, 2**77 in float32 and bfloat16.
_ORDERS = {torch.float16: 16, torch.bfloat16: 100, torch.float32: 100, torch.float64: 900}


@dataclass(frozen=True, slots=True)
class XPos:
    """The constants of torchscale's xPos (Sun et al. 2022, arXiv 2212.10554) for heads of an even width D.

    Pair j of a head is rotated by the angle ``p / 10000^(2j / D)`` at position p, and the product of a query at p and a
    key at t is scaled by ``zeta_j^((p - t) / scale_base)``, ``zeta_j = (2j + 0.4 D) / (1.4 D)``. Only that product
    matters: torchscale scales the query by ``zeta^(p / scale_base)`` and the key by its inverse, which overflow.
    """

    head_dim: int
    scale_base: float

    def decays(self, device: torch.device) -> Tensor:
        """zeta, float32 ``[D / 2]``, rounded as torchscale's buffer ``xpos.scale``."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        return (pairs + _SHARE * self.head_dim) / ((1 + _SHARE) * self.head_dim)

    def num_rows_within(self, dtype: torch.dtype) -> int:
        """Number of rows that the factors of one call may span in ``dtype``, at least 1."""
        steepest = math.log((1 + _SHARE) / _SHARE) / self.scale_base
        return max(1, int(_ORDERS[dtype] * math.log(2) / steepest))

    def turned(self, x: Tensor, positions: Tensor, distances: Tensor) -> Tensor:
        """Rows rotated by their positions and multiplied by ``zeta^(distance / scale_base)``.

        Args:
            x: ``[B, N, H, D]``.
            positions: int64 ``[N]``, on a device with float64.
            distances: float64 ``[N]``.
        """
        half = self.head_dim // 2
        # Angles are rounded to float32, as they were when the weights were trained.
        frequency = 1.0 / (_THETA ** (torch.arange(half, dtype=torch.float32, device=positions.device) / half))
        angle = (positions.float()[:, None] * frequency).double()
        factor = self.decays(positions.device).double() ** (distances / self.scale_base)[:, None]
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = ((part * factor).to(dtype).to(x.device)[:, None] for part in (angle.cos(), angle.sin()))
        even, odd = x.to(dtype).unflatten(-1, (half, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


def attend_with_xpos(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    xpos: XPos,
    *,
    is_causal: bool = False,
    query_offset: int = 0,
    boundaries: Sequence[int] | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """:func:`attend` with xPos: ``s[p, t] = scale * sum_j zeta_j^((p - t) / scale_base) * <turned q, turned k>_j``.

    With a causal mask every factor ``zeta^((p - t) / scale_base)`` is at most 1, and any length works: as many queries
    as the dtype's range allows share a centre c, ``q zeta^((p - c) / scale_base)`` is multiplied by
    ``k zeta^((c - t) / scale_base)``, and factors that underflow would not have contributed to the score.

    Without a causal mask, scores grow as ``zeta^-((t - p) / scale_base)`` for keys after the query: the length is
    limited by the range of float32 (float64 for float64); float16 is computed in float32 where necessary.

    Args:
        query: ``[B, N, H, D]``, row 0 at position ``query_offset``, which must be 0 without ``is_causal``.
        key, value: ``[B, M, H, D]`` from position 0 on.
        pattern: a pattern without segment shifts.
        xpos: the constants.
        boundaries: first row of every packed document, and the number of rows; needs ``query_offset`` 0.
        is_causal, dropout_p: see :func:`attend`.

    Raises:
        ValueError: without ``is_causal``, the scores of that many rows overflow the dtype.
    """
    query, key, value = cast_by_autocast(query, key, value)
    rows = xpos.num_rows_within(query.dtype)
    ends = (0, key.shape[1]) if boundaries is None else tuple(boundaries)
    longest = max(stop - start for start, stop in itertools.pairwise(ends))
    if longest > rows and not is_causal:
        if query.dtype == torch.float16:
            with without_autocast(query.device.type):
                out = attend_with_xpos(
                    query.float(), key.float(), value.float(), pattern, xpos, boundaries=boundaries, dropout_p=dropout_p
                )
            return out.to(query.dtype)
        raise ValueError(
            "xPos without is_causal multiplies the score of query p and a later key t by up to "
            f"{(1 + _SHARE) / _SHARE:.1f}^((t - p) / {xpos.scale_base:g}), which {query.dtype} holds for sequences of "
            f"at most {rows} rows, got {longest}; pass is_causal=True, shorter sequences, or a wider dtype"
        )
    if longest > rows or query_offset:
        outs = []
        for start, stop in itertools.pairwise(ends):
            q, k, v = (x[:, start:stop] for x in (query, key, value))
            outs.append(_causal_rows(q, k, v, pattern, xpos, query_offset, rows, dropout_p))
        return torch.cat(outs, dim=1)
    device = float64_device(query.device)
    starts = torch.tensor(ends[:-1], device=device)
    lengths = torch.tensor(ends[1:], device=device) - starts
    positions = torch.arange(ends[-1], device=device) - starts.repeat_interleave(lengths)
    distances = positions.double() - lengths.repeat_interleave(lengths) / 2
    return attend(
        xpos.turned(query, positions, distances),
        xpos.turned(key, positions, -distances),
        value,
        pattern,
        is_causal=is_causal,
        dropout_p=dropout_p,
        cu_seqlens=None if boundaries is None else torch.tensor(ends, dtype=torch.int32),
        heads_first=False,
    )


def _causal_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: DilatedPattern,
    xpos: XPos,
    query_offset: int,
    rows: int,
    dropout_p: float,
) -> Tensor:
    """Queries of one sequence in chunks of ``rows``, each with the keys that any of them may attend to."""
    # Slabs do not know the whole sequence's padding keys; under a causal mask no query attends to them anyway.
    ragged = replace(pattern, tail="ragged")
    outs = [query[:, :0]]
    for start in range(0, query.shape[1], rows):
        part = query[:, start : start + rows]
        first = query_offset + start
        last = first + part.shape[1]
        seen = min(first // length * length for length in pattern.segment_lengths)
        positions = torch.arange(seen, last, device=float64_device(query.device))
        distances = positions.double() - (first + last) / 2
        of_query = slice(first - seen, None)
        outs.append(
            attend(
                xpos.turned(part, positions[of_query], distances[of_query]),
                xpos.turned(key[:, seen:last], positions, -distances),
                value[:, seen:last],
                ragged,
                is_causal=True,
                query_offset=first,
                key_offset=seen,
                dropout_p=dropout_p,
                heads_first=False,
            )
        )
    return torch.cat(outs, dim=1)
