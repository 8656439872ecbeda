"""The dense reference as an implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.dropout import keep_factors
from dilated_attention_pytorch.kernels.reference import reference_attention
from dilated_attention_pytorch.precision import without_autocast

from .call import Call, Implementation
from .host import without_padding
from .validation import check_documents, documents_of


class Dense(Implementation):
    """``"reference"``: one softmax over ``s + log c``, in memory that grows with N M; autograd differentiates it."""

    name = "reference"
    takes_offset_tensor = True

    def attend(self, call: Call) -> tuple[Tensor, Tensor]:
        """See :meth:`.Implementation.attend`."""
        if isinstance(call.query_offset, Tensor):
            call = _with_known_offset(call, call.query_offset)
        query, key, pattern = call.query, call.key, call.pattern
        assert pattern is not None
        assert call.scale is not None
        if call.cu_seqlens is not None and not torch.compiler.is_compiling():
            check_documents(pattern, documents_of(call.cu_seqlens, query.shape[1]), key.shape[2])
        with without_autocast(query.device.type):
            return reference_attention(
                query,
                key,
                call.value,
                pattern,
                is_causal=call.is_causal,
                scale=call.scale,
                query_offset=call.first_query,
                key_offset=call.key_offset,
                cu_seqlens=call.cu_seqlens,
                key_padding_mask=call.key_padding_mask,
                keep_probability=_dense_keep_factors(call),
                softcap=call.softcap,
                distance_bias=call.distance_bias,
                key_bias=call.key_bias,
                coordinates=call.coordinates,
            )


def _with_known_offset(call: Call, query_offset: Tensor) -> Call:
    """The call with the value of a ``query_offset`` tensor, and zeros in the keys after its last query."""
    offset = int(query_offset.clamp(0, call.last_start))
    rows = torch.arange(call.key_offset, call.key_offset + call.key.shape[1], device=call.key.device)
    is_ahead = (rows >= offset + call.query.shape[1]).expand(call.key.shape[:2])
    key, value = (without_padding(x, is_ahead) for x in (call.key, call.value))
    return call._replace(key=key, value=value, query_offset=offset)


def _dense_keep_factors(call: Call) -> Tensor | None:
    """Dropout factors of all pairs, ``[B, H, N, M]``; None without dropout."""
    query, key, seed = call.query, call.key, call.dropout_seed
    if seed is None:
        return None

    def index(size: int, offset: int, dim: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[dim] = size
        return (torch.arange(size, device=query.device) + offset).view(shape)

    return keep_factors(
        seed,
        index(query.shape[0], 0, 0),
        index(query.shape[2], 0, 1),
        index(query.shape[1], call.first_query, 2),
        index(key.shape[1], call.key_offset, 3),
        call.dropout_p,
        call.dtype,
    )
