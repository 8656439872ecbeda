"""Rules of who sees whom that are no segments: windows and fixed rectangles of positions, and what every rule has."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

NO_END = 1 << 62
"""Stands for the end of what has none."""
Range = tuple[int, int]
"""Positions ``[start, stop)``."""


class Spans(NamedTuple):
    """Rectangles of positions: the queries ``[query_start, query_stop)`` see the keys ``[key_start, key_stop)``.

    int64 ``[spans]`` each, ordered by ``query_start``, then ``key_start``. No pair lies in two of them.
    """

    query_start: Tensor
    query_stop: Tensor
    key_start: Tensor
    key_stop: Tensor


class Rule(ABC):
    """A count of 0 or 1 for every pair of positions and every key/value head.

    Query p sees key t iff one of :meth:`spans` holds the pair and ``-before <= t - p <= after``.
    """

    before: int | None = None
    """How far back a query sees at most; None is any distance."""
    after: int | None = None
    """How far ahead a query sees at most; None is any distance."""

    @property
    def period(self) -> int | None:
        """Where all positions move on by a multiple of it, what is seen moves along; None: there is no such number."""
        return None

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Distances back and ahead beyond which nothing is seen, perhaps with gaps; None is any distance."""
        return self.before, self.after

    @property
    @abstractmethod
    def entry(self) -> list[Any]:
        """The rule as JSON values: its name, then its numbers."""

    @abstractmethod
    def sees(self, kv_head: int, num_kv_heads: int, query: Tensor, key: Tensor) -> Tensor:
        """The definition: bool, for integer tensors of positions p and t that broadcast."""

    @abstractmethod
    def spans(self, kv_head: int, num_kv_heads: int, queries: Range, keys: Range) -> Spans:
        """Every pair that the rule may show within two ranges of positions."""

    def kind(self, kv_head: int, num_kv_heads: int) -> Hashable:
        """Equal for heads that see alike."""
        return None

    def last_query(self, kv_head: int, num_kv_heads: int, key: Tensor) -> Tensor:
        """For int64 positions t the last query that sees each, or a bound on it; :data:`NO_END` where there is none.

        What a bounded cache may drop is what no later query sees.
        """
        return torch.full_like(key, NO_END)

    def check(self, num_positions: int, num_kv_heads: int) -> None:  # noqa: B027 - most rules hold everywhere
        """Raise ValueError if the rule is not defined for that many positions or key/value heads."""


@dataclass(frozen=True, slots=True)
class Window(Rule):
    """Query p sees the keys ``p - before`` to ``p + after``."""

    before: int
    after: int

    @property
    def period(self) -> int:
        return 1

    @property
    def entry(self) -> list[Any]:
        return ["window", self.before, self.after]

    def sees(self, kv_head: int, num_kv_heads: int, query: Tensor, key: Tensor) -> Tensor:
        return (key >= query - self.before) & (key <= query + self.after)

    def spans(self, kv_head: int, num_kv_heads: int, queries: Range, keys: Range) -> Spans:
        start, stop = max(keys[0], queries[0] - self.before), min(keys[1], queries[1] + self.after)
        query_start, query_stop = max(queries[0], start - self.after), min(queries[1], stop + self.before)
        if start >= stop or query_start >= query_stop:
            return spans_of([])
        return spans_of([(query_start, query_stop, start, stop)])

    def last_query(self, kv_head: int, num_kv_heads: int, key: Tensor) -> Tensor:
        return key + self.before


@dataclass(frozen=True, slots=True)
class Rectangles(Rule):
    """Queries ``[p0, p1)`` see keys ``[t0, t1)``, for fixed ranges that do not overlap; None is no end."""

    rectangles: tuple[tuple[int, int | None, int, int | None], ...]

    @property
    def entry(self) -> list[Any]:
        return ["rectangles", [list(rectangle) for rectangle in self.rectangles]]

    @property
    def _bounds(self) -> list[tuple[int, int, int, int]]:
        return [(a, NO_END if b is None else b, c, NO_END if d is None else d) for a, b, c, d in self.rectangles]

    def sees(self, kv_head: int, num_kv_heads: int, query: Tensor, key: Tensor) -> Tensor:
        inside = [(query >= a) & (query < b) & (key >= c) & (key < d) for a, b, c, d in self._bounds]
        return functools.reduce(torch.logical_or, inside)

    def spans(self, kv_head: int, num_kv_heads: int, queries: Range, keys: Range) -> Spans:
        clipped = [
            (max(a, queries[0]), min(b, queries[1]), max(c, keys[0]), min(d, keys[1])) for a, b, c, d in self._bounds
        ]
        return spans_of(sorted((a, b, c, d) for a, b, c, d in clipped if a < b and c < d))

    def last_query(self, kv_head: int, num_kv_heads: int, key: Tensor) -> Tensor:
        last = torch.full_like(key, -1)
        for _, b, c, d in self._bounds:
            last = torch.where((key >= c) & (key < d), last.clamp(min=b if b == NO_END else b - 1), last)
        return last


def num_pairs(spans: Spans, before: int | None, after: int | None) -> int:
    """How many pairs with ``-before <= t - p <= after`` the spans hold; None is no bound."""
    height, width = spans.query_stop - spans.query_start, spans.key_stop - spans.key_start

    def up_to(distance: int) -> Tensor:
        """Pairs with ``t - p <= distance``: query p sees ``p + distance + 1 - key_start`` keys, if there are."""
        last = spans.query_stop + distance - spans.key_start
        return _sum_of_clamped(last, width) - _sum_of_clamped(last - height, width)

    pairs = height * width if after is None else up_to(after)
    if before is not None:
        pairs = pairs - up_to(-before - 1)
    return int(pairs.sum())


def _sum_of_clamped(last: Tensor, most: Tensor) -> Tensor:
    """The sum of ``min(i, most)`` for i from 1 to ``last``, 0 where that is less than 1."""
    rising = torch.minimum(last, most).clamp(min=0)
    return rising * (rising + 1) // 2 + (last - most).clamp(min=0) * most


def spans_of(rectangles: list[tuple[int, int, int, int]]) -> Spans:
    """Rectangles ``(query_start, query_stop, key_start, key_stop)`` as spans."""
    columns = torch.tensor(rectangles, dtype=torch.int64).view(-1, 4).T
    return Spans(columns[0], columns[1], columns[2], columns[3])
