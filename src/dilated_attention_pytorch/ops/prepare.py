"""Operands in the form that the kernels require: positive scale, unit last stride, zeros at padded keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dilated_attention_pytorch.precision import accumulation_dtype


def with_scale(query: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """The query with the sign of the scale folded in, and the positive scale (None: ``1 / sqrt(D)``).

    Kernels take the row maximum before scaling, which is only correct for a positive scale. They multiply scores of
    hidden keys, -inf, by the scale: one that is 0, or that their numbers round to 0, is folded in as well.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    least = torch.finfo(accumulation_dtype(query.dtype)).tiny
    if abs(scale) < least:
        return query * (scale / least), least
    return (-query, -scale) if scale < 0.0 else (query, scale)


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor with a last stride of 1, which the kernels assume."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def without_padding(tensor: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Keys or values ``[B, M, G, D]``, zero where ``key_padding_mask [B, M]`` is True.

    The kernels multiply padded rows by 0, and 0 * NaN is NaN.
    """
    return tensor if key_padding_mask is None else tensor.masked_fill(key_padding_mask[:, :, None, None], 0.0)
