"""Attention modules by name: thin functions over the classes. A name picks a class, never another result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from .nn import (
    AdaptiveBlockAttention,
    DilatedAttention,
    DynamicDilatedAttention,
    DynamicMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    MultiheadPatternAttention,
    PatternAttention,
)

AttentionType = Literal["auto", "standard", "improved", "block_sparse", "dynamic", "adaptive"]
_WITHOUT_LENGTHS = {
    "block_sparse": "a pattern",
    "dynamic": "a selector_config",
    "adaptive": "blocks_per_query and block_size",
}


def create_dilated_attention(
    attention_type: AttentionType = "auto",
    *,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    use_tf32: bool | None = None,
    **options: Any,
) -> PatternAttention | AdaptiveBlockAttention:
    """Make an attention module without projections.

    Args:
        attention_type: ``"auto"``, ``"standard"`` and ``"improved"`` are :class:`DilatedAttention`. ``"block_sparse"``
            is :class:`PatternAttention` and takes ``pattern``. ``"dynamic"`` is :class:`DynamicDilatedAttention`, which
            chooses its segments for every shape; ``"adaptive"`` is :class:`AdaptiveBlockAttention`, which chooses its
            blocks by their content.
        segment_lengths, dilation_rates: the pattern of the first three; not for the others.
        use_tf32: True or False lets PyTorch use TF32 for float32 matrix products, or not, in this whole process
            (``torch.set_float32_matmul_precision``); None leaves the setting alone.
        options: the keywords of the class.

    Raises:
        ValueError: an unknown ``attention_type``, lengths or rates for a class that has none, or none for one that has.
        TypeError: an option that the class does not have, or one that it needs is not there.

    >>> create_dilated_attention("auto", segment_lengths=[2048, 4096], dilation_rates=[1, 2])
    DilatedAttention(segment_lengths=[2048, 4096], dilation_rates=[1, 2], dropout=0.0)
    """
    lengths = _check(attention_type, segment_lengths, dilation_rates)
    set_tf32(use_tf32)
    if lengths is not None:
        return DilatedAttention(*lengths, **options)
    if attention_type == "block_sparse":
        return PatternAttention(**options)
    return AdaptiveBlockAttention(**options) if attention_type == "adaptive" else DynamicDilatedAttention(**options)


def create_multihead_dilated_attention(
    attention_type: AttentionType = "auto",
    *,
    embed_dim: int,
    num_heads: int,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    use_tf32: bool | None = None,
    **options: Any,
) -> MultiheadPatternAttention:
    """Make a :class:`MultiheadDilatedAttention`; arguments and errors as in :func:`create_dilated_attention`.

    ``"block_sparse"`` is :class:`MultiheadPatternAttention`, ``"dynamic"`` :class:`DynamicMultiheadDilatedAttention`;
    there is no ``"adaptive"`` with projections.

    >>> attention = create_multihead_dilated_attention(
    ...     embed_dim=64, num_heads=4, segment_lengths=[16, 64], dilation_rates=[1, 4]
    ... )
    >>> x = torch.randn(1, 100, 64)
    >>> attention(x, x, x)[0].shape
    torch.Size([1, 100, 64])
    """
    lengths = _check(attention_type, segment_lengths, dilation_rates)
    if attention_type == "adaptive":
        raise ValueError(
            'attention_type="adaptive" has no module with projections: project query, key and value before, and call '
            'the module of create_dilated_attention("adaptive", num_heads=..., head_dim=...)'
        )
    set_tf32(use_tf32)
    if lengths is not None:
        return MultiheadDilatedAttention(embed_dim, num_heads, *lengths, **options)
    if attention_type == "block_sparse":
        return MultiheadPatternAttention(embed_dim, num_heads, **options)
    return DynamicMultiheadDilatedAttention(embed_dim, num_heads, **options)


def set_tf32(use_tf32: bool | None) -> None:
    """Let float32 matrix products of this process use TF32 (True), or not (False); None changes nothing."""
    if use_tf32 is not None:
        torch.set_float32_matmul_precision("high" if use_tf32 else "highest")


def _check(
    attention_type: str, segment_lengths: Sequence[int] | None, dilation_rates: Sequence[int] | None
) -> tuple[Sequence[int], Sequence[int]] | None:
    """The lengths and rates; None where the class has none."""
    if attention_type not in get_args(AttentionType):
        known = ", ".join(map(repr, get_args(AttentionType)))
        raise ValueError(f"attention_type must be one of {known}, got {attention_type!r}")
    if attention_type in _WITHOUT_LENGTHS:
        if segment_lengths is not None or dilation_rates is not None:
            raise ValueError(
                f"attention_type={attention_type!r} has {_WITHOUT_LENGTHS[attention_type]} instead of segment_lengths "
                f"and dilation_rates: leave these out, got {segment_lengths} and {dilation_rates}"
            )
        return None
    if segment_lengths is None or dilation_rates is None:
        raise ValueError(
            f"attention_type={attention_type!r} needs segment_lengths and dilation_rates, got {segment_lengths} and "
            f'{dilation_rates}; attention_type="dynamic" chooses them'
        )
    return segment_lengths, dilation_rates
