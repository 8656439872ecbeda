"""Dense attention between rows that were picked out before, such as the rows of a cache: one partial, no gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels import aten, blockwise
from dilated_attention_pytorch.kernels.select import select

from .merge import AttentionOutput


@torch.no_grad()
def attend_rows(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> AttentionOutput:
    """The partial in which every query sees every key, for :func:`merge`. For inference: it has no gradient.

    Args:
        query: ``[B, N, H, D]``; key, value: ``[B, M, G, D]`` with M at least 1 and G dividing H. Not checked.
        scale: factor of the scores; ``1 / sqrt(D)`` without it.

    Returns:
        ``AttentionOutput(out [B, N, H, D], lse [B, N, H])``, ``out`` in the accumulation dtype where the kernel
        computes in it, else in the query's.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if select("auto", query.device, query.dtype, query.shape[-1]) == "triton":
        from dilated_attention_pytorch.kernels.triton import launch

        return AttentionOutput(*launch.attend_rows(query, key, value, scale=scale))
    ratio = query.shape[2] // key.shape[2]
    # One problem per key/value head: the queries that share it are rows of the problem, so nothing is repeated.
    batch, rows, _, head_dim = query.shape
    q = query.unflatten(2, (-1, ratio)).permute(0, 2, 1, 3, 4).reshape(batch, key.shape[2], rows * ratio, head_dim)
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    if aten.is_fused(q, has_bias=False):
        out, lse = aten.fused_forward(q, k, v, None, is_causal=False, scale=scale)
    else:
        out, lse = blockwise.blockwise_forward(q, k, v, (), is_causal=False, scale=scale)
    out = out.unflatten(2, (rows, ratio)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    return AttentionOutput(out, lse.unflatten(2, (rows, ratio)).permute(0, 2, 1, 3).flatten(2, 3))
