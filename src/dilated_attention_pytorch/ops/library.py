"""The engine as operators of ``torch.library``: traced by torch.compile, counted by FlopCounterMode."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dilated_attention_pytorch.engine import call as engine
from dilated_attention_pytorch.engine import extremes
from dilated_attention_pytorch.engine.call import Inputs
from dilated_attention_pytorch.patterns import pattern_from_spec
from dilated_attention_pytorch.patterns.blocks import HeadRule
from dilated_attention_pytorch.patterns.dilated import DilationGroup
from dilated_attention_pytorch.planning.plan import Call, plan
from dilated_attention_pytorch.precision import accumulation_dtype

from .autocast import without_autocast
from .derivatives import gradients, refuse_tangents
from .prepare import as_rows, without_padding
from .validation import check_documents, documents_of
from .weighted_sum import Axis, Factor, Operands, Operators

if TYPE_CHECKING:
    from dilated_attention_pytorch.kernels.triton.problem import Problem


class Arguments(NamedTuple):
    """The arguments of :data:`attend`, also the last ones of :data:`attend_backward`, in the order of their schemas."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens: Tensor | None
    key_padding_mask: Tensor | None
    dropout_seed: Tensor | None
    pattern: str
    is_causal: bool
    scale: float
    query_offset: int
    key_offset: int
    dropout_p: float
    impl: str = "aten"


_OPTIONS = (
    "Tensor? cu_seqlens, Tensor? key_padding_mask, Tensor? dropout_seed, str pattern, bool is_causal, float scale, "
    "SymInt query_offset, SymInt key_offset, float dropout_p"
)
_ARGUMENTS = f"Tensor query, Tensor key, Tensor value, {_OPTIONS}, str impl"


def _call(
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor | None,
    pattern: str,
    is_causal: bool,
    query_offset: int,
    key_offset: int,
) -> Call:
    who_sees_whom, documents = pattern_from_spec(pattern), documents_of(cu_seqlens, query.shape[1])
    check_documents(who_sees_whom, documents, key.shape[2])
    batch, num_queries, num_heads, _ = query.shape
    _, num_keys, num_kv_heads, _ = key.shape
    sizes = (batch, num_queries, num_keys, num_heads, num_kv_heads)
    return Call(who_sees_whom, *sizes, query_offset, key_offset, is_causal, documents)


def _inputs(arguments: Arguments) -> Inputs:
    query, key, value, cu_seqlens, mask, seed, pattern, is_causal, scale, *_, dropout_p, impl = arguments
    offsets = arguments.query_offset, arguments.key_offset
    call = _call(query, key, cu_seqlens, pattern, is_causal, *offsets)
    return Inputs(query, key, value, call, scale, mask, seed, dropout_p, impl)


def _problem(arguments: Arguments) -> Problem:
    """The operands of the Triton kernels, which plan on the device. Boundaries on the CPU are checked, then copied."""
    from dilated_attention_pytorch.kernels.triton.problem import Problem

    query, key, value, cu_seqlens, mask, seed, pattern, is_causal, scale, *_, dropout_p, _ = arguments
    offsets = arguments.query_offset, arguments.key_offset
    groups, rules = summands(pattern)
    if cu_seqlens is not None:
        # Boundaries on the device are not read, which would wait for it: a document may be as long as all rows.
        boundaries = documents_of(cu_seqlens, query.shape[1]) if cu_seqlens.is_cpu else (0, query.shape[1])
        check_documents(pattern_from_spec(pattern), boundaries, key.shape[2])
        cu_seqlens = cu_seqlens.to(query.device).contiguous()
    return Problem(query, key, value, groups, is_causal, scale, *offsets, cu_seqlens, mask, seed, dropout_p, rules)


@functools.lru_cache(maxsize=64)
def summands(pattern: str) -> tuple[tuple[DilationGroup, ...], tuple[HeadRule, ...]]:
    """Groups and rules of a pattern: the same objects in every call, since the plan of launches is found by them."""
    counted = pattern_from_spec(pattern)
    return counted.groups, counted.rules


def attend_prepared(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """:data:`attend` for operands with a last stride of 1, and with zeros in padded keys and values."""
    if arguments.impl == "triton":
        from dilated_attention_pytorch.kernels.triton import launch

        return launch.forward(_problem(arguments))
    with without_autocast(arguments.query.device.type):
        return extremes.forward(_inputs(arguments))


def attend_backward_prepared(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, arguments: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    """:data:`attend_backward` for operands as :func:`attend_prepared` takes them."""
    grad_out = as_rows(grad_out)
    if arguments.impl == "triton":
        from dilated_attention_pytorch.kernels.triton import launch

        # The kernels read out and lse as they write them, contiguous; rows of a longer call are not contiguous.
        return launch.backward(_problem(arguments), out.contiguous(), lse.contiguous(), grad_out, grad_lse)
    with without_autocast(arguments.query.device.type):
        return extremes.backward(_inputs(arguments), out, lse, grad_out, grad_lse)


def attend_pair(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`attend_prepared` for large scores, with the log-sum-exp as a pair: see :func:`.engine.call.forward`.

    For slabs whose partials are merged with others. It is computed by matrix products, whatever ``impl`` is.
    """
    inputs = _inputs(arguments._replace(impl="aten"))
    rest = torch.zeros(inputs.query.shape[:3], dtype=inputs.accumulation_dtype, device=inputs.query.device)
    return *engine.forward(inputs, rest), rest


def attend_pair_backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, pair: tuple[Tensor, Tensor], arguments: Arguments
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value under a merged output and pair, for the operands of :func:`attend_pair`."""
    lse, rest = pair
    return engine.backward(_inputs(arguments._replace(impl="aten")), out, lse, as_rows(grad_out), grad_lse, rest)


def _prepared(arguments: Arguments) -> Arguments:
    """Operands in the form that the kernels require; the Triton kernels do not read hidden keys and values."""
    query, key, value = arguments[:3]
    if arguments.impl != "triton":
        key, value = (without_padding(x, arguments.key_padding_mask) for x in (key, value))
    return Arguments(as_rows(query), as_rows(key), as_rows(value), *arguments[3:])


def _attend(*operands: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; see :func:`dilated_attention_pytorch.attend_with_lse`."""
    refuse_tangents(*operands[:3])
    return attend_prepared(_prepared(Arguments(*operands)))


def _attend_backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *operands: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from the merged output and log-sum-exp."""
    refuse_tangents(*operands[:3], grad_out, grad_lse)
    return attend_backward_prepared(grad_out, grad_lse, out, lse, _prepared(Arguments(*operands)))


attend = torch.library.custom_op(
    "dilated_attention_pytorch::attend", _attend, mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
attend_backward = torch.library.custom_op(
    "dilated_attention_pytorch::attend_backward",
    _attend_backward,
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)


@torch.library.custom_op(
    "dilated_attention_pytorch::weighted_sum",
    mutates_args=(),
    schema="(Tensor values, Tensor[] lefts, Tensor[] rights, bool of_keys, Tensor lse, Tensor query, Tensor key, "
    f"{_OPTIONS}) -> Tensor",
)
def weighted_sum(
    values: Tensor,
    lefts: list[Tensor],
    rights: list[Tensor],
    of_keys: bool,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    *options: Any,
) -> Tensor:
    """A weighted sum per query, or per key, in the accumulation dtype; see :mod:`.weighted_sum`."""
    _, key_padding_mask, *_ = options

    def of_key(tensor: Tensor) -> Tensor:
        return as_rows(without_padding(tensor, key_padding_mask))

    factors = [(as_rows(left), of_key(right)) for left, right in zip(lefts, rights, strict=True)]
    values = as_rows(values) if of_keys else of_key(values)
    key = of_key(key)
    inputs = _inputs(Arguments(as_rows(query), key, key, *options))
    with without_autocast(query.device.type):
        return extremes.weighted_sum(inputs, lse, values, factors, of_keys=of_keys)


@attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return out, torch.empty(query.shape[:3], dtype=accumulation_dtype(query.dtype), device=query.device)


@attend_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
    return grads[0], grads[1], grads[2]


@weighted_sum.register_fake
def _(
    values: Tensor,
    lefts: list[Tensor],
    rights: list[Tensor],
    of_keys: bool,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    *_: Any,
) -> Tensor:
    return lse.new_empty((*(key if of_keys else query).shape[:3], values.shape[3]))


@dataclass(slots=True, eq=False)
class AttendOperators(Operators):
    """The operators of one call of :func:`attend`."""

    scale: float
    pattern: str
    is_causal: bool
    query_offset: int
    key_offset: int
    dropout_p: float
    impl: str

    def compute(self, operands: Operands, value: Tensor) -> tuple[Tensor, Tensor]:
        return _attend(*self._arguments(operands, value))

    def compute_gradients(
        self, operands: Operands, value: Tensor, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        return _attend_backward(grad_out, grad_lse, out, lse, *self._arguments(operands, value))

    def forward(self, operands: Operands, value: Tensor) -> tuple[Tensor, Tensor]:
        return attend(*self._arguments(operands, value))

    def backward(
        self, operands: Operands, value: Tensor, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        return attend_backward(grad_out, grad_lse, out, lse, *self._arguments(operands, value))

    def weighted_sum(
        self, axis: Axis, operands: Operands, lse: Tensor, values: Tensor | None, factors: Sequence[Factor]
    ) -> Tensor:
        return weighted_sum(
            values,
            [factor.left for factor in factors],
            [factor.right for factor in factors],
            axis == "keys",
            lse,
            operands.query,
            operands.key,
            *operands[3:],
            *self._options,
        )

    def _arguments(self, operands: Operands, value: Tensor) -> tuple[Any, ...]:
        query, key, _, *others = operands
        return query, key, value, *others, *self._options, self.impl

    @property
    def _options(self) -> tuple[Any, ...]:
        return self.pattern, self.is_causal, self.scale, self.query_offset, self.key_offset, self.dropout_p


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    pattern, is_causal, scale, *rest = inputs[6:]
    ctx.save_for_backward(*inputs[:6], *output)  # the order of derivatives.Attend
    ctx.operators = AttendOperators(scale, pattern, is_causal, *rest)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, *rest, out, lse = ctx.saved_tensors
    operands = Operands(query, key, None, *rest)
    grads = gradients(ctx.operators, value, operands, grad_out, grad_lse, out, lse)
    return (*grads[:3], *(None for _ in range(10)))


attend.register_autograd(_backward, setup_context=_setup_context)


def num_pairs(
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor | None,
    pattern: str,
    is_causal: bool,
    query_offset: int,
    key_offset: int,
) -> int:
    """Number of query-key pairs under the pattern; padded keys count, as the kernels compute with them."""
    return plan(_call(query, key, cu_seqlens, pattern, is_causal, query_offset, key_offset), 1 << 62).num_pairs


def _num_pairs(operands: tuple[Any, ...]) -> int:
    """:func:`num_pairs` for the operands of :data:`attend`."""
    query, key, _, cu_seqlens, _, _, pattern, is_causal, _, query_offset, key_offset, *_ = operands
    return num_pairs(query, key, cu_seqlens, pattern, is_causal, query_offset, key_offset)


@register_flop_formula(torch.ops.dilated_attention_pytorch.attend, get_raw=True)
def _attend_flops(*operands: Any, out_val: Any = None, **_: Any) -> int:
    """Two matrix products over exactly the pairs of the pattern: 4 D operations per pair."""
    return 4 * operands[0].shape[-1] * _num_pairs(operands)


@register_flop_formula(torch.ops.dilated_attention_pytorch.attend_backward, get_raw=True)
def _attend_backward_flops(*operands: Any, out_val: Any = None, **_: Any) -> int:
    """Five matrix products, including the recomputation of the scores, as PyTorch counts its own attention."""
    return 10 * operands[4].shape[-1] * _num_pairs(operands[4:])


@register_flop_formula(torch.ops.dilated_attention_pytorch.weighted_sum, get_raw=True)
def _weighted_sum_flops(*operands: Any, out_val: Any = None, **_: Any) -> int:
    """The scores, the factors and the sum: two operations per pair and column."""
    values, lefts, _, _, _, query, key, *rest = operands
    columns = query.shape[-1] + values.shape[-1] + sum(left.shape[-1] for left in lefts)
    return 2 * columns * _num_pairs((query, key, key, *rest))
