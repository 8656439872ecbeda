"""Attention modules by name: thin functions over the classes. A name picks a class, never another result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from .nn import DilatedAttention, MultiheadDilatedAttention

AttentionType = Literal["auto", "standard", "improved"]


def create_dilated_attention(
    attention_type: AttentionType = "auto",
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    use_tf32: bool | None = None,
    **options: Any,
) -> DilatedAttention:
    """Make a :class:`DilatedAttention`.

    Args:
        attention_type: ``"auto"``, ``"standard"`` and ``"improved"`` are one class here.
        segment_lengths, dilation_rates: the pattern.
        use_tf32: True or False lets PyTorch use TF32 for float32 matrix products, or not, in this whole process
            (``torch.set_float32_matmul_precision``); None leaves the setting alone.
        options: the keywords of :class:`DilatedAttention`.

    Raises:
        ValueError: an unknown ``attention_type``.
        TypeError: an option that the class does not have.

    >>> create_dilated_attention("auto", segment_lengths=[2048, 4096], dilation_rates=[1, 2])
    DilatedAttention(segment_lengths=[2048, 4096], dilation_rates=[1, 2], dropout=0.0)
    """
    _check(attention_type)
    set_tf32(use_tf32)
    return DilatedAttention(segment_lengths, dilation_rates, **options)


def create_multihead_dilated_attention(
    attention_type: AttentionType = "auto",
    *,
    embed_dim: int,
    num_heads: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    use_tf32: bool | None = None,
    **options: Any,
) -> MultiheadDilatedAttention:
    """Make a :class:`MultiheadDilatedAttention`; arguments and errors as in :func:`create_dilated_attention`.

    >>> attention = create_multihead_dilated_attention(
    ...     embed_dim=64, num_heads=4, segment_lengths=[16, 64], dilation_rates=[1, 4]
    ... )
    >>> x = torch.randn(1, 100, 64)
    >>> attention(x, x, x)[0].shape
    torch.Size([1, 100, 64])
    """
    _check(attention_type)
    set_tf32(use_tf32)
    return MultiheadDilatedAttention(embed_dim, num_heads, segment_lengths, dilation_rates, **options)


def set_tf32(use_tf32: bool | None) -> None:
    """Let float32 matrix products of this process use TF32 (True), or not (False); None changes nothing."""
    if use_tf32 is not None:
        torch.set_float32_matmul_precision("high" if use_tf32 else "highest")


def _check(attention_type: str) -> None:
    if attention_type not in get_args(AttentionType):
        known = ", ".join(map(repr, get_args(AttentionType)))
        raise ValueError(f"attention_type must be one of {known}, got {attention_type!r}")
