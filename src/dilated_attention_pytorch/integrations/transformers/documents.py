"""Opaque masks: the document of every key column, in a dtype that supports no arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

PADDING = -1
UNWRITTEN = -2
"""A column of a static cache behind the new tokens."""

_SEALS = {True: torch.bits16, False: torch.bits8}
"""Dtype of a seal for causal and non-causal attention. PyTorch moves, slices and views bits, but has no arithmetic."""
_NUMBERS = {torch.bits16: torch.int16, torch.bits8: torch.int8}
_EXPORTED = {True: torch.float8_e4m3fn, False: torch.float8_e5m2}
"""The same within torch.export, which cannot save bits: their sums and products with scores raise as well."""


def is_unread(tensor: Tensor) -> bool:
    """Whether the host cannot read a tensor's values: in a graph, or on the meta device."""
    return torch.compiler.is_compiling() or tensor.is_meta


def seal(documents: Tensor, *, is_causal: bool, is_packed: bool = False) -> Tensor:
    """Pack the documents of key columns into a tensor that supports no arithmetic.

    A model that bypasses the attention interface would use the result of transformers' ``create_causal_mask`` as a
    dense mask, and None as no mask, which would attend to everything. No PyTorch operation adds, compares or converts
    bits, so such a model raises.

    Args:
        documents: int32 ``[B, columns]``. Columns with equal numbers, adjacent up to padding, are one sequence starting
            at position 0; negative numbers are :data:`PADDING` and :data:`UNWRITTEN`.
        is_causal: whether a column attends to earlier columns only, or to its whole document.
        is_packed: whether a row may have several documents.

    Returns:
        bits ``[B, 1, 1, columns]``, packed ``[B, 1, 3, columns]``; four dimensions, so that transformers passes it
        through.
    """
    sealed = _sealed(documents, is_causal)[:, None, None]
    return sealed.expand(-1, -1, 3, -1) if is_packed else sealed


def seal_single(num_columns: int, device: torch.device, *, is_causal: bool) -> Tensor:
    """The seal of rows that are one document each, without padding: bits ``[1, 1, 2, columns]``."""
    sealed = _sealed(torch.zeros(1, 1, dtype=torch.int32, device=device), is_causal)
    return sealed[None, None].expand(1, 1, 2, num_columns)


def is_seal(mask: Tensor) -> bool:
    """Whether a mask was made by :func:`seal` or :func:`seal_single`."""
    return mask.dtype in (*_SEALS.values(), *_EXPORTED.values()) and mask.dim() == 4


def is_packed_seal(mask: Tensor) -> bool:
    """The ``is_packed`` of a seal."""
    return mask.shape[2] == 3


def is_causal_seal(mask: Tensor) -> bool:
    """The ``is_causal`` of a seal."""
    return mask.dtype in (_SEALS[True], _EXPORTED[True])


def unseal(mask: Tensor) -> Tensor | None:
    """The documents of a :func:`seal`, int32 ``[B, columns]``; None for :func:`seal_single`."""
    if mask.shape[2] == 2:
        return None
    return _unseal(mask[:, 0, 0]) if mask.dtype in _NUMBERS else mask[:, 0, 0].int()


def _sealed(documents: Tensor, is_causal: bool) -> Tensor:
    if torch.compiler.is_exporting():
        return documents.to(_EXPORTED[is_causal])
    return _seal(documents, is_causal)


# Custom operators, because torch.compile does not support bits dtypes.
@torch.library.custom_op("dilated_attention_pytorch::seal", mutates_args=())
def _seal(documents: Tensor, is_causal: bool) -> Tensor:
    dtype = _SEALS[is_causal]
    # Readers only need adjacent documents to differ.
    numbers = torch.where(documents < 0, documents, documents % 128)
    return numbers.to(_NUMBERS[dtype]).view(dtype)


@_seal.register_fake
def _(documents: Tensor, is_causal: bool) -> Tensor:
    return documents.new_empty(documents.shape, dtype=_SEALS[is_causal])


@torch.library.custom_op("dilated_attention_pytorch::unseal", mutates_args=())
def _unseal(bits: Tensor) -> Tensor:
    return bits.view(_NUMBERS[bits.dtype]).int()


@_unseal.register_fake
def _(bits: Tensor) -> Tensor:
    return bits.new_empty(bits.shape, dtype=torch.int32)
