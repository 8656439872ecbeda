"""What stands in the place of a mask: the document of every key column, sealed."""

from __future__ import annotations

import torch
from torch import Tensor

PADDING = -1

_SEALS = {True: torch.bits16, False: torch.bits8}
"""The dtype of a seal by whether attention is causal. PyTorch moves, slices and views bits, and computes nothing."""
_NUMBERS = {torch.bits16: torch.int16, torch.bits8: torch.int8}


def seal(documents: Tensor, *, is_causal: bool) -> Tensor:
    """Documents of columns as models may hand them on, with which nothing can be computed.

    A model that computes attention itself takes what transformers' ``create_causal_mask`` gives for a dense mask, and
    None for none: it would let everything be seen. No operation of PyTorch adds bits to scores, compares them or makes
    numbers of them, so such a model raises.

    Args:
        documents: int32 ``[B, columns]``. Columns of one number, side by side, are one sequence that starts at position
            0; :data:`PADDING` is padding.
        is_causal: whether a column sees those before it, or all of its document.

    Returns:
        bits ``[B, 1, 1, columns]``. Four dimensions, so that transformers hands it on as it is.
    """
    return _seal(documents, is_causal)[:, None, None]


def seal_whole(num_columns: int, device: torch.device, *, is_causal: bool) -> Tensor:
    """The seal of rows that are one document each, without padding: bits ``[1, 1, 2, columns]`` of one number."""
    return _seal(torch.zeros(1, 1, dtype=torch.int32, device=device), is_causal)[None, None].expand(
        1, 1, 2, num_columns
    )


def is_seal(mask: Tensor) -> bool:
    """Whether a mask is one of :func:`seal`."""
    return mask.dtype in _NUMBERS and mask.dim() == 4


def is_causal_seal(mask: Tensor) -> bool:
    """What :func:`seal` was told."""
    return mask.dtype == _SEALS[True]


def unseal(mask: Tensor) -> Tensor | None:
    """The documents of a :func:`seal`, int32 ``[B, columns]``; None of :func:`seal_whole`."""
    return None if mask.shape[2] == 2 else _unseal(mask[:, 0, 0])


# Operators, because the compiler of PyTorch knows no bits.
@torch.library.custom_op("dilated_attention_pytorch::seal", mutates_args=())
def _seal(documents: Tensor, is_causal: bool) -> Tensor:
    dtype = _SEALS[is_causal]
    # That two documents side by side differ is all that is read.
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
