"""The published LongNet algorithm, written plainly: per group gather, pad, flash attention, scatter; then merge all.

The algorithm of the authors' code (torchscale, ``dilated_attention.py``), with two corrections that make it equal the
definition in output and gradient, at negligible cost: padding keys are removed from the softmax, and
the merge weights are differentiated. The shorter last segment is a separate call, so that the sequence itself
is not padded.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels import fused
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.patterns.dilated import DilationGroup


def published_attention(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, *, is_causal: bool) -> Tensor:
    """Attention under ``pattern`` by the published algorithm: ``[B, N, H, D]``, differentiable.

    Args:
        query: ``[B, N, H, D]``.
        key, value: ``[B, N, G, D]`` with G dividing H.
        pattern: dilation groups without shifts and with ragged tails.
        is_causal: a query attends only to keys at or before its own position.
    """
    outs, lses = [], []
    for group in pattern.groups:
        for start, stop, length in _runs_of_segments(group, query.shape[1]):
            out, lse = _Group.apply(query, key, value, group, start, stop, length, is_causal)
            outs.append(out)
            lses.append(lse)
    stacked = torch.stack(lses)
    # A row that no group selects has only -inf: its softmax and its gradient would be NaN.
    stacked = torch.where((stacked == -math.inf).all(0), 0.0, stacked)
    weights = torch.softmax(stacked, dim=0).unsqueeze(-1).to(query.dtype)
    merged = torch.zeros_like(query)
    for out, weight in zip(outs, weights, strict=True):
        merged = merged + out * weight
    return merged


def _runs_of_segments(group: DilationGroup, num_rows: int) -> list[tuple[int, int, int]]:
    """First row, stop row and segment length of the whole segments, and of the shorter last one."""
    length = group.segment_length
    whole = num_rows // length * length
    runs = [(0, whole, length), (whole, num_rows, num_rows - whole)]
    return [run for run in runs if run[0] < run[1]]


class _Classes(NamedTuple):
    """Row indices of every class of some segments."""

    places: Tensor
    """Indices into rows times heads, int64 ``[segments, heads, class rows]``; 0 where a class is shorter."""
    exists: Tensor | None
    """Validity of the indices, bool ``[heads, class rows]``; None if all classes are equally long."""


@functools.lru_cache(maxsize=16)
def _classes(
    group: DilationGroup, start: int, stop: int, length: int, num_kv_heads: int, num_heads: int, device: torch.device
) -> _Classes:
    """The classes of the segments of ``length`` rows in ``[start, stop)``; cached, since the authors use views."""
    rate, ratio = group.dilation_rate, num_heads // num_kv_heads
    offsets = [group.offset(head // ratio, num_kv_heads) for head in range(num_heads)]
    class_rows = -(-length // rate)
    within = torch.tensor(offsets, device=device)[:, None] + rate * torch.arange(class_rows, device=device)
    rows = torch.arange(start, stop, length, device=device)[:, None, None] + within
    places = rows * num_heads + torch.arange(num_heads, device=device)[:, None]
    if max(offsets) + rate * (class_rows - 1) < length:
        return _Classes(places, None)
    exists = within < length
    return _Classes(places.masked_fill_(~exists, 0), exists)


def _gather(tensor: Tensor, classes: _Classes) -> Tensor:
    """``[B, N, H, D]`` to ``[B * segments, H, class rows, D]``, zero-padded for shorter classes."""
    rows = tensor.flatten(1, 2).index_select(1, classes.places.flatten())
    gathered = rows.view(tensor.shape[0], *classes.places.shape, tensor.shape[3])
    if classes.exists is not None:
        gathered = gathered.masked_fill(~classes.exists[..., None], 0.0)
    return gathered.flatten(0, 1)


def _scatter(gathered: Tensor, classes: _Classes, like: Tensor, fill: float = 0.0) -> Tensor:
    """The inverse of :func:`_gather`: a dense tensor, with ``fill`` at rows of no class."""
    dense = torch.full(like.shape, fill, dtype=gathered.dtype, device=like.device)
    rows, places = gathered.unflatten(0, (like.shape[0], -1)).flatten(1, 3), classes.places.flatten()
    if classes.exists is not None:
        exists = classes.exists.expand(classes.places.shape).flatten()
        rows, places = rows[:, exists], places[exists]
    dense.flatten(1, 2).index_copy_(1, places, rows)
    return dense


def _real_share(classes: _Classes, lse: Tensor, *, is_causal: bool) -> Tensor | None:
    """Fraction of every row's softmax on real keys, 1 for rows without keys. None if it is 1 everywhere.

    A padding key has score 0, so n of them have the mass ``n exp(-lse)``. They come last: with the causal mask no real
    row attends to one.
    """
    if is_causal or classes.exists is None:
        return None
    missing = (~classes.exists).sum(1)
    share = 1.0 - missing[:, None] * torch.exp(-lse)
    return share.masked_fill(missing[:, None] == classes.exists.shape[1], 1.0)


class _Group(torch.autograd.Function):
    """One dilation group over some of its segments: dense output and log-sum-exp, both differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: DilationGroup,
        start: int,
        stop: int,
        length: int,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor]:
        num_heads, num_kv_heads, scale = query.shape[2], key.shape[2], query.shape[3] ** -0.5
        of_query = _classes(group, start, stop, length, num_kv_heads, num_heads, query.device)
        of_key = _classes(group, start, stop, length, num_kv_heads, num_kv_heads, query.device)
        q = _gather(query, of_query)
        k, v = (_gather(x, of_key).repeat_interleave(num_heads // num_kv_heads, 1) for x in (key, value))
        out, lse = fused.forward(q, k, v, None, is_causal=is_causal, scale=scale)
        out, share = out.to(query.dtype), _real_share(of_query, lse, is_causal=is_causal)
        real_out = out if share is None else out / share.unsqueeze(-1).to(out.dtype)
        real_lse = lse if share is None else lse + share.log()
        dense_out = _scatter(real_out, of_query, query)
        dense_lse = _scatter(real_lse.unsqueeze(-1), of_query, query[..., :1], -math.inf)
        ctx.save_for_backward(query, key, value, q, k, v, out, lse)
        ctx.options = (of_query, of_key, is_causal, scale)
        return dense_out, dense_lse.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, q, k, v, out, lse = ctx.saved_tensors
        of_query, of_key, is_causal, scale = ctx.options
        # The softmax without padding is P / share, which is also the gradient of its log-sum-exp, so the score gradient
        # is P / share * (dP - rowsum(dO * O) + dL). The kernel computes P * (dP' - rowsum(dO' * O')): with dO' = dO /
        # share, O' is the O without padding, shifted along dO' so that the row sum matches.
        g, g_lse = _gather(grad_out, of_query), _gather(grad_lse.unsqueeze(-1), of_query)
        share = _real_share(of_query, lse, is_causal=is_causal)
        if share is not None:
            share = share.unsqueeze(-1)
            g, out, g_lse = g / share.to(g.dtype), out / share.to(out.dtype), g_lse / share
        size = (g * g).sum(-1, keepdim=True, dtype=lse.dtype)
        moved = out - torch.where(size > 0, g_lse / size, 0.0).to(out.dtype) * g
        grad_q, grad_k, grad_v = fused.backward(g, q, k, v, moved, lse, None, is_causal=is_causal, scale=scale)
        ratio = query.shape[2] // key.shape[2]
        grad_k, grad_v = (x.unflatten(1, (-1, ratio)).sum(2) for x in (grad_k, grad_v))
        return (
            _scatter(grad_q, of_query, query).to(query.dtype),
            _scatter(grad_k, of_key, key).to(key.dtype),
            _scatter(grad_v, of_key, value).to(value.dtype),
            None,
            None,
            None,
            None,
            None,
        )
