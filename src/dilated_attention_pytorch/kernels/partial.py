"""The kernels that take views of a partial, behind one interface.

Views are ``[problems, problems, rows(, D)]`` with a contiguous last dimension; any stride elsewhere, 0 included. The
native kernels take a whole partial in place instead: see :mod:`.native`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import fused, products
from .products import KeepFactors, Result


class Kernel(NamedTuple):
    """The kernel of a partial over views, forward and backward."""

    forward: Callable[..., Result]
    """Output and log-sum-exp of one partial; arguments as in :func:`.products.forward`."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]
    """Gradients of one partial under the merged ``out`` and ``lse``, which is +inf in rows without a key.

    Arguments as in :func:`_products_backward`. The last gradient is that of the bias; only matrix products have it."""


def _products_backward(
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
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
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


def _fused_forward(
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
    assert keep_factors is None
    assert not is_pair
    return Result(*fused.forward(query, key, value, bias, is_causal=is_causal, scale=scale))


def _fused_backward(
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
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, None]:
    assert grad_lse is rest is None
    assert keep_factors is None
    assert not needs_bias
    return *fused.backward(grad_out, query, key, value, out, lse, bias, is_causal=is_causal, scale=scale), None


def _problems(bias: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor | None]]:
    """Ranges of the second problem axis per launch: all, or one each if padding differs between them."""
    if bias is None:
        yield slice(None), None
        return
    for problem in range(count):
        yield slice(problem, problem + 1), bias[:, problem, 0] < 0


def _triton_forward(
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
    assert keep_factors is None
    assert not is_pair
    assert not is_causal, "rows of other ranks and of caches are seen by all queries of a partial"
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
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, None]:
    assert grad_lse is rest is None
    assert keep_factors is None
    assert not is_causal
    assert not needs_bias
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
    return grad_query, grad_key, grad_value, None


PRODUCTS = Kernel(products.forward, _products_backward)
FUSED = Kernel(_fused_forward, _fused_backward)
TRITON = Kernel(_triton_forward, _triton_backward)
