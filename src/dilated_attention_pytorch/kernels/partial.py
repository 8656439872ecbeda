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
from .products import BlockTerms, KeepFactors, Result


class PartialCall(NamedTuple):
    """What a partial is computed from; see :func:`.products.forward`."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    keep_factors: KeepFactors | None
    terms: BlockTerms | None
    is_causal: bool
    scale: float


class MergedViews(NamedTuple):
    """The merged results in the rows of a partial, and the gradients that come for them."""

    grad_out: Tensor
    grad_lse: Tensor | None
    out: Tensor
    lse: Tensor
    """+inf in rows without a key."""
    rest: Tensor | None


Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Of query, key, value and, by matrix products only, the bias."""


class Kernel(NamedTuple):
    """The kernel of a partial over views, forward and backward."""

    forward: Callable[[PartialCall, bool], Result]
    """Output and log-sum-exp, as a pair if the second argument says so."""
    backward: Callable[[PartialCall, MergedViews, bool], Gradients]
    """Gradients under the merged results; of the bias, too, if the third argument says so."""


def _products_forward(call: PartialCall, is_pair: bool) -> Result:
    return products.forward(*call[:6], is_causal=call.is_causal, scale=call.scale, is_pair=is_pair)


def _products_backward(call: PartialCall, merged: MergedViews, needs_bias: bool) -> Gradients:
    dtype = merged.lse.dtype
    delta = (merged.grad_out.to(dtype) * merged.out.to(dtype)).sum(-1)
    if merged.grad_lse is not None:
        delta -= merged.grad_lse
    return products.backward(
        merged.grad_out,
        *call[:3],
        merged.lse,
        merged.rest,
        delta,
        call.bias,
        call.keep_factors,
        call.terms,
        is_causal=call.is_causal,
        scale=call.scale,
        needs_bias=needs_bias,
    )


def _fused_forward(call: PartialCall, is_pair: bool) -> Result:
    assert call.keep_factors is None
    assert call.terms is None
    assert not is_pair
    return Result(*fused.forward(*call[:4], is_causal=call.is_causal, scale=call.scale))


def _fused_backward(call: PartialCall, merged: MergedViews, needs_bias: bool) -> Gradients:
    assert merged.grad_lse is merged.rest is None
    assert call.keep_factors is None
    assert call.terms is None
    assert not needs_bias
    of_query, of_key, of_value = fused.backward(
        merged.grad_out, *call[:3], merged.out, merged.lse, call.bias, is_causal=call.is_causal, scale=call.scale
    )
    return of_query, of_key, of_value, None


def _problems(bias: Tensor | None, count: int) -> Iterator[tuple[slice, Tensor | None]]:
    """Ranges of the second problem axis per launch: all, or one each if padding differs between them."""
    if bias is None:
        yield slice(None), None
        return
    for problem in range(count):
        yield slice(problem, problem + 1), bias[:, problem, 0] < 0


def _triton_forward(call: PartialCall, is_pair: bool) -> Result:
    assert call.keep_factors is None
    assert call.terms is None
    assert not is_pair
    assert not call.is_causal, "rows of other ranks and of caches are seen by all queries of a partial"
    from .triton import launch

    parts = [
        launch.attend_rows(*(x[:, heads].transpose(1, 2) for x in call[:3]), scale=call.scale, key_padding_mask=hidden)
        for heads, hidden in _problems(call.bias, call.query.shape[1])
    ]
    out, lse = (torch.cat(part, dim=2).transpose(1, 2) for part in zip(*parts, strict=True))
    return Result(out, lse)


def _triton_backward(call: PartialCall, merged: MergedViews, needs_bias: bool) -> Gradients:
    assert merged.grad_lse is merged.rest is None
    assert call.keep_factors is None
    assert call.terms is None
    assert not call.is_causal
    assert not needs_bias
    from .triton import launch

    parts = [
        launch.attend_rows_backward(
            *(x[:, heads].transpose(1, 2) for x in call[:3]),
            *(x[:, heads].transpose(1, 2).contiguous() for x in (merged.out, merged.lse, merged.grad_out)),
            scale=call.scale,
            key_padding_mask=hidden,
        )
        for heads, hidden in _problems(call.bias, call.query.shape[1])
    ]
    grad_query, grad_key, grad_value = (torch.cat(part, dim=2).transpose(1, 2) for part in zip(*parts, strict=True))
    return grad_query, grad_key, grad_value, None


PRODUCTS = Kernel(_products_forward, _products_backward)
FUSED = Kernel(_fused_forward, _fused_backward)
TRITON = Kernel(_triton_forward, _triton_backward)
