"""What the queries of one shard see of the rows of another: rectangles under dilation groups, slabs under rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import HeadRule, Range

from .layout import Run, Shards, with_rows
from .shards import Block, Rectangle, ShardedCall, document_at, rectangles_between, segments_beyond


@dataclass(frozen=True, slots=True)
class SlabPair:
    """A run of queries and a run of keys of one document, where the pattern's rules say who sees whom.

    What one call of the engine computes with the rules alone, as it does for slabs of one process. Rows count within
    the two shards; of those of the keys, what no query sees is in no block.
    """

    queries: Run
    query_position: int
    """Position of the first query in the document."""
    keys: Run
    key_position: int
    blocks: tuple[int, ...]
    """Which blocks of the exchange hold the rows of the keys that some query sees, for the heads that see them."""


class Exchange(NamedTuple):
    """The rows of one shard that the queries of another see, and which of them see what."""

    blocks: tuple[Block, ...]
    rectangles: tuple[Rectangle, ...]
    slab_pairs: tuple[SlabPair, ...]


class _Sight(NamedTuple):
    """What a run of queries sees of a run of keys under all rules, in rows of the whole sequence."""

    begin: int
    """Where position 0 of the document is that both have rows of."""
    queries: Run
    """From the first to the last that sees anything."""
    keys: dict[int, tuple[Run, ...]]
    """For every key/value head that sees anything the rows that it sees."""


@functools.lru_cache(maxsize=256)
def exchange(call: ShardedCall, key_runs: tuple[Run, ...], query_runs: tuple[Run, ...]) -> Exchange:
    """The rows of one shard that the queries of another see, and who sees them; rows count within the shards.

    A run that both shards hold is left out: what its rows see of each other is a call of its own. Of a run of keys
    the rows that rules show to any query of the other shard are in its blocks once, whatever number of rules and runs
    of queries see them; beside those of the dilation groups.
    """
    of_groups, rectangles = rectangles_between(call, key_runs, query_runs)
    blocks, pairs = list(of_groups), []
    if call.pattern.rules:
        for keys, key_row in with_rows(key_runs):
            sights = [(queries, row, _sight(call, keys, queries)) for queries, row in with_rows(query_runs)]
            first = len(blocks)
            blocks += _blocks(_united([sight for _, _, sight in sights if sight]), key_row - keys[0])
            for queries, query_row, sight in sights:
                if sight:
                    pairs.append(_pair(sight, query_row - queries[0], key_row - keys[0], blocks, first))
    return Exchange(tuple(blocks), rectangles, tuple(pairs))


def neighbours(call: ShardedCall, shards: Shards, rank: int) -> tuple[set[int], set[int]]:
    """The ranks that may show rows to ``rank``, and those that it may show rows to: those that do, and perhaps others.

    Found from the rows of ``rank`` alone, so that it takes no longer the more ranks there are that share nothing with
    it.
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
        sources |= ranks_in_sight(call, shards, run, of_queries=True)
        targets |= ranks_in_sight(call, shards, run, of_queries=False)
    return sources - {rank}, targets - {rank}


def ranks_in_sight(call: ShardedCall, shards: Shards, run: Run, *, of_queries: bool) -> set[int]:
    """The ranks with rows that rules may show to a run's queries; or with queries that they may show its keys to."""
    begin, end = document_at(call, run[0])
    _, last_end = document_at(call, run[1] - 1)
    # A run that holds several documents shares the first and the last of them with other runs.
    parts = [(max(begin, 0), end)] if end == last_end else [(max(begin, 0), run[1]), (run[0], last_end)]
    found: set[int] = set()
    for rule in call.pattern.rules:
        before, after = rule.reach(is_causal=call.is_causal)
        back, ahead = (before, after) if of_queries else (after, before)
        for start, stop in parts:
            first = start if back is None else max(start, run[0] - back)
            last = stop if ahead is None else min(stop, run[1] + ahead)
            if rule.block_size is None and before is None and end == last_end:
                found |= _ranks_of_few(call, shards, rule, run, (first, last), of_queries=of_queries)
            else:
                found |= shards.owners(shards.runs_between(first, last))
    return found


def _ranks_of_few(
    call: ShardedCall, shards: Shards, rule: HeadRule, run: Run, others: Run, *, of_queries: bool
) -> set[int]:
    """The ranks with rows in any of a few rectangles that the rule has for a run of one document and other rows."""
    begin, _ = document_at(call, run[0])
    queries, keys = (run, others) if of_queries else (others, run)
    found: set[int] = set()
    for some in heads_alike(rule, call.num_kv_heads):
        spans = rule.spans(some[0], call.num_kv_heads, _from(begin, queries), _from(begin, keys))
        of_others = spans[2:] if of_queries else spans[:2]
        for start, stop in zip(*(bound.tolist() for bound in of_others), strict=True):
            found |= shards.owners(shards.runs_between(start + begin, stop + begin))
    return found


def seen_rows(call: ShardedCall, keys: Run, query_runs: tuple[Run, ...]) -> int:
    """How many rows of a run of keys, of one head each, :func:`exchange` has blocks of because of rules."""
    near = tuple(queries for queries in query_runs if _is_in_reach(call, keys, queries))
    return _seen_rows(*moved_to_the_start(call, keys, *near)) if near else 0


@functools.lru_cache(maxsize=4096)
def _seen_rows(call: ShardedCall, keys: Run, *query_runs: Run) -> int:
    sights = [sight for queries in query_runs if (sight := _sight(call, keys, queries))]
    return sum(stop - start for runs in _united(sights).values() for start, stop in runs)


def moved_to_the_start(call: ShardedCall, *runs: Run) -> tuple[ShardedCall | Run, ...]:
    """The call and the runs, moved to the first rows that see alike under the call's rules: equal for all that do."""
    periods = [rule.period for rule in call.pattern.rules]
    if call.documents is not None or None in periods:
        return call, *runs
    period = math.lcm(*(number for number in periods if number is not None))
    first = min(start for start, _ in runs)
    moved = replace(call, offset=(call.offset + first) % period)
    return moved, *((start - first, stop - first) for start, stop in runs)


def _is_in_reach(call: ShardedCall, keys: Run, queries: Run) -> bool:
    """Whether any rule reaches from a run of queries to one of keys."""
    reaches = [rule.reach(is_causal=call.is_causal) for rule in call.pattern.rules]
    return any(
        (before is None or queries[0] - before < keys[1]) and (after is None or keys[0] < queries[1] + after)
        for before, after in reaches
    )


def _sight(call: ShardedCall, keys: Run, queries: Run) -> _Sight | None:
    """What rules show to a run of queries of another run; None is nothing."""
    if queries == keys or (call.is_causal and keys[0] > queries[0]):
        return None
    later, earlier = max(keys[0], queries[0]), min(keys[1], queries[1])
    # Disjoint runs have rows of one document at most in common: documents are runs too.
    begin, end = document_at(call, earlier - 1)
    if later >= end:
        return None
    query_range, key_range = (_from(begin, (max(run[0], begin), min(run[1], end))) for run in (queries, keys))
    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by rule and by the first of the heads that see alike
    names: dict[int, tuple[tuple[int, int], ...]] = {}
    first, stop = query_range[1], query_range[0]
    for number, rule in enumerate(call.pattern.rules):
        for some in heads_alike(rule, call.num_kv_heads):
            rows = _rows_of_rule(call, rule, some[0], query_range, key_range)
            if rows:
                first, stop = min(first, rows[0][0]), max(stop, rows[0][1])
                found[number, some[0]] = rows[1]
                names |= {head: (*names.get(head, ()), (number, some[0])) for head in some}
    if not names:
        return None
    united = {
        name: _union(*(torch.cat(bounds) + begin for bounds in zip(*(found[one] for one in name), strict=True)))
        for name in set(names.values())
    }
    return _Sight(begin, (first + begin, stop + begin), {head: united[name] for head, name in names.items()})


def _rows_of_rule(
    call: ShardedCall, rule: HeadRule, head: int, queries: Range, keys: Range
) -> tuple[Range, tuple[Tensor, Tensor]] | None:
    """Positions of the queries that see anything, and bounds of the keys that are seen; None if nothing is."""
    back, ahead = rule.reach(is_causal=call.is_causal)
    queries, keys = _near(queries, keys, ahead, back), _near(keys, queries, back, ahead)
    if queries[0] >= queries[1] or keys[0] >= keys[1]:
        return None
    spans = rule.spans(head, call.num_kv_heads, queries, keys)
    before, after = rule.band(is_causal=call.is_causal)
    first, stop, start, end = spans
    # A band of neighbours leaves of a rectangle's edges what lies within its reach.
    if before is not None:
        start, stop = torch.maximum(start, first - before), torch.minimum(stop, end + before)
    if after is not None:
        end, first = torch.minimum(end, spans.query_stop + after), torch.maximum(first, spans.key_start - after)
    is_seen = (start < end) & (first < stop)
    if not is_seen.any():
        return None
    return (int(first[is_seen].min()), int(stop[is_seen].max())), (start[is_seen], end[is_seen])


@functools.lru_cache(maxsize=64)
def heads_alike(rule: HeadRule, num_kv_heads: int) -> tuple[tuple[int, ...], ...]:
    """The key/value heads that a rule is for; those that see alike under it together."""
    alike: dict[Hashable, list[int]] = {}
    for head in range(num_kv_heads):
        kind = rule.kind(head, num_kv_heads)
        if kind is not None:
            alike.setdefault(kind, []).append(head)
    return tuple(map(tuple, alike.values()))


def _from(begin: int, run: Run) -> Range:
    """Rows of the whole sequence as positions of the document that begins there."""
    return run[0] - begin, run[1] - begin


def _near(some: Range, others: Range, back: int | None, ahead: int | None) -> Range:
    """Those of ``some`` positions that lie at most so far back from, or ahead of, any of the others."""
    first = some[0] if back is None else max(some[0], others[0] - back)
    return first, some[1] if ahead is None else min(some[1], others[1] + ahead)


def _union(starts: Tensor, stops: Tensor) -> tuple[Run, ...]:
    """Intervals as disjoint ones, in order; those that touch become one."""
    starts, order = starts.sort()
    stops = stops[order].cummax(0).values
    is_apart = starts[1:] > stops[:-1]
    edge = torch.ones(1, dtype=torch.bool)
    return tuple(
        zip(starts[torch.cat([edge, is_apart])].tolist(), stops[torch.cat([is_apart, edge])].tolist(), strict=True)
    )


def _united(sights: list[_Sight]) -> dict[int, tuple[Run, ...]]:
    """For every head the rows that any of some runs of queries see."""
    if len(sights) == 1:
        return sights[0].keys
    runs_of: dict[int, list[Run]] = {}
    for sight in sights:
        for head, runs in sight.keys.items():
            runs_of.setdefault(head, []).extend(runs)
    return {head: _union(*torch.tensor(runs).unbind(1)) for head, runs in runs_of.items()}


def _blocks(runs_of: dict[int, tuple[Run, ...]], to_shard: int) -> Iterator[Block]:
    """Rows by head as blocks; consecutive heads with the same rows share them."""
    heads = sorted(runs_of)
    index = 0
    while index < len(heads):
        head, size = heads[index], 1
        while runs_of.get(head + size) == runs_of[head]:
            size += 1
        for start, stop in runs_of[head]:
            yield Block(start + to_shard, stop - start, 1, head, size, 0)
        index += size


def _pair(sight: _Sight, to_query_shard: int, to_key_shard: int, blocks: list[Block], first: int) -> SlabPair:
    start = min(runs[0][0] for runs in sight.keys.values())
    stop = max(runs[-1][1] for runs in sight.keys.values())
    keys = (start + to_key_shard, stop + to_key_shard)
    holding = tuple(
        number for number in range(first, len(blocks))
        if blocks[number].row < keys[1] and keys[0] < blocks[number].row + blocks[number].count
    )  # fmt: skip
    return SlabPair(
        (sight.queries[0] + to_query_shard, sight.queries[1] + to_query_shard), sight.queries[0] - sight.begin,
        keys, start - sight.begin, holding,
    )  # fmt: skip
