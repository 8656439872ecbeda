"""Positions in queries and keys: rotation, and scores that grow with the position."""

from __future__ import annotations

import math
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


class PositionTerms(NamedTuple):
    """What a layer does with the positions of its rows."""

    rotation: Rotary | None
    """Of queries and keys; None = none."""
    scale: Tensor | None
    """Factor of the scores of each query, ``[N, 1, 1]`` or ``[B, N, 1, 1]``, float32 or float64; None = 1."""

    def of_query(self, query: Tensor) -> Tensor:
        """Query heads ``[B, N, H, D]``, rotated and scaled."""
        query = self.of_key(query)
        return query if self.scale is None else (query.to(self.scale.dtype) * self.scale).to(query.dtype)

    def of_key(self, key: Tensor) -> Tensor:
        """Key heads ``[B, N, G, D]``, rotated."""
        return key if self.rotation is None else rotate(key, self.rotation)


def position_terms(
    positions: Tensor, head_dim: int, theta: float, scale_length: int, dtype: torch.dtype
) -> PositionTerms:
    """The terms of a layer with the rotary base ``theta`` (0 = none) and scores scaled beyond ``scale_length`` (0 =
    never): those of the query at position p by ``max(1, log(p + 1) / log(scale_length))``."""
    scale = None
    if scale_length:
        dtype_of_scale = torch.float64 if dtype == torch.float64 else torch.float32
        logs = torch.log1p(positions.to(float64_device(positions.device)).to(torch.float64)) / math.log(scale_length)
        scale = logs.clamp(min=1.0).to(dtype_of_scale).to(positions.device)[..., None, None]
    return PositionTerms(rotary(positions, head_dim, theta, dtype) if theta else None, scale)
