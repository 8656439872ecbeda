"""Dropout of merged probabilities by counter: whether a pair is kept depends on its place, not on who computes it."""

from __future__ import annotations

import torch
from torch import Tensor

# Odd multipliers of well-known integer mixers: splitmix64 (Steele et al. 2014) and the 32-bit mixer of murmur3.
_SPLITMIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
_MURMUR = (-2048144789, -1028477387)


def keep_factors(
    seed: Tensor,
    batch: Tensor,
    heads: Tensor,
    query_rows: Tensor,
    key_rows: Tensor,
    dropout_p: float,
    dtype: torch.dtype,
) -> Tensor:
    """``1 / (1 - p)`` where the pair (query row, key row) of a sequence and query head is kept, else 0.

    Args:
        seed: int64 scalar tensor.
        batch, heads, query_rows, key_rows: integer tensors that broadcast against each other: the index of the
            sequence in the batch, of the query head, and the absolute rows of query and key.
        dropout_p: probability of dropping a pair, ``0 <= p < 1``.
        dtype: of the factors.

    Returns:
        Tensor of the broadcast shape. Equal places give equal factors, in whatever slabs they are asked for.
    """
    queries = _mix64(_mix64(_mix64(seed + batch) + heads) + query_rows)
    keys = _mix64(_mix64(seed + 1) + key_rows)
    state = queries.to(torch.int32) ^ keys.to(torch.int32)
    state = (state ^ _shifted(state, 16, 32)) * _MURMUR[0]
    state = (state ^ _shifted(state, 13, 32)) * _MURMUR[1]
    threshold = round(dropout_p * 2**32) - 2**31
    return (state >= threshold).to(dtype) * (1.0 / (1.0 - dropout_p))


def _shifted(state: Tensor, by: int, width: int) -> Tensor:
    """Shift right with zeros coming in; PyTorch's own shift repeats the sign."""
    return (state >> by) & ((1 << (width - by)) - 1)


def _mix64(state: Tensor) -> Tensor:
    state = state + _SPLITMIX[0]
    state = (state ^ _shifted(state, 30, 64)) * _SPLITMIX[1]
    state = (state ^ _shifted(state, 27, 64)) * _SPLITMIX[2]
    return state ^ _shifted(state, 31, 64)
