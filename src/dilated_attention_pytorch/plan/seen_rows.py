"""Rows of one shard that another shard's queries attend to: rectangles for dilation groups, slabs for rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.blocks import HeadRule
from dilated_attention_pytorch.patterns.rules import NO_END, Range

from .layout import Run, Shards, with_rows
from .shards import Block, Rectangle, ShardedCall, document_at, rectangles_between, segments_beyond


@dataclass(frozen=True, slots=True)
class SlabPair:
    """A run of queries and a run of keys of one document, connected by the pattern's rules.

    The engine computes it in one call with the rules alone, as for slabs in a single process. Rows count within
    the two shards; key rows that no query attends to are in no block.
    """

    queries: Run
    query_position: int
    """Position of the first query in the document."""
    keys: Run
    key_position: int
    blocks: tuple[int, ...]
    """The blocks that hold the visible key rows, for the heads that attend to them."""


class SeenRows(NamedTuple):
    """The rows of one shard that the queries of another attend to, and which queries attend to which rows."""

    blocks: tuple[Block, ...]
    rectangles: tuple[Rectangle, ...]
    slab_pairs: tuple[SlabPair, ...]


class _Visibility(NamedTuple):
    """Visibility between a run of queries and a run of keys under all rules, in rows of the whole sequence."""

    begin: int
    """Row of position 0 of their common document."""
    queries: Run
    """Range from the first to the last query with a visible key."""
    keys: dict[int, tuple[Run, ...]]
    """Visible rows per key/value head."""


@functools.lru_cache(maxsize=256)
def seen_rows(call: ShardedCall, key_runs: tuple[Run, ...], query_runs: tuple[Run, ...]) -> SeenRows:
    """The rows of one shard that the queries of another attend to, and their visibility; rows count within the shards.

    A run that both shards hold is excluded, since it is computed locally. Key rows that rules make visible to any query
    of the other shard are in the blocks once, however many rules and query runs select them, in addition to the blocks
    of the dilation groups.
    """
    of_groups, rectangles = rectangles_between(call, key_runs, query_runs)
    blocks, pairs = list(of_groups), []
    if call.pattern.rules:
        for keys, key_row in with_rows(key_runs):
            visible = [
                (queries, row, _visibility(call, call.pattern.rules, keys, queries))
                for queries, row in with_rows(query_runs)
            ]
            first = len(blocks)
            blocks += _blocks(_united([visibility for _, _, visibility in visible if visibility]), key_row - keys[0])
            for queries, query_row, visibility in visible:
                if visibility:
                    pairs.append(_pair(visibility, query_row - queries[0], key_row - keys[0], blocks, first))
    return SeenRows(tuple(blocks), rectangles, tuple(pairs))


def neighbours(call: ShardedCall, shards: Shards, rank: int) -> tuple[set[int], set[int]]:
    """The ranks that may send rows to ``rank``, and the ranks that it may send rows to (supersets of the actual ones).

    Computed from the rows of ``rank`` alone, so the cost does not grow with ranks that share nothing with it.
    """
    sources: set[int] = set()
    targets: set[int] = set()
    for run in shards[rank]:
        (own,) = shards.runs_between(*run)
        for segment in segments_beyond(call, run):
            sharing = shards.runs_between(segment.start, segment.stop)
            is_causal = call.is_causal
            sources |= shards.owners(range(sharing.start, own) if is_causal else sharing)
            targets |= shards.owners(range(own, sharing.stop) if is_causal else sharing)
        sources |= peers_of_run(call, shards, run, of_queries=True)
        targets |= peers_of_run(call, shards, run, of_queries=False)
    return sources - {rank}, targets - {rank}


def peers_of_run(
    call: ShardedCall, shards: Shards, run: Run, *, of_queries: bool, is_bounded: bool = False
) -> set[int]:
    """Ranks whose rows rules may make visible to a run's queries; or whose queries may attend to its keys.

    With ``is_bounded``, only by rules other than fixed ones.
    """
    begin, end = document_at(call, run[0])
    _, last_end = document_at(call, run[1] - 1)
    # Of a run with several documents, only the first and the last are shared with other runs.
    parts = [(max(begin, 0), end)] if end == last_end else [(max(begin, 0), run[1]), (run[0], last_end)]
    found: set[int] = set()
    for rule in call.pattern.rules:
        if is_bounded and is_fixed(call, rule):
            continue
        before, after = rule.reach(is_causal=call.is_causal)
        back, ahead = (before, after) if of_queries else (after, before)
        for start, stop in parts:
            first = start if back is None else max(start, run[0] - back)
            last = stop if ahead is None else min(stop, run[1] + ahead)
            if rule.block_size is None and before is None and end == last_end:
                found |= _ranks_of_rectangles(call, shards, rule, run, (first, last), of_queries=of_queries)
            else:
                found |= shards.owners(shards.runs_between(first, last))
    return found


def _ranks_of_rectangles(
    call: ShardedCall, shards: Shards, rule: HeadRule, run: Run, others: Run, *, of_queries: bool
) -> set[int]:
    """Ranks with rows in any of a rule's few rectangles between one document's run and other rows."""
    begin, _ = document_at(call, run[0])
    queries, keys = (run, others) if of_queries else (others, run)
    found: set[int] = set()
    for heads in group_heads(rule, call.num_kv_heads):
        spans = rule.spans(heads[0], call.num_kv_heads, _from(begin, queries), _from(begin, keys))
        of_others = spans[2:] if of_queries else spans[:2]
        for start, stop in zip(*(bound.tolist() for bound in of_others), strict=True):
            found |= shards.owners(shards.runs_between(start + begin, stop + begin))
    return found


def rows_sent_by_rules(call: ShardedCall, shards: Shards, rank: int) -> Iterator[tuple[int, int]]:
    """Ranks to which rules send rows of ``rank``, each with the number of rows (per head) in :func:`seen_rows`.

    A rank is repeated for every run of keys that is sent to it.
    """
    for keys in shards[rank]:
        fixed = [
            (one.rule, max(one.queries[0], keys[0]) if call.is_causal else one.queries[0], one.queries[1])
            for one in fixed_rectangles(call)
            if one.keys[0] < keys[1] and keys[0] < one.keys[1]
        ]
        near = peers_of_run(call, shards, keys, of_queries=False, is_bounded=True)
        targets = near.union(*(shards.owners(shards.runs_between(first, stop)) for _, first, stop in fixed)) - {rank}
        far: dict[frozenset[int], int] = {}
        for target in targets:
            runs = shards[target]
            touched = frozenset(
                index
                for index, (_, first, stop) in enumerate(fixed)
                if any(first < end and start < stop for start, end in runs)
            )
            # Outside the reach of all other rules, queries in the same rectangles see the same keys.
            number = None if target in near else far.get(touched)
            if number is None:
                number = _seen_rows_of(call, _rules_of(call, {fixed[index][0] for index in touched}), keys, runs)
                if target not in near:
                    far[touched] = number
            if number:
                yield target, number


def is_fixed(call: ShardedCall, rule: HeadRule) -> bool:
    """Whether a rule is a few rectangles at fixed rows: in a single document, where positions are rows.

    Rules without a period and without blocks have fixed positions, which restart in every document.
    """
    return call.documents is None and rule.period is None and rule.block_size is None


class Fixed(NamedTuple):
    """Queries and keys of a fixed rule's rectangle in rows of the whole sequence, causality aside."""

    rule: HeadRule
    num_heads: int
    """Number of key/value heads with the same rectangle."""
    queries: Run
    keys: Run


@functools.lru_cache(maxsize=64)
def fixed_rectangles(call: ShardedCall) -> tuple[Fixed, ...]:
    """All rectangles of the fixed rules. Some end beyond the last row."""
    everything = (0, NO_END)
    found = []
    for rule in call.pattern.rules:
        if is_fixed(call, rule):
            for heads in group_heads(rule, call.num_kv_heads):
                spans = rule.spans(heads[0], call.num_kv_heads, everything, everything)
                for first, stop, start, end in zip(*((bound - call.offset).tolist() for bound in spans), strict=True):
                    found.append(Fixed(rule, len(heads), (first, stop), (start, end)))
    return tuple(found)


def _rules_of(call: ShardedCall, shown: set[HeadRule]) -> tuple[HeadRule, ...]:
    """The rules, except fixed rules without visible rows."""
    return tuple(rule for rule in call.pattern.rules if not is_fixed(call, rule) or rule in shown)


def _seen_rows_of(call: ShardedCall, rules: tuple[HeadRule, ...], keys: Run, query_runs: tuple[Run, ...]) -> int:
    """Number of rows (per head) of a run of keys that :func:`seen_rows` has because of some rules."""
    near = tuple(queries for queries in query_runs if _is_in_reach(call, rules, keys, queries))
    if not near:
        return 0
    moved, *runs = moved_to_the_start(call, rules, keys, *near)
    return _seen_rows(moved, rules, *runs)


@functools.lru_cache(maxsize=4096)
def _seen_rows(call: ShardedCall, rules: tuple[HeadRule, ...], keys: Run, *query_runs: Run) -> int:
    visible = [visibility for queries in query_runs if (visibility := _visibility(call, rules, keys, queries))]
    return sum(stop - start for runs in _united(visible).values() for start, stop in runs)


def moved_to_the_start(call: ShardedCall, rules: tuple[HeadRule, ...], *runs: Run) -> tuple[Any, ...]:
    """The call and the runs, shifted to the first rows with the same visibility: a canonical cache key."""
    periods = [rule.period for rule in rules]
    if call.documents is not None or None in periods:
        return call, *runs
    period = math.lcm(*(number for number in periods if number is not None))
    first = min(start for start, _ in runs)
    moved = replace(call, offset=(call.offset + first) % period)
    return moved, *((start - first, stop - first) for start, stop in runs)


def _is_in_reach(call: ShardedCall, rules: tuple[HeadRule, ...], keys: Run, queries: Run) -> bool:
    """Whether the reach of any rule extends from a run of queries to a run of keys."""
    reaches = [rule.reach(is_causal=call.is_causal) for rule in rules]
    return any(
        (before is None or queries[0] - before < keys[1]) and (after is None or keys[0] < queries[1] + after)
        for before, after in reaches
    )


def _visibility(call: ShardedCall, rules: tuple[HeadRule, ...], keys: Run, queries: Run) -> _Visibility | None:
    """Visibility of one run to the queries of another under some rules; None if there is none."""
    if queries == keys or (call.is_causal and keys[0] > queries[0]):
        return None
    later, earlier = max(keys[0], queries[0]), min(keys[1], queries[1])
    # Disjoint runs have at most one document in common, since documents are contiguous.
    begin, end = document_at(call, earlier - 1)
    if later >= end:
        return None
    query_range, key_range = (_from(begin, (max(run[0], begin), min(run[1], end))) for run in (queries, keys))
    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by rule and first of the heads with equal visibility
    names: dict[int, tuple[tuple[int, int], ...]] = {}
    first, stop = query_range[1], query_range[0]
    for number, rule in enumerate(rules):
        for heads in group_heads(rule, call.num_kv_heads):
            rows = _rows_of_rule(call, rule, heads[0], query_range, key_range)
            if rows:
                first, stop = min(first, rows[0][0]), max(stop, rows[0][1])
                found[number, heads[0]] = rows[1]
                names |= {head: (*names.get(head, ()), (number, heads[0])) for head in heads}
    if not names:
        return None
    united = {
        name: _union(*(torch.cat(bounds) + begin for bounds in zip(*(found[one] for one in name), strict=True)))
        for name in set(names.values())
    }
    return _Visibility(begin, (first + begin, stop + begin), {head: united[name] for head, name in names.items()})


def _rows_of_rule(
    call: ShardedCall, rule: HeadRule, head: int, queries: Range, keys: Range
) -> tuple[Range, tuple[Tensor, Tensor]] | None:
    """Positions of queries with visible keys, and bounds of those keys; None if there are none."""
    back, ahead = rule.reach(is_causal=call.is_causal)
    queries, keys = _near(queries, keys, ahead, back), _near(keys, queries, back, ahead)
    if queries[0] >= queries[1] or keys[0] >= keys[1]:
        return None
    spans = rule.spans(head, call.num_kv_heads, queries, keys)
    before, after = rule.band(is_causal=call.is_causal)
    first, stop, start, end = spans
    # With a band, only positions within its reach from the rectangle's edges remain.
    if before is not None:
        start, stop = torch.maximum(start, first - before), torch.minimum(stop, end + before)
    if after is not None:
        end, first = torch.minimum(end, spans.query_stop + after), torch.maximum(first, spans.key_start - after)
    is_seen = (start < end) & (first < stop)
    if not is_seen.any():
        return None
    return (int(first[is_seen].min()), int(stop[is_seen].max())), (start[is_seen], end[is_seen])


@functools.lru_cache(maxsize=64)
def group_heads(rule: HeadRule, num_kv_heads: int) -> tuple[tuple[int, ...], ...]:
    """The key/value heads that a rule applies to, grouped by equal visibility."""
    alike: dict[Hashable, list[int]] = {}
    for head in range(num_kv_heads):
        kind = rule.kind(head, num_kv_heads)
        if kind is not None:
            alike.setdefault(kind, []).append(head)
    return tuple(map(tuple, alike.values()))


def _from(begin: int, run: Run) -> Range:
    """Rows of the whole sequence as positions of the document that starts at ``begin``."""
    return run[0] - begin, run[1] - begin


def _near(rows: Range, others: Range, back: int | None, ahead: int | None) -> Range:
    """The part of ``rows`` within distance ``back`` before or ``ahead`` after any of ``others``."""
    first = rows[0] if back is None else max(rows[0], others[0] - back)
    return first, rows[1] if ahead is None else min(rows[1], others[1] + ahead)


def _union(starts: Tensor, stops: Tensor) -> tuple[Run, ...]:
    """The union of intervals as sorted disjoint ones; adjacent intervals are joined."""
    starts, order = starts.sort()
    stops = stops[order].cummax(0).values
    is_apart = starts[1:] > stops[:-1]
    edge = torch.ones(1, dtype=torch.bool)
    return tuple(
        zip(starts[torch.cat([edge, is_apart])].tolist(), stops[torch.cat([is_apart, edge])].tolist(), strict=True)
    )


def _united(visible: list[_Visibility]) -> dict[int, tuple[Run, ...]]:
    """Per head, the rows that any of several query runs attends to."""
    if len(visible) == 1:
        return visible[0].keys
    runs_of: dict[int, list[Run]] = {}
    for visibility in visible:
        for head, runs in visibility.keys.items():
            runs_of.setdefault(head, []).extend(runs)
    return {head: _union(*torch.tensor(runs).unbind(1)) for head, runs in runs_of.items()}


def _blocks(runs_of: dict[int, tuple[Run, ...]], to_shard: int) -> Iterator[Block]:
    """Rows per head as blocks; consecutive heads with the same rows share a block."""
    heads = sorted(runs_of)
    index = 0
    while index < len(heads):
        head, size = heads[index], 1
        while runs_of.get(head + size) == runs_of[head]:
            size += 1
        for start, stop in runs_of[head]:
            yield Block(start + to_shard, stop - start, 1, head, size, 0)
        index += size


def _pair(visibility: _Visibility, to_query_shard: int, to_key_shard: int, blocks: list[Block], first: int) -> SlabPair:
    start = min(runs[0][0] for runs in visibility.keys.values())
    stop = max(runs[-1][1] for runs in visibility.keys.values())
    keys = (start + to_key_shard, stop + to_key_shard)
    holding = tuple(
        number
        for number in range(first, len(blocks))
        if blocks[number].row < keys[1] and keys[0] < blocks[number].row + blocks[number].count
    )
    return SlabPair(
        (visibility.queries[0] + to_query_shard, visibility.queries[1] + to_query_shard),
        visibility.queries[0] - visibility.begin,
        keys,
        start - visibility.begin,
        holding,
    )
