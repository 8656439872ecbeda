"""Configurations of the attention modules that the functions of ``core`` make, checked when they are created.

The fields of a configuration are the keywords of a module, with the module's defaults. A module made of them on the
meta device checks the values, so that a wrong one raises what the module raises.
"""

# ruff: noqa: RUF009 - a default that is read from the module's signature is as constant as one that is written here

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch

from dilated_attention_pytorch.installation import importing
from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.legacy import look_up
from dilated_attention_pytorch.legacy.keywords import answers_old_keywords
from dilated_attention_pytorch.legacy.table import path_of
from dilated_attention_pytorch.nn import (
    AdaptiveBlockAttention,
    DilatedAttention,
    DynamicDilatedAttention,
    MultiheadPatternAttention,
    PatternAttention,
)
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern
from dilated_attention_pytorch.patterns.dilated import OffsetRule, Tail
from dilated_attention_pytorch.patterns.expression import pattern_from_text, text_of
from dilated_attention_pytorch.plan.layout import Layout
from dilated_attention_pytorch.selection import DynamicSegmentSelector, SegmentSelectionConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

_Config = TypeVar("_Config", bound="AttentionConfig")


def class_of(path: str) -> Callable[..., nn.Module]:
    """The class ``home:name`` of this package, imported on first use: that of `parallel` takes seconds."""
    home, _, name = path.partition(":")
    found: Callable[..., nn.Module] = getattr(importlib.import_module(path_of(home)), name)
    return found


def check_names(what: str, given: Iterable[str], names: Collection[str]) -> None:
    """Raise TypeError unless every name that is given is one of ``names``."""
    for name in given:
        if name not in names:
            nearest = difflib.get_close_matches(str(name), names, 1, cutoff=0.75)
            remedy = f"did you mean {nearest[0]}? Its" if nearest else "its"
            raise TypeError(f"{what} has no field {name}; {remedy} fields are {', '.join(names)}")


def _default(kind: type[nn.Module], name: str) -> Any:
    return inspect.signature(kind).parameters[name].default


def _parallel(name: str, of: str = "RingDilatedAttention") -> Any:
    """A field with the default that a class of `parallel` has, or its parent."""

    def default() -> Any:
        kind: Any = class_of(f"parallel:{of}")
        signatures = (inspect.signature(base).parameters for base in kind.__mro__)
        return next(parameters[name].default for parameters in signatures if name in parameters)

    return dataclasses.field(default_factory=default)


def _by_name(kind: type[_Config]) -> type[_Config]:
    """Let a configuration answer old, unknown and missing fields in words."""
    create = kind.__init__

    @functools.wraps(create)
    def checked(self: _Config, *unnamed: Any, **given: Any) -> None:
        if unnamed:
            raise TypeError(
                f"the fields of {kind.__name__} are given by name, {', '.join(kind.names())}; got {unnamed}"
            )
        check_names(kind.__name__, given, kind.names())
        missing = [name for name in kind.required() if name not in given]
        if missing:
            raise TypeError(f"{kind.__name__} needs {' and '.join(kind.required())}, got no {' and no '.join(missing)}")
        create(self, **given)

    setattr(kind, "__init__", answers_old_keywords(checked))  # noqa: B010 - mypy forbids the assignment
    return kind


class AttentionConfig:
    """What the configurations have in common: a dict, TOML, and the module's keywords.

    Creating one raises TypeError or ValueError for a field that is unknown, missing, of the wrong type or out of range.
    """

    __slots__ = ()
    _module: ClassVar[str]
    """The class, ``home:name``, that checks the values."""
    _besides: ClassVar[Mapping[str, Any]] = {}
    """Other arguments that the class requires."""

    def __post_init__(self) -> None:
        for name, convert in _CONVERSIONS.items():
            if name in self.names():
                setattr(self, name, convert(getattr(self, name)))
        # The parameters of the module that checks the values take no memory, whatever device is named.
        on_meta = {"device": "meta"} if "device" in self.names() else {}
        class_of(self._module)(**{**self.keywords(), **self._besides, **on_meta})
        for name, value in self.keywords().items():
            if isinstance(value, list):
                setattr(self, name, tuple(value))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the fields."""
        return tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]

    @classmethod
    def required(cls) -> tuple[str, ...]:
        """The names of the fields without a default."""
        fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]
        without = dataclasses.MISSING
        return tuple(field.name for field in fields if field.default is without is field.default_factory)

    def keywords(self) -> dict[str, Any]:
        """The fields by name, as the module takes them."""
        return {name: getattr(self, name) for name in self.names()}

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as values that JSON and TOML hold; None where a field is None.

        Raises:
            ValueError: a field holds an object that no file can hold: a mesh or a selector.
        """
        return {name: _plain(type(self).__name__, name, value) for name, value in self.keywords().items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`; fields with a default may be missing.

        Raises:
            TypeError, ValueError: an unknown, missing or invalid field.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"values must be a dict of fields of {cls.__name__}, got {values!r}")
        check_names(cls.__name__, (name for name in values if not isinstance(name, str)), cls.names())
        return cls(**values)

    def to_toml(self) -> str:
        """The fields as TOML; those that are None are left out.

        Raises:
            ImportError: tomli-w is not installed.
            ValueError: see :meth:`to_dict`.
        """
        with importing("to_toml", "train"):
            import tomli_w
        return tomli_w.dumps(_without_none(self.to_dict()))

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """The inverse of :meth:`to_toml`.

        Raises:
            TypeError, ValueError: the text is not TOML, or see :meth:`from_dict`.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be TOML such as Path(file).read_text() returns, got {text!r}")
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(
                f"text must be TOML with the fields of {cls.__name__}, got {text!r:.60}: {error}"
            ) from None
        return cls.from_dict(values)


@_by_name
@dataclass(kw_only=True, slots=True)
class DilatedAttentionConfig(AttentionConfig):
    """The configuration of a :class:`DilatedAttention`: types "auto", "standard" and "improved".

    Raises:
        TypeError, ValueError: as any configuration: a field is unknown, missing, of the wrong type or out of range.

    >>> from dilated_attention_pytorch.core import DilatedAttentionConfig, create_dilated_attention
    >>> config = DilatedAttentionConfig(segment_lengths=[2048, 4096], dilation_rates=[1, 2], dropout=0.1)
    >>> create_dilated_attention("auto", config)
    DilatedAttention(segment_lengths=[2048, 4096], dilation_rates=[1, 2], dropout=0.1)
    >>> DilatedAttentionConfig.from_dict(config.to_dict()) == config
    True
    """

    _module: ClassVar[str] = "nn:DilatedAttention"

    segment_lengths: Sequence[int]
    """Segment lengths w_i, in positions."""
    dilation_rates: Sequence[int]
    """Dilation rates r_i, one for every segment length and none larger than it."""
    dropout: float = _default(DilatedAttention, "dropout")
    """Probability of dropping a merged attention probability, in training only."""
    softmax_scale: float | None = _default(DilatedAttention, "softmax_scale")
    """Scale of the scores; None = ``1 / sqrt(D)``."""
    offset_rule: OffsetRule = _default(DilatedAttention, "offset_rule")
    """How heads choose residues, see :class:`DilatedPattern`."""
    tail: Tail = _default(DilatedAttention, "tail")
    """What the last, incomplete segment holds, see :class:`DilatedPattern`."""
    segment_shift: int | Sequence[int] = _default(DilatedAttention, "segment_shift")
    """Shift of the segments in positions, see :class:`DilatedPattern`."""
    impl: Impl = _default(DilatedAttention, "impl")
    """How a call is computed, see :func:`attend`."""


@_by_name
@dataclass(kw_only=True, slots=True)
class RingAttentionConfig(DilatedAttentionConfig):
    """The configuration of a :class:`parallel.RingDilatedAttention`: type "ring".

    >>> from dilated_attention_pytorch.core import RingAttentionConfig, create_ring_attention
    >>> config = RingAttentionConfig(segment_lengths=[16, 64], dilation_rates=[1, 4], ring_size=1)
    >>> create_ring_attention("auto", config).ring_size
    1
    """

    _module: ClassVar[str] = "parallel:RingDilatedAttention"

    ring_size: int | None = _parallel("ring_size")
    """Expected number of ranks; None = any number, including a single process."""
    mesh: DeviceMesh | None = _parallel("mesh")
    """The ranks that share a sequence; None = all ranks of the process group that exists at the first call."""
    layout: Layout = _parallel("layout")
    """Which rows a rank has, see :func:`parallel.attend`."""
    sequence_length: int | None = _parallel("sequence_length")
    """Rows of the whole sequence, see :func:`parallel.attend`."""


@_by_name
@dataclass(kw_only=True, slots=True)
class DistributedAttentionConfig(DilatedAttentionConfig):
    """The configuration of a :class:`parallel.DistributedDilatedAttention`: type "distributed"."""

    _module: ClassVar[str] = "parallel:DistributedDilatedAttention"

    sequence_parallel: bool = _parallel("sequence_parallel", "DistributedDilatedAttention")
    """Shard rows."""
    model_parallel: bool = _parallel("model_parallel", "DistributedDilatedAttention")
    """Shard heads; with both, along the second axis of a 2-D mesh."""
    mesh: DeviceMesh | None = _parallel("mesh")
    """The ranks that share a sequence; None = all ranks of the process group that exists at the first call."""
    layout: Layout = _parallel("layout")
    """Which rows a rank has, see :func:`parallel.attend`."""
    sequence_length: int | None = _parallel("sequence_length")
    """Rows of the whole sequence, see :func:`parallel.attend`."""


@_by_name
@dataclass(kw_only=True, slots=True)
class SparseAttentionConfig(AttentionConfig):
    """The configuration of a :class:`PatternAttention`: type "block_sparse".

    >>> from dilated_attention_pytorch.core import SparseAttentionConfig
    >>> SparseAttentionConfig.from_dict({"pattern": "local_window(127) + strided_blocks(8)"}).pattern.density(4096)
    0.15576553344726562
    """

    _module: ClassVar[str] = "nn:PatternAttention"

    pattern: Pattern | str
    """A pattern, or its text for :func:`pattern_from_expression`; the field then holds the pattern."""
    dropout: float = _default(PatternAttention, "dropout")
    """Probability of dropping a merged attention probability, in training only."""
    softmax_scale: float | None = _default(PatternAttention, "softmax_scale")
    """Scale of the scores; None = ``1 / sqrt(D)``."""
    impl: Impl = _default(PatternAttention, "impl")
    """How a call is computed, see :func:`attend`."""


@_by_name
@dataclass(kw_only=True, slots=True)
class DynamicAttentionConfig(AttentionConfig):
    """The configuration of a :class:`DynamicDilatedAttention`: type "dynamic"."""

    _module: ClassVar[str] = "nn:DynamicDilatedAttention"

    selector_config: SegmentSelectionConfig | None = _default(DynamicDilatedAttention, "selector_config")
    """Selection policy, or a dict of its fields; None = the defaults."""
    dropout: float = _default(DynamicDilatedAttention, "dropout")
    """Probability of dropping a merged attention probability, in training only."""
    softmax_scale: float | None = _default(DynamicDilatedAttention, "softmax_scale")
    """Scale of the scores; None = ``1 / sqrt(D)``."""
    offset_rule: OffsetRule = _default(DynamicDilatedAttention, "offset_rule")
    """How heads choose residues, see :class:`DilatedPattern`."""
    tail: Tail = _default(DynamicDilatedAttention, "tail")
    """What the last, incomplete segment holds, see :class:`DilatedPattern`."""
    segment_shift: int | Sequence[int] = _default(DynamicDilatedAttention, "segment_shift")
    """Shift of the segments in positions, see :class:`DilatedPattern`."""
    impl: Impl = _default(DynamicDilatedAttention, "impl")
    """How a call is computed, see :func:`attend`."""
    selector: DynamicSegmentSelector | None = _default(DynamicDilatedAttention, "selector")
    """A selector instead of a policy, to share choices between modules."""


@_by_name
@dataclass(kw_only=True, slots=True)
class AdaptiveAttentionConfig(AttentionConfig):
    """The configuration of an :class:`AdaptiveBlockAttention`: type "adaptive"."""

    _module: ClassVar[str] = "nn:AdaptiveBlockAttention"

    num_heads: int
    """Number of query heads H."""
    head_dim: int
    """Head dimension D."""
    num_kv_heads: int | None = _default(AdaptiveBlockAttention, "num_kv_heads")
    """Number of key/value heads G, which divides H; None = H."""
    blocks_per_query: int = _default(AdaptiveBlockAttention, "blocks_per_query")
    """Number of blocks that a query block sees, including its own, at least 2."""
    block_size: int = _default(AdaptiveBlockAttention, "block_size")
    """Positions of a key block."""
    query_block_size: int | None = _default(AdaptiveBlockAttention, "query_block_size")
    """Rows that share a choice, which divides ``block_size``; None = ``block_size``."""
    scorer_dim: int = _default(AdaptiveBlockAttention, "scorer_dim")
    """Width of the scorer's projections."""
    pattern: Pattern | str | None = _default(AdaptiveBlockAttention, "pattern")
    """A static pattern in addition to the chosen blocks, or its text."""
    dropout: float = _default(AdaptiveBlockAttention, "dropout")
    """Probability of dropping a merged attention probability, in training only."""
    softmax_scale: float | None = _default(AdaptiveBlockAttention, "softmax_scale")
    """Scale of the scores, also of the scorer's; None = ``1 / sqrt(D)``."""
    device: torch.device | str | None = _default(AdaptiveBlockAttention, "device")
    """Of the scorer's parameters."""
    dtype: torch.dtype | str | None = _default(AdaptiveBlockAttention, "dtype")
    """Of the scorer's parameters; a name such as "bfloat16" stands for the type."""


@_by_name
@dataclass(kw_only=True, slots=True)
class MultiheadConfig(AttentionConfig):
    """The projections around a module of any other configuration: :class:`MultiheadPatternAttention`.

    >>> from dilated_attention_pytorch.core import MultiheadConfig, create_multihead_dilated_attention
    >>> attention = create_multihead_dilated_attention(
    ...     multihead_config=MultiheadConfig(embed_dim=64, num_heads=4),
    ...     attention_config=DilatedAttentionConfig(segment_lengths=[16, 64], dilation_rates=[1, 4]),
    ... )
    >>> attention.head_dim
    16
    """

    _module: ClassVar[str] = "nn:MultiheadPatternAttention"
    _besides: ClassVar[Mapping[str, Any]] = {"pattern": DilatedPattern([1], [1])}

    embed_dim: int
    """Width E of query and output; ``num_heads`` divides it."""
    num_heads: int
    """Number of query heads H."""
    bias: bool = _default(MultiheadPatternAttention, "bias")
    """Whether the projections have biases."""
    kdim: int | None = _default(MultiheadPatternAttention, "kdim")
    """Width of key; None = E."""
    vdim: int | None = _default(MultiheadPatternAttention, "vdim")
    """Width of value; None = E."""
    num_kv_heads: int | None = _default(MultiheadPatternAttention, "num_kv_heads")
    """Number of key/value heads G, which divides H (grouped-query attention); None = H."""
    sub_layernorm: bool = _default(MultiheadPatternAttention, "sub_layernorm")
    """Whether there is a LayerNorm over the concatenated heads (MAGNETO, arXiv 2210.06423, section 2.1)."""
    layernorm_eps: float = _default(MultiheadPatternAttention, "layernorm_eps")
    """Epsilon of that LayerNorm."""
    gain: float = _default(MultiheadPatternAttention, "gain")
    """Xavier gain of the value and output projections."""
    device: torch.device | str | None = _default(MultiheadPatternAttention, "device")
    """Of the parameters."""
    dtype: torch.dtype | str | None = _default(MultiheadPatternAttention, "dtype")
    """Of the parameters; a name such as "bfloat16" stands for the type."""


def _pattern(pattern: Any) -> Any:
    """The pattern of a text; other values unchanged, for the module to check."""
    try:
        return pattern_from_text(pattern) if isinstance(pattern, str) else pattern
    except ValueError as error:
        raise ValueError(f"pattern: {error}") from error


def _policy(policy: Any) -> Any:
    """The selection policy of a dict; other values unchanged, for the module to check."""
    if not isinstance(policy, Mapping):
        return policy
    check_names("selector_config", policy, [field.name for field in dataclasses.fields(SegmentSelectionConfig)])
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in policy.items()}
    return SegmentSelectionConfig(**given)


def _device(device: Any) -> torch.device | None:
    if device is None or isinstance(device, torch.device):
        return device
    try:
        return torch.device(str(device))
    except RuntimeError:
        raise ValueError(f'device must be a device such as "cuda:0" or "cpu", or None, got {device!r}') from None


def _dtype(dtype: Any) -> torch.dtype | None:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f'dtype must be a floating type such as "bfloat16" or torch.float32, or None, got {dtype!r}')
    return found


_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "pattern": _pattern,
    "selector_config": _policy,
    "device": _device,
    "dtype": _dtype,
}
"""Of the fields that a file holds as text or as a table."""


def _plain(config: str, name: str, value: Any) -> Any:
    """A field as JSON and TOML hold it."""
    if isinstance(value, Pattern):
        return text_of(value)
    if isinstance(value, SegmentSelectionConfig):
        return {key: _plain(config, key, one) for key, one in dataclasses.asdict(value).items()}
    if isinstance(value, torch.device | torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return list(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{name} of {config} must be None to be written, as a {type(value).__name__} lives in its process alone: write "
        f"dataclasses.replace(config, {name}=None), and set {name} again after reading"
    )


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }


def __getattr__(name: str) -> Any:
    return look_up("core.config", name)
