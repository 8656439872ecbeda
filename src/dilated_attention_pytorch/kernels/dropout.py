"""Counter-based dropout of merged probabilities: each pair's draw depends only on its position, head and seed."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.mixing import shifted_right, splitmix64

# Odd multipliers of murmur3's 32-bit mixer.
_MURMUR = (-2048144789, -1028477387)


def drawn_seed(device: torch.device) -> Tensor:
    """A seed drawn from PyTorch's random state of the device, an int64 scalar."""
    # On Metal, PyTorch draws integers of 32 bits only, whatever the bounds.
    return torch.randint(2**31 - 1 if device.type == "mps" else 2**62, (), device=device)


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
        batch, heads, query_rows, key_rows: broadcastable integer tensors: the index of the
            sequence in the batch, the query head, and the absolute rows of query and key.
        dropout_p: probability of dropping a pair, ``0 <= p < 1``.
        dtype: dtype of the factors.

    Returns:
        Tensor of the broadcast shape. Equal indices give equal factors, whatever slabs they are computed in.
    """
    queries = splitmix64(splitmix64(splitmix64(seed + batch) + heads) + query_rows)
    keys = splitmix64(splitmix64(seed + 1) + key_rows)
    state = queries.to(torch.int32) ^ keys.to(torch.int32)
    state = (state ^ shifted_right(state, 16, 32)) * _MURMUR[0]
    state = (state ^ shifted_right(state, 13, 32)) * _MURMUR[1]
    threshold = round(dropout_p * 2**32) - 2**31
    return (state >= threshold).to(dtype) * (1.0 / (1.0 - dropout_p))
