"""The operator for attention with the query position in a device tensor, forward only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dilated_attention_pytorch.patterns import pattern_from_spec

from . import run
from .call import Call
from .derivatives import is_seen, refuse_tangents
from .operators import num_pairs


def last_start(call: Call) -> int:
    """The largest valid query position: the last query row is then at the last key row."""
    return call.key_offset + call.key.shape[1] - call.query.shape[1]


def attend_from(call: Call) -> tuple[Tensor, Tensor]:
    """Causal attention of queries starting at the position ``query_offset``, a tensor: output and log-sum-exp.

    Raises:
        NotImplementedError: an operand requires a gradient or has a tangent.
    """
    tensors, mask = call[:3], call.key_padding_mask
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(
            "attention with query_offset as a tensor has no gradient, got operands that require one: call it under "
            "torch.no_grad(), or pass query_offset as an integer"
        )
    assert call.pattern is not None
    assert call.scale is not None
    assert isinstance(call.query_offset, Tensor)
    operands = (*tensors, call.query_offset, mask, call.pattern.spec, call.scale, call.key_offset)
    out, lse = (attend_at if is_seen(*operands[:5]) else _attend_at)(*operands)
    return out, lse


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start: Tensor,
    key_padding_mask: Tensor | None,
    pattern: str,
    scale: float,
    key_offset: int,
) -> Call:
    return Call(
        query,
        key,
        value,
        key_padding_mask=key_padding_mask,
        pattern=pattern_from_spec(pattern),
        is_causal=True,
        scale=scale,
        query_offset=query_start,
        key_offset=key_offset,
        impl="triton",
    )


def _attend_at(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start: Tensor,
    key_padding_mask: Tensor | None,
    pattern: str,
    scale: float,
    key_offset: int,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp from the Triton kernels; see :func:`dilated_attention_pytorch.attend`."""
    refuse_tangents(query, key, value)
    return run.forward(_call(query, key, value, query_start, key_padding_mask, pattern, scale, key_offset))


attend_at = torch.library.custom_op("dilated_attention_pytorch::attend_at", _attend_at, mutates_args=())


@attend_at.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return out, torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)


@register_flop_formula(torch.ops.dilated_attention_pytorch.attend_at, get_raw=True)
def _flops(*operands: Any, out_val: Any = None, **_: Any) -> int:
    """Two matrix products over the pairs of the last valid query position; the actual position is on the device."""
    call = _call(*operands)
    return 4 * call.query.shape[-1] * num_pairs(call._replace(query_offset=last_start(call)))
