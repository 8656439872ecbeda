"""The planner: from a pattern and lengths to cached tiles of partials, independent of tensor values."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.patterns.dilated import DilationGroup
from dilated_attention_pytorch.patterns.rules import NO_END

from .block_lists import AnyPartial
from .gathered import Gathered, rule_partials
from .geometry import Bands, Partial, Slabs, fold, group_partials


@dataclass(frozen=True, slots=True)
class CallShape:
    """The cache key of a plan: sizes of a call, and positions of its slabs and documents; no tensors."""

    pattern: Pattern
    batch_size: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    query_offset: int
    key_offset: int
    is_causal: bool
    documents: tuple[int, ...] | None = None
    """Boundaries of packed documents (``cu_seqlens``) in absolute positions; None = one unbounded document."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A closed set of rows and heads: it can be computed, merged and rounded independently."""

    query_rows: tuple[int, int]
    key_rows: tuple[int, int]
    kv_heads: tuple[int, int]
    partials: tuple[AnyPartial, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiles of one call. Every tile is computed for ``batch_step`` sequences of the batch at a time."""

    tiles: tuple[Tile, ...]
    batch_step: int
    num_pairs: int
    """Query-key pairs over groups, query heads and the batch: the sum of the pattern's count."""


_TILE_FLOOR = 1 << 20
"""Minimum number of elements; smaller tiles save no significant memory and add calls."""


def tile_size(num_rows: int, head_dim: int, itemsize: int) -> int:
    """Tile size in rows times query heads, such that temporaries of a tile are small relative to the operands.

    Args:
        num_rows: rows times heads times sequences of the larger of query and key.
        head_dim: head dimension.
        itemsize: bytes per element of the operands. In low precision, a tile has three float32 accumulators in addition
            to the gradients.
    """
    parts = 24 if itemsize >= 4 else 48
    return max(1, max(num_rows * head_dim // parts, _TILE_FLOOR) // head_dim)


@functools.lru_cache(maxsize=128)
def plan(call: CallShape, tile_size: int, *, bands: Bands = "cut") -> Plan:
    """Split a call into tiles of about ``tile_size`` rows times query heads, without splitting a segment.

    ``bands``: how windows and the causal mask are planned.

    Rules reach across any boundary: with a rule in the pattern, documents are not split.

    Consecutive independent row ranges share a tile while they fit; if a single range is larger, its heads are
    split; the smallest tile is one range of rows for one key/value head.
    """
    ratio = call.num_heads // call.num_kv_heads
    groups = tuple(sorted(call.pattern.groups, key=lambda group: group.dilation_rate))
    size_of_all = max(call.num_queries * ratio, call.num_keys) * call.num_kv_heads
    batch_step = max(1, min(call.batch_size, tile_size // max(1, size_of_all)))
    tiles = []
    for ranges in _row_ranges(call, groups, max(1, tile_size // (ratio * call.num_kv_heads))):
        query_rows = _clip(ranges[0][0], ranges[-1][1], call.query_offset, call.num_queries)
        key_rows = _clip(ranges[0][0], ranges[-1][1], call.key_offset, call.num_keys)
        num_rows = max((query_rows[1] - query_rows[0]) * ratio, key_rows[1] - key_rows[0])
        heads_per_tile = min(call.num_kv_heads, max(1, tile_size // max(1, num_rows)))
        for head in range(0, call.num_kv_heads, heads_per_tile):
            heads = (head, min(head + heads_per_tile, call.num_kv_heads))
            partials: list[Partial | Gathered] = []
            for group in _partials(call, groups, ranges, heads, bands):
                partials += fold(group)
            for of_rule in _partials_of_rules(call, ranges, heads, bands):
                is_first = not partials
                partials += [one if is_first else replace(one, is_first=False) for one in of_rule]
            # Folding groups partials by shape; a partial that initialises rows must precede those that merge into them.
            tiles.append(Tile(query_rows, key_rows, heads, tuple(sorted(partials, key=lambda p: not p.is_first))))
    pairs = sum(partial.num_pairs for tile in tiles for partial in tile.partials)
    return Plan(tuple(tiles), batch_step, pairs * ratio * call.batch_size)


def _clip(start: int, stop: int, offset: int, num_rows: int) -> tuple[int, int]:
    """Absolute positions ``[start, stop)`` as rows of the slab that starts at ``offset``."""
    first = min(max(start - offset, 0), num_rows)
    return first, min(max(stop - offset, first), num_rows)


def _documents(call: CallShape) -> Iterator[tuple[int, int, int]]:
    """First position, end within the slabs, and full length of every document that overlaps the slabs."""
    start = min(call.query_offset, call.key_offset)
    stop = max(call.query_offset + call.num_queries, call.key_offset + call.num_keys)
    if call.documents is None:
        yield 0, stop, stop
        return
    for begin, end in zip(call.documents, call.documents[1:], strict=False):
        if max(begin, start) < min(end, stop):
            yield begin, min(end, stop), end - begin


def _row_ranges(
    call: CallShape, groups: tuple[DilationGroup, ...], max_rows: int
) -> Iterator[list[tuple[int, int, int, int]]]:
    """Groups of ranges ``(first, stop, document begin, document length)`` of absolute positions closed under the
    pattern.

    A group has ranges of up to ``max_rows`` positions in total, or a single longer range.
    """
    first_row = min(call.query_offset, call.key_offset)
    lattices = {(group.segment_length, group.shift(head)) for group in groups for head in range(call.num_kv_heads)}
    if call.pattern.rules or any(group.boundaries is not None for group in groups):
        lattices = {(NO_END, 0)}
    longest_length, longest_shift = max(lattices)
    run: list[tuple[int, int, int, int]] = []
    for begin, end, length in _documents(call):
        start = max(begin, first_row)
        cut = (start - begin + longest_shift) // longest_length * longest_length - longest_shift + begin
        while start < end:
            cut += longest_length
            stop = min(cut, end)
            local = stop - begin
            if stop < end and any((local + shift) % segment_length for segment_length, shift in lattices):
                continue
            if run and stop - run[0][0] > max_rows:
                yield run
                run = []
            run.append((start, stop, begin, length))
            start = stop
    if run:
        yield run


def _partials(
    call: CallShape,
    groups: tuple[DilationGroup, ...],
    ranges: list[tuple[int, int, int, int]],
    heads: tuple[int, int],
    bands: Bands,
) -> Iterator[list[Partial]]:
    """The partials of one tile, one list per group, sorted by head.

    Partials of one group are disjoint and can be folded; those of different groups can overlap.
    """
    for group in groups:
        partials = []
        of_class: dict[tuple[int, int], list[Partial]] = {}
        for head in range(*heads):
            name = (group.offset(head, call.num_kv_heads), group.shift(head))
            if name not in of_class:
                of_class[name] = [
                    partial
                    for first, stop, begin, length in ranges
                    for partial in group_partials(
                        group,
                        head,
                        call.num_kv_heads,
                        _slabs(call, first, stop, begin, length),
                        is_causal=call.is_causal,
                        bands=bands,
                        is_first_group=group is groups[0],
                    )
                ]
            partials += [partial if partial.head == head else replace(partial, head=head) for partial in of_class[name]]
        yield partials


def _partials_of_rules(
    call: CallShape, ranges: list[tuple[int, int, int, int]], heads: tuple[int, int], bands: Bands
) -> Iterator[list[Partial | Gathered]]:
    """The partials of one tile, one list per rule, over all heads and documents."""
    for rule in call.pattern.rules:
        alike: dict[Hashable, list[int]] = {}
        for head in range(*heads):
            kind = rule.kind(head, call.num_kv_heads)
            if kind is not None:
                alike.setdefault(kind, []).append(head)
        partials: list[Partial] = []
        gathered: list[Gathered] = []
        for some in alike.values():
            for first, stop, begin, length in ranges:
                slabs = _slabs(call, first, stop, begin, length)
                dense, lists = rule_partials(
                    rule, tuple(some), call.num_kv_heads, slabs, is_causal=call.is_causal, bands=bands
                )
                partials += dense
                gathered += lists
        yield [*fold(partials), *gathered]


def _slabs(call: CallShape, first: int, stop: int, begin: int, length: int) -> Slabs:
    query_first, query_stop = _clip(first, stop, call.query_offset, call.num_queries)
    key_first, key_stop = _clip(first, stop, call.key_offset, call.num_keys)
    query_origin, key_origin = begin - call.query_offset, begin - call.key_offset
    return Slabs(
        query_origin,
        key_origin,
        query_first - query_origin,
        query_stop - query_origin,
        key_first - key_origin,
        key_stop - key_origin,
        length,
    )
