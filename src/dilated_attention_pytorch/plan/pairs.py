"""Number of query-key pairs per rank, counted for all ranks at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.blocks import HeadRule
from dilated_attention_pytorch.patterns.dilated import DilationGroup
from dilated_attention_pytorch.patterns.rules import Range, Spans, span_pairs
from dilated_attention_pytorch.patterns.rules import num_pairs as pairs_of_spans

from .layout import Run, Shards
from .seen_rows import fixed_rectangles, group_heads, is_fixed
from .segments import bounds_of, heads_of, num_selected
from .shards import ShardedCall, document_at


@functools.lru_cache(maxsize=64)
def num_pairs(call: ShardedCall, shards: Shards) -> tuple[int, ...]:
    """Query-key pairs that every rank computes, per query head of a key/value head."""
    num_rows = shards.num_rows
    found = [
        (*part, min(end, num_rows), rank)
        for rank, runs in enumerate(shards)
        for run in runs
        for *part, end in _by_document(call, run)
    ]
    first, stop, begin, end, ranks = torch.tensor(found, dtype=torch.int64).view(-1, 5).T
    total = torch.zeros(len(shards), dtype=torch.int64)
    for group in call.pattern.groups:
        pairs = _pairs(call, group, *(x[:, None] for x in (first, stop, begin, end)))
        total.index_add_(0, ranks, pairs.sum(1))
    if call.pattern.rules:
        of_rules = [
            _pairs_of_rules(call, (row - start, stop_row - start), (max(start, 0) - start, stop_of_all - start))
            for row, stop_row, start, stop_of_all, _ in found
        ]
        total.index_add_(0, ranks, torch.tensor(of_rules, dtype=torch.int64))
        total.index_add_(0, ranks, _pairs_of_fixed_rules(call, first, stop, num_rows))
    return tuple(total.tolist())


def _pairs(call: ShardedCall, group: DilationGroup, first: Tensor, stop: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Pairs of the queries in rows ``[first, stop)`` of a document under one group, per head.

    The document has rows ``[max(begin, 0), end)``, and its position 0 is at row ``begin``.
    """
    assert group.boundaries is None, "segments of one length are counted, and callers refuse others"
    offsets, shifts = heads_of(call, group)
    # Segments of the first and the last row, in rows of the whole sequence.
    (start, after), (last, beyond) = (bounds_of(group, row - begin, shifts, begin) for row in (first, stop - 1))

    def rows(of_segment: Tensor, from_row: Tensor, to_row: Tensor) -> Tensor:
        return num_selected(group, of_segment, offsets, from_row, torch.maximum(from_row, to_row))

    def within(number: Tensor) -> Tensor:
        return number * (number + 1) // 2 if call.is_causal else number * number

    is_one = start == last
    head = rows(start, first, torch.minimum(after, stop))
    tail = rows(last, last, stop).masked_fill_(is_one, 0)
    between = ((last - start) // group.segment_length - 1).clamp_(min=0)
    pairs = within(head) + within(tail) + between * within(rows(start, start, after))
    pairs += head * rows(start, torch.maximum(start, begin).clamp_(min=0), first)
    if not call.is_causal:
        pairs += torch.where(is_one, head, tail) * rows(last, stop, torch.minimum(beyond, end))
    return pairs


def _pairs_of_rules(call: ShardedCall, queries: Range, keys: Range) -> int:
    """Pairs of two position ranges of one document under rules that are not fixed, summed over their heads."""
    total = 0
    for rule in call.pattern.rules:
        if is_fixed(call, rule):
            continue
        before, after = rule.reach(is_causal=call.is_causal)
        first = keys[0] if before is None else max(keys[0], queries[0] - before)
        stop = keys[1] if after is None else min(keys[1], queries[1] + after)
        # Shifted to a canonical position, so that ranks far from the ends share one cached call.
        period = rule.period
        to = 0 if period is None else min(first, queries[0]) // period * period
        for heads in group_heads(rule, call.num_kv_heads):
            total += len(heads) * _pairs_of_rule(
                rule,
                heads[0],
                call.num_kv_heads,
                (queries[0] - to, queries[1] - to),
                (first - to, stop - to),
                is_causal=call.is_causal,
            )
    return total


def _pairs_of_fixed_rules(call: ShardedCall, first: Tensor, stop: Tensor, num_rows: int) -> Tensor:
    """Pairs of the queries in rows ``[first, stop)`` under the fixed rules, summed over their heads."""
    total = torch.zeros_like(first)
    for rule, num_heads, queries, keys in fixed_rectangles(call):
        rows = (first.clamp(min=queries[0]), stop.clamp(max=queries[1]))
        bounds = (torch.full_like(first, max(keys[0], 0)), torch.full_like(first, min(keys[1], num_rows)))
        is_any = (rows[0] < rows[1]) & (bounds[0] < bounds[1])
        pairs = span_pairs(Spans(*rows, *bounds), *rule.band(is_causal=call.is_causal))
        total += torch.where(is_any, pairs, 0) * num_heads
    return total


@functools.lru_cache(maxsize=4096)
def _pairs_of_rule(
    rule: HeadRule, head: int, num_kv_heads: int, queries: Range, keys: Range, *, is_causal: bool
) -> int:
    return pairs_of_spans(rule.spans(head, num_kv_heads, queries, keys), *rule.band(is_causal=is_causal))


def _by_document(call: ShardedCall, run: Run) -> Iterator[tuple[int, int, int, int]]:
    """The parts of a run by document: first row, stop, and the document's :func:`document_at`."""
    first = run[0]
    while first < run[1]:
        begin, end = document_at(call, first)
        yield first, min(end, run[1]), begin, end
        first = end
