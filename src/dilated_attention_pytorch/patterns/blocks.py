"""Patterns that are no dilation groups: windows, global tokens and blocks, for all heads or head by head."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
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
from .rules import Range, Rectangles, Rule, Spans, Window, num_pairs

_LARGEST_DENOMINATOR = 64
_END = 1 << 31
"""No length or distance reaches it."""


@dataclass(frozen=True)
class HeadRule:
    """A rule as the key/value heads of one call meet it.

    Where ``heads`` is given, head i of the call is head ``heads[i]`` of ``all_heads``. Where ``part = (i, n)`` is, the
    rule holds for the heads ``g mod n == i`` alone.
    """

    rule: Rule
    part: tuple[int, int] = (0, 1)
    heads: tuple[int, ...] | None = None
    all_heads: int = 0

    @property
    def block_size(self) -> int | None:
        """Positions of a block where the rule is one of blocks."""
        return self.rule.block_size if isinstance(self.rule, BlockRule) else None

    def kind(self, kv_head: int, num_kv_heads: int) -> Hashable:
        """Equal for heads that see alike; None for those that the rule is not for."""
        head, number = self._head(kv_head, num_kv_heads)
        return ("heads alike", self.rule.kind(head, number)) if self._holds(head) else None

    def sees(self, kv_head: int, num_kv_heads: int, query: Tensor, key: Tensor) -> Tensor:
        """Whether query position p sees key position t: bool, for integer tensors that broadcast."""
        head, number = self._head(kv_head, num_kv_heads)
        seen = self.rule.sees(head, number, query, key)
        return seen if self._holds(head) else torch.zeros_like(seen)

    def spans(self, kv_head: int, num_kv_heads: int, queries: Range, keys: Range) -> Spans:
        """See :meth:`Rule.spans`."""
        head, number = self._head(kv_head, num_kv_heads)
        return self.rule.spans(head, number, queries, keys if self._holds(head) else (0, 0))

    def num_pairs(self, kv_head: int, num_kv_heads: int, sequence_length: int, *, is_causal: bool) -> int:
        """How many pairs of the first ``sequence_length`` positions see each other."""
        at_once, size = sequence_length, self.block_size
        if size is not None:
            blocks = -(-sequence_length // size)
            if blocks**2 > MOST_BLOCK_PAIRS:
                raise ValueError(
                    f"{sequence_length:,} positions in blocks of {size} are {blocks**2:,} pairs of blocks to look at, "
                    f"and at most {MOST_BLOCK_PAIRS:,} are; take fewer positions or larger blocks"
                )
            # Some rows of blocks at a time, so that memory does not grow with all pairs.
            at_once = max(1, MASK_CELLS // blocks) * size
        pairs = 0
        for start in range(0, sequence_length, at_once):
            queries = (start, min(start + at_once, sequence_length))
            spans = self.spans(kv_head, num_kv_heads, queries, (0, sequence_length))
            pairs += num_pairs(spans, *self.band(is_causal=is_causal))
        return pairs

    def band(self, *, is_causal: bool) -> tuple[int | None, int | None]:
        """How far back and how far ahead a query sees at most, under a causal mask not at all ahead; None is any."""
        after = self.rule.after
        return self.rule.before, after if not is_causal else 0 if after is None else min(after, 0)

    @property
    def period(self) -> int | None:
        """See :attr:`Rule.period`."""
        return self.rule.period

    def reach(self, *, is_causal: bool) -> tuple[int | None, int | None]:
        """See :attr:`Rule.reach`; under a causal mask nothing is seen ahead."""
        before, after = self.rule.reach
        return before, after if not is_causal else 0 if after is None else min(after, 0)

    def last_query(self, kv_head: int, num_kv_heads: int, key: Tensor) -> Tensor:
        """See :meth:`Rule.last_query`; -1 for heads that the rule is not for."""
        head, number = self._head(kv_head, num_kv_heads)
        return self.rule.last_query(head, number, key) if self._holds(head) else torch.full_like(key, -1)

    def check(self, num_positions: int, num_kv_heads: int) -> None:
        """Raise ValueError if the rule is not for a call of that many positions and key/value heads."""
        if self.heads is not None and len(self.heads) != num_kv_heads:
            raise ValueError(f"the pattern is for {len(self.heads)} key/value heads, got {num_kv_heads}")
        self.rule.check(num_positions, num_kv_heads if self.heads is None else self.all_heads)

    def _head(self, kv_head: int, num_kv_heads: int) -> tuple[int, int]:
        return (kv_head, num_kv_heads) if self.heads is None else (self.heads[kv_head], self.all_heads)

    def _holds(self, head: int) -> bool:
        return head % self.part[1] == self.part[0]


@dataclass(frozen=True)
class BlockPattern(Pattern):
    """A pattern made of one rule: what :func:`local_window` and its like return."""

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
    # By hand: torch.compile traces the construction of a pattern, but not the json module.
    if isinstance(value, list):
        return "[" + ", ".join([_json(one) for one in value]) + "]"
    if isinstance(value, str):
        return f'"{value}"'
    return "null" if value is None else str(value)


def local_window(before: int, after: int = 0) -> BlockPattern:
    """Query p sees the keys ``p - before`` to ``p + after`` (Beltagy et al. 2020, Longformer, arXiv 2004.05150).

    Args:
        before: how many positions back, at least 0.
        after: how many positions ahead, at least 0. A causal call leaves these out.

    Raises:
        TypeError, ValueError: not an integer, or negative.

    >>> local_window(2).counts(torch.arange(4), torch.arange(4), 1)[0].tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    """
    _check_integers(least=0, before=before, after=after)
    return BlockPattern(HeadRule(Window(before, after)))


def global_tokens(num_tokens: int) -> BlockPattern:
    """The first ``num_tokens`` positions see all, and all see them (Longformer, arXiv 2004.05150, section 3.1).

    Args:
        num_tokens: how many positions, from the first of every document on; at least 1.

    Raises:
        TypeError, ValueError: not an integer, or less than 1.

    >>> global_tokens(1).counts(torch.arange(3), torch.arange(3), 1)[0].tolist()
    [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    """
    _check_integers(least=1, num_tokens=num_tokens)
    return BlockPattern(HeadRule(Rectangles(((0, num_tokens, 0, None), (num_tokens, None, 0, num_tokens)))))


def strided_blocks(stride: int, *, block_size: int = 128) -> BlockPattern:
    """Query block i sees the key blocks j with ``(i - j) mod stride == 0``, its own among them.

    The density is ``1 / stride``. (Child et al. 2019, arXiv 1904.10509, section 4.2, in blocks.)

    Args:
        stride: distance of the blocks seen, in blocks, at least 1.
        block_size: positions of a block, at least 1.

    Raises:
        TypeError, ValueError: not an integer, or less than 1.

    >>> strided_blocks(2, block_size=1).counts(torch.arange(4), torch.arange(4), 1)[0].tolist()
    [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    """
    _check_integers(least=1, stride=stride, block_size=block_size)
    return BlockPattern(HeadRule(StridedBlocks(stride, block_size)))


def random_blocks(density: float, *, seed: int = 0, block_size: int = 128) -> BlockPattern:
    """Every query block sees m of every P consecutive key blocks, drawn by the seed and the key/value head.

    (Zaheer et al. 2020, BigBird, arXiv 2007.14062, section 2.) m / P is ``density`` as the nearest fraction with
    P up to 64, so that the density asked for is the one got wherever P divides the number of blocks. What a query block
    sees depends on its number, the head and the seed only: longer texts, shards and machines draw the same.

    Args:
        density: the part of all keys that a query sees, above 0 and up to 1.
        seed: integer of at least 0 and below 2^63.
        block_size: positions of a block, at least 1.

    Raises:
        TypeError, ValueError: a number of the wrong kind or out of range.

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
    """Finer near, coarser far: every block nearer than ``near``, then on level l every ``factor^l``-th block.

    Level l = 1 to ``levels - 1`` holds the key blocks at a distance of ``near * factor^(l - 1)`` to
    ``near * factor^l`` blocks, and shows the last block of each run of ``factor^l``. A query sees about
    ``2 near - 1 + 2 near (levels - 1) (1 - 1 / factor)`` blocks, however long the text is.

    Args:
        near: nearness in blocks of which all are seen, at least 1; a block's own has the distance 0.
        levels: number of levels, at least 1, the near one among them.
        factor: how much each level is coarser and further than the one before, at least 2.
        block_size: positions of a block, at least 1.

    Raises:
        TypeError, ValueError: not an integer, or too small.

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
    """Query block i of head h sees key block j where ``mask[h, i, j]`` is True.

    Args:
        mask: bool ``[heads or 1, query blocks, key blocks]``; heads are the key/value heads of the call, 1 is one mask
            for all. Kept as bits: later changes of the tensor do not reach the pattern.
        block_size: positions of a block, at least 1. The last block may be ragged.

    Raises:
        TypeError: the mask is no bool tensor, the size no integer.
        ValueError: the mask has not three dimensions, is empty, or the size is less than 1. A call of more positions
            than the mask covers raises when it is made.

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
    """A pattern for every key/value head: head g has ``patterns[g mod len(patterns)]``.

    Args:
        patterns: windows, blocks, global tokens and sums of them. A dilated pattern has offsets and shifts by head of
            its own and is added to the result instead.

    Raises:
        TypeError: something else than a pattern.
        ValueError: none; or one that holds dilation groups or is per head already.

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
    """The pattern of one entry of a :attr:`Pattern.spec` that holds a rule."""
    rule, part, *heads = entry
    of_heads = (tuple(heads[0]), heads[1]) if heads else (None, 0)
    return BlockPattern(HeadRule(rule_from_entry(*rule), tuple(part), *of_heads))


def _check_integers(*, least: int, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
        if not least <= value < _END:
            raise ValueError(f"{name} must be at least {least} and below 2^31, got {value}")
