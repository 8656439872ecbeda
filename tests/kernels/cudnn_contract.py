"""PyTorch's two cuDNN operators on CPU tensors: dense arithmetic that first refuses what cuDNN would not take.

They are registered for the true operators, so that PyTorch checks every call against their schemas.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


@dataclass
class Contract:
    """What was asked of the operators, and which dtypes they take."""

    dtypes: tuple[torch.dtype, ...] = HALF
    num_forward: int = 0
    num_backward: int = 0
    layouts: dict[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)
    """By what PyTorch looks a plan of the backward up with: the layouts that it bakes in without looking at them."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        self.num_forward += 1
        self.check_operands(query, key, value, dropout_p, is_causal, scale)
        assert (attn_bias, compute_log_sumexp, return_debug_mask) == (None, True, False)
        _, v, s = scores(query, key, value, is_causal, scale)
        lse = s.logsumexp(-1)
        out = torch.empty_like(query).copy_(torch.exp(s - lse.unsqueeze(-1)) @ v)
        seed = torch.zeros((), dtype=torch.int64)
        return out, lse.unsqueeze(-1), None, None, query.shape[2], key.shape[2], seed, seed.clone(), None

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        philox_seed: Tensor,
        philox_offset: Tensor,
        attn_bias: Tensor | None,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.num_backward += 1
        self.check_operands(query, key, value, dropout_p, is_causal, scale)
        assert (attn_bias, cum_seq_q, cum_seq_k) == (None, None, None)
        assert (max_q, max_k) == (query.shape[2], key.shape[2])
        assert philox_seed.dtype == philox_offset.dtype == torch.int64
        # PyTorch's plans for the backward are kept by query, key and value alone: what else they read has to lie as
        # PyTorch's own forward lays it out, or a later call would read it wrongly.
        for tensor in (out, grad_out):
            assert tensor.shape == query.shape
            assert tensor.dtype == query.dtype
            assert tensor.stride() == torch.empty_like(query).stride()
            assert tensor.data_ptr() % 16 == 0
        assert logsumexp.shape == (*query.shape[:3], 1)
        assert logsumexp.stride() == torch.empty(logsumexp.shape).stride()
        assert logsumexp.dtype == (torch.float32 if query.dtype in HALF else query.dtype)
        layout = (out.stride(), grad_out.stride(), logsumexp.stride())
        name = tuple((tensor.shape, tensor.stride()) for tensor in (query, key, value))
        assert self.layouts.setdefault((name, is_causal), layout) == layout

        k, v, s = scores(query, key, value, is_causal, scale)
        accumulate = s.dtype
        g, o, q = (tensor.to(accumulate) for tensor in (grad_out, out, query))
        p = torch.exp(s - logsumexp)
        d_s = p * (g @ v.mT - (g * o).sum(-1, keepdim=True))
        grads = (scale * d_s @ k, scale * d_s.mT @ q, p.mT @ g)
        heads = key.shape[1]
        summed = [grads[0], *(grad.unflatten(1, (heads, -1)).sum(2) for grad in grads[1:])]
        grad_query, grad_key, grad_value = (
            torch.empty_like(tensor).copy_(grad) for tensor, grad in zip((query, key, value), summed, strict=True)
        )
        return grad_query, grad_key, grad_value

    def check_operands(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
    ) -> None:
        batch, heads, rows, width = query.shape
        assert key.shape == value.shape
        assert key.shape[::3] == (batch, width)
        assert heads % key.shape[1] == 0
        assert max(batch, heads) <= 65535
        assert rows > 1
        assert key.shape[2] > 1
        assert width % 8 == 0
        assert width <= 128
        assert dropout_p == 0.0
        assert scale is not None
        assert math.isfinite(scale)
        # With more keys than queries, or fewer, cuDNN and FlashAttention align the mask differently.
        assert not is_causal or rows == key.shape[2]
        for tensor in (query, key, value):
            assert tensor.dtype in self.dtypes
            assert tensor.stride(3) == 1
            assert tensor.data_ptr() % 16 == 0
            for stride in tensor.stride()[:3]:
                assert stride > 0
                assert stride * tensor.element_size() % 16 == 0


def scores(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of every query head, and the scores, in the accumulation dtype."""
    accumulate = torch.float32 if query.dtype in HALF else query.dtype
    k, v = (x.to(accumulate).repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    s = scale * query.to(accumulate) @ k.mT
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return k, v, s


@contextlib.contextmanager
def on_the_cpu(*, dtypes: tuple[torch.dtype, ...] = HALF) -> Iterator[Contract]:
    """The two operators for CPU tensors."""
    contract = Contract(dtypes)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", contract.forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", contract.backward, "CPU")
    try:
        yield contract
    finally:
        library._destroy()
