"""The table of rules that the planning kernel reads: rectangles of positions, and the band that a row sees in them.

It covers ranges of positions that are a little larger than a call's (:data:`_GRANULE_BLOCKS`), so that decoding, where
every step is a new call, shares one table among many steps. The kernel clips it to the call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.blocks import HeadRule
from dilated_attention_pytorch.patterns.rules import Spans

FAR = 2**31 - 1
"""A distance larger than that of any two positions, and a position beyond all others."""
LAST_POSITION = 2**31 - 2**12
"""Bound of positions: leaves room for a block of positions that begins at the last one and extends past it."""
NUM_COLUMNS = 5
"""Columns of a span: first own row and one past the last, first other row and one past the last, and the running
maximum of the ends of own rows in the list, by which spans are found."""
LIST_COLUMNS = 4
"""Columns of a list: first span, number of spans, smallest and largest ``t - p`` of a pair."""
_GRANULE_BLOCKS = 32
_GRANULE = 4096
Range = tuple[int, int]


class TileRanges(NamedTuple):
    """Properties of a side's tiles that bound the number of their runs."""

    rows: Range | None
    """Positions of the first row and one past the last, if tiles begin at multiples of ``reach`` after the first;
    None = anywhere."""
    reach: int
    """Maximum number of rows from the first row of a tile to its last, inclusive."""


@dataclass(frozen=True, slots=True, eq=False)
class RuleTable:
    """Lists of spans, one per rule and key/value head; heads that see alike share a list.

    A tile holds rows of one side, its own rows; the rows that they see, or are seen by, are the other rows. Lists are
    ordered by the first own row.
    """

    spans: Tensor
    """int32 ``[spans, 5]`` on the device."""
    lists: Tensor
    """int32 ``[rules, key/value heads, 4]`` on the device."""
    longest: int
    """Number of spans in the longest list."""
    others_per_row: tuple[float, ...]
    """Number of other rows that a row meets by each rule, averaged over own rows and heads."""
    _spans: tuple[Tensor, ...]
    """int64 ``[spans, 5]``, one per distinct list."""
    _list_of: tuple[tuple[int, ...], ...]
    """Index of the list, by rule and head."""
    _runs_of_span: tuple[int, ...]
    """Number of runs that a tile makes from one span, by rule."""
    _most_runs: dict[TileRanges, int] = field(default_factory=dict)

    def most_runs(self, tiles: TileRanges) -> int:
        """Upper bound on the number of runs of any tile in one document, over all rules."""
        if tiles not in self._most_runs:
            self._most_runs[tiles] = self._most([_most_spans(spans, tiles) for spans in self._spans])
        return self._most_runs[tiles]

    def most_runs_within(self, num_rows: int) -> int:
        """The same bound for a tile that contains a whole document of at most ``num_rows`` rows."""
        # The tile meets the spans that begin within the document on both sides.
        return self._most([int((spans[:, [0, 2]].amax(1) < num_rows).sum()) for spans in self._spans])

    def _most(self, spans: list[int]) -> int:
        """Number of runs of the head that has most, given the number of spans met in every list."""
        per_head = zip(*self._list_of, strict=True)
        return max(
            sum(runs * spans[index] for index, runs in zip(of_rules, self._runs_of_span, strict=True))
            for of_rules in per_head
        )


def _most_spans(spans: Tensor, tiles: TileRanges) -> int:
    """Maximum number of spans of a list that a tile meets."""
    if not len(spans):
        return 0
    begin, reach = spans[:, 0].contiguous(), spans[:, 4].contiguous()
    if tiles.rows is not None:
        start, stop = tiles.rows
        first = torch.arange(start, stop, tiles.reach)
        last = (first + tiles.reach - 1).clamp(max=stop - 1)
        met = torch.searchsorted(begin, last, right=True) - torch.searchsorted(reach, first, right=True)
        return int(met.max())
    # Consecutive rows anywhere: the maximum is met by a tile that begins at the last own row of a span.
    some = torch.searchsorted(begin, reach + tiles.reach - 2, right=True)
    return int((some - torch.searchsorted(reach, reach - 1, right=True)).max())


def rule_table(
    rules: tuple[HeadRule, ...],
    num_kv_heads: int,
    queries: Range,
    keys: Range,
    *,
    is_causal: bool,
    of_queries: bool,
    device: torch.device,
) -> RuleTable:
    """The table for tiles of queries in one range of positions and keys in another; or, ``of_queries``, tiles of keys.

    Raises:
        NotImplementedError: positions that do not fit 32 bits.
    """
    if max(queries[1], keys[1]) > LAST_POSITION:
        raise NotImplementedError(
            "the Triton kernels count positions in 32 bits: with windows, blocks and global tokens the last position "
            f'must stay below {LAST_POSITION}, got {max(queries[1], keys[1])}; impl="aten" has no such limit'
        )
    sizes = [rule.block_size for rule in rules if rule.block_size is not None]
    granule = min(_GRANULE_BLOCKS * min(sizes, default=_GRANULE), _GRANULE)
    around = [(start // granule * granule, min(-(-stop // granule) * granule, FAR)) for start, stop in (queries, keys)]
    return _table(rules, num_kv_heads, around[0], around[1], is_causal, of_queries, device)


# Cached for both passes of several patterns and lengths.
@functools.lru_cache(maxsize=64)
def _table(
    rules: tuple[HeadRule, ...],
    num_kv_heads: int,
    queries: Range,
    keys: Range,
    is_causal: bool,
    of_queries: bool,
    device: torch.device,
) -> RuleTable:
    found: dict[object, int] = {}
    spans: list[Tensor] = []
    means: list[float] = []
    list_of: list[tuple[int, ...]] = []
    own, others = (keys, queries) if of_queries else (queries, keys)
    for number, rule in enumerate(rules):
        of_heads = []
        low, high = band_of(rule, is_causal=is_causal)
        for head in range(num_kv_heads):
            name = (number, rule.kind(head, num_kv_heads))
            if name not in found:
                found[name] = len(spans)
                one = _columns(rule.spans(head, num_kv_heads, queries, keys), rule, high, of_queries=of_queries)
                spans.append(one)
                pairs = ((one[:, 1] - one[:, 0]) * (one[:, 3] - one[:, 2])).sum().item()
                band = high - low + 1 if low > -FAR else others[1] - others[0]
                means.append(min(pairs / max(1, own[1] - own[0]), band))
            of_heads.append(found[name])
        list_of.append(tuple(of_heads))
    numbers = [len(one) for one in spans]
    lines = [
        [[sum(numbers[:index]), numbers[index], *band_of(rule, is_causal=is_causal)] for index in of_heads]
        for rule, of_heads in zip(rules, list_of, strict=True)
    ]
    return RuleTable(
        torch.cat(spans).to(torch.int32).to(device),
        torch.tensor(lines, dtype=torch.int32).to(device),
        max(numbers),
        tuple(sum(means[index] for index in of_heads) / num_kv_heads for of_heads in list_of),
        tuple(spans),
        tuple(list_of),
        tuple(2 if rule.band(is_causal=is_causal)[0] is not None else 1 for rule in rules),
    )


def band_of(rule: HeadRule, *, is_causal: bool) -> Range:
    """Smallest and largest ``t - p`` of a pair of the rule; :data:`FAR` in magnitude where unbounded."""
    before, after = rule.band(is_causal=is_causal)
    return -FAR if before is None else max(-before, -FAR), FAR if after is None else min(after, FAR)


def _columns(spans: Spans, rule: HeadRule, high: int, *, of_queries: bool) -> Tensor:
    """int64 ``[spans, 5]``, ordered by the first own row, without spans whose keys all lie too far ahead."""
    if of_queries:
        spans = _by_keys(spans, rule.block_size)
    is_met = spans.key_start <= spans.query_stop - 1 + high
    own, others = spans[:2], spans[2:]
    if of_queries:
        own, others = others, own
    four = torch.stack([*own, *others], 1)[is_met]
    reach = four[:, 1].cummax(0).values if len(four) else four[:, 1]
    return torch.cat([four, reach[:, None]], 1)


def _by_keys(spans: Spans, block_size: int | None) -> Spans:
    """The same pairs ordered by keys: for a rule of blocks, runs of query blocks for every key block."""
    if block_size is None or not len(spans.key_start):
        order = torch.argsort(spans.key_start, stable=True)
        return Spans(*(column[order] for column in spans))
    first = spans.key_start // block_size
    count = -(-spans.key_stop // block_size) - first
    place = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
    key_block = first.repeat_interleave(count) + place
    query_start, query_stop, key_start, key_stop = (column.repeat_interleave(count) for column in spans)
    key_start = torch.maximum(key_start, key_block * block_size)
    key_stop = torch.minimum(key_stop, (key_block + 1) * block_size)
    order = torch.argsort(key_block, stable=True)  # the queries of a key block stay in order
    key_block, query_start, query_stop = key_block[order], query_start[order], query_stop[order]
    begins = torch.ones_like(key_block, dtype=torch.bool)
    begins[1:] = (key_block[1:] != key_block[:-1]) | (query_start[1:] != query_stop[:-1])
    ends = torch.cat([begins[1:], begins.new_ones(1)])
    return Spans(query_start[begins], query_stop[ends], key_start[order][begins], key_stop[order][begins])
