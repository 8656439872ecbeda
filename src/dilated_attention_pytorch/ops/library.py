"""The engine as two operators of ``torch.library``: traced by torch.compile, counted by FlopCounterMode."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dilated_attention_pytorch.patterns import DilationGroup, HeadRule, pattern_from_spec
from dilated_attention_pytorch.planning import Call, plan

from . import execute, extremes
from .autocast import without_autocast
from .derivatives import gradients, refuse_tangents
from .validation import check_documents, documents_of
from .weighted_sum import Axis, Factor, Operands, Operators

if TYPE_CHECKING:
    from dilated_attention_pytorch.kernels.triton import launch


def _call(
    query: Tensor, key: Tensor, cu_seqlens: Tensor | None, pattern: str, is_causal: bool, query_offset: int,
    key_offset: int,
) -> Call:  # fmt: skip
    who_sees_whom, documents = pattern_from_spec(pattern), documents_of(cu_seqlens, query.shape[1])
    check_documents(who_sees_whom, documents, key.shape[2])
    return Call(
        who_sees_whom, query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2],
        query_offset, key_offset, is_causal, documents,
    )  # fmt: skip


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None,
    key_padding_mask: Tensor | None,
    dropout_seed: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
    query_offset: int,
    key_offset: int,
    dropout_p: float,
    *,
    is_native: bool = False,
) -> execute.Inputs:
    if key_padding_mask is not None:
        key, value = _without_padding(key, key_padding_mask), _without_padding(value, key_padding_mask)
    call = _call(query, key, cu_seqlens, pattern, is_causal, query_offset, key_offset)
    query, key, value = (_rows_contiguous(tensor) for tensor in (query, key, value))
    return execute.Inputs(
        query, key, value, call, scale, key_padding_mask, dropout_seed, dropout_p, is_native=is_native
    )  # fmt: skip


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None,
    key_padding_mask: Tensor | None,
    dropout_seed: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
    query_offset: int,
    key_offset: int,
    dropout_p: float,
) -> launch.Problem:
    """The operands of the Triton kernels, which plan on the device; boundaries on the CPU are checked, then copied."""
    from dilated_attention_pytorch.kernels.triton import launch

    groups, rules = _summands(pattern)
    if cu_seqlens is not None:
        # Boundaries on the device are not waited for: a document may be as long as all of them.
        boundaries = documents_of(cu_seqlens, query.shape[1]) if cu_seqlens.is_cpu else (0, query.shape[1])
        check_documents(pattern_from_spec(pattern), boundaries, key.shape[2])
        cu_seqlens = cu_seqlens.to(query.device).contiguous()
    query, key, value = (_rows_contiguous(tensor) for tensor in (query, key, value))
    return launch.Problem(
        query, key, value, groups, is_causal, scale, query_offset, key_offset, cu_seqlens, key_padding_mask,
        dropout_seed, dropout_p, rules,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _summands(pattern: str) -> tuple[tuple[DilationGroup, ...], tuple[HeadRule, ...]]:
    """Groups and rules of a pattern: the same objects in every call, which finds its plan of launches by them."""
    counted = pattern_from_spec(pattern)
    return counted.groups, counted.rules


def _without_padding(tensor: Tensor, key_padding_mask: Tensor) -> Tensor:
    # Not even a NaN at a padded key may reach a result: 0 * NaN is NaN.
    return tensor.masked_fill(key_padding_mask[:, :, None, None], 0.0)


def _rows_contiguous(tensor: Tensor) -> Tensor:
    # The fused kernels read the last dimension as if its stride were 1, whatever it is.
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@torch.library.custom_op("dilated_attention_pytorch::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None,
    key_padding_mask: Tensor | None,
    dropout_seed: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
    query_offset: int,
    key_offset: int,
    dropout_p: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; see :func:`dilated_attention_pytorch.attend_with_lse`."""
    refuse_tangents(query, key, value)
    options = (
        cu_seqlens, key_padding_mask, dropout_seed, pattern, is_causal, scale, query_offset, key_offset, dropout_p
    )  # fmt: skip
    with without_autocast(query.device.type):
        if impl == "triton":
            from dilated_attention_pytorch.kernels.triton import launch

            return launch.forward(_problem(query, key, value, *options))
        return extremes.forward(_inputs(query, key, value, *options, is_native=impl == "native"))


@torch.library.custom_op("dilated_attention_pytorch::attend_backward", mutates_args=())
def attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None,
    key_padding_mask: Tensor | None,
    dropout_seed: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
    query_offset: int,
    key_offset: int,
    dropout_p: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from the merged output and log-sum-exp."""
    refuse_tangents(query, key, value, grad_out, grad_lse)
    options = (
        cu_seqlens, key_padding_mask, dropout_seed, pattern, is_causal, scale, query_offset, key_offset, dropout_p
    )  # fmt: skip
    grad_out = _rows_contiguous(grad_out)
    with without_autocast(query.device.type):
        if impl == "triton":
            from dilated_attention_pytorch.kernels.triton import launch

            # The kernels read them as they write them, contiguous; rows of a longer call are not.
            out, lse = out.contiguous(), lse.contiguous()
            return launch.backward(_problem(query, key, value, *options), out, lse, grad_out, grad_lse)
        inputs = _inputs(query, key, value, *options, is_native=impl == "native")
        return extremes.backward(inputs, out, lse, grad_out, grad_lse)


def attend_pair(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What :data:`attend` gives where scores are large, the log-sum-exp as a pair: see :func:`execute.forward`.

    ``operands`` are those of :data:`attend` but for ``impl``. For slabs whose partials are merged with others.
    """
    inputs = _inputs(*operands)
    rest = torch.zeros(inputs.query.shape[:3], dtype=inputs.accumulation_dtype, device=inputs.query.device)
    return *execute.forward(inputs, rest), rest


def attend_pair_backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, pair: tuple[Tensor, Tensor], *operands: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value under a merged output and pair, of the operands of :func:`attend_pair`."""
    return execute.backward(_inputs(*operands), out, pair[0], _rows_contiguous(grad_out), grad_lse, pair[1])


@torch.library.custom_op("dilated_attention_pytorch::weighted_sum", mutates_args=())
def weighted_sum(
    values: Tensor,
    lefts: list[Tensor],
    rights: list[Tensor],
    of_keys: bool,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor | None,
    key_padding_mask: Tensor | None,
    dropout_seed: Tensor | None,
    pattern: str,
    is_causal: bool,
    scale: float,
    query_offset: int,
    key_offset: int,
    dropout_p: float,
) -> Tensor:
    """A weighted sum of the queries, or of the keys, in the accumulation dtype; see :mod:`.weighted_sum`."""

    def of_key(tensor: Tensor) -> Tensor:
        return _rows_contiguous(tensor if key_padding_mask is None else _without_padding(tensor, key_padding_mask))

    factors = [(_rows_contiguous(left), of_key(right)) for left, right in zip(lefts, rights, strict=True)]
    values = _rows_contiguous(values) if of_keys else of_key(values)
    inputs = _inputs(
        query, key, key, cu_seqlens, key_padding_mask, dropout_seed, pattern, is_causal, scale, query_offset,
        key_offset, dropout_p,
    )  # fmt: skip
    with without_autocast(query.device.type):
        return extremes.weighted_sum(inputs, lse, values, factors, of_keys=of_keys)


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return out, torch.empty(query.shape[:3], dtype=_lse_dtype(query), device=query.device)


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
    values: Tensor, lefts: list[Tensor], rights: list[Tensor], of_keys: bool, lse: Tensor, query: Tensor, key: Tensor,
    *_: Any,
) -> Tensor:  # fmt: skip
    return lse.new_empty((*(key if of_keys else query).shape[:3], values.shape[3]))


@dataclass(frozen=True, slots=True)
class AttendOperators(Operators):
    """The operators of one call of :func:`attend`."""

    scale: float
    pattern: str
    is_causal: bool
    query_offset: int
    key_offset: int
    dropout_p: float
    impl: str

    def forward(self, operands: Operands, value: Tensor) -> tuple[Tensor, Tensor]:
        return attend(operands.query, operands.key, value, *operands[3:], *self._options, self.impl)

    def backward(
        self, operands: Operands, value: Tensor, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        return attend_backward(
            grad_out, grad_lse, out, lse, operands.query, operands.key, value, *operands[3:], *self._options, self.impl
        )

    def weighted_sum(
        self, axis: Axis, operands: Operands, lse: Tensor, values: Tensor | None, factors: Sequence[Factor]
    ) -> Tensor:
        return weighted_sum(
            values, [factor.left for factor in factors], [factor.right for factor in factors], axis == "keys", lse,
            operands.query, operands.key, *operands[3:], *self._options,
        )  # fmt: skip

    @property
    def _options(self) -> tuple[Any, ...]:
        return (self.pattern, self.is_causal, self.scale, self.query_offset, self.key_offset, self.dropout_p)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    pattern, is_causal, scale, *rest = inputs[6:]
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.operators = AttendOperators(scale, pattern, is_causal, *rest)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, *rest, out, lse = ctx.saved_tensors
    operands = Operands(query, key, None, *rest)
    grads = gradients(ctx.operators, value, operands, grad_out, grad_lse, out, lse)
    return (*grads[:3], *(None for _ in range(10)))


attend.register_autograd(_backward, setup_context=_setup_context)


def _num_pairs(operands: tuple[Any, ...]) -> int:
    """Pairs of a query and a key under the pattern; a padded key counts, the kernels compute with it."""
    query, key, _, cu_seqlens, _, _, pattern, is_causal, _, query_offset, key_offset, *_ = operands
    call = _call(query, key, cu_seqlens, pattern, is_causal, query_offset, key_offset)
    return plan(call, 1 << 62).num_pairs


@register_flop_formula(torch.ops.dilated_attention_pytorch.attend, get_raw=True)
def _attend_flops(*operands: Any, out_val: Any = None, **_: Any) -> int:
    """Two matrix products over exactly the pairs of the pattern: 4 D operations a pair."""
    return 4 * operands[0].shape[-1] * _num_pairs(operands)


@register_flop_formula(torch.ops.dilated_attention_pytorch.attend_backward, get_raw=True)
def _attend_backward_flops(*operands: Any, out_val: Any = None, **_: Any) -> int:
    """Five matrix products, the scores' recomputation among them, as PyTorch counts its own attention."""
    return 10 * operands[4].shape[-1] * _num_pairs(operands[4:])


@register_flop_formula(torch.ops.dilated_attention_pytorch.weighted_sum, get_raw=True)
def _weighted_sum_flops(*operands: Any, out_val: Any = None, **_: Any) -> int:
    """The scores, the factors and the sum: two operations a pair and column."""
    values, lefts, _, _, _, query, key, *rest = operands
    columns = query.shape[-1] + values.shape[-1] + sum(left.shape[-1] for left in lefts)
    return 2 * columns * _num_pairs((query, key, key, *rest))
