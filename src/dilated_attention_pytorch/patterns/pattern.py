"""What a pattern is: integers that say how often every query position sees every key position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .blocks import HeadRule
    from .dilated import DilationGroup

MOST_POSITIONS = 1 << 31
"""Of longer texts the pairs of positions overflow 64 bits."""


class Pattern(ABC):
    """Who may look at whom, and how often it counts: a count ``c[g, p, t] >= 0`` for every key/value head g.

    Patterns are frozen, hashable and hold integers only. They add: ``(a + b)`` has the count ``c_a + c_b``, and
    attention under it is one softmax over everything that a query sees (docs/definition.md).
    """

    spec: str
    """The pattern as JSON text. Equal patterns have equal text; :func:`pattern_from_spec` reads it back."""
    groups: tuple[DilationGroup, ...]
    """The dilation groups whose counts add up to this pattern's, together with the :attr:`rules`."""
    rules: tuple[HeadRule, ...] = ()
    """The rules (windows, blocks, global tokens) whose counts add up to this pattern's, with the groups."""

    @abstractmethod
    def for_heads(self, heads: Sequence[int], num_kv_heads: int) -> Pattern:
        """The same pattern for a call that has only some of the heads, as where ranks split them.

        Args:
            heads: for every key/value head of the call its number among all; any order, and one may come twice.
            num_kv_heads: the number of all key/value heads.

        Raises:
            ValueError: a head that is not among them, or none.

        >>> DilatedPattern([4], [2]).for_heads([1], 2).counts(torch.arange(4), torch.arange(4), 1)[0].tolist()
        [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 1]]
        """

    def __add__(self, other: Pattern) -> PatternSum:
        if not isinstance(other, Pattern):
            return NotImplemented
        return PatternSum((self, other))

    def counts(
        self, query_positions: Tensor, key_positions: Tensor, num_kv_heads: int, *, is_causal: bool = False
    ) -> Tensor:
        """The dense count ``c[g, p, t]``, straight from the definition.

        Args:
            query_positions: integer tensor ``[N]`` of absolute positions p.
            key_positions: integer tensor ``[M]`` of absolute positions t.
            num_kv_heads: number of key/value heads G.
            is_causal: keep ``t <= p`` only.

        Returns:
            int32 tensor ``[G, N, M]`` on the positions' device. Costs G * N * M; for pictures, tests and the reference.

        >>> DilatedPattern([4], [2]).counts(torch.arange(4), torch.arange(4), 1)[0].tolist()
        [[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
        """
        heads = []
        for head in range(num_kv_heads):
            count = torch.zeros(
                len(query_positions), len(key_positions), dtype=torch.int32, device=query_positions.device
            )
            for group in self.groups:
                query_segment, query_selected = group.locate(query_positions, head, num_kv_heads)
                key_segment, key_selected = group.locate(key_positions, head, num_kv_heads)
                same = query_segment[:, None] == key_segment[None, :]
                count += (same & query_selected[:, None] & key_selected[None, :]).int()
            for rule in self.rules:
                count += rule.sees(head, num_kv_heads, query_positions[:, None], key_positions[None, :]).int()
            heads.append(count)
        stacked = torch.stack(heads)
        if is_causal:
            stacked = stacked * (key_positions[None, :] <= query_positions[:, None])
        return stacked

    def num_pairs(self, sequence_length: int, *, num_kv_heads: int = 1, is_causal: bool = False) -> int:
        """The sum of the count over all pairs of positions and key/value heads: what attention computes, exactly.

        Args:
            sequence_length: number of positions N, at least 1.
            num_kv_heads: number of key/value heads G.
            is_causal: count ``t <= p`` only.

        Raises:
            ValueError: see :meth:`density`.

        >>> DilatedPattern([4], [2]).num_pairs(8, is_causal=True)
        6
        """
        for name, number in (("sequence_length", sequence_length), ("num_kv_heads", num_kv_heads)):
            _check_count(name, number)
        if sequence_length > MOST_POSITIONS:
            raise ValueError(
                f"sequence_length must be at most {MOST_POSITIONS:,}, whose pairs are counted in 64 bits, got "
                f"{sequence_length}"
            )
        for rule in self.rules:
            rule.check(sequence_length, num_kv_heads)
        pairs = 0
        for head in range(num_kv_heads):
            for group in self.groups:
                pairs += group.num_pairs(head, num_kv_heads, sequence_length, is_causal=is_causal)
            for rule in self.rules:
                pairs += rule.num_pairs(head, num_kv_heads, sequence_length, is_causal=is_causal)
        return pairs

    def flops(
        self,
        sequence_length: int,
        *,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        head_dim: int,
        batch_size: int = 1,
        is_causal: bool = False,
        is_training: bool = False,
    ) -> int:
        """Operations of the matrix products of attention, multiplications and additions, exactly.

        Two products of the width D for every pair that the pattern has: ``4 D`` a pair. The backward pass has five, the
        scores' recomputation among them: ``10 D`` more, as :class:`torch.utils.flop_counter.FlopCounterMode` counts.

        Args:
            sequence_length: number of positions N, at least 1.
            num_heads: query heads H.
            num_kv_heads: key/value heads G, which divide H; H without it.
            head_dim: width D of a head.
            batch_size: sequences.
            is_causal: count ``t <= p`` only.
            is_training: with the backward pass.

        Raises:
            TypeError: a number that is no integer.
            ValueError: a number below 1, key/value heads that do not divide the heads, or see :meth:`density`.

        >>> DilatedPattern([4], [2]).flops(8, num_heads=2, head_dim=16)  # 8 pairs of each head
        1024
        """
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "batch_size": batch_size}
        for name, number in sizes.items():
            _check_count(name, number)
        if num_heads % kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads: got {kv_heads} of {num_heads} heads")
        pairs = self.num_pairs(sequence_length, num_kv_heads=kv_heads, is_causal=is_causal)
        return pairs * (num_heads // kv_heads) * batch_size * head_dim * (14 if is_training else 4)

    def density(self, sequence_length: int, *, num_kv_heads: int = 1, is_causal: bool = False) -> float:
        """What attention under the pattern computes of what dense attention does: ``sum c / (G N^2)``.

        A pair that counts twice is computed twice. Under a causal mask it is divided by the ``N (N + 1) / 2`` pairs
        that dense causal attention has. Exact; no N x N mask is made.

        Args:
            sequence_length: number of positions N, at least 1.
            num_kv_heads: number of key/value heads G, over which it is the mean.
            is_causal: count ``t <= p`` only.

        Raises:
            ValueError: a number below 1, a length for which the pattern is not defined or whose pairs 64 bits do not
                count, or more pairs of blocks than can be looked at.

        >>> DilatedPattern([4], [2]).density(8)
        0.125
        """
        pairs = self.num_pairs(sequence_length, num_kv_heads=num_kv_heads, is_causal=is_causal)
        dense = sequence_length * (sequence_length + 1) // 2 if is_causal else sequence_length**2
        return pairs / (num_kv_heads * dense)

    def plot(
        self, sequence_length: int, *, num_kv_heads: int = 1, is_causal: bool = False, axes: Axes | None = None
    ) -> Axes:
        """Draw the counts of the first ``sequence_length`` positions (needs the extra ``plot``, matplotlib).

        Args:
            sequence_length: number of positions N; the picture has N x N cells, or, from 2,049 positions on, those
                of every second, third, ... position.
            num_kv_heads: key/value heads drawn side by side in one row of cells per head.
            is_causal: leave out the keys after the query.
            axes: matplotlib axes to draw on; a new figure without it.

        Returns:
            The matplotlib axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from .picture import draw

        return draw(self, sequence_length, num_kv_heads=num_kv_heads, is_causal=is_causal, axes=axes)


def _check_count(name: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be an integer, got {number!r} of type {type(number).__name__}")
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")


def _summands(pattern: Pattern) -> tuple[Pattern, ...]:
    return pattern.patterns if isinstance(pattern, PatternSum) else (pattern,)


@dataclass(frozen=True)
class PatternSum(Pattern):
    """The sum of patterns: a pair of positions counts as often as it does in all of them together.

    >>> both = DilatedPattern([4, 8], [1, 2]) + DilatedPattern([16], [4])
    >>> [group.segment_length for group in both.groups]
    [4, 8, 16]
    """

    patterns: tuple[Pattern, ...]
    spec: str = field(init=False, repr=False, compare=False)
    groups: tuple[DilationGroup, ...] = field(init=False, repr=False, compare=False)
    rules: tuple[HeadRule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", tuple(one for pattern in self.patterns for one in _summands(pattern)))
        object.__setattr__(self, "spec", "[" + ", ".join(pattern.spec[1:-1] for pattern in self.patterns) + "]")
        object.__setattr__(self, "groups", tuple(group for pattern in self.patterns for group in pattern.groups))
        object.__setattr__(self, "rules", tuple(rule for pattern in self.patterns for rule in pattern.rules))

    def for_heads(self, heads: Sequence[int], num_kv_heads: int) -> PatternSum:
        return PatternSum(tuple(pattern.for_heads(heads, num_kv_heads) for pattern in self.patterns))
