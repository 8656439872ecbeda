"""The executor on the host's plan: a chosen call, without derivatives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels import fused
from dilated_attention_pytorch.kernels.partial import FUSED, PRODUCTS, Kernel
from dilated_attention_pytorch.precision import accumulation_dtype, without_autocast

from . import extremes
from .call import Call, Implementation
from .derivatives import attend_call
from .validation import check_block_numbers


class Host(Implementation):
    """``"aten"``: partials over views by PyTorch's kernels; ``"native"``: by this package's CPU kernels, in place."""

    attend = staticmethod(attend_call)

    def __init__(self, name: str, *, is_in_place: bool) -> None:
        self.name = name
        self.is_in_place = is_in_place

    def forward(self, call: Call, *, is_prepared: bool = False) -> tuple[Tensor, Tensor]:
        """See :meth:`.Implementation.forward`."""
        if call.blocks is not None:
            check_block_numbers(call.blocks, call.key.shape[1], call.block_sizes[0])
        if not is_prepared:
            call = prepared(call)
        with without_autocast(call.query.device.type):
            return extremes.forward(call)

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
        if not is_prepared:
            call = prepared(call)
        with without_autocast(call.query.device.type):
            return extremes.backward(call, contiguous_rows(out), lse, contiguous_rows(grad_out), grad_lse)

    def kernel(self, query: Tensor, *, has_bias: bool) -> Kernel:
        """See :meth:`.Implementation.kernel`."""
        return FUSED if fused.is_fused(query, has_bias=has_bias) else PRODUCTS


def weighted_sum(
    call: Call,
    axis: str,
    values: Tensor | None,
    factors: Sequence[tuple[Tensor | None, Tensor | None, Tensor | None]],
    lse: Tensor,
) -> Tensor:
    """A weighted sum per query, key or listed block, in the accumulation dtype; see :mod:`.weighted_sum`."""

    def of_key(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else contiguous_rows(without_padding(tensor, call.key_padding_mask))

    def of_query(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else contiguous_rows(tensor)

    terms = [(of_query(left), of_key(right), gates) for left, right, gates in factors]
    values = of_key(values) if axis == "queries" else of_query(values)
    with without_autocast(call.query.device.type):
        return extremes.weighted_sum(prepared(call), lse, values, terms, axis=axis)


def prepared(call: Call) -> Call:
    """The call with last strides of 1, and zeros in padded keys and values."""
    query, key, value = call[:3]
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        query, key, value = contiguous_rows(query), contiguous_rows(key), contiguous_rows(value)
    if call.key_padding_mask is not None:
        key, value = (without_padding(x, call.key_padding_mask) for x in (key, value))
    return call._replace(query=query, key=key, value=value)


def contiguous_rows(tensor: Tensor) -> Tensor:
    """The tensor with a last stride of 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def without_padding(tensor: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Keys or values ``[B, M, G, D]``, zero where ``key_padding_mask [B, M]`` is True.

    The kernels multiply padded rows by 0, and 0 * NaN is NaN.
    """
    return tensor if key_padding_mask is None else tensor.masked_fill(key_padding_mask[:, :, None, None], 0.0)


def with_positive_scale(query: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """The query with the sign of the scale folded in, and the positive scale (None: ``1 / sqrt(D)``).

    Kernels take the row maximum before scaling, which is only correct for a positive scale. They multiply scores of
    hidden keys, -inf, by the scale: one that is 0, or that their numbers round to 0, is folded in as well.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    least = torch.finfo(accumulation_dtype(query.dtype)).tiny
    if abs(scale) < least:
        return query * (scale / least), least
    return (-query, -scale) if scale < 0.0 else (query, scale)
