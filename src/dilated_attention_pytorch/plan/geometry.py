"""Partials as geometry: strided query and key slabs, repeated along axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from dilated_attention_pytorch.patterns.dilated import DilationGroup
from dilated_attention_pytorch.patterns.rules import Spans, num_pairs

Bands = Literal["cut", "whole"]
"""Planning of windows and the causal mask: "cut" into partials for kernels without band support, or "whole" as bands.
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """``size`` copies of a partial, each shifted by ``rows`` rows and ``heads`` key/value heads."""

    size: int
    rows: int
    heads: int


@dataclass(frozen=True, slots=True)
class Partial:
    """Dense attention between ``num_queries`` and ``num_keys`` rows, ``step`` rows apart, repeated along ``axes``.

    Rows count from the first row of the query slab and of the key slab. A causal partial is square: query i
    attends to the first i + 1 keys. A partial without keys stands for ``zero_pad_keys`` keys of score 0 and value 0.
    """

    query_row: int
    key_row: int
    num_queries: int
    num_keys: int
    step: int
    head: int
    is_causal: bool = False
    zero_pad_keys: int = 0
    band: tuple[int, int] | None = None
    """Query i attends to key j iff ``j - i`` is within these two bounds; None = unbounded."""
    is_first: bool = False
    """Whether no earlier partial of the plan writes to the same query rows."""
    axes: tuple[Axis, ...] = ()

    @property
    def num_problems(self) -> int:
        """Number of independent problems along the axes."""
        problems = 1
        for axis in self.axes:
            problems *= axis.size
        return problems

    @property
    def num_pairs(self) -> int:
        """Number of query-key pairs, per query head of a key/value head."""
        if self.band is not None:
            rectangle = Spans(*(torch.tensor([bound]) for bound in (0, self.num_queries, 0, self.num_keys)))
            return num_pairs(rectangle, -self.band[0], self.band[1]) * self.num_problems
        pairs = self.num_queries * (self.num_queries + 1) // 2 if self.is_causal else self.num_queries * self.num_keys
        return pairs * self.num_problems


@dataclass(frozen=True, slots=True)
class Slabs:
    """A range of query positions and a range of key positions of one document of ``length`` positions.

    Position 0 of the document corresponds to row ``query_origin`` of the query slab and ``key_origin`` of the key slab.
    """

    query_origin: int
    key_origin: int
    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    length: int


def group_partials(
    group: DilationGroup,
    head: int,
    num_kv_heads: int,
    slabs: Slabs,
    *,
    is_causal: bool,
    bands: Bands,
    is_first_group: bool,
) -> Iterator[Partial]:
    """The partials of one dilation group for one key/value head, segment by segment."""
    shift, offset = group.shift(head), group.offset(head, num_kv_heads)
    position = slabs.query_start
    while position < slabs.query_stop:
        start, stop = group.segment_bounds(position, shift)
        query, num_queries = group.selected(start, offset, position, min(stop, slabs.query_stop))
        key, num_keys = 0, 0
        key_from, key_to = max(start, slabs.key_start), min(stop, slabs.key_stop)
        if key_from < key_to:
            key, num_keys = group.selected(start, offset, key_from, key_to)
        if num_queries:
            first = is_first_group
            for part in dense_and_causal(
                query, num_queries, key, num_keys, group.dilation_rate, head, is_causal=is_causal, bands=bands
            ):
                rows = (part.query_row + slabs.query_origin, part.key_row + slabs.key_origin)
                yield replace(part, query_row=rows[0], key_row=rows[1], is_first=first)
                first = False
            if not is_causal:
                zero_pad_keys = group.zero_pad_keys(slabs.length, num_keys)
                if zero_pad_keys:
                    row = query + slabs.query_origin
                    yield Partial(row, row, num_queries, 0, group.dilation_rate, head, zero_pad_keys=zero_pad_keys)
        position = stop


def dense_and_causal(
    query: int, num_queries: int, key: int, num_keys: int, step: int, head: int, *, is_causal: bool, bands: Bands
) -> Iterator[Partial]:
    """Split queries and keys of one class of one segment into dense partials and causal squares.

    With whole bands, a single partial, with a band where it is neither dense nor causal.
    """
    ahead = (key - query) // step  # queries before the first key attend to nothing
    if is_causal and ahead > 0:
        query, num_queries, ahead = key, num_queries - ahead, 0
    if not num_keys or num_queries <= 0:
        return
    behind = min(-ahead, num_keys)  # keys before the first query are visible to every query
    of_first = min(behind + 1, num_keys)
    if not is_causal or of_first == num_keys or num_queries == 1:
        yield Partial(query, key, num_queries, of_first if is_causal else num_keys, step, head)
        return
    square = min(num_queries, num_keys - behind)
    if bands == "whole" and (behind or num_queries > square):
        yield Partial(query, key, num_queries, behind + square, step, head, band=(1 - num_queries, behind))
        return
    yield Partial(query, key + behind * step, square, square, step, head, is_causal=True)
    if num_queries > square:  # queries after the last key
        yield Partial(query + square * step, key + behind * step, num_queries - square, square, step, head)
    if behind:
        yield Partial(query, key, num_queries, behind, step, head)


def fold(partials: Sequence[Partial]) -> list[Partial]:
    """Fold runs of equal partials at a constant distance into one partial with one more axis, level by level.

    Problems of one partial never share a query or key row, since gradients are accumulated in one operation.
    """
    folded = list(partials)
    while True:
        before = len(folded)
        folded = _fold_once(folded)
        if len(folded) == before:
            return folded


def _fold_once(partials: list[Partial]) -> list[Partial]:
    by_shape: dict[tuple[object, ...], list[Partial]] = {}
    for partial in partials:
        shape = (
            partial.num_queries,
            partial.num_keys,
            partial.step,
            partial.is_causal,
            partial.zero_pad_keys,
            partial.band,
            partial.is_first,
            partial.axes,
            partial.key_row - partial.query_row,
        )
        by_shape.setdefault(shape, []).append(partial)
    folded = []
    for alike in by_shape.values():
        index = 0
        while index < len(alike):
            first, size, rows, heads = alike[index], 1, 0, 0
            if index + 1 < len(alike):
                rows = alike[index + 1].query_row - first.query_row
                heads = alike[index + 1].head - first.head
                # Partials with a negative step stay separate: strides of a view cannot be negative.
                shares_rows = heads == 0 and rows < _extent(first)
                while min(rows, heads) >= 0 and not shares_rows and index + size < len(alike):
                    following = alike[index + size]
                    distance = (following.query_row - first.query_row, following.head - first.head)
                    if distance != (size * rows, size * heads):
                        break
                    size += 1
            index += size
            axes = (Axis(size, rows, heads), *first.axes) if size > 1 else first.axes
            folded.append(replace(first, axes=axes))
    return folded


def _extent(partial: Partial) -> int:
    """Number of rows spanned by a problem of one head, of queries or of keys."""
    rows = (max(partial.num_queries, partial.num_keys, 1) - 1) * partial.step + 1
    return rows + sum((axis.size - 1) * axis.rows for axis in partial.axes if axis.heads == 0)
