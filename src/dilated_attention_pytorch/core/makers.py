"""Attention modules by type name, as earlier packages made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dilated_attention_pytorch.legacy import table
from dilated_attention_pytorch.legacy.keywords import is_old, set_tf32
from dilated_attention_pytorch.patterns import Pattern

from .config import (
    AdaptiveAttentionConfig,
    AttentionConfig,
    DilatedAttentionConfig,
    DistributedAttentionConfig,
    DynamicAttentionConfig,
    MultiheadConfig,
    RingAttentionConfig,
    SparseAttentionConfig,
    check_names,
    class_of,
)

if TYPE_CHECKING:
    from dilated_attention_pytorch.nn import AdaptiveBlockAttention, MultiheadPatternAttention, PatternAttention
    from dilated_attention_pytorch.parallel import RingDilatedAttention, RingMultiheadDilatedAttention

AttentionType = Literal["auto", "standard", "improved", "ring", "distributed", "block_sparse", "dynamic", "adaptive"]
_CONFIGURATIONS: Mapping[str, type[AttentionConfig]] = {
    "auto": DilatedAttentionConfig,
    "standard": DilatedAttentionConfig,
    "improved": DilatedAttentionConfig,
    "ring": RingAttentionConfig,
    "distributed": DistributedAttentionConfig,
    "block_sparse": SparseAttentionConfig,
    "dynamic": DynamicAttentionConfig,
    "adaptive": AdaptiveAttentionConfig,
}


def create_dilated_attention(
    attention_type: AttentionType = "auto",
    segment_lengths: Sequence[int] | AttentionConfig | None = None,
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
        segment_lengths: of the pattern of the first five types; or the configuration of any type, such as a
            :class:`core.DilatedAttentionConfig`, in place of all that follows but ``use_tf32``.
        dilation_rates: of the pattern of the first five types.
        use_tf32: enable or disable TF32 for float32 matrix products in the whole process
            (``torch.set_float32_matmul_precision``); None = unchanged.
        options: the other fields of the type's configuration.

    Raises:
        TypeError, ValueError: an unknown ``attention_type``, a configuration of another type, or a field of it that is
            unknown, missing or invalid.

    >>> create_dilated_attention("auto", segment_lengths=[2048, 4096], dilation_rates=[1, 2])
    DilatedAttention(segment_lengths=[2048, 4096], dilation_rates=[1, 2], dropout=0.0)
    """
    given: dict[str, Any] = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    config = given.pop("segment_lengths") if isinstance(segment_lengths, AttentionConfig | Mapping) else None
    config = _attention(attention_type, config, {**_given(given), **options})
    set_tf32(use_tf32)
    return _make("types", attention_type, config)


def create_multihead_dilated_attention(
    attention_type: AttentionType = "auto",
    embed_dim: int | None = None,
    num_heads: int | None = None,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    *,
    multihead_config: MultiheadConfig | None = None,
    attention_config: AttentionConfig | None = None,
    use_tf32: bool | None = None,
    **options: Any,
) -> MultiheadPatternAttention:
    """Create a :class:`MultiheadDilatedAttention`; arguments and errors as in :func:`create_dilated_attention`.

    ``"ring"`` is :class:`parallel.RingMultiheadDilatedAttention`, ``"block_sparse"``
    :class:`MultiheadPatternAttention`, ``"dynamic"`` :class:`DynamicMultiheadDilatedAttention`; ``"distributed"`` and
    ``"adaptive"`` have no variant with projections. ``multihead_config`` is in place of the sizes and the other fields
    of :class:`core.MultiheadConfig`, ``attention_config`` in place of lengths, rates and the fields of its class.

    >>> attention = create_multihead_dilated_attention(
    ...     embed_dim=64, num_heads=4, segment_lengths=[16, 64], dilation_rates=[1, 4]
    ... )
    >>> x = torch.randn(1, 100, 64)
    >>> attention(x, x, x)[0].shape
    torch.Size([1, 100, 64])
    """
    if instead := _sentence("multihead_types", attention_type):
        raise ValueError(f'attention_type="{attention_type}" has no module with projections{instead}')
    given = {
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "segment_lengths": segment_lengths,
        "dilation_rates": dilation_rates,
    }
    if any(isinstance(value, AttentionConfig) for value in given.values()):
        raise TypeError("configurations are given by name here: multihead_config=..., attention_config=...")
    multihead, attention = _split(attention_type, {**_given(given), **options})
    config = _attention(attention_type, attention_config, attention)
    projections = _checked(MultiheadConfig, "multihead_config", multihead_config, multihead)
    set_tf32(use_tf32)
    return _make("multihead_types", attention_type, config, projections)


def create_block_sparse_attention(
    pattern: Pattern | str | SparseAttentionConfig | None = None,
    *,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    multihead_config: MultiheadConfig | None = None,
    **options: Any,
) -> PatternAttention | MultiheadPatternAttention:
    """Create a :class:`MultiheadPatternAttention`; without projections a :class:`PatternAttention`.

    Args:
        pattern: block pattern, such as :func:`from_block_mask`, :func:`strided_blocks`, :func:`local_window` or a sum;
            its text; or a :class:`core.SparseAttentionConfig`.
        embed_dim, num_heads: sizes of the projections; both or none.
        multihead_config: a :class:`core.MultiheadConfig` in place of the sizes.
        options: the other fields of both configurations.

    Raises:
        TypeError, ValueError: a field of a configuration is unknown, missing or invalid, such as a ratio or a name of
            an earlier package for the pattern.

    >>> create_block_sparse_attention(local_window(127) + strided_blocks(8)).dropout
    0.0
    """
    config, given = (pattern, {}) if isinstance(pattern, SparseAttentionConfig) else (None, {"pattern": pattern})
    return _with_sizes("block_sparse", config, {**given, **options}, multihead_config, embed_dim, num_heads)


def create_adaptive_sparse_attention(
    config: AdaptiveAttentionConfig | None = None, *, embed_dim: int | None = None, **options: Any
) -> AdaptiveBlockAttention:
    """Create an :class:`AdaptiveBlockAttention`, which chooses blocks by content.

    Args:
        config: its configuration.
        embed_dim: must be omitted: the module has no projections.
        options: the fields of the configuration instead, ``num_heads`` and ``head_dim`` at least.

    Raises:
        TypeError, ValueError: a field is unknown, missing or invalid, or ``embed_dim`` is given.

    >>> create_adaptive_sparse_attention(num_heads=4, head_dim=16, blocks_per_query=4, block_size=32).block_size
    32
    """
    if embed_dim is not None:
        raise TypeError(
            "attention that chooses its blocks has no projections: project query, key and value before, and pass "
            f"num_heads and head_dim, the width of one head; got embed_dim={embed_dim}"
        )
    return _make("types", "adaptive", _attention("adaptive", config, options))


def create_ring_attention(
    implementation: Literal["auto", "standard", "distributed"] = "auto",
    config: RingAttentionConfig | None = None,
    *,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    multihead_config: MultiheadConfig | None = None,
    **options: Any,
) -> RingDilatedAttention | RingMultiheadDilatedAttention:
    """Create a :class:`parallel.RingDilatedAttention`; with sizes, a :class:`parallel.RingMultiheadDilatedAttention`.

    Args:
        implementation: all three names select the same ring.
        config: the configuration of the ring.
        embed_dim, num_heads: sizes of the projections; both or none.
        multihead_config: a :class:`core.MultiheadConfig` in place of the sizes.
        options: the fields of the configurations instead, ``segment_lengths`` and ``dilation_rates`` at least.

    Raises:
        TypeError, ValueError: an unknown ``implementation``, or a field that is unknown, missing or invalid.

    >>> ring = create_ring_attention(segment_lengths=[16, 64], dilation_rates=[1, 4])
    >>> q = k = v = torch.randn(1, 100, 4, 16)
    >>> ring(q, k, v).shape
    torch.Size([1, 100, 4, 16])
    """
    if implementation not in ("auto", "standard", "distributed"):
        why = _sentence("types", {"hilbert": "hilbert", "block_sparse": "block_sparse_ring"}.get(str(implementation)))
        raise ValueError(f'implementation must be "auto", "standard" or "distributed", got {implementation!r}{why}')
    return _with_sizes("ring", config, options, multihead_config, embed_dim, num_heads)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _with_sizes(
    attention_type: AttentionType,
    config: AttentionConfig | None,
    options: Mapping[str, Any],
    multihead_config: MultiheadConfig | None,
    embed_dim: int | None,
    num_heads: int | None,
) -> Any:
    """A module with projections if a configuration or sizes ask for them, else one without."""
    sizes = _given({"embed_dim": embed_dim, "num_heads": num_heads})
    if multihead_config is None and not sizes:
        return _make("types", attention_type, _attention(attention_type, config, options))
    multihead, attention = _split(attention_type, {**sizes, **options})
    config = _attention(attention_type, config, attention)
    projections = _checked(MultiheadConfig, "multihead_config", multihead_config, multihead)
    return _make("multihead_types", attention_type, config, projections)


def _attention(
    attention_type: AttentionType, config: AttentionConfig | None, options: Mapping[str, Any]
) -> AttentionConfig:
    """The configuration of a type: the one that is given, or that of the options."""
    return _checked(_configuration(attention_type), f"attention_type={attention_type!r}", config, options)


def _configuration(attention_type: AttentionType) -> type[AttentionConfig]:
    kind = _CONFIGURATIONS.get(attention_type) if isinstance(attention_type, str) else None
    if kind is None:
        why = _sentence("types", attention_type)
        if not isinstance(attention_type, str):
            why = "; lengths and rates, or a configuration, come after it"
        names = ", ".join(map(repr, _CONFIGURATIONS))
        raise ValueError(f"attention_type must be one of {names}, got {attention_type!r:.60}{why}")
    return kind


def _checked(
    kind: type[AttentionConfig], what: str, config: AttentionConfig | None, options: Mapping[str, Any]
) -> AttentionConfig:
    if config is None:
        return kind(**options)
    if type(config) is not kind:
        raise TypeError(f"{what} takes {kind.__name__}(...), or its fields by name, got {type(config).__name__}")
    if options:
        raise TypeError(
            f"{kind.__name__} holds all options, got {', '.join(options)} as well: leave them out, or write them into "
            "the configuration with dataclasses.replace"
        )
    return config


def _split(attention_type: AttentionType, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the projections, and those of the attention."""
    of_projections = MultiheadConfig.names()
    names = (*of_projections, *_configuration(attention_type).names())
    check_names("attention with projections", [name for name in options if not is_old(name)], names)
    today = table.read()["renamed"]
    is_first = {name: today.get(name, name) in of_projections for name in options}
    first, second = ({name: options[name] for name in options if is_first[name] is side} for side in (True, False))
    return first, second


def _make(section: str, attention_type: str, *configurations: AttentionConfig) -> Any:
    keywords: dict[str, Any] = {}
    for config in configurations:
        keywords |= config.keywords()
    return class_of(table.read()[section][attention_type])(**keywords)


def _sentence(section: str, attention_type: object) -> str:
    """What the table says of a type without a class."""
    sentence = table.read()["sentences"].get(table.read()[section].get(str(attention_type)))
    return f": {sentence}" if sentence else ""
