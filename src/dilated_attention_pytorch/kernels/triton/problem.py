"""The operands of a call, and what calls of one kind have in common wherever they lie."""

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


class Scales(NamedTuple):
    """What each row of e4m3 operands is times, float32, and the dtype of what is computed of them."""

    query: Tensor
    """``[B, H, N]``."""
    key: Tensor
    """``[B, G, M]``, as those of the values."""
    value: Tensor
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class Problem:
    """The operands of one call, checked; last dimensions are contiguous.

    ``query`` is ``[B, N, H, D]``, ``key`` and ``value`` are ``[B, M, G, D]`` with G dividing H, all of one floating
    dtype; ``cu_seqlens`` is int32 ``[documents + 1]``, ``key_padding_mask`` bool ``[B, M]`` and ``dropout_seed`` an
    int64 scalar, on the same device. ``scale`` is not negative. ``query_offset`` is an integer; or, for the forward
    under a causal mask, an int64 scalar on the device, which kernels keep within 0 and ``key_offset + M - N``.
    e4m3 operands have ``scales``, for the forward alone: see :mod:`.fp8`.
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
    scales: Scales | None = None


class Positions(NamedTuple):
    """The ranges of positions that a call is about."""

    num_queries: int
    num_keys: int
    query_offset: int | None
    """None where the device alone knows it: queries then lie before ``last``, and nothing here depends on where."""
    key_offset: int

    @property
    def last(self) -> int:
        """One past the last position of either slab."""
        last_key = self.key_offset + self.num_keys
        return last_key if self.query_offset is None else max(self.query_offset + self.num_queries, last_key)

    @property
    def queries(self) -> tuple[int, int | None]:
        """Number and first position."""
        return self.num_queries, self.query_offset

    @property
    def range_of_queries(self) -> tuple[int, int]:
        """First position of a query that sees a key, and one past the last."""
        if self.query_offset is None:
            return self.key_offset, self.last
        return self.query_offset, self.query_offset + self.num_queries

    @property
    def keys(self) -> tuple[int, int]:
        """Number and first position."""
        return self.num_keys, self.key_offset


@dataclass(frozen=True, eq=False)
class Kind:
    """All that decides about the launches of a call but for the ranges of positions that it is about."""

    device: torch.device
    dtype: torch.dtype
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    groups: tuple[DilationGroup, ...]
    rules: tuple[HeadRule, ...]
    is_causal: bool
    scale: float
    dropout_p: float
    num_documents: int | None
    """How many documents are packed; None is none."""
    is_padded: bool

    @property
    def ratio(self) -> int:
        """Query heads of one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_scaled(self) -> bool:
        """Whether rows are e4m3 numbers times a scale."""
        return self.dtype == torch.float8_e4m3fn

    @functools.cached_property
    def packed_heads(self) -> int:
        """Query heads of one key/value head that share a tile: their rows see the same keys."""
        return largest_divisor(self.ratio, 16)

    @functools.cached_property
    def block_d(self) -> int:
        """The width of the blocks that hold a head: products take 16 numbers at a time, 32 of 8 bits."""
        return max(32 if self.is_scaled else 16, next_power_of_2(self.head_dim))

    @functools.cached_property
    def target(self) -> str:
        """The compiler's name of the device; where there is none, as in Triton's interpreter, ``"sm_90"``."""
        return target_of(self.device)

    @functools.cached_property
    def num_multiprocessors(self) -> int:
        """How many programs the device computes side by side."""
        if self.device.type != "cuda":
            return 2  # Triton's interpreter: enough that decoding splits its keys there too
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    @functools.cached_property
    def sorted_groups(self) -> tuple[DilationGroup, ...]:
        """The groups from the densest to the sparsest: the order of rows and the table of groups count on it."""
        return tuple(sorted(self.groups, key=lambda group: (group.dilation_rate, group.segment_length)))

    @functools.cached_property
    def segment_lengths(self) -> tuple[int, ...]:
        """Of the sorted groups."""
        return tuple(group.segment_length for group in self.sorted_groups)

    @functools.cached_property
    def num_shifted_groups(self) -> int:
        """Groups whose first segment is cut short for some head."""
        return sum(any(group.shift(head) for head in range(self.num_kv_heads)) for group in self.groups)

    @functools.cached_property
    def num_unaligned_groups(self) -> int:
        """Groups with segments that begin within one of the densest shortest group, for some head."""
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
        """The least and the largest ``t - p`` of a pair of each rule."""
        return tuple(band_of(rule, is_causal=self.is_causal) for rule in self.rules)

    @functools.cached_property
    def is_banded(self) -> bool:
        """Whether a rule bounds the distance of a key otherwise than the causal mask does."""
        causal = (-FAR, 0 if self.is_causal else FAR)
        return any(band != causal for band in self.bands)

    @functools.cached_property
    def has_zero_pad_keys(self) -> bool:
        """Whether keys of score 0 and value 0 fill up the classes of a group."""
        return not self.is_causal and any(group.tail == "zero_padded" for group in self.groups)

    @functools.cached_property
    def search(self) -> tuple[int, int]:
        """Number of documents, and halvings that find one among them."""
        return (1, 0) if self.num_documents is None else (self.num_documents, self.num_documents.bit_length())

    @functools.cached_property
    def factors(self) -> tuple[float, float, int, float]:
        """Scale of the gradients, of the scores in base 2, and what dropout compares with and multiplies by.

        The scores' is positive: for 0 it is 2^-126, which makes every probability 1 as well, but leaves -inf as it is.
        """
        scale_log2 = max(self.scale * math.log2(math.e), torch.finfo(torch.float32).tiny)
        threshold = min(round(self.dropout_p * 2**32) - 2**31, 2**31 - 1)
        return self.scale, scale_log2, threshold, 1.0 / (1.0 - self.dropout_p)

    @functools.cached_property
    def constants(self) -> dict[str, object]:
        """What every kernel that computes is compiled for, whatever its blocks."""
        return {
            "RATIO": self.ratio,
            "D": self.head_dim,
            "BLOCK_D": self.block_d,
            "CAUSAL": self.is_causal,
            "BANDED": self.is_banded,
            "PADDED": self.is_padded,
            "DROPOUT": self.dropout_p > 0.0,
        }


kind_of = functools.lru_cache(maxsize=64)(Kind)
"""The one :class:`Kind` of these fields."""


def next_power_of_2(number: int) -> int:
    """The least power of two that is not less than a number from 1 on; Triton's own takes several microseconds."""
    return 1 << (number - 1).bit_length()


@functools.lru_cache(maxsize=256)
def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is ``most`` at most."""
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)
