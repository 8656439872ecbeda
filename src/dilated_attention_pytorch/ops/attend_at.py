"""The operator for attention with the query position in a device tensor, forward only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .derivatives import refuse_tangents
from .dispatch import is_seen
from .library import num_pairs, summands
from .prepare import as_rows


def last_start(query: Tensor, key: Tensor, key_offset: int) -> int:
    """The largest valid query position: the last query row is then at the last key row."""
    return key_offset + key.shape[1] - query.shape[1]


def attend_from(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start: Tensor,
    key_padding_mask: Tensor | None,
    pattern: str,
    scale: float,
    key_offset: int,
) -> tuple[Tensor, Tensor]:
    """Causal attention of queries starting at position ``query_start``: output and log-sum-exp.

    Raises:
        NotImplementedError: an operand requires a gradient or has a tangent.
    """
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise NotImplementedError(
            "attention with query_offset as a tensor has no gradient, got operands that require one: call it under "
            "torch.no_grad(), or pass query_offset as an integer"
        )
    call = attend_at if is_seen(query, key, value, query_start, key_padding_mask) else _attend_at
    out, lse = call(query, key, value, query_start, key_padding_mask, pattern, scale, key_offset)
    return out, lse


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
    from dilated_attention_pytorch.kernels.triton import launch

    refuse_tangents(query, key, value)
    groups, rules = summands(pattern)
    problem = launch.Problem(
        as_rows(query),
        as_rows(key),
        as_rows(value),
        groups,
        True,
        scale,
        query_start,
        key_offset,
        key_padding_mask=key_padding_mask,
        rules=rules,
    )
    return launch.forward(problem)


attend_at = torch.library.custom_op("dilated_attention_pytorch::attend_at", _attend_at, mutates_args=())


@attend_at.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return out, torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)


@register_flop_formula(torch.ops.dilated_attention_pytorch.attend_at, get_raw=True)
def _flops(*operands: Any, out_val: Any = None, **_: Any) -> int:
    """Two matrix products over the pairs of the last valid query position; the actual position is on the device."""
    query, key, _, _, _, pattern, _, key_offset = operands
    pairs = num_pairs(query, key, None, pattern, True, last_start(query, key, key_offset), key_offset)
    return 4 * query.shape[-1] * pairs
