"""The pattern base class: integer counts of every pair of query and key positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .flops import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, pair_flops
from .reach import MOST_POSITIONS as MOST_IN_REACH
from .reach import Reach, reach

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .blocks import HeadRule
    from .dilated import DilationGroup

MOST_POSITIONS = 1 << 31
"""Longest sequence; the number of pairs of a longer one overflows 64 bits."""


class Pattern(ABC):
    """An attention pattern: a count ``c[g, p, t] >= 0`` per key/value head g, query position p and key position t.

    Patterns are frozen, hashable and hold integers only. They add: ``(a + b)`` has the count ``c_a + c_b``, and
    attention under it is one softmax over the keys of both (docs/definition.md).
    """

    spec: str
    """The pattern as JSON text. Equal patterns have equal text; :func:`pattern_from_spec` parses it."""
    groups: tuple[DilationGroup, ...]
    """The pattern's dilation groups; its count is the sum over the groups and the :attr:`rules`."""
    rules: tuple[HeadRule, ...] = ()
    """The pattern's other rules (windows, blocks, global tokens); their counts add to those of the groups."""

    @abstractmethod
    def for_heads(self, heads: Sequence[int], num_kv_heads: int) -> Pattern:
        """The pattern restricted to some key/value heads, e.g. one rank's heads under tensor parallelism.

        Args:
            heads: indices of the call's key/value heads among all; any order, repeats allowed.
            num_kv_heads: total number of key/value heads.

        Raises:
            ValueError: an index is out of range, or the list is empty.

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
            is_causal: count only ``t <= p``.

        Returns:
            int32 tensor ``[G, N, M]`` on the positions' device. O(G N M): for pictures, tests and the reference.

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
        """The sum of the count over all pairs of positions and key/value heads: the pairs that attention computes.

        Args:
            sequence_length: number of positions N, at least 1.
            num_kv_heads: number of key/value heads G.
            is_causal: count only ``t <= p``.

        Raises:
            ValueError: see :meth:`density`.

        >>> DilatedPattern([4], [2]).num_pairs(8, is_causal=True)
        6
        """
        self.check_countable(sequence_length, num_kv_heads)
        pairs = 0
        for head in range(num_kv_heads):
            for group in self.groups:
                pairs += group.num_pairs(head, num_kv_heads, sequence_length, is_causal=is_causal)
            for rule in self.rules:
                pairs += rule.num_pairs(head, num_kv_heads, sequence_length, is_causal=is_causal)
        return pairs

    def check_countable(self, sequence_length: int, num_kv_heads: int) -> None:
        """Raise TypeError or ValueError unless the pairs of this length and number of heads can be counted."""
        for name, number in (("sequence_length", sequence_length), ("num_kv_heads", num_kv_heads)):
            check_count(name, number)
        if sequence_length > MOST_POSITIONS:
            raise ValueError(
                f"sequence_length must be at most {MOST_POSITIONS:,}, so that the number of pairs fits 64 bits, got "
                f"{sequence_length}"
            )
        for rule in self.rules:
            rule.check(sequence_length, num_kv_heads)
            rule.check_block_pairs(sequence_length)

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
        """Exact number of floating-point operations of attention's matrix products.

        The forward pass has two products of width D per pair: ``4 D``. The backward pass has five, including the
        recomputation of the scores: ``10 D`` more, as :class:`torch.utils.flop_counter.FlopCounterMode` counts.

        Args:
            sequence_length: number of positions N, at least 1.
            num_heads: number of query heads H.
            num_kv_heads: number of key/value heads G, which divides H; None = H.
            head_dim: head dimension D.
            batch_size: number of sequences.
            is_causal: count only ``t <= p``.
            is_training: include the backward pass.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is below 1, G does not divide H, or see :meth:`density`.

        >>> DilatedPattern([4], [2]).flops(8, num_heads=2, head_dim=16)  # 8 pairs of each head
        1024
        """
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "batch_size": batch_size}
        for name, number in sizes.items():
            check_count(name, number)
        if num_heads % kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads: got {kv_heads} of {num_heads} heads")
        pairs = self.num_pairs(sequence_length, num_kv_heads=kv_heads, is_causal=is_causal)
        pairs *= num_heads // kv_heads * batch_size
        return pair_flops(pairs, head_dim, FORWARD_PRODUCTS + is_training * BACKWARD_PRODUCTS)

    def density(self, sequence_length: int, *, num_kv_heads: int = 1, is_causal: bool = False) -> float:
        """Fraction of dense attention's pairs that the pattern computes: ``sum c / (G N^2)``.

        A pair with count 2 is computed twice. Causal: relative to the ``N (N + 1) / 2`` pairs of dense causal
        attention. Exact, without forming an N x N mask.

        Args:
            sequence_length: number of positions N, at least 1.
            num_kv_heads: number of key/value heads G, averaged over.
            is_causal: count only ``t <= p``.

        Raises:
            ValueError: a number is below 1, the pattern is not defined for the length, the number of pairs overflows
                64 bits, or there are too many block pairs to count.

        >>> DilatedPattern([4], [2]).density(8)
        0.125
        """
        pairs = self.num_pairs(sequence_length, num_kv_heads=num_kv_heads, is_causal=is_causal)
        dense = sequence_length * (sequence_length + 1) // 2 if is_causal else sequence_length**2
        return pairs / (num_kv_heads * dense)

    def reach(self, sequence_length: int, num_layers: int, *, num_kv_heads: int = 1, is_causal: bool = False) -> Reach:
        """Receptive field after several layers: which positions can influence which.

        Each layer mixes the heads and has a residual connection. With ``A[p, t] = 1`` if ``p == t`` or some head has
        ``c[g, p, t] > 0``, position p depends on the token at t after l layers iff ``(A^l)[p, t] > 0``.

        Args:
            sequence_length: number of positions N, 1 to 8,192.
            num_layers: number of layers L with this pattern, at least 1.
            num_kv_heads: number of key/value heads G.
            is_causal: keep only ``t <= p``.

        Returns:
            a :class:`Reach`: the first layer of every pair, and the number of pairs by distance.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is out of range, or the pattern is not defined for the length or number of heads.

        >>> reach = local_window(2).reach(8, 3, is_causal=True)
        >>> [reach.farthest(layers) for layers in range(4)]
        [0, 2, 4, 6]
        >>> reach.first_layer[7].tolist()
        [-1, 3, 3, 2, 2, 1, 1, 0]
        """
        sizes = {"sequence_length": sequence_length, "num_layers": num_layers, "num_kv_heads": num_kv_heads}
        for name, number in sizes.items():
            check_count(name, number)
        if sequence_length > MOST_IN_REACH:
            raise ValueError(
                f"sequence_length must be at most {MOST_IN_REACH:,}, as every pair of positions is examined, got "
                f"{sequence_length}; take a shorter sequence with shorter segments and windows"
            )
        return reach(self, sequence_length, num_layers, num_kv_heads=num_kv_heads, is_causal=is_causal)

    def plot(
        self, sequence_length: int, *, num_kv_heads: int = 1, is_causal: bool = False, axes: Axes | None = None
    ) -> Axes:
        """Plot the counts of the first ``sequence_length`` positions (needs the extra ``plot``, matplotlib).

        Args:
            sequence_length: number of positions N; the plot has N x N cells. From 257 positions on it has 256 x 256,
                with the exact mean of the counts in each.
            num_kv_heads: number of key/value heads, one panel each.
            is_causal: keep only ``t <= p``.
            axes: matplotlib axes to draw on; None = a new figure.

        Returns:
            The matplotlib axes.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: see :meth:`density`.
        """
        from .picture import draw

        return draw(self, sequence_length, num_kv_heads=num_kv_heads, is_causal=is_causal, axes=axes)


def check_count(name: str, number: object) -> None:
    """Raise TypeError or ValueError unless a number is an integer of at least 1."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be an integer, got {number!r} of type {type(number).__name__}")
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")


def _summands(pattern: Pattern) -> tuple[Pattern, ...]:
    return pattern.patterns if isinstance(pattern, PatternSum) else (pattern,)


@dataclass(frozen=True)
class PatternSum(Pattern):
    """The sum of patterns; their counts add.

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

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.patterns))

    def for_heads(self, heads: Sequence[int], num_kv_heads: int) -> PatternSum:
        return PatternSum(tuple(pattern.for_heads(heads, num_kv_heads) for pattern in self.patterns))
