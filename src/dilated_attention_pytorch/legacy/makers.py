"""Attention modules by type name, as earlier packages made them; also importable from ``core``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from dilated_attention_pytorch.patterns import Pattern

from . import table

if TYPE_CHECKING:
    from dilated_attention_pytorch.nn import AdaptiveBlockAttention, MultiheadPatternAttention, PatternAttention
    from dilated_attention_pytorch.parallel import RingDilatedAttention, RingMultiheadDilatedAttention

__all__ = [
    "create_adaptive_sparse_attention",
    "create_block_sparse_attention",
    "create_dilated_attention",
    "create_multihead_dilated_attention",
    "create_ring_attention",
]

AttentionType = Literal["auto", "standard", "improved", "ring", "distributed", "block_sparse", "dynamic", "adaptive"]
_INSTEAD_OF_LENGTHS = {
    "block_sparse": "a pattern",
    "dynamic": "a selector_config",
    "adaptive": "blocks_per_query and block_size",
}
_INSTEAD_OF_PATTERN = ("variant", "sparsity_ratio", "pattern_type", "sparse_config", "block_size")


def create_dilated_attention(
    attention_type: AttentionType = "auto",
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    use_tf32: bool | None = None,
    **options: Any,
) -> PatternAttention | AdaptiveBlockAttention:
    """Create an attention module without projections.

    Args:
        attention_type: ``"auto"``, ``"standard"`` and ``"improved"`` are :class:`DilatedAttention`. ``"ring"`` is
            :class:`parallel.RingDilatedAttention` and ``"distributed"`` :class:`parallel.DistributedDilatedAttention`,
            whose inputs and outputs are this rank's rows. ``"block_sparse"`` is :class:`PatternAttention` and takes
            ``pattern``. ``"dynamic"`` is :class:`DynamicDilatedAttention`, which chooses segments per input shape;
            ``"adaptive"`` is :class:`AdaptiveBlockAttention`, which chooses blocks by content.
        segment_lengths, dilation_rates: the pattern of the first five types; not allowed for the others.
        use_tf32: enable or disable TF32 for float32 matrix products in the whole process
            (``torch.set_float32_matmul_precision``); None = unchanged.
        options: keywords of the class.

    Raises:
        ValueError: an unknown ``attention_type``; lengths or rates for a class without them, or none for one with them.
        TypeError: an unknown option, or a missing required one.

    >>> create_dilated_attention("auto", segment_lengths=[2048, 4096], dilation_rates=[1, 2])
    DilatedAttention(segment_lengths=[2048, 4096], dilation_rates=[1, 2], dropout=0.0)
    """
    lengths = _lengths(attention_type, segment_lengths, dilation_rates)
    set_tf32(use_tf32)
    return _class("types", attention_type)(*lengths, **options)


def create_multihead_dilated_attention(
    attention_type: AttentionType = "auto",
    embed_dim: int | None = None,
    num_heads: int | None = None,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    use_tf32: bool | None = None,
    **options: Any,
) -> MultiheadPatternAttention:
    """Create a :class:`MultiheadDilatedAttention`; arguments and errors as in :func:`create_dilated_attention`.

    ``"ring"`` is :class:`parallel.RingMultiheadDilatedAttention`, ``"block_sparse"``
    :class:`MultiheadPatternAttention`, ``"dynamic"`` :class:`DynamicMultiheadDilatedAttention`; ``"distributed"`` and
    ``"adaptive"`` have no variant with projections.

    >>> attention = create_multihead_dilated_attention(
    ...     embed_dim=64, num_heads=4, segment_lengths=[16, 64], dilation_rates=[1, 4]
    ... )
    >>> x = torch.randn(1, 100, 64)
    >>> attention(x, x, x)[0].shape
    torch.Size([1, 100, 64])
    """
    lengths = _lengths(attention_type, segment_lengths, dilation_rates)
    if embed_dim is None or num_heads is None:
        raise TypeError(f"projections need embed_dim and num_heads, got {embed_dim} and {num_heads}")
    if instead := _sentence("multihead_types", attention_type):
        raise ValueError(f'attention_type="{attention_type}" has no module with projections{instead}')
    set_tf32(use_tf32)
    return _class("multihead_types", attention_type)(embed_dim, num_heads, *lengths, **options)


def create_block_sparse_attention(
    pattern: Pattern | None = None, *, embed_dim: int | None = None, num_heads: int | None = None, **options: Any
) -> PatternAttention | MultiheadPatternAttention:
    """Create a :class:`MultiheadPatternAttention`; without ``embed_dim``, ``num_heads`` a :class:`PatternAttention`.

    Args:
        pattern: block pattern, such as :func:`from_block_mask`, :func:`strided_blocks`, :func:`local_window` or a sum.
        embed_dim, num_heads: sizes of the projections; both or none.
        options: keywords of the class.

    Raises:
        TypeError: ``pattern`` is not a :class:`Pattern`, such as a ratio or a name of an earlier package; or only one
            of ``embed_dim`` and ``num_heads`` is given.

    >>> create_block_sparse_attention(local_window(127) + strided_blocks(8)).dropout
    0.0
    """
    old = [f"{name}={value!r}" for name, value in options.items() if name in _INSTEAD_OF_PATTERN]
    if not isinstance(pattern, Pattern) or old:
        raise TypeError(
            "pattern must be a pattern such as local_window(127) + global_tokens(64), strided_blocks(8, block_size=64) "
            "or from_block_mask(mask, block_size), and nothing beside it: a ratio or a name does not say which keys a "
            f"query sees, and packages that take one differ in what it means; got {', '.join([repr(pattern), *old])}"
        )
    sizes = _sizes(embed_dim, num_heads)
    if sizes is None:
        return _class("types", "block_sparse")(pattern, **options)
    return _class("multihead_types", "block_sparse")(*sizes, pattern, **options)


def create_adaptive_sparse_attention(
    *, num_heads: int, head_dim: int | None = None, embed_dim: int | None = None, **options: Any
) -> AdaptiveBlockAttention:
    """Create an :class:`AdaptiveBlockAttention`, which chooses blocks by content.

    Args:
        num_heads, head_dim: number of query heads and head dimension.
        embed_dim: must be omitted: the module has no projections.
        options: keywords of the class.

    Raises:
        TypeError: ``head_dim`` is missing, or ``embed_dim`` is given.

    >>> create_adaptive_sparse_attention(num_heads=4, head_dim=16, blocks_per_query=4, block_size=32).block_size
    32
    """
    if head_dim is None or embed_dim is not None:
        raise TypeError(
            "attention that chooses its blocks has no projections: project query, key and value before, and pass "
            f"num_heads and head_dim, the width of one head; got head_dim={head_dim} and embed_dim={embed_dim}"
        )
    return _class("types", "adaptive")(num_heads, head_dim, **options)


def create_ring_attention(
    implementation: Literal["auto", "standard", "distributed"] = "auto",
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    embed_dim: int | None = None,
    num_heads: int | None = None,
    **options: Any,
) -> RingDilatedAttention | RingMultiheadDilatedAttention:
    """Create a :class:`parallel.RingDilatedAttention`; with sizes, a :class:`parallel.RingMultiheadDilatedAttention`.

    Args:
        implementation: all three names select the same ring.
        segment_lengths, dilation_rates: the pattern.
        embed_dim, num_heads: sizes of the projections; both or none.
        options: keywords of the class.

    Raises:
        ValueError: an unknown ``implementation``.
        TypeError: only one of ``embed_dim`` and ``num_heads`` is given.

    >>> ring = create_ring_attention(segment_lengths=[16, 64], dilation_rates=[1, 4])
    >>> q = k = v = torch.randn(1, 100, 4, 16)
    >>> ring(q, k, v).shape
    torch.Size([1, 100, 4, 16])
    """
    if implementation not in ("auto", "standard", "distributed"):
        why = _sentence("types", {"hilbert": "hilbert", "block_sparse": "block_sparse_ring"}.get(str(implementation)))
        raise ValueError(f'implementation must be "auto", "standard" or "distributed", got {implementation!r}{why}')
    sizes = _sizes(embed_dim, num_heads)
    if sizes is None:
        return _class("types", "ring")(segment_lengths, dilation_rates, **options)
    return _class("multihead_types", "ring")(*sizes, segment_lengths, dilation_rates, **options)


def set_tf32(use_tf32: bool | None) -> None:
    """Enable (True) or disable (False) TF32 for float32 matrix products of this process; None = unchanged."""
    if use_tf32 is not None:
        torch.set_float32_matmul_precision("high" if use_tf32 else "highest")


def _sizes(embed_dim: int | None, num_heads: int | None) -> tuple[int, int] | None:
    """Both sizes of the projections, or None for a module without them."""
    if (embed_dim is None) != (num_heads is None):
        raise TypeError(f"embed_dim and num_heads go together, got embed_dim={embed_dim} and num_heads={num_heads}")
    return None if embed_dim is None or num_heads is None else (embed_dim, num_heads)


def _lengths(
    attention_type: str, segment_lengths: Sequence[int] | None, dilation_rates: Sequence[int] | None
) -> tuple[Sequence[int], ...]:
    """The lengths and rates of a class with them, nothing for one without."""
    known = [name for name, found in table.read()["types"].items() if ":" in found]
    if attention_type not in known:
        why = _sentence("types", attention_type)
        if not isinstance(attention_type, str):  # a list of lengths
            why = "; lengths and rates come after it, or by name: segment_lengths=, dilation_rates="
        names = ", ".join(map(repr, known))
        raise ValueError(f"attention_type must be one of {names}, got {attention_type!r}{why}")
    if attention_type in _INSTEAD_OF_LENGTHS:
        if segment_lengths is not None or dilation_rates is not None:
            raise ValueError(
                f"attention_type={attention_type!r} has {_INSTEAD_OF_LENGTHS[attention_type]} instead of "
                f"segment_lengths and dilation_rates: leave these out, got {segment_lengths} and {dilation_rates}"
            )
        return ()
    if segment_lengths is None or dilation_rates is None:
        raise ValueError(
            f"attention_type={attention_type!r} needs segment_lengths and dilation_rates, got {segment_lengths} and "
            f'{dilation_rates}; attention_type="dynamic" chooses them'
        )
    return segment_lengths, dilation_rates


def _class(section: str, attention_type: str) -> Callable[..., Any]:
    """The class of a type, imported on first use: that of `parallel` takes seconds."""
    home, _, name = table.read()[section][attention_type].partition(":")
    return getattr(importlib.import_module(table.path_of(home)), name)


def _sentence(section: str, attention_type: object) -> str:
    """What the table says of a type without a class."""
    sentence = table.read()["sentences"].get(table.read()[section].get(str(attention_type)))
    return f": {sentence}" if sentence else ""
