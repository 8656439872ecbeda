"""Rotary position embeddings of queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.precision import float64_device


class Rotary(NamedTuple):
    """Cosines and sines of the rotation angles, ``[N, 1, D / 2]`` or ``[B, N, 1, D / 2]``, float32 or float64."""

    cos: Tensor
    sin: Tensor


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """The rotation for ``positions`` (``[N]`` or ``[B, N]``): angle ``p * theta ** (-2 i / D)`` for pair i."""
    # A float32 product is off by a fraction of a radian beyond a million positions; float64 costs N * D / 2 numbers.
    device = float64_device(positions.device)
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    angles = (positions.to(device).to(torch.float64).unsqueeze(-1) * theta**-pairs).unsqueeze(-2)
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Rotary(angles.cos().to(dtype).to(positions.device), angles.sin().to(dtype).to(positions.device))


def rotate(heads: Tensor, turn: Rotary) -> Tensor:
    """Rotate ``heads [B, N, heads, D]`` in pairs (i, i + D / 2), in the rotation's dtype; returns their own dtype."""
    first, second = heads.to(turn.cos.dtype).chunk(2, dim=-1)
    turned = torch.cat([first * turn.cos - second * turn.sin, second * turn.cos + first * turn.sin], dim=-1)
    return turned.to(heads.dtype)
