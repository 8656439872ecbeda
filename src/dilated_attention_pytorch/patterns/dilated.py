"""The dilated pattern of LongNet and its segment arithmetic."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from .pattern import Pattern
from .rules import NO_END

_Rows = TypeVar("_Rows", int, Tensor)
OffsetRule = Literal["modulo", "block"]
Tail = Literal["ragged", "zero_padded"]


@dataclass(frozen=True, slots=True)
class DilationGroup:
    """One pair (w, r): attention within every segment of w positions, at every r-th position.

    Position p lies in segment ``(p + shift) // w`` at ``u = (p + shift) mod w`` and is selected for key/value head g
    iff ``u mod r == offset(g)``.
    """

    segment_length: int
    dilation_rate: int
    offset_rule: OffsetRule = "modulo"
    tail: Tail = "ragged"
    segment_shift: tuple[int, ...] = (0,)
    heads: tuple[int, ...] | None = None
    """For a pattern restricted to some heads: head i of the call is head ``heads[i]`` of ``all_heads``."""
    all_heads: int = 0
    boundaries: tuple[int, ...] | None = None
    """Start positions of segments of unequal length, beginning with 0; the last segment is unbounded."""

    def offset(self, kv_head: int, num_kv_heads: int) -> int:
        """The offset o(g): the residue that key/value head g of ``num_kv_heads`` selects."""
        if self.heads is not None:
            kv_head, num_kv_heads = self.heads[kv_head], self.all_heads
        if self.offset_rule == "modulo":
            return kv_head % self.dilation_rate
        return kv_head // -(-num_kv_heads // self.dilation_rate)

    def shift(self, kv_head: int) -> int:
        """The segment shift of key/value head g in positions, reduced to ``0 <= shift < w``."""
        if self.heads is not None:
            kv_head = self.heads[kv_head]
        return self.segment_shift[kv_head % len(self.segment_shift)] % self.segment_length

    def locate(self, positions: Tensor, kv_head: int, num_kv_heads: int) -> tuple[Tensor, Tensor]:
        """Segment index of each position, and whether it is selected, for one key/value head."""
        if self.boundaries is not None:
            starts = torch.tensor(self.boundaries, device=positions.device)
            segment = torch.bucketize(positions, starts, right=True) - 1
            within = positions - starts[segment]
            return segment, within % self.dilation_rate == self.offset(kv_head, num_kv_heads)
        shifted = positions + self.shift(kv_head)
        within = shifted % self.segment_length
        selected = within % self.dilation_rate == self.offset(kv_head, num_kv_heads)
        return shifted // self.segment_length, selected

    def segment_bounds(self, position: int, shift: int) -> tuple[int, int]:
        """Start and stop of the segment that contains ``position`` (the start may be negative)."""
        if self.boundaries is not None:
            index = bisect.bisect_right(self.boundaries, position)
            return self.boundaries[index - 1], [*self.boundaries[index : index + 1], NO_END][0]
        start = (position + shift) // self.segment_length * self.segment_length - shift
        return start, start + self.segment_length

    def selected(self, segment_start: _Rows, offset: int, start: _Rows, stop: _Rows) -> tuple[_Rows, _Rows]:
        """First selected row and number of selected rows of one segment within ``[start, stop)``.

        ``[start, stop)`` lies within the segment; selected rows are ``dilation_rate`` apart. Also accepts tensors.
        """
        first = start + (offset - (start - segment_start)) % self.dilation_rate
        return first, -((first - stop) // self.dilation_rate)

    def class_sizes(self, kv_head: int, num_kv_heads: int, sequence_length: int) -> list[tuple[int, int]]:
        """Pairs (selected rows n, number of segments with n of them) of the first ``sequence_length`` positions."""
        offset, first = self.offset(kv_head, num_kv_heads), -self.shift(kv_head)
        if self.boundaries is not None:
            starts = [bound for bound in self.boundaries if bound < sequence_length]
            segments = [(start, stop, 1) for start, stop in itertools.pairwise([*starts, sequence_length])]
        else:
            # All segments except the first and the last are equal.
            length, count = self.segment_length, -((first - sequence_length) // self.segment_length)
            last = first + (count - 1) * length
            segments = [(first, min(first + length, sequence_length), 1)]
            if count > 1:
                segments += [(first + length, first + 2 * length, count - 2), (last, sequence_length, 1)]
        return [(self.selected(start, offset, max(start, 0), stop)[1], alike) for start, stop, alike in segments]

    def num_pairs(self, kv_head: int, num_kv_heads: int, sequence_length: int, *, is_causal: bool) -> int:
        """Number of visible pairs among the first ``sequence_length`` positions."""
        return sum(
            alike * (number * (number + 1) // 2 if is_causal else number * number)
            for number, alike in self.class_sizes(kv_head, num_kv_heads, sequence_length)
        )

    def zero_pad_keys(self, sequence_length: int, num_selected: int) -> int:
        """Number of zero keys that fill a class of ``num_selected`` rows under ``tail="zero_padded"``, else 0."""
        if self.tail == "ragged":
            return 0
        filled = -(-min(self.segment_length, sequence_length) // self.dilation_rate)
        return max(0, filled - num_selected)


@dataclass(frozen=True)
class DilatedPattern(Pattern):
    """The multi-scale dilated pattern of LongNet (Ding et al. 2023, arXiv 2307.02486, section 2.2).

    For each pair ``(w_i, r_i)``, query p attends to key t if both lie in the same segment of w_i positions and both
    are selected: ``u mod r_i == o_i``, with u the position in the segment. The counts of all pairs add. Any sequence
    length, w and r.

    Args:
        segment_lengths: segment lengths w_i, in positions, each at least 1. Stored as a tuple.
        dilation_rates: dilation rates r_i, each at least 1, one per segment length. Stored as a tuple.
        offset_rule: ``"modulo"``: key/value head g selects the residue ``g mod r_i`` (the paper's rule).
            ``"block"``: ``g // ceil(G / r_i)`` with G key/value heads (the rule of the authors' code).
        tail: ``"ragged"``: classes with fewer rows stay short. ``"zero_padded"``: every class of a segment is padded to
            ``ceil(min(w_i, N) / r_i)`` keys with score 0 and value 0, as in checkpoints trained with the authors' code.
            Under a causal mask these keys come after every query of their class and are never visible.
        segment_shift: all segments start this many positions earlier. A tuple is cycled over the key/value heads, so
            that heads (or, with one pattern per layer, layers) do not share segment boundaries.

    Raises:
        TypeError: a length, rate or shift is not an integer.
        ValueError: the lists are empty or of unequal length, a value is out of range (at most 2^62), or the rule or
            tail is unknown.

    >>> pattern = DilatedPattern([2048, 4096], [1, 2])
    >>> pattern.segment_lengths, pattern.dilation_rates
    ((2048, 4096), (1, 2))
    """

    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    offset_rule: OffsetRule = field(default="modulo", kw_only=True)
    tail: Tail = field(default="ragged", kw_only=True)
    segment_shift: int | Sequence[int] = field(default=0, kw_only=True)
    spec: str = field(init=False, repr=False, compare=False)
    groups: tuple[DilationGroup, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = _integers("segment_lengths", self.segment_lengths, least=1)
        rates = _integers("dilation_rates", self.dilation_rates, least=1)
        if len(lengths) != len(rates):
            raise ValueError(
                "segment_lengths and dilation_rates pair up, so they must be equally long: "
                f"got {len(lengths)} segment lengths {list(lengths)} and {len(rates)} dilation rates {list(rates)}"
            )
        if self.offset_rule not in ("modulo", "block"):
            raise ValueError(f'offset_rule must be "modulo" or "block", got {self.offset_rule!r}')
        if self.tail not in ("ragged", "zero_padded"):
            raise ValueError(f'tail must be "ragged" or "zero_padded", got {self.tail!r}')
        shift = self.segment_shift
        shifts = _integers("segment_shift", (shift,) if isinstance(shift, int) else shift, least=0)
        object.__setattr__(self, "segment_lengths", lengths)
        object.__setattr__(self, "dilation_rates", rates)
        object.__setattr__(self, "segment_shift", shifts[0] if len(shifts) == 1 else shifts)
        # Hand-written: torch.compile traces the construction of a pattern, but not the json module.
        numbers = ", ".join(str(list(part)) for part in (lengths, rates, shifts))
        object.__setattr__(self, "spec", f'[[{numbers}, "{self.offset_rule}", "{self.tail}"]]')
        groups = tuple(
            DilationGroup(length, rate, self.offset_rule, self.tail, shifts)
            for length, rate in zip(lengths, rates, strict=True)
        )
        object.__setattr__(self, "groups", groups)

    def __repr__(self) -> str:
        options = (("offset_rule", "modulo"), ("tail", "ragged"), ("segment_shift", 0))
        others = [f", {name}={getattr(self, name)!r}" for name, default in options if getattr(self, name) != default]
        return f"DilatedPattern({list(self.segment_lengths)}, {list(self.dilation_rates)}{''.join(others)})"

    def for_heads(self, heads: Sequence[int], num_kv_heads: int) -> Pattern:
        return PatternOfHeads(self, tuple(heads), num_kv_heads)


@dataclass(frozen=True)
class SegmentedPattern(Pattern):
    """A dilated pattern with segments of unequal length, given by their start positions.

    As :class:`DilatedPattern`, with segments ``[b_j, b_(j+1))`` instead of w positions each. Positions past the last
    boundary form one more segment. For packed documents the boundaries apply to every document.

    Args:
        boundaries: for every dilation rate, the ascending start positions of the segments, beginning with 0; as
            ``selection.snap_boundaries`` returns them.
        dilation_rates: dilation rates r_i, each at least 1.
        offset_rule: see :class:`DilatedPattern`.

    Raises:
        TypeError: a boundary or rate is not an integer.
        ValueError: the lists are empty or of unequal length, a value is out of range, or boundaries do not ascend from
            0.

    >>> from dilated_attention_pytorch.patterns import SegmentedPattern
    >>> pattern = SegmentedPattern([[0, 3, 5]], [1])
    >>> pattern.counts(torch.arange(6), torch.tensor([4]), 1)[0, :, 0].tolist()
    [0, 0, 0, 1, 1, 0]
    """

    boundaries: Sequence[Sequence[int]]
    dilation_rates: Sequence[int]
    offset_rule: OffsetRule = field(default="modulo", kw_only=True)
    spec: str = field(init=False, repr=False, compare=False)
    groups: tuple[DilationGroup, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rates = _integers("dilation_rates", self.dilation_rates, least=1)
        boundaries = tuple(_integers("boundaries", some, least=0) for some in self.boundaries)
        if len(boundaries) != len(rates):
            raise ValueError(
                "boundaries and dilation_rates pair up, so they must be equally long: "
                f"got {len(boundaries)} lists of boundaries and {len(rates)} dilation rates"
            )
        for some in boundaries:
            if some[0] != 0 or any(later <= earlier for earlier, later in itertools.pairwise(some)):
                raise ValueError(f"boundaries must ascend from 0 on, got {list(some)}")
        if self.offset_rule not in ("modulo", "block"):
            raise ValueError(f'offset_rule must be "modulo" or "block", got {self.offset_rule!r}')
        object.__setattr__(self, "boundaries", boundaries)
        object.__setattr__(self, "dilation_rates", rates)
        lists = [list(some) for some in boundaries]
        object.__setattr__(self, "spec", f'[["segments", {lists}, {list(rates)}, "{self.offset_rule}"]]')
        groups = tuple(
            DilationGroup(NO_END, rate, self.offset_rule, boundaries=some)
            for some, rate in zip(boundaries, rates, strict=True)
        )
        object.__setattr__(self, "groups", groups)

    def for_heads(self, heads: Sequence[int], num_kv_heads: int) -> Pattern:
        return PatternOfHeads(self, tuple(heads), num_kv_heads)


@dataclass(frozen=True)
class PatternOfHeads(Pattern):
    """A dilated pattern restricted to some key/value heads, see :meth:`Pattern.for_heads`.

    Raises:
        ValueError: an index is not one of ``num_kv_heads`` heads, or the list is empty.
    """

    pattern: DilatedPattern | SegmentedPattern
    heads: tuple[int, ...]
    num_kv_heads: int
    spec: str = field(init=False, repr=False, compare=False)
    groups: tuple[DilationGroup, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.heads or any(not 0 <= head < self.num_kv_heads for head in self.heads):
            raise ValueError(
                f"heads must be some of the key/value heads 0 to {self.num_kv_heads - 1}, got {list(self.heads)}"
            )
        object.__setattr__(self, "spec", f"{self.pattern.spec[:-2]}, {list(self.heads)}, {self.num_kv_heads}]]")
        groups = tuple(replace(group, heads=self.heads, all_heads=self.num_kv_heads) for group in self.pattern.groups)
        object.__setattr__(self, "groups", groups)

    def for_heads(self, heads: Sequence[int], num_kv_heads: int) -> Pattern:
        if num_kv_heads != len(self.heads):
            raise ValueError(f"the pattern is for {len(self.heads)} key/value heads, got num_kv_heads {num_kv_heads}")
        return PatternOfHeads(self.pattern, tuple(self.heads[head] for head in heads), self.num_kv_heads)


def _integers(name: str, values: Sequence[int], *, least: int) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list or tuple of integers, got {values!r}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must hold integers, got {value!r} of type {type(value).__name__} in {values!r}")
        if value < least:
            raise ValueError(f"{name} must hold integers of at least {least}, got {value} in {list(values)}")
        if value > NO_END:
            raise ValueError(f"{name} must hold integers of at most 2^62, got {value}")
    if not values:
        raise ValueError(f"{name} must hold at least one integer, got an empty {type(values).__name__}")
    return tuple(values)
