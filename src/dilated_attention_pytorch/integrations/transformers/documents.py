"""Opaque masks: the document of every key column, in a dtype that supports no arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

PADDING = -1

_SEALS = {True: torch.bits16, False: torch.bits8}
"""Dtype of a seal for causal and non-causal attention. PyTorch moves, slices and views bits, but has no arithmetic."""
_NUMBERS = {torch.bits16: torch.int16, torch.bits8: torch.int8}


def seal(documents: Tensor, *, is_causal: bool) -> Tensor:
    """Pack the documents of key columns into a tensor that supports no arithmetic.

    A model that bypasses the attention interface would use the result of transformers' ``create_causal_mask`` as a
    dense mask, and None as no mask, which would attend to everything. No PyTorch operation adds, compares or converts
    bits, so such a model raises.

    Args:
        documents: int32 ``[B, columns]``. Adjacent columns with equal numbers are one sequence starting at position 0;
            :data:`PADDING` is padding.
        is_causal: whether a column attends to earlier columns only, or to its whole document.

    Returns:
        bits ``[B, 1, 1, columns]``; four dimensions, so that transformers passes it through.
    """
    return _seal(documents, is_causal)[:, None, None]


def seal_whole(num_columns: int, device: torch.device, *, is_causal: bool) -> Tensor:
    """The seal of rows that are one document each, without padding: bits ``[1, 1, 2, columns]``."""
    return _seal(torch.zeros(1, 1, dtype=torch.int32, device=device), is_causal)[None, None].expand(
        1, 1, 2, num_columns
    )


def is_seal(mask: Tensor) -> bool:
    """Whether a mask was made by :func:`seal` or :func:`seal_whole`."""
    return mask.dtype in _NUMBERS and mask.dim() == 4


def is_causal_seal(mask: Tensor) -> bool:
    """The ``is_causal`` of a seal."""
    return mask.dtype == _SEALS[True]


def unseal(mask: Tensor) -> Tensor | None:
    """The documents of a :func:`seal`, int32 ``[B, columns]``; None for :func:`seal_whole`."""
    return None if mask.shape[2] == 2 else _unseal(mask[:, 0, 0])


# Custom operators, because torch.compile does not support bits dtypes.
@torch.library.custom_op("dilated_attention_pytorch::seal", mutates_args=())
def _seal(documents: Tensor, is_causal: bool) -> Tensor:
    dtype = _SEALS[is_causal]
    # Readers only need adjacent documents to differ.
    numbers = torch.where(documents < 0, PADDING, documents % 128)
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
