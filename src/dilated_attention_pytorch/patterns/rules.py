"""The base class of rules, sliding windows, and fixed rectangles of positions."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

NO_END = 1 << 62
"""Stands for an open end."""
Range = tuple[int, int]
"""Half-open range of positions ``[start, stop)``."""
Bounds = tuple[int, int | None, int, int | None]
"""Queries ``[p0, p1)`` and keys ``[t0, t1)`` of a rectangle; None = open end."""


class Spans(NamedTuple):
    """Rectangles of positions: the queries ``[query_start, query_stop)`` attend to the keys ``[key_start, key_stop)``.

    int64 ``[spans]`` each, sorted by ``query_start``, then ``key_start``. The rectangles are disjoint.
    """

    query_start: Tensor
    query_stop: Tensor
    key_start: Tensor
    key_stop: Tensor


class Rule(ABC):
    """A count of 0 or 1 for every pair of positions and every key/value head.

    Query p attends to key t iff one of :meth:`spans` holds the pair and ``-before <= t - p <= after``.
    """

    before: int | None = None
    """Largest distance back; None = unbounded."""
    after: int | None = None
    """Largest distance ahead; None = unbounded."""

    @property
    def period(self) -> int | None:
        """Shift in positions under which the rule is invariant; None if there is none."""
        return None

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Bounds of the distances back and ahead of visible keys, possibly with gaps; None = unbounded."""
        return self.before, self.after

    @property
    @abstractmethod
    def entry(self) -> list[Any]:
        """The rule as JSON values: its name, then its parameters."""

    @abstractmethod
    def sees(self, kv_head: int, num_kv_heads: int, query: Tensor, key: Tensor) -> Tensor:
        """The rule's definition: a bool tensor, for broadcastable integer tensors of positions p and t."""

    @abstractmethod
    def spans(self, kv_head: int, num_kv_heads: int, queries: Range, keys: Range) -> Spans:
        """Rectangles that cover every visible pair within two ranges of positions."""

    def kind(self, kv_head: int, num_kv_heads: int) -> Hashable:
        """A key that is equal for heads with the same visible pairs."""
        return None

    def last_query(self, kv_head: int, num_kv_heads: int, key: Tensor) -> Tensor:
        """The last query that attends to each int64 position t, or an upper bound; :data:`NO_END` if unbounded.

        A bounded cache may drop a key after its last query.
        """
        return torch.full_like(key, NO_END)

    def check(self, num_positions: int, num_kv_heads: int) -> None:  # noqa: B027 - most rules hold everywhere
        """Raise ValueError if the rule is not defined for that many positions or key/value heads."""


@dataclass(frozen=True, slots=True)
class Window(Rule):
    """Query p attends to the keys ``p - before`` to ``p + after``."""

    before: int
    after: int

    def __repr__(self) -> str:
        return f"local_window({self.before}, {self.after})" if self.after else f"local_window({self.before})"

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
    """Queries ``[p0, p1)`` attend to keys ``[t0, t1)``, for fixed disjoint rectangles; None = open end."""

    rectangles: tuple[Bounds, ...]

    def __repr__(self) -> str:
        start, stop, _, end = self.rectangles[0]
        if stop is not None and self.rectangles == of_first_tokens(stop):
            return f"global_tokens({stop})"
        if end is not None and len(self.rectangles) == 2 * end <= 2 * start:
            beyond = start - end
            if self.rectangles == of_first_tokens(end, beyond):
                return f"global_tokens({end}, beyond={beyond})"
        return f"Rectangles({self.rectangles})"

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


def of_first_tokens(num_tokens: int, beyond: int | None = None) -> tuple[Bounds, ...]:
    """Disjoint rectangles of the pairs with one of the first tokens; with ``beyond``, of those further apart.

    >>> of_first_tokens(2, 5)
    ((7, None, 0, 2), (6, 7, 0, 1), (0, 2, 7, None), (0, 1, 6, 7))
    """
    if beyond is None:
        return (0, num_tokens, 0, None), (num_tokens, None, 0, num_tokens)
    far = beyond + num_tokens  # queries from here on see all of the first tokens
    below: list[Bounds] = [(far, None, 0, num_tokens)]
    below += [(beyond + 1 + key, far, key, key + 1) for key in range(num_tokens - 1)]
    return (*below, *((c, d, a, b) for a, b, c, d in below))


def num_pairs(spans: Spans, before: int | None, after: int | None) -> int:
    """Number of pairs with ``-before <= t - p <= after`` in the spans; None = unbounded."""
    return int(span_pairs(spans, before, after).sum())


def span_pairs(spans: Spans, before: int | None, after: int | None) -> Tensor:
    """:func:`num_pairs` per span; spans must not be empty."""
    height, width = spans.query_stop - spans.query_start, spans.key_stop - spans.key_start

    def up_to(distance: int) -> Tensor:
        """Pairs with ``t - p <= distance``: query p has ``p + distance + 1 - key_start`` keys, if positive."""
        last = spans.query_stop + distance - spans.key_start
        return _sum_of_clamped(last, width) - _sum_of_clamped(last - height, width)

    pairs = height * width if after is None else up_to(after)
    if before is not None:
        pairs = pairs - up_to(-before - 1)
    return pairs


def _sum_of_clamped(last: Tensor, most: Tensor) -> Tensor:
    """The sum of ``min(i, most)`` for i = 1 to ``last``; 0 for ``last < 1``."""
    rising = torch.minimum(last, most).clamp(min=0)
    return rising * (rising + 1) // 2 + (last - most).clamp(min=0) * most


def spans_of(rectangles: list[tuple[int, int, int, int]]) -> Spans:
    """Rectangles ``(query_start, query_stop, key_start, key_stop)`` as spans."""
    columns = torch.tensor(rectangles, dtype=torch.int64).view(-1, 4).T
    return Spans(columns[0], columns[1], columns[2], columns[3])
