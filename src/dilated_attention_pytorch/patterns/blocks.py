"""Window, global-token and block-sparse patterns, shared by all heads or per head."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from .block_rules import (
    MASK_CELLS,
    MOST_BLOCK_PAIRS,
    BlockMask,
    BlockRule,
    Hierarchical,
    RandomBlocks,
    StridedBlocks,
    packed_mask,
    rule_from_entry,
)
from .pattern import Pattern, PatternSum
from .rules import Range, Rectangles, Rule, Spans, Window, num_pairs, of_first_tokens

_LARGEST_DENOMINATOR = 64
_MOST_TOKENS_BEYOND = 256
_END = 1 << 31
"""Exclusive upper bound of lengths and distances."""


@dataclass(frozen=True)
class HeadRule:
    """A rule as applied to the key/value heads of one call.

    With ``heads``, head i of the call is head ``heads[i]`` of ``all_heads``. With ``part = (i, n)``, the rule applies
    only to the heads g with ``g mod n == i``.
    """

    rule: Rule
    part: tuple[int, int] = (0, 1)
    heads: tuple[int, ...] | None = None
    all_heads: int = 0

    @property
    def block_size(self) -> int | None:
        """Block size in positions for block rules, else None."""
        return self.rule.block_size if isinstance(self.rule, BlockRule) else None

    def kind(self, kv_head: int, num_kv_heads: int) -> Hashable:
        """A key that is equal for heads with the same visible pairs; None for heads that the rule does not apply to."""
        head, number = self._head(kv_head, num_kv_heads)
        return ("heads alike", self.rule.kind(head, number)) if self._holds(head) else None

    def sees(self, kv_head: int, num_kv_heads: int, query: Tensor, key: Tensor) -> Tensor:
        """Whether query position p attends to key position t: bool, for broadcastable integer tensors."""
        head, number = self._head(kv_head, num_kv_heads)
        seen = self.rule.sees(head, number, query, key)
        return seen if self._holds(head) else torch.zeros_like(seen)

    def spans(self, kv_head: int, num_kv_heads: int, queries: Range, keys: Range) -> Spans:
        """See :meth:`Rule.spans`."""
        head, number = self._head(kv_head, num_kv_heads)
        return self.rule.spans(head, number, queries, keys if self._holds(head) else (0, 0))

    def num_pairs(self, kv_head: int, num_kv_heads: int, sequence_length: int, *, is_causal: bool) -> int:
        """Number of visible pairs among the first ``sequence_length`` positions."""
        parts = self.spans_in_parts(kv_head, num_kv_heads, sequence_length)
        return sum(num_pairs(spans, *self.band(is_causal=is_causal)) for spans in parts)

    def spans_in_parts(self, kv_head: int, num_kv_heads: int, sequence_length: int) -> Iterator[Spans]:
        """:meth:`spans` of the first positions, a few rows of blocks at a time, which bounds the memory."""
        at_once, size = sequence_length, self.block_size
        if size is not None:
            at_once = max(1, MASK_CELLS // -(-sequence_length // size)) * size
        for start in range(0, sequence_length, at_once):
            queries = (start, min(start + at_once, sequence_length))
            yield self.spans(kv_head, num_kv_heads, queries, (0, sequence_length))

    def check_block_pairs(self, sequence_length: int) -> None:
        """Raise ValueError if the blocks of that many positions make too many pairs to count."""
        blocks = 0 if self.block_size is None else -(-sequence_length // self.block_size)
        if blocks**2 > MOST_BLOCK_PAIRS:
            raise ValueError(
                f"{sequence_length:,} positions in blocks of {self.block_size} make {blocks**2:,} pairs of blocks, and "
                f"at most {MOST_BLOCK_PAIRS:,} are counted; take fewer positions or larger blocks"
            )

    def band(self, *, is_causal: bool) -> tuple[int | None, int | None]:
        """Window bounds ``(before, after)``; causal caps ``after`` at 0; None = unbounded."""
        after = self.rule.after
        return self.rule.before, after if not is_causal else 0 if after is None else min(after, 0)

    @property
    def period(self) -> int | None:
        """See :attr:`Rule.period`."""
        return self.rule.period

    def reach(self, *, is_causal: bool) -> tuple[int | None, int | None]:
        """See :attr:`Rule.reach`; causal caps the reach ahead at 0."""
        before, after = self.rule.reach
        return before, after if not is_causal else 0 if after is None else min(after, 0)

    def last_query(self, kv_head: int, num_kv_heads: int, key: Tensor) -> Tensor:
        """See :meth:`Rule.last_query`; -1 for heads that the rule does not apply to."""
        head, number = self._head(kv_head, num_kv_heads)
        return self.rule.last_query(head, number, key) if self._holds(head) else torch.full_like(key, -1)

    def check(self, num_positions: int, num_kv_heads: int) -> None:
        """Raise ValueError if the rule is not defined for that many positions or key/value heads."""
        if self.heads is not None and len(self.heads) != num_kv_heads:
            raise ValueError(f"the pattern is for {len(self.heads)} key/value heads, got {num_kv_heads}")
        self.rule.check(num_positions, num_kv_heads if self.heads is None else self.all_heads)

    def _head(self, kv_head: int, num_kv_heads: int) -> tuple[int, int]:
        return (kv_head, num_kv_heads) if self.heads is None else (self.heads[kv_head], self.all_heads)

    def _holds(self, head: int) -> bool:
        return head % self.part[1] == self.part[0]


@dataclass(frozen=True)
class BlockPattern(Pattern):
    """A pattern with a single rule, as :func:`local_window` and the other constructors return it."""

    groups = ()
    rule: HeadRule
    spec: str = field(init=False, repr=False, compare=False)
    rules: tuple[HeadRule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rule = self.rule
        entry: list[Any] = [rule.rule.entry, list(rule.part)]
        if rule.heads is not None:
            entry += [list(rule.heads), rule.all_heads]
        object.__setattr__(self, "spec", _json([entry]))
        object.__setattr__(self, "rules", (rule,))

    def __repr__(self) -> str:
        """The call that makes it, and the heads that it is for where they are not all."""
        rule = self.rule
        part = "" if rule.part == (0, 1) else f" for heads g mod {rule.part[1]} == {rule.part[0]}"
        heads = "" if rule.heads is None else f" (heads {list(rule.heads)} of {rule.all_heads})"
        return f"{rule.rule!r}{part}{heads}"

    def for_heads(self, heads: Sequence[int], num_kv_heads: int) -> BlockPattern:
        rule, heads = self.rule, tuple(heads)
        if rule.heads is not None:
            if num_kv_heads != len(rule.heads):
                raise ValueError(
                    f"the pattern is for {len(rule.heads)} key/value heads, got num_kv_heads {num_kv_heads}"
                )
            heads, num_kv_heads = tuple(rule.heads[head] for head in heads), rule.all_heads
        if not heads or any(not 0 <= head < num_kv_heads for head in heads):
            raise ValueError(f"heads must be some of the key/value heads 0 to {num_kv_heads - 1}, got {list(heads)}")
        return BlockPattern(HeadRule(rule.rule, rule.part, heads, num_kv_heads))


def _json(value: Any) -> str:
    # Hand-written: torch.compile traces the construction of a pattern, but not the json module.
    if isinstance(value, list):
        return "[" + ", ".join([_json(one) for one in value]) + "]"
    if isinstance(value, str):
        return f'"{value}"'
    return "null" if value is None else str(value)


def local_window(before: int, after: int = 0) -> BlockPattern:
    """Sliding window: query p attends to keys ``p - before`` to ``p + after`` (Longformer, arXiv 2004.05150).

    Args:
        before: window size to the left, in positions, at least 0.
        after: window size to the right, in positions, at least 0; ignored in causal calls.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is negative or 2^31 or more.

    >>> local_window(2).counts(torch.arange(4), torch.arange(4), 1)[0].tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    """
    _check_integers(least=0, before=before, after=after)
    return BlockPattern(HeadRule(Window(before, after)))


def has_local_window(pattern: Pattern) -> bool:
    """Whether a :func:`local_window` is part of a pattern, of all heads or of some."""
    return any(isinstance(rule.rule, Window) for rule in pattern.rules)


def with_local_window(pattern: Pattern, before: int) -> Pattern:
    """The pattern with ``before`` as the size to the left of every :func:`local_window` in it.

    >>> with_local_window(local_window(7, 3) + global_tokens(2), 31)
    local_window(31, 3) + global_tokens(2)
    """
    if isinstance(pattern, PatternSum):
        return PatternSum(tuple(with_local_window(one, before) for one in pattern.patterns))
    if not isinstance(pattern, BlockPattern) or not isinstance(pattern.rule.rule, Window):
        return pattern
    return BlockPattern(replace(pattern.rule, rule=replace(pattern.rule.rule, before=before)))


def global_tokens(num_tokens: int, *, beyond: int | None = None) -> BlockPattern:
    """The first ``num_tokens`` positions attend to all, and all attend to them (Longformer, arXiv 2004.05150, 3.1).

    Args:
        num_tokens: number of global positions at the start of every document; at least 1.
        beyond: leave out pairs that are at most this far apart. In a sum with ``local_window(beyond, beyond)``, or with
            ``local_window(beyond)`` under a causal mask, every pair then counts once; ``num_tokens`` is at most 256.

    Raises:
        TypeError, ValueError: not an integer, or out of range.

    >>> global_tokens(1).counts(torch.arange(3), torch.arange(3), 1)[0].tolist()
    [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    >>> (local_window(1) + global_tokens(1, beyond=1)).counts(torch.arange(3), torch.arange(3), 1)[0].tolist()
    [[1, 0, 1], [1, 1, 0], [1, 1, 1]]
    """
    _check_integers(least=1, num_tokens=num_tokens)
    if beyond is not None:
        _check_integers(least=0, beyond=beyond)
        if num_tokens > _MOST_TOKENS_BEYOND:
            raise ValueError(f"num_tokens must be at most {_MOST_TOKENS_BEYOND} with beyond, got {num_tokens}")
    return BlockPattern(HeadRule(Rectangles(of_first_tokens(num_tokens, beyond))))


def strided_blocks(stride: int, *, block_size: int = 128) -> BlockPattern:
    """Query block i attends to the key blocks j with ``(i - j) mod stride == 0``, its own included.

    The density is ``1 / stride``. (Child et al. 2019, arXiv 1904.10509, section 4.2, in blocks.)

    Args:
        stride: distance between visible blocks, in blocks, at least 1.
        block_size: positions per block, at least 1.

    Raises:
        TypeError, ValueError: not an integer, or less than 1.

    >>> strided_blocks(2, block_size=1).counts(torch.arange(4), torch.arange(4), 1)[0].tolist()
    [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    """
    _check_integers(least=1, stride=stride, block_size=block_size)
    return BlockPattern(HeadRule(StridedBlocks(stride, block_size)))


def random_blocks(density: float, *, seed: int = 0, block_size: int = 128) -> BlockPattern:
    """Every query block attends to m of every P consecutive key blocks, drawn by the seed and the key/value head.

    (Zaheer et al. 2020, BigBird, arXiv 2007.14062, section 2.) m / P is the fraction nearest to ``density`` with P up
    to 64; the density is exact where P divides the number of blocks. The draw of a query block depends only on its
    number, the head and the seed: longer sequences, shards and other machines draw the same blocks.

    Args:
        density: fraction of keys that a query attends to, in (0, 1].
        seed: integer of at least 0 and below 2^63.
        block_size: positions per block, at least 1.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    >>> random_blocks(0.25, block_size=16).density(640)
    0.25
    """
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise TypeError(f"density must be a number, got {density!r} of type {type(density).__name__}")
    share = Fraction(density).limit_denominator(_LARGEST_DENOMINATOR) if 0 < density <= 1 else Fraction(0)
    if share == 0:
        raise ValueError(
            f"density must be at least 1/{2 * _LARGEST_DENOMINATOR} and at most 1 "
            f"(a query block sees m of every P key blocks, P up to {_LARGEST_DENOMINATOR}), got {density!r}"
        )
    _check_integers(least=1, block_size=block_size)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an integer, got {seed!r} of type {type(seed).__name__}")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be at least 0 and below 2^63, got {seed}")
    return BlockPattern(HeadRule(RandomBlocks(share.numerator, share.denominator, block_size, seed)))


def hierarchical(near: int = 2, *, levels: int = 4, factor: int = 2, block_size: int = 128) -> BlockPattern:
    """Fine nearby, coarse far away: all blocks within ``near``, then on level l every ``factor^l``-th block.

    Level l = 1 to ``levels - 1`` covers key blocks at distances from ``near * factor^(l - 1)`` to ``near * factor^l``
    blocks and keeps the last of every ``factor^l``. A query attends to about
    ``2 near - 1 + 2 near (levels - 1) (1 - 1 / factor)`` blocks, whatever the sequence length.

    Args:
        near: distance, in blocks, below which all blocks are visible, at least 1; a block's own distance is 0.
        levels: number of levels including the near one, at least 1.
        factor: growth of stride and distance from level to level, at least 2.
        block_size: positions per block, at least 1.

    Raises:
        TypeError, ValueError: an argument is not an integer, or too small.

    >>> hierarchical(1, levels=3, block_size=1).counts(torch.tensor([7]), torch.arange(8), 1)[0].tolist()
    [[0, 0, 0, 0, 0, 0, 0, 1]]
    """
    _check_integers(least=1, near=near, levels=levels, block_size=block_size)
    _check_integers(least=2, factor=factor)
    if levels > 31 or near * factor ** (levels - 1) >= _END:
        raise ValueError(
            f"near * factor^(levels - 1) blocks must stay below 2^31, got {near} * {factor}^{levels - 1}; "
            "take fewer levels"
        )
    return BlockPattern(HeadRule(Hierarchical(near, levels, factor, block_size)))


def from_block_mask(mask: Tensor, block_size: int = 128) -> BlockPattern:
    """Query block i of head h attends to key block j iff ``mask[h, i, j]`` is True.

    Args:
        mask: bool ``[heads or 1, query blocks, key blocks]``; heads are the key/value heads of the call, 1 is one mask
            for all. Copied: later changes of the tensor do not affect the pattern.
        block_size: positions per block, at least 1. The last block may be ragged.

    Raises:
        TypeError: the mask is not a bool tensor, or the size not an integer.
        ValueError: the mask does not have three dimensions or is empty, or the size is less than 1. A call with more
            positions than the mask covers raises ValueError as well.

    >>> from_block_mask(torch.eye(3, dtype=torch.bool)[None], 2).density(6)
    0.3333333333333333
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor [heads or 1, query blocks, key blocks], got {kind}")
    if mask.dim() != 3 or mask.numel() == 0:
        raise ValueError(
            f"mask must have the shape [heads or 1, query blocks, key blocks], each at least 1, got {tuple(mask.shape)}"
        )
    _check_integers(least=1, block_size=block_size)
    heads, queries, keys = mask.shape
    return BlockPattern(HeadRule(BlockMask(packed_mask(mask.cpu()), (heads, queries, keys), block_size)))


def per_head(patterns: Sequence[Pattern]) -> Pattern:
    """One pattern per key/value head: head g has ``patterns[g mod len(patterns)]``.

    Args:
        patterns: windows, blocks, global tokens and their sums. A dilated pattern has its own per-head offsets and
            shifts; add it to the result instead.

    Raises:
        TypeError: an entry is not a pattern.
        ValueError: the list is empty, or an entry has dilation groups or is per head already.

    >>> per_head([local_window(0), local_window(1)]).counts(torch.arange(2), torch.arange(2), 2).tolist()
    [[[1, 0], [0, 1]], [[1, 0], [1, 1]]]
    """
    if isinstance(patterns, Pattern):
        raise TypeError(f"patterns must be a list with a pattern for every head, got {patterns!r}; put it in a list")
    if not patterns:
        raise ValueError("patterns must hold at least one pattern, got none")
    parts: list[Pattern] = []
    for index, pattern in enumerate(patterns):
        if not isinstance(pattern, Pattern):
            raise TypeError(f"patterns must hold patterns, got {pattern!r} of type {type(pattern).__name__}")
        if pattern.groups or any(rule.part != (0, 1) or rule.heads is not None for rule in pattern.rules):
            raise ValueError(
                "patterns must hold windows, blocks, global tokens and their sums, the same for all heads, got "
                f"{pattern!r}; add a dilated pattern to the result of per_head"
            )
        parts += [BlockPattern(HeadRule(rule.rule, (index, len(patterns)))) for rule in pattern.rules]
    return parts[0] if len(parts) == 1 else PatternSum(tuple(parts))


def block_pattern_from_entry(entry: list[Any]) -> BlockPattern:
    """The pattern of one rule entry of a :attr:`Pattern.spec`."""
    rule, part, *heads = entry
    of_heads = (tuple(heads[0]), heads[1]) if heads else (None, 0)
    return BlockPattern(HeadRule(rule_from_entry(*rule), tuple(part), *of_heads))


def _check_integers(*, least: int, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
        if not least <= value < _END:
            raise ValueError(f"{name} must be at least {least} and below 2^31, got {value}")
