"""Partials of rules: dense rectangles and bands over views, and lists of key blocks that are gathered first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.blocks import HeadRule
from dilated_attention_pytorch.patterns.rules import Spans

from .geometry import Bands, Partial, Slabs, dense_and_causal

_BAND_ROWS = (64, 128, 256)
"""Query rows per partial for narrow, medium and wide bands; more rows mean more masked pairs."""
_NARROW = 512
"""Key count above which a band is not narrow."""
_WIDE = 2560
"""Key count above which a band is split so that only its edges are masked: reading a mask costs per score."""
_KEYS_TOGETHER = 16
"""Scores per cache line; alignment is worth a few masked keys."""


class KeyLists(NamedTuple):
    """Problems with equal numbers of query rows and of keys.

    Problem i has, for every j, the ``rows_of_range`` query rows starting at ``query_rows[i, j]``, and the key units
    ``units[i]``.
    """

    query_rows: Tensor
    """int64 ``[problems, ranges per problem]``; disjoint between problems. Rows count within the query slab."""
    rows_of_range: int
    units: Tensor
    """int64 ``[problems, units per problem]``, relative to the first unit of any list."""

    @property
    def num_queries(self) -> int:
        """Query rows per problem."""
        return self.query_rows.shape[1] * self.rows_of_range


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """Problems in which all query rows attend to all keys of the problem's list, equal for all ``heads``.

    Keys are whole units of ``unit`` rows; unit 0 starts at row ``first_key`` of the key slab.
    """

    lists: tuple[KeyLists, ...]
    unit: int
    first_key: int
    num_units: int
    """One past the last unit of any list."""
    heads: tuple[int, ...]
    is_first: bool = False
    """Whether no earlier partial of the plan writes to the same query rows."""
    zero_pad_keys: ClassVar[int] = 0

    @property
    def num_pairs(self) -> int:
        """Number of query-key pairs computed, per query head of a key/value head."""
        return sum(alike.num_queries * alike.units.numel() for alike in self.lists) * self.unit * len(self.heads)


def rule_partials(
    rule: HeadRule, heads: tuple[int, ...], num_kv_heads: int, slabs: Slabs, *, is_causal: bool, bands: Bands
) -> tuple[list[Partial], list[Gathered]]:
    """The partials of one rule for key/value heads with equal visibility, and the gathered ones.

    Sorted by head. ``is_first`` marks partials whose rows no earlier one writes to.
    """
    queries, keys = (slabs.query_start, slabs.query_stop), (slabs.key_start, slabs.key_stop)
    spans = rule.spans(heads[0], num_kv_heads, queries, keys)
    before, after = rule.band(is_causal=is_causal)
    gathered: list[Gathered] = []
    if before is not None:
        assert after is not None, "a window is bounded on both sides"
        if bands == "whole":
            bands_of = (_band(*one, before, after) for one in _rectangles(spans))
            partials = [partial for partial in bands_of if partial.num_keys]
        else:
            partials = [partial for one in _rectangles(spans) for partial in _banded(*one, before, after)]
    elif (size := rule.block_size) is None:
        partials = [
            partial
            for first, stop, key, key_stop in _rectangles(spans)
            for partial in dense_and_causal(
                first, stop - first, key, key_stop - key, 1, 0, is_causal=is_causal, bands=bands
            )
        ]
    else:
        partials, spans = _cut_by_causality(spans) if is_causal else ([], spans)
        gathered = _gathered(spans, size, slabs, heads)
        if _share_no_row(gathered):
            gathered = [replace(one, is_first=True) for one in gathered]
    partials = [
        replace(
            partial,
            head=head,
            query_row=partial.query_row + slabs.query_origin,
            key_row=partial.key_row + slabs.key_origin,
        )
        for head in heads
        for partial in partials
    ]
    return partials, gathered


def _rectangles(spans: Spans) -> list[tuple[int, int, int, int]]:
    return list(zip(*(column.tolist() for column in spans), strict=True))


def _band(query: int, query_stop: int, key: int, key_stop: int, before: int, after: int) -> Partial:
    """A band across a rectangle, restricted to visible keys."""
    first, last = max(key, query - before), min(key_stop, query_stop + after)
    band = (query - before - first, query + after - first)
    return Partial(query, first, query_stop - query, max(0, last - first), 1, 0, band=band, is_first=True)


def _banded(query: int, query_stop: int, key: int, key_stop: int, before: int, after: int) -> Iterator[Partial]:
    """A band across a rectangle: for a few rows at a time, all keys visible to any of them, masked.

    In a wide band, keys visible to all of the rows are separate from the edges, and only the edges are
    masked. The order lets :func:`fold` find runs of partials with disjoint keys.
    """
    width = before + after + 1
    narrow, middle, many = _BAND_ROWS
    is_cut = width >= _WIDE
    rows = many if is_cut else middle if width >= _NARROW else narrow
    starts = range(query, query_stop, rows)
    apart = -(-(rows + width - 1 + _KEYS_TOGETHER) // rows)
    for index in range(min(apart, len(starts))):
        for start in starts[index::apart]:
            stop = min(start + rows, query_stop)
            first, last = max(key, start - before), min(key_stop, stop + after)
            first = max(key, last - -(-(last - first) // _KEYS_TOGETHER) * _KEYS_TOGETHER)
            whole, whole_stop = max(first, stop - 1 - before), min(last, start + after + 1)
            cuts = [(first, last)]
            if is_cut and whole_stop - whole > rows:
                cuts = [(whole, whole_stop), (first, whole), (whole_stop, last)]
            is_first = True
            for low, high in cuts:
                if low < high:
                    band = None if low >= whole and high <= whole_stop else (start - before - low, start + after - low)
                    yield Partial(start, low, stop - start, high - low, 1, 0, band=band, is_first=is_first)
                    is_first = False


def _cut_by_causality(spans: Spans) -> tuple[list[Partial], Spans]:
    """Causal squares where the diagonal crosses the spans, and the spans that are visible to all of their queries."""
    is_whole = spans.key_stop - 1 <= spans.query_start
    is_cut = ~is_whole & (spans.key_start < spans.query_stop)
    squares, rectangles = [], [tuple(column[is_whole] for column in spans)]
    cut = Spans(*(column[is_cut] for column in spans))
    for first, stop, key, key_stop in _rectangles(cut):
        for part in dense_and_causal(first, stop - first, key, key_stop - key, 1, 0, is_causal=True, bands="cut"):
            if part.is_causal:
                squares.append(part)
            else:
                bounds = (
                    part.query_row,
                    part.query_row + part.num_queries,
                    part.key_row,
                    part.key_row + part.num_keys,
                )
                rectangles.append(tuple(torch.tensor([bound]) for bound in bounds))
    whole = Spans(*(torch.cat(columns) for columns in zip(*rectangles, strict=True)))
    return squares, whole


def _gathered(spans: Spans, block_size: int, slabs: Slabs, heads: tuple[int, ...]) -> list[Gathered]:
    """Lists of whole key blocks, and of the rows of blocks that are only partly in the slab."""
    # Positions of blocks that lie entirely in the span.
    inner_start = -(-spans.key_start // block_size) * block_size
    inner_stop = torch.maximum(spans.key_stop // block_size * block_size, inner_start)
    outer = [
        Spans(*spans[:2], spans.key_start, torch.minimum(inner_start, spans.key_stop)),
        Spans(*spans[:2], torch.minimum(inner_stop, spans.key_stop), spans.key_stop),
    ]
    rest = Spans(*(torch.cat(columns) for columns in zip(*outer, strict=True)))
    found = (
        _lists(Spans(*spans[:2], inner_start, inner_stop), block_size, slabs, heads),
        _lists(rest, 1, slabs, heads),
    )
    return [gathered for gathered in found if gathered is not None]


def _lists(spans: Spans, unit: int, slabs: Slabs, heads: tuple[int, ...]) -> Gathered | None:
    """Spans of whole units as problems, grouped by numbers of queries and keys."""
    counts = ((spans.key_stop - spans.key_start) // unit).clamp(min=0)
    order = torch.argsort(spans.query_start * _ROW_BOUND + spans.query_stop - spans.query_start, stable=True)
    order = order[counts[order] > 0]
    if not len(order):
        return None
    names = torch.stack([spans.query_start[order], spans.query_stop[order]], 1)
    problems, problem_of, _ = torch.unique_consecutive(names, dim=0, return_inverse=True, return_counts=True)
    counts = counts[order]
    starts = spans.key_start[order]
    # Unit numbers of every span, concatenated.
    before = counts.cumsum(0) - counts
    nth = torch.arange(int(counts.sum())) - before.repeat_interleave(counts)
    units = (starts // unit).repeat_interleave(counts) + nth
    first_unit = int(units.min())
    units -= first_unit
    totals = torch.zeros(len(problems), dtype=torch.int64).index_add_(0, problem_of, counts)
    ends = totals.cumsum(0)
    sizes = torch.stack([problems[:, 1] - problems[:, 0], totals], 1)
    found = []
    for num_queries, num_units in torch.unique(sizes, dim=0).tolist():
        of_size = ((sizes[:, 0] == num_queries) & (sizes[:, 1] == num_units)).nonzero().squeeze(1)
        indices = (ends[of_size] - num_units).unsqueeze(1) + torch.arange(num_units)
        query_rows = problems[of_size, 0] + slabs.query_origin
        found += [KeyLists(rows, num_queries, lists) for rows, lists in _alike(query_rows, units[indices])]
    # Units are aligned within the document, which may be offset in the slab.
    first_key = slabs.key_origin + first_unit * unit
    return Gathered(tuple(found), unit, first_key, int(units.max()) + 1, heads)


def _alike(query_rows: Tensor, lists: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Merge ranges of query rows with the same key list into one problem; group problems by number of ranges."""
    unique, problem_of, counts = torch.unique(lists, dim=0, return_inverse=True, return_counts=True)
    # Ranges sorted by problem.
    rows = query_rows[torch.argsort(problem_of, stable=True)]
    starts = counts.cumsum(0) - counts
    for number in counts.unique().tolist():
        problems = (counts == number).nonzero().squeeze(1)
        # In row order, so that they are often contiguous.
        problems = problems[torch.argsort(rows[starts[problems]])]
        yield rows[starts[problems].unsqueeze(1) + torch.arange(number)], unique[problems]


_ROW_BOUND = 1 << 31


def _share_no_row(gathered: list[Gathered]) -> bool:
    """Whether the query rows of all problems are disjoint."""
    lists = [alike for one in gathered for alike in one.lists]
    if not lists:
        return True
    starts = torch.cat([alike.query_rows.view(-1) for alike in lists])
    numbers = torch.cat([torch.full_like(alike.query_rows.view(-1), alike.rows_of_range) for alike in lists])
    order = torch.argsort(starts)
    return bool((starts[order][1:] >= (starts + numbers)[order][:-1]).all())
