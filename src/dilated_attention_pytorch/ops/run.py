"""The one executor: a validated call on its implementation, without derivatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention_pytorch.precision import accumulation_dtype, without_autocast

from . import extremes
from .call import Call
from .validation import check_block_numbers, check_documents, documents_of

if TYPE_CHECKING:
    from dilated_attention_pytorch.kernels.triton.problem import Problem


def forward(call: Call, *, is_prepared: bool = False) -> tuple[Tensor, Tensor]:
    """Output in the query's dtype and log-sum-exp; see :func:`dilated_attention_pytorch.attend_with_lse`.

    ``is_prepared``: the call is as :func:`prepared` returns it.
    """
    if call.blocks is not None:
        check_block_numbers(call.blocks, call.key.shape[1], call.block_sizes[0])
    if not is_prepared:
        call = prepared(call)
    if call.impl == "triton":
        from dilated_attention_pytorch.kernels.triton import launch

        return launch.forward(_problem(call))
    with without_autocast(call.query.device.type):
        return extremes.forward(call)


def backward(
    call: Call, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *, is_prepared: bool = False
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and, if given, log-gates, under a merged output and log-sum-exp."""
    if not is_prepared:
        call = prepared(call)
    grad_out = as_rows(grad_out)
    if call.impl == "triton":
        from dilated_attention_pytorch.kernels.triton import launch

        # The kernels read out and lse as they write them, contiguous; rows of a longer call are not contiguous.
        return launch.backward(_problem(call), out.contiguous(), lse.contiguous(), grad_out, grad_lse)
    with without_autocast(call.query.device.type):
        return extremes.backward(call, as_rows(out), lse, grad_out, grad_lse)


def weighted_sum(
    call: Call,
    axis: str,
    values: Tensor | None,
    factors: Sequence[tuple[Tensor | None, Tensor | None, Tensor | None]],
    lse: Tensor,
) -> Tensor:
    """A weighted sum per query, key or listed block, in the accumulation dtype; see :mod:`.weighted_sum`."""

    def of_key(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else as_rows(without_padding(tensor, call.key_padding_mask))

    def of_query(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else as_rows(tensor)

    terms = [(of_query(left), of_key(right), gates) for left, right, gates in factors]
    values = of_key(values) if axis == "queries" else of_query(values)
    with without_autocast(call.query.device.type):
        return extremes.weighted_sum(prepared(call), lse, values, terms, axis=axis)


def prepared(call: Call) -> Call:
    """The call with last strides of 1, and zeros in padded keys and values for the kernels that read these."""
    query, key, value = call[:3]
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        query, key, value = as_rows(query), as_rows(key), as_rows(value)
    if call.key_padding_mask is not None and call.impl != "triton":
        key, value = (without_padding(x, call.key_padding_mask) for x in (key, value))
    return call._replace(query=query, key=key, value=value)


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor with a last stride of 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def without_padding(tensor: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Keys or values ``[B, M, G, D]``, zero where ``key_padding_mask [B, M]`` is True.

    The kernels multiply padded rows by 0, and 0 * NaN is NaN.
    """
    return tensor if key_padding_mask is None else tensor.masked_fill(key_padding_mask[:, :, None, None], 0.0)


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
        *call[:3],
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
    )


def with_scale(query: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """The query with the sign of the scale folded in, and the positive scale (None: ``1 / sqrt(D)``).

    Kernels take the row maximum before scaling, which is only correct for a positive scale. They multiply scores of
    hidden keys, -inf, by the scale: one that is 0, or that their numbers round to 0, is folded in as well.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    least = torch.finfo(accumulation_dtype(query.dtype)).tiny
    if abs(scale) < least:
        return query * (scale / least), least
    return (-query, -scale) if scale < 0.0 else (query, scale)
