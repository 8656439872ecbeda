"""Derivatives of attention of any order, forward and reverse mode, expressed as weighted sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad
from torch.autograd.function import Function

from dilated_attention_pytorch.tracing import constant_of_graph

from .dispatch import is_dual_level, is_recorded, is_seen
from .weighted_sum import (
    Axis,
    Factor,
    Operands,
    Operators,
    Tangents,
    by_sequence,
    less,
    moved_scores,
    nestable,
    ones_of,
    tangent_of,
    weighted_sum,
)


class Attend(Function):
    """Output and log-sum-exp: ``Attend.apply(operators, value, *operands)``."""

    @staticmethod
    def forward(operators: Operators, value: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
        return operators.forward(Operands(*operands), value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.operators, value, *operands = inputs
        # In the order in which the operators save them: activation checkpointing matches tensors by order alone and
        # may run the operator in the forward pass and this function in the recomputation.
        tensors = (*operands[:2], value, *operands[2:], *output)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, *others, out, lse = ctx.saved_tensors
        grads = gradients(ctx.operators, value, Operands(query, key, *others), grad_out, grad_lse, out, lse)
        return (None, grads[2], grads[0], grads[1], grads[3], None, None, None)

    @staticmethod
    @nestable
    def jvp(ctx: Any, saved: list[Any], *tangents: Any) -> tuple[Tensor, Tensor]:
        query, key, value, *others, out, lse = saved
        _, value_tangent, query_tangent, key_tangent, gate_tangent, *_ = tangents
        moved = Tangents(query_tangent, key_tangent, value_tangent, gate_tangent)
        return _tangents_of_outputs(ctx.operators, value, Operands(query, key, *others), lse, moved, out.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        return by_sequence(Attend, info.batch_size, in_dims, inputs)


class _Computed(Attend):
    """:class:`Attend` where only autograd observes the call: the dispatcher is skipped."""

    @staticmethod
    def forward(operators: Operators, value: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
        return operators.compute(Operands(*operands), value)


# `Function.apply` first binds the arguments to a signature; only torch.func transforms need that.
_computed = super(Function, _Computed).apply


def attend_operands(operators: Operators, value: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, with derivatives of any order.

    Raises:
        NotImplementedError: torch.compile traces a ``torch.func`` derivative through it.
    """
    if not is_seen(value, *operands):
        if is_recorded(value, *operands):
            out, lse = _computed(operators, value, *operands)
            return out, lse
        return operators.compute(operands, value)
    if torch.compiler.is_compiling():
        if _is_differentiated_by_transforms():
            raise NotImplementedError(
                "torch.compile cannot trace torch.func derivatives (grad, vjp, jvp, ...) of this attention: "
                'call them outside torch.compile, or attend with impl="reference"'
            )
        return operators.forward(operands, value)
    if not is_transformed(value, *operands):
        return operators.forward(operands, value)  # the operator has its own gradient
    out, lse = Attend.apply(operators, value, *operands)
    return out, lse


@constant_of_graph
def _is_differentiated_by_transforms() -> bool:
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() in (TransformType.Grad, TransformType.Jvp) for level in levels)


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether forward-mode tangents or torch.func transforms are active; the operators support neither."""
    return torch._C._are_functorch_transforms_active() or (is_dual_level() and _has_tangents(*tensors))


def _has_tangents(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise if a tensor with a tangent reaches an operator, compiled or called directly; it would be dropped silently.

    Raises:
        NotImplementedError: a tensor has an active tangent.
    """
    if not is_dual_level():
        return
    # Operators run below the autograd keys; tangents are visible only with no key excluded.
    everything = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), everything):
        is_lost = _has_tangents(*tensors)
    if is_lost:
        raise NotImplementedError(
            "this operator does not propagate forward-mode tangents when compiled or called directly: call attend "
            "or attend_blocks on dual tensors outside torch.compile"
        )


def gradients(
    operators: Operators,
    value: Tensor,
    operands: Operands,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key, value and log-gates, themselves differentiable."""
    if grad_out is None and grad_lse is None:
        return None, None, None, None
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    tensors = (grad_out, grad_lse, out, lse, value, *operands)
    if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or is_transformed(*tensors)):
        grads = _Gradients.apply(operators, *tensors)
    elif not is_seen(grad_out, grad_lse, value, *operands):
        grads = operators.compute_gradients(operands, value, grad_out, grad_lse, out, lse)
    else:
        grads = operators.backward(operands, value, grad_out, grad_lse, out, lse)
    return (*grads, None) if len(grads) == 3 else grads


class _Gradients(Function):
    """Gradients of query, key, value and, if given, log-gates.

    ``out`` and ``lse`` are functions of the other operands, and derivatives flow through those; they get no gradient.
    """

    @staticmethod
    def forward(
        operators: Operators,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        value: Tensor,
        *operands: Any,
    ) -> tuple[Tensor, ...]:
        return operators.backward(Operands(*operands), value, grad_out, grad_lse, out, lse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.operators, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Vector-Jacobian product: ``<gradients, grads>`` is the directional derivative of the loss; its gradient needs
        the tangents of the gradients and of the outputs."""
        grad_out, grad_lse, out, lse, value, *rest = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return (None,) * (6 + len(rest))
        operands, moved = Operands(*rest), Tangents(*grads, *(None,) * (4 - len(grads)))
        of_out, of_lse = _tangents_of_outputs(ctx.operators, value, operands, lse, moved, lse.dtype)
        of_query, of_key, of_value, of_gates = _tangents_of_gradients(
            ctx.operators, value, operands, out, lse, (grad_out, grad_lse), moved, (of_out, of_lse), (None, None)
        )
        return (
            None,
            of_out.to(grad_out.dtype),
            None if grad_lse is None else of_lse.to(grad_lse.dtype),
            None,
            None,
            of_value,
            of_query,
            of_key,
            of_gates,
            None,
            None,
            None,
        )

    @staticmethod
    @nestable
    def jvp(ctx: Any, saved: list[Any], *tangents: Any) -> tuple[Tensor, ...]:
        grad_out, grad_lse, out, lse, value, *rest = saved
        _, of_grad_out, of_grad_lse, of_out, of_lse, of_value, of_query, of_key, of_gates, *_ = tangents
        results = _tangents_of_gradients(
            ctx.operators,
            value,
            Operands(*rest),
            out,
            lse,
            (grad_out, grad_lse),
            Tangents(of_query, of_key, of_value, of_gates),
            (of_out, of_lse),
            (of_grad_out, of_grad_lse),
        )
        return tuple(result for result in results if result is not None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        return by_sequence(_Gradients, info.batch_size, in_dims, inputs)


def _tangents_of_outputs(
    operators: Operators, value: Tensor, operands: Operands, lse: Tensor, moved: Tangents, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``dL = sum P ds`` and ``dO = sum P (ds - dL) v + sum P dv``; dO in ``dtype``."""
    scores = moved_scores(operators.scale, operands, moved)
    of_out, of_lse = [], torch.zeros_like(lse)
    if scores is not None:
        ones = ones_of(operands.key)
        of_lse = weighted_sum("queries", operators, operands.undropped(), lse, ones, [scores]).squeeze(-1)
        of_out.append(weighted_sum("queries", operators, operands, lse, value, [less(scores, of_lse, ones)]))
    if moved.value is not None:
        of_out.append(weighted_sum("queries", operators, operands, lse, moved.value, []))
    total = sum(of_out) if of_out else torch.zeros_like(operands.query)
    assert isinstance(total, Tensor)
    return total.to(dtype), of_lse


def _tangents_of_gradients(
    operators: Operators,
    value: Tensor,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor | None],
    moved: Tangents,
    moved_outputs: tuple[Tensor | None, Tensor | None],
    moved_grads: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Tangents of the gradients of query, key, value and log-gates.

    With dO and dL the gradients of the outputs and ``delta = dO . O - dL``, the gradient of a score is P times
    ``dO . v - delta``, its tangent P times ``(s' - L') (dO . v - delta) + (dO . v - delta)'``, where ``'`` are
    tangents.
    """
    (grad_out, grad_lse), (of_grad_out, of_grad_lse) = grads, moved_grads
    query, key = operands.query, operands.key
    scale, dtype, ones = operators.scale, lse.dtype, ones_of(operands.key)
    of_out, of_lse = moved_outputs
    delta = _dot(grad_out, out, dtype)
    if grad_lse is not None:
        delta = delta - grad_lse
    of_delta = torch.zeros_like(delta)
    of_delta = of_delta if of_grad_out is None else of_delta + _dot(of_grad_out, out, dtype)
    of_delta = of_delta if of_out is None else of_delta + _dot(grad_out, of_out, dtype)
    of_delta = of_delta if of_grad_lse is None else of_delta - of_grad_lse
    scores = moved_scores(scale, operands, moved)
    if scores is not None:
        assert of_lse is not None
        scores = less(scores, of_lse, ones)
    product = Factor(grad_out, value)
    of_probability = _Less(product, delta)
    its_tangent = _Less(tangent_of(product, Factor(of_grad_out, moved.value)), of_delta)

    def total(axis: Axis, values: Tensor | None, of_values: Tensor | None) -> Tensor:
        """The tangent of ``sum (score gradient) * values``."""
        parts = _sums_less(axis, operators, operands, lse, values, [], its_tangent, ones)
        if scores is not None:
            parts += _sums_less(axis, operators, operands, lse, values, [scores], of_probability, ones)
        if of_values is not None:
            parts += _sums_less(axis, operators, operands, lse, of_values, [], of_probability, ones)
        result = sum(parts)
        assert isinstance(result, Tensor)
        return result

    of_value = torch.zeros_like(value, dtype=dtype)
    if scores is not None:
        of_value = of_value + weighted_sum("keys", operators, operands, lse, grad_out, [scores])
    if of_grad_out is not None:
        of_value = of_value + weighted_sum("keys", operators, operands, lse, of_grad_out, [])
    gates = operands.log_gates
    return (
        (scale * total("queries", key, moved.key)).to(query.dtype),
        (scale * total("keys", query, moved.query)).to(key.dtype),
        of_value.to(value.dtype),
        None if gates is None else total("blocks", None, None).to(gates.dtype),
    )


class _Less(NamedTuple):
    """A multiplier of the probabilities: a factor, subject to dropout, minus one number per query."""

    factor: Factor | None
    number: Tensor


def _sums_less(
    axis: Axis,
    operators: Operators,
    operands: Operands,
    lse: Tensor,
    values: Tensor | None,
    factors: list[Factor],
    last: _Less,
    ones: Tensor,
) -> list[Tensor]:
    """Terms whose sum is the weighted sum with ``factors`` times ``last``."""
    if last.factor is not None and operands.dropout_seed is None:
        both = less(last.factor, last.number, ones)
        return [weighted_sum(axis, operators, operands, lse, values, [*factors, both])]
    number = Factor(-last.number.unsqueeze(-1), ones)
    parts = [weighted_sum(axis, operators, operands.undropped(), lse, values, [*factors, number])]
    if last.factor is not None:
        parts.append(weighted_sum(axis, operators, operands, lse, values, [*factors, last.factor]))
    return parts


def _dot(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return (left.to(dtype) * right.to(dtype)).sum(-1)
