"""Kernel selection for a partial, and a common interface of the kernels that take views.

Views are ``[problems, problems, rows(, D)]`` with a contiguous last dimension; any stride elsewhere, 0 included. The
native kernels take a whole partial in place instead: see :mod:`.native`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from . import fused, native, products
from .products import KeepFactors, Result

Kernel = Literal["native", "triton", "fused", "products"]


def reads_listed_rows(impl: str, num_rows: int) -> bool:
    """Whether the kernel of a call reads remote keys row by row in place, for that many query rows per key/value
    head; otherwise visible rows must be contiguous."""
    return impl == "native" and num_rows <= native.ROWS_OF_STREAM


def forward(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    keep_factors: KeepFactors | None,
    *,
    is_causal: bool,
    scale: float,
    is_pair: bool,
) -> Result:
    """Output and log-sum-exp of one partial; arguments as in :func:`.products.forward`."""
    if kernel == "products":
        return products.forward(
            query, key, value, bias, keep_factors, is_causal=is_causal, scale=scale, is_pair=is_pair
        )
    if kernel == "triton":
        return _triton_forward(query, key, value, bias, scale)
    return Result(*fused.forward(query, key, value, bias, is_causal=is_causal, scale=scale))


def backward(
    kernel: Kernel,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    bias: Tensor | None,
    keep_factors: KeepFactors | None,
    *,
    is_causal: bool,
    scale: float,
    needs_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of one partial under the merged ``out`` and ``lse``, which is +inf in rows without a key.

    The last one is that of the bias, summed over the queries, if ``needs_bias``; only matrix products have it.
    """
    if kernel == "products":
        delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        if grad_lse is not None:
            delta -= grad_lse
        return products.backward(
            grad_out,
            query,
            key,
            value,
            lse,
            rest,
            delta,
            bias,
            keep_factors,
            is_causal=is_causal,
            scale=scale,
            needs_bias=needs_bias,
        )
    assert not needs_bias
    if kernel == "triton":
        return *_triton_backward(grad_out, query, key, value, out, lse, bias, scale), None
    return *fused.backward(grad_out, query, key, value, out, lse, bias, is_causal=is_causal, scale=scale), None


def _problems(bias: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor | None]]:
    """Ranges of the second problem axis per launch: all, or one each if padding differs between them."""
    if bias is None:
        yield slice(None), None
        return
    for problem in range(count):
        yield slice(problem, problem + 1), bias[:, problem, 0] < 0


def _triton_forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Result:
    from .triton import launch

    parts = [
        launch.attend_rows(
            *(x[:, some].transpose(1, 2) for x in (query, key, value)), scale=scale, key_padding_mask=hidden
        )
        for some, hidden in _problems(bias, query.shape[1])
    ]
    out, lse = (torch.cat(part, dim=2).transpose(1, 2) for part in zip(*parts, strict=True))
    return Result(out, lse)


def _triton_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from .triton import launch

    parts = [
        launch.attend_rows_backward(
            *(x[:, some].transpose(1, 2) for x in (query, key, value)),
            *(x[:, some].transpose(1, 2).contiguous() for x in (out, lse, grad_out)),
            scale=scale,
            key_padding_mask=hidden,
        )
        for some, hidden in _problems(bias, query.shape[1])
    ]
    grad_query, grad_key, grad_value = (torch.cat(part, dim=2).transpose(1, 2) for part in zip(*parts, strict=True))
    return grad_query, grad_key, grad_value
