"""The executor as operators of ``torch.library``: traced by torch.compile, counted by FlopCounterMode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dilated_attention_pytorch.patterns import pattern_from_spec
from dilated_attention_pytorch.patterns.flops import backward_flops, forward_flops, pair_flops

from . import host
from .call import NUM_LEAVES, SCHEMA, Call
from .derivatives import refuse_tangents, save, saved_gradients
from .implementations import IMPLEMENTATIONS
from .tiles import num_pairs
from .weighted_sum import factors_of


def call_of(*arguments: Any) -> Call:
    """The call from the arguments of an operator, :meth:`.Call.for_operator`."""
    call = Call(*arguments)
    pattern = None if call.block_sizes else pattern_from_spec(str(call.pattern))
    return call._replace(pattern=pattern, impl=IMPLEMENTATIONS[call.impl])


def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; see :func:`dilated_attention_pytorch.attend_with_lse`."""
    call = call_of(*arguments)
    refuse_tangents(*call.leaves)
    out, lse = call.impl.forward(call)
    return out, lse


def _attend_backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """Gradients of the call's differentiable fields from the merged output and log-sum-exp; empty for None."""
    call = call_of(*arguments)
    refuse_tangents(*call.leaves, grad_out, grad_lse)
    grads = call.by_leaf(call.impl.backward(call, grad_out, grad_lse, out, lse))
    return tuple(lse.new_empty(0) if grad is None else grad for grad in grads)


def _weighted_sum(
    axis: str, values: Tensor | None, factors: list[Tensor | None], lse: Tensor, *arguments: Any
) -> Tensor:
    """A weighted sum per query, key or listed block, in the accumulation dtype; see :mod:`.weighted_sum`."""
    return host.weighted_sum(call_of(*arguments), axis, values, factors_of(factors), lse)


_OPERATORS = (
    ("attend", _attend, "", "(Tensor, Tensor)"),
    (
        "attend_backward",
        _attend_backward,
        "Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, ",
        f"({', '.join(['Tensor'] * NUM_LEAVES)})",
    ),
    ("weighted_sum", _weighted_sum, "str axis, Tensor? values, Tensor?[] factors, Tensor lse, ", "Tensor"),
)
attend, attend_backward, weighted_sum = (
    torch.library.custom_op(
        f"dilated_attention_pytorch::{name}", function, mutates_args=(), schema=f"({before}{SCHEMA}) -> {result}"
    )
    for name, function, before, result in _OPERATORS
)


@attend.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = call_of(*arguments)
    query = call.query
    out = torch.empty(call.shape_of_out, dtype=query.dtype, device=query.device)
    return out, torch.empty(query.shape[:3], dtype=call.dtype, device=query.device)


@attend_backward.register_fake
def _(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(
        lse.new_empty(0) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in call_of(*arguments).leaves
    )


@weighted_sum.register_fake
def _(axis: str, values: Tensor | None, factors: list[Tensor | None], lse: Tensor, *arguments: Any) -> Tensor:
    call = call_of(*arguments)
    like = {"queries": call.query, "keys": call.key, "blocks": call.blocks}[axis]
    assert like is not None
    return lse.new_empty(like.shape if values is None else (*like.shape[:3], values.shape[3]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    save(ctx, call_of(*inputs), output)


attend.register_autograd(saved_gradients, setup_context=_save)


@register_flop_formula(torch.ops.dilated_attention_pytorch.attend, get_raw=True)
def _attend_flops(*arguments: Any, out_val: Any = None, **_: Any) -> int:
    """Two matrix products over exactly the pairs of the pattern: scores, and the sum of values."""
    call = call_of(*arguments)
    return forward_flops(num_pairs(call), call.query.shape[-1], call.value.shape[-1])


@register_flop_formula(torch.ops.dilated_attention_pytorch.attend_backward, get_raw=True)
def _attend_backward_flops(*arguments: Any, out_val: Any = None, **_: Any) -> int:
    """Five matrix products, including the recomputation of the scores, as PyTorch counts its own attention."""
    call = call_of(*arguments[4:])
    return backward_flops(num_pairs(call), call.query.shape[-1], call.value.shape[-1])


@register_flop_formula(torch.ops.dilated_attention_pytorch.weighted_sum, get_raw=True)
def _weighted_sum_flops(*arguments: Any, out_val: Any = None, **_: Any) -> int:
    """The scores, the factors and the sum: two operations per pair and column."""
    (_, values, factors, _), call = arguments[:4], call_of(*arguments[4:])
    lefts = [left for left in factors[::3] if left is not None]
    columns = call.query.shape[-1] + sum(x.shape[-1] for x in (values, *lefts) if x is not None)
    return pair_flops(num_pairs(call), columns, products=1)
