"""The operands of a call, and the properties that calls of one kind share at any positions."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.blocks import HeadRule
from dilated_attention_pytorch.patterns.dilated import DilationGroup

from .rule_table import FAR, Range, band_of
from .target import target_of
from .tiles import Width


@dataclass(slots=True, eq=False)
class Problem:
    """Validated operands of one call; last dimensions are contiguous.

    ``query`` is ``[B, N, H, D]``, ``key`` ``[B, M, G, D]`` and ``value`` ``[B, M, G, Dv]`` with G dividing H, all of
    one floating dtype; ``cu_seqlens`` is int32 ``[documents + 1]``, ``key_padding_mask`` bool ``[B, M]`` and
    ``dropout_seed`` an int64 scalar, on the same device. ``scale`` is positive. ``query_offset`` is an integer; or, for
    the forward under a causal mask, an int64 scalar on the device, which kernels clamp between 0 and
    ``key_offset + M - N``. Terms of the scores (:mod:`.terms`) are ``distance_bias``, float32 ``[H, N + M - 1]``,
    ``key_bias``, float32 ``[B, M, G]``, and ``softcap``, 0 for no cap. With ``coordinates``, float32 ``[B, 2, M]``,
    ``distance_bias`` is ``[H, 1]``, and every query has the position of a key, by an integer ``query_offset``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    groups: tuple[DilationGroup, ...]
    is_causal: bool
    scale: float
    query_offset: int | Tensor = 0
    key_offset: int = 0
    cu_seqlens: Tensor | None = None
    key_padding_mask: Tensor | None = None
    dropout_seed: Tensor | None = None
    dropout_p: float = 0.0
    rules: tuple[HeadRule, ...] = ()
    distance_bias: Tensor | None = None
    key_bias: Tensor | None = None
    softcap: float = 0.0
    coordinates: Tensor | None = None


class PositionRanges(NamedTuple):
    """The ranges of positions of a call."""

    num_queries: int
    num_keys: int
    query_offset: int | None
    """None if only the device knows it: queries then lie before ``last``, and nothing here depends on where."""
    key_offset: int

    @property
    def last(self) -> int:
        """One past the last position of either slab."""
        last_key = self.key_offset + self.num_keys
        return last_key if self.query_offset is None else max(self.query_offset + self.num_queries, last_key)

    @property
    def queries(self) -> tuple[int, int | None]:
        """Number of queries, and first position."""
        return self.num_queries, self.query_offset

    @property
    def range_of_queries(self) -> tuple[int, int]:
        """First position of a query that sees a key, and one past the last."""
        if self.query_offset is None:
            return self.key_offset, self.last
        return self.query_offset, self.query_offset + self.num_queries

    @property
    def keys(self) -> tuple[int, int]:
        """Number of keys, and first position."""
        return self.num_keys, self.key_offset


@dataclass(frozen=True, eq=False)
class Kind:
    """Everything that determines the launches of a call, except its ranges of positions."""

    device: torch.device
    dtype: torch.dtype
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    groups: tuple[DilationGroup, ...]
    rules: tuple[HeadRule, ...]
    is_causal: bool
    scale: float
    dropout_p: float
    num_documents: int | None
    """Number of packed documents; None = not packed."""
    is_padded: bool
    softcap: float
    has_distance_bias: bool
    has_coordinates: bool
    has_key_bias: bool

    @property
    def ratio(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @functools.cached_property
    def packed_heads(self) -> int:
        """Query heads of one key/value head that share a tile, since their rows see the same keys."""
        return largest_divisor(self.ratio, 16)

    @functools.cached_property
    def widths(self) -> tuple[Width, Width]:
        """Width of queries and keys, and width of values; matrix products need blocks of at least 16."""
        of_keys, of_values = (Width(dim, max(16, next_power_of_2(dim))) for dim in (self.head_dim, self.value_dim))
        return of_keys, of_values

    @property
    def has_terms(self) -> bool:
        """Whether scores are more than scaled products."""
        return self.softcap > 0.0 or self.has_distance_bias or self.has_key_bias

    @functools.cached_property
    def target(self) -> str:
        """The compiler's name of the device; without a GPU, as in Triton's interpreter, ``"sm_90"``."""
        return target_of(self.device)

    @functools.cached_property
    def num_multiprocessors(self) -> int:
        """Number of multiprocessors, which run programs in parallel."""
        if self.device.type != "cuda":
            return 2  # Triton's interpreter: enough that decoding splits its keys there too
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    @functools.cached_property
    def sorted_groups(self) -> tuple[DilationGroup, ...]:
        """The groups from densest to sparsest; the order of rows and the table of groups rely on this."""
        return tuple(sorted(self.groups, key=lambda group: (group.dilation_rate, group.segment_length)))

    @functools.cached_property
    def segment_lengths(self) -> tuple[int, ...]:
        """Segment lengths of the sorted groups."""
        return tuple(group.segment_length for group in self.sorted_groups)

    @functools.cached_property
    def num_shifted_groups(self) -> int:
        """Groups whose first segment is cut short for some head."""
        return sum(any(group.shift(head) for head in range(self.num_kv_heads)) for group in self.groups)

    @functools.cached_property
    def num_unaligned_groups(self) -> int:
        """Groups with segments that begin inside a segment of the densest shortest group, for some head."""
        lengths = self.segment_lengths
        shortest = self.sorted_groups[lengths.index(min(lengths))] if lengths else None
        return sum(
            any(
                group.segment_length % shortest.segment_length
                or (group.shift(head) - shortest.shift(head)) % shortest.segment_length
                for head in range(self.num_kv_heads)
            )
            for group in self.groups
            if shortest is not None
        )

    @functools.cached_property
    def bands(self) -> tuple[Range, ...]:
        """Smallest and largest ``t - p`` of a pair, for each rule."""
        return tuple(band_of(rule, is_causal=self.is_causal) for rule in self.rules)

    @functools.cached_property
    def is_banded(self) -> bool:
        """Whether a rule bounds distances differently from the causal mask."""
        causal = (-FAR, 0 if self.is_causal else FAR)
        return any(band != causal for band in self.bands)

    @functools.cached_property
    def has_zero_pad_keys(self) -> bool:
        """Whether zero-padding keys (score 0, value 0) fill up the classes of a group."""
        return not self.is_causal and any(group.tail == "zero_padded" for group in self.groups)

    @functools.cached_property
    def search(self) -> tuple[int, int]:
        """Number of documents, and number of bisection steps to find one."""
        return (1, 0) if self.num_documents is None else (self.num_documents, self.num_documents.bit_length())

    @functools.cached_property
    def scales(self) -> tuple[float, float]:
        """Scale of the gradients, and scale of the scores in base 2; with terms, the scores are scaled before it."""
        return self.scale, math.log2(math.e) * (1.0 if self.has_terms else self.scale)

    @functools.cached_property
    def cap(self) -> tuple[float, float]:
        """Factor of the products before the terms, and the cap of the scores."""
        if self.softcap == 0.0:
            return self.scale, 0.0
        return min(self.scale / self.softcap, 1e30), self.softcap  # not infinite: a product may be 0

    @functools.cached_property
    def dropout(self) -> tuple[int, float]:
        """Threshold of the random states of kept pairs, and the factor of their probabilities."""
        threshold = min(round(self.dropout_p * 2**32) - 2**31, 2**31 - 1)
        return threshold, 1.0 / (1.0 - self.dropout_p)


kind_of = functools.lru_cache(maxsize=64)(Kind)
"""The cached :class:`Kind` of these fields."""


def next_power_of_2(number: int) -> int:
    """Smallest power of two that is at least ``number`` (1 or more); Triton's own takes several microseconds."""
    return 1 << (number - 1).bit_length()


@functools.lru_cache(maxsize=256)
def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most ``most``."""
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)
