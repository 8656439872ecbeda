"""Operands as the kernels take them: a scale that is not negative, rows of stride 1, nothing at padded keys."""

from __future__ import annotations

import math

from torch import Tensor


def with_scale(query: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """The query and a factor of the scores that is not negative, ``1 / sqrt(D)`` for None; of the query's gradient too.

    Kernels look for the row maximum before they scale, which is right for positive factors only.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    return (-query, -scale) if scale < 0.0 else (query, scale)


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor with a last dimension of stride 1: kernels read it as if it were, whatever it is."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def without_padding(tensor: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Keys or values ``[B, M, G, D]``, zero where ``key_padding_mask [B, M]`` is True.

    Not even a NaN at a padded key may reach a result: 0 * NaN is NaN.
    """
    return tensor if key_padding_mask is None else tensor.masked_fill(key_padding_mask[:, :, None, None], 0.0)
