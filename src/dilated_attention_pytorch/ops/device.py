"""The Triton kernels as an implementation: they plan on the device, and take the query position from it too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dilated_attention_pytorch.kernels.partial import TRITON, Kernel
from dilated_attention_pytorch.patterns import pattern_from_spec
from dilated_attention_pytorch.patterns.flops import pair_flops

from .call import Call, Implementation
from .derivatives import attend_call, needs_dispatcher, refuse_tangents
from .host import contiguous_rows
from .tiles import num_pairs
from .validation import check_documents, documents_of

if TYPE_CHECKING:
    from dilated_attention_pytorch.kernels.triton.problem import Problem


class Triton(Implementation):
    """``"triton"``: this package's kernels for GPUs. They do not read hidden keys and values."""

    name = "triton"
    takes_offset_tensor = True

    def attend(self, call: Call) -> tuple[Tensor, Tensor]:
        """See :meth:`.Implementation.attend`."""
        return _attend_from(call) if isinstance(call.query_offset, Tensor) else attend_call(call)

    def forward(self, call: Call, *, is_prepared: bool = False) -> tuple[Tensor, Tensor]:
        """See :meth:`.Implementation.forward`."""
        from dilated_attention_pytorch.kernels.triton import launch

        return launch.forward(_problem(call))

    def backward(
        self,
        call: Call,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        *,
        is_prepared: bool = False,
    ) -> tuple[Tensor, ...]:
        """See :meth:`.Implementation.backward`."""
        from dilated_attention_pytorch.kernels.triton import launch

        # The kernels read out and lse as they write them, contiguous; rows of a longer call are not contiguous.
        results = out.contiguous(), lse.contiguous(), contiguous_rows(grad_out), grad_lse
        grads = launch.backward(_problem(call), *results, needs_distance_bias=not call.has_fixed_bias)
        return tuple(grad for grad in grads if grad is not None)

    def kernel(self, query: Tensor, *, has_bias: bool) -> Kernel:
        """See :meth:`.Implementation.kernel`."""
        return TRITON


def _problem(call: Call) -> Problem:
    """The operands of the Triton kernels, which plan on the device and do not read hidden keys and values.

    Boundaries of documents on the CPU are checked, then copied.
    """
    from dilated_attention_pytorch.kernels.triton.problem import Problem

    pattern, cu_seqlens = call.pattern, call.cu_seqlens
    assert pattern is not None
    assert call.scale is not None
    if cu_seqlens is not None:
        # Boundaries on the device are not read, which would wait for it: a document may be as long as all rows.
        num_rows = call.query.shape[1]
        boundaries = documents_of(cu_seqlens, num_rows) if cu_seqlens.is_cpu else (0, num_rows)
        check_documents(pattern, boundaries, call.key.shape[2])
        cu_seqlens = cu_seqlens.to(call.query.device).contiguous()
    return Problem(
        contiguous_rows(call.query),
        contiguous_rows(call.key),
        contiguous_rows(call.value),
        pattern.groups,
        call.is_causal,
        call.scale,
        call.query_offset,
        call.key_offset,
        cu_seqlens,
        call.key_padding_mask,
        call.dropout_seed,
        call.dropout_p,
        pattern.rules,
        call.distance_bias,
        call.key_bias,
        call.softcap,
        call.coordinates,
    )


def _attend_from(call: Call) -> tuple[Tensor, Tensor]:
    """Causal attention of queries starting at the position ``query_offset``, a tensor: output and log-sum-exp.

    Raises:
        NotImplementedError: an operand requires a gradient or has a tangent.
    """
    if torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in call.leaves):
        raise NotImplementedError(
            "attention with query_offset as a tensor has no gradient, got operands that require one: call it under "
            "torch.no_grad(), or pass query_offset as an integer"
        )
    assert call.pattern is not None
    assert call.scale is not None
    assert isinstance(call.query_offset, Tensor)
    terms = call.distance_bias, call.key_bias
    tensors = (*call[:3], call.query_offset, call.key_padding_mask, *terms)
    operands = (*tensors, call.pattern.spec, call.scale, call.key_offset, call.softcap)
    out, lse = (attend_at if needs_dispatcher(*tensors) else _attend_at)(*operands)
    return out, lse


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start: Tensor,
    key_padding_mask: Tensor | None,
    distance_bias: Tensor | None,
    key_bias: Tensor | None,
    pattern: str,
    scale: float,
    key_offset: int,
    softcap: float,
) -> Call:
    return Call(
        query,
        key,
        value,
        distance_bias=distance_bias,
        key_bias=key_bias,
        key_padding_mask=key_padding_mask,
        pattern=pattern_from_spec(pattern),
        is_causal=True,
        scale=scale,
        query_offset=query_start,
        key_offset=key_offset,
        softcap=softcap,
        impl=Triton(),
    )


def _attend_at(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start: Tensor,
    key_padding_mask: Tensor | None,
    distance_bias: Tensor | None,
    key_bias: Tensor | None,
    pattern: str,
    scale: float,
    key_offset: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp from the Triton kernels; see :func:`dilated_attention_pytorch.attend`."""
    refuse_tangents(query, key, value, distance_bias, key_bias)
    terms = distance_bias, key_bias
    call = _call(query, key, value, query_start, key_padding_mask, *terms, pattern, scale, key_offset, softcap)
    return Triton().forward(call)


attend_at = torch.library.custom_op("dilated_attention_pytorch::attend_at", _attend_at, mutates_args=())


@attend_at.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    return out, torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)


@register_flop_formula(torch.ops.dilated_attention_pytorch.attend_at, get_raw=True)
def _flops(*operands: Any, out_val: Any = None, **_: Any) -> int:
    """Two matrix products over the pairs of the last valid query position; the actual position is on the device."""
    call = _call(*operands)
    columns = call.query.shape[-1] + call.value.shape[-1]
    return pair_flops(num_pairs(call._replace(query_offset=call.last_start)), columns, products=1)
