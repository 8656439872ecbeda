"""Derivatives of attention of any order, forward and reverse mode, expressed as weighted sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._C._functorch import TransformType
from torch.autograd import forward_ad
from torch.autograd.function import Function

from dilated_attention_pytorch.tracing import constant_of_graph

from .call import NUM_LEAVES, NUM_TENSORS, Call
from .weighted_sum import (
    Axis,
    Factor,
    Tangents,
    by_sequence,
    less,
    moved_scores,
    nestable,
    ones_of,
    refuse_terms,
    tangent_of,
    weighted_sum,
)

_OPERATORS = torch.ops.dilated_attention_pytorch

# Compilers, profilers, modes, transforms and tensor subclasses need PyTorch's dispatcher; autograd does not, since a
# `torch.autograd.Function` records the call.


def _keys(*names: str) -> DispatchKeySet:
    found = DispatchKeySet(DispatchKey.Undefined)
    for name in names:
        found = found | DispatchKeySet(getattr(DispatchKey, name))
    return found


_OF_PLAIN_TENSORS = [
    _keys(*names, *of_autograd)
    for names, of_autograd in (
        (("CUDA", "AutocastCUDA"), ("ADInplaceOrView", "AutogradCUDA")),
        (("CPU", "AutocastCPU"), ("ADInplaceOrView", "AutogradCPU")),
        (("CUDA", "AutocastCUDA"), ()),
        (("CPU", "AutocastCPU"), ()),
    )
]
"""Dispatch keys of plain strided tensors; without the autograd keys for inference tensors."""
_PLAIN_DISPATCH_STATES = [_keys("BackendSelect", "ADInplaceOrView"), _keys("BackendSelect")]
"""Thread-local dispatch keys when no mode, transform or tracer is active."""


def needs_dispatcher(*tensors: Tensor | None, is_named: bool = True) -> bool:
    """Whether anything besides autograd must observe an operator on these tensors, so that it needs the dispatcher.

    Args:
        tensors: operands.
        is_named: whether the profiler, which records operators by name, must see it too.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0 or torch.overrides.has_torch_function(tensors):
        return True
    if is_named and torch._C._autograd._profiler_enabled():
        return True
    if torch._C._dispatch_tls_local_include_set() not in _PLAIN_DISPATCH_STATES:
        return True
    for tensor in tensors:  # noqa: SIM110 - a generator costs as much as the test itself
        if tensor is not None and torch._C._dispatch_keys(tensor) not in _OF_PLAIN_TENSORS:
            return True
    return False


def is_recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records an operator on these tensors."""
    if not torch.is_grad_enabled() or torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
        return False
    for tensor in tensors:  # noqa: SIM110 - as above
        if tensor is not None and tensor.requires_grad:
            return True
    return False


_AUTOGRAD = DispatchKey.AutogradFunctionality


def is_dual_level() -> bool:
    """Whether forward-mode AD is active; a cheap test, as every call makes it."""
    return forward_ad._current_level >= 0 and forward_ad._is_fwd_grad_enabled()


class Attend(Function):
    """Output and log-sum-exp: ``Attend.apply(*call)``."""

    @staticmethod
    def forward(*call: Any) -> tuple[Tensor, Tensor]:
        out, lse = _OPERATORS.attend.default(*Call(*call).for_operator())
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        save(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:NUM_TENSORS], *output)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return saved_gradients(ctx, grad_out, grad_lse)

    @staticmethod
    @nestable
    def jvp(ctx: Any, saved: list[Any], *tangents: Any) -> tuple[Tensor, Tensor]:
        *tensors, out, lse = saved
        call = Call(*tensors, *ctx.options)
        refuse_terms(call)
        return _tangents_of_outputs(call, lse, Tangents(*tangents[:4]), out.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        return by_sequence(Attend, 0, info.batch_size, in_dims, inputs)


class _Computed(Attend):
    """:class:`Attend` where only autograd observes the call: the dispatcher is skipped."""

    @staticmethod
    def forward(*call: Any) -> tuple[Tensor, Tensor]:
        of_call = Call(*call)
        out, lse = of_call.impl.forward(of_call)
        return out, lse


# `Function.apply` first binds the arguments to a signature; only torch.func transforms need that.
_computed = super(Function, _Computed).apply


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save a call and its results for :func:`saved_gradients`, by the operator and by :class:`Attend` alike.

    Activation checkpointing matches saved tensors by order alone, and may run the operator in the forward pass and the
    function in the recomputation.
    """
    ctx.options = inputs[NUM_TENSORS:]
    ctx.save_for_backward(*inputs[:NUM_TENSORS], *output)
    ctx.set_materialize_grads(False)


def saved_gradients(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """One gradient, or None, for every field of a saved call."""
    *tensors, out, lse = ctx.saved_tensors
    call = Call(*tensors, *ctx.options)
    grads = gradients(call, grad_out, grad_lse, out, lse)
    others = NUM_TENSORS - NUM_LEAVES + len(ctx.options)
    return (*(call.by_leaf(grads) if grads else (None,) * NUM_LEAVES), *(None,) * others)


def attend_call(call: Call) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, with derivatives of any order.

    Raises:
        NotImplementedError: torch.compile traces a ``torch.func`` derivative through it.
    """
    tensors: tuple[Any, ...] = call[:NUM_TENSORS]
    if not needs_dispatcher(*tensors):
        if is_recorded(*tensors):
            out, lse = _computed(*call)
            return out, lse
        out, lse = call.impl.forward(call)
        return out, lse
    if torch.compiler.is_compiling():
        if _is_differentiated_by_transforms():
            raise NotImplementedError(
                "torch.compile cannot trace torch.func derivatives (grad, vjp, jvp, ...) of this attention: "
                'call them outside torch.compile, or attend with impl="reference"'
            )
    elif is_transformed(*tensors):
        out, lse = Attend.apply(*call)
        return out, lse
    out, lse = _OPERATORS.attend.default(*call.for_operator())  # the operator has its own gradient
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
    call: Call, grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of :attr:`.Call.leaves`, themselves differentiable; none without a gradient of a result."""
    if grad_out is None and grad_lse is None:
        return ()
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    tensors = (grad_out, grad_lse, out, lse)
    of_call: tuple[Any, ...] = call[:NUM_TENSORS]
    if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or is_transformed(*tensors, *of_call)):
        return tuple(_Gradients.apply(*tensors, *call))
    if not needs_dispatcher(grad_out, grad_lse, *of_call):
        return tuple(call.impl.backward(call, *tensors))
    return _backward_operator(call, *tensors)


def _backward_operator(call: Call, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The registered operator's gradients of :attr:`.Call.leaves`."""
    grads = _OPERATORS.attend_backward.default(*tensors, *call.for_operator())
    return tuple(grad for grad, leaf in zip(grads, call.leaves, strict=True) if leaf is not None)


class _Gradients(Function):
    """Gradients of :attr:`.Call.leaves`: ``apply(grad_out, grad_lse, out, lse, *call)``.

    ``out`` and ``lse`` are functions of the other operands, and derivatives flow through those; they get no gradient.
    """

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _backward_operator(Call(*arguments[4:]), *arguments[:4])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors = inputs[: 4 + NUM_TENSORS]
        ctx.options = inputs[4 + NUM_TENSORS :]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Vector-Jacobian product: ``<gradients, grads>`` is the directional derivative of the loss; its gradient needs
        the tangents of the gradients and of the outputs."""
        grad_out, grad_lse, out, lse, *tensors = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return (None,) * (4 + len(Call._fields))
        call = Call(*tensors, *ctx.options)
        refuse_terms(call)
        moved = Tangents(*grads, *(None,) * (4 - len(grads)))
        of_out, of_lse = _tangents_of_outputs(call, lse, moved, lse.dtype)
        of_call = _tangents_of_gradients(call, out, lse, (grad_out, grad_lse), moved, (of_out, of_lse), (None, None))
        return (
            of_out.to(grad_out.dtype),
            None if grad_lse is None else of_lse.to(grad_lse.dtype),
            None,
            None,
            *of_call,
            *(None,) * (len(Call._fields) - len(of_call)),
        )

    @staticmethod
    @nestable
    def jvp(ctx: Any, saved: list[Any], *tangents: Any) -> tuple[Tensor, ...]:
        grad_out, grad_lse, out, lse, *tensors = saved
        of_grad_out, of_grad_lse, of_out, of_lse, *of_call = tangents
        call = Call(*tensors, *ctx.options)
        refuse_terms(call)
        results = _tangents_of_gradients(
            call,
            out,
            lse,
            (grad_out, grad_lse),
            Tangents(*of_call[:4]),
            (of_out, of_lse),
            (of_grad_out, of_grad_lse),
        )
        return tuple(result for result in results if result is not None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        return by_sequence(_Gradients, 4, info.batch_size, in_dims, inputs)


def _tangents_of_outputs(call: Call, lse: Tensor, moved: Tangents, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``dL = sum P ds`` and ``dO = sum P (ds - dL) v + sum P dv``; dO in ``dtype``."""
    scores = moved_scores(call, moved)
    of_out, of_lse = [], torch.zeros_like(lse)
    if scores is not None:
        ones = ones_of(call.key)
        of_lse = weighted_sum("queries", _undropped(call), lse, ones, [scores]).squeeze(-1)
        of_out.append(weighted_sum("queries", call, lse, call.value, [less(scores, of_lse, ones)]))
    if moved.value is not None:
        of_out.append(weighted_sum("queries", call, lse, moved.value, []))
    total = sum(of_out) if of_out else call.query.new_zeros(call.shape_of_out)
    assert isinstance(total, Tensor)
    return total.to(dtype), of_lse


def _tangents_of_gradients(
    call: Call,
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
    query, key, value = call.query, call.key, call.value
    scale, dtype, ones = call.scale, lse.dtype, ones_of(key)
    assert scale is not None
    of_out, of_lse = moved_outputs
    delta = _dot(grad_out, out, dtype)
    if grad_lse is not None:
        delta = delta - grad_lse
    of_delta = torch.zeros_like(delta)
    of_delta = of_delta if of_grad_out is None else of_delta + _dot(of_grad_out, out, dtype)
    of_delta = of_delta if of_out is None else of_delta + _dot(grad_out, of_out, dtype)
    of_delta = of_delta if of_grad_lse is None else of_delta - of_grad_lse
    scores = moved_scores(call, moved)
    if scores is not None:
        assert of_lse is not None
        scores = less(scores, of_lse, ones)
    product = Factor(grad_out, value)
    of_probability = _Less(product, delta)
    its_tangent = _Less(tangent_of(product, Factor(of_grad_out, moved.value)), of_delta)

    def total(axis: Axis, values: Tensor | None, of_values: Tensor | None) -> Tensor:
        """The tangent of ``sum (score gradient) * values``."""
        parts = _sums_less(axis, call, lse, values, [], its_tangent, ones)
        if scores is not None:
            parts += _sums_less(axis, call, lse, values, [scores], of_probability, ones)
        if of_values is not None:
            parts += _sums_less(axis, call, lse, of_values, [], of_probability, ones)
        result = sum(parts)
        assert isinstance(result, Tensor)
        return result

    of_value = torch.zeros_like(value, dtype=dtype)
    if scores is not None:
        of_value = of_value + weighted_sum("keys", call, lse, grad_out, [scores])
    if of_grad_out is not None:
        of_value = of_value + weighted_sum("keys", call, lse, of_grad_out, [])
    gates = call.log_gates
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
    call: Call,
    lse: Tensor,
    values: Tensor | None,
    factors: list[Factor],
    last: _Less,
    ones: Tensor,
) -> list[Tensor]:
    """Terms whose sum is the weighted sum with ``factors`` times ``last``."""
    if last.factor is not None and call.dropout_seed is None:
        return [weighted_sum(axis, call, lse, values, [*factors, less(last.factor, last.number, ones)])]
    number = Factor(-last.number.unsqueeze(-1), ones)
    parts = [weighted_sum(axis, _undropped(call), lse, values, [*factors, number])]
    if last.factor is not None:
        parts.append(weighted_sum(axis, call, lse, values, [*factors, last.factor]))
    return parts


def _undropped(call: Call) -> Call:
    return call._replace(dropout_seed=None)


def _dot(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return (left.to(dtype) * right.to(dtype)).sum(-1)
