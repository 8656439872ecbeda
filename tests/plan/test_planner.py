"""Plans: every pair that the pattern counts is in exactly as many partials, in the tile that owns its rows."""

from __future__ import annotations

import itertools
from typing import get_args

import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.plan.gathered import Gathered
from dilated_attention_pytorch.plan.geometry import Bands, Partial
from dilated_attention_pytorch.plan.planner import CallShape, Plan, plan
from support.drawn import DrawnCall, block_calls, calls, examples

BANDS = st.sampled_from(get_args(Bands))


def plan_of(call: DrawnCall, tile_size: int, bands: Bands = "cut") -> Plan:
    documents = call.options.get("cu_seqlens")
    return plan(
        CallShape(
            call.pattern,
            call.batch,
            call.num_queries,
            call.num_keys,
            call.kv_heads * call.ratio,
            call.kv_heads,
            call.options.get("query_offset", 0),
            call.options.get("key_offset", 0),
            call.is_causal,
            None if documents is None else tuple(documents.tolist()),
        ),
        tile_size,
        bands=bands,
    )


def problems(partial: Partial) -> list[tuple[int, int]]:
    """The (row, head) by which each problem of a partial is further than the first."""
    places = itertools.product(*(range(axis.size) for axis in partial.axes))
    return [
        tuple(
            sum(i * getattr(axis, name) for i, axis in zip(place, partial.axes, strict=True))
            for name in ("rows", "heads")
        )
        for place in places
    ]  # type: ignore[misc]


@examples(150)
@given(calls(with_padding=False), st.integers(1, 3000), BANDS)
def test_partials_cover_exactly_what_the_pattern_counts(call: DrawnCall, tile_size: int, bands: Bands) -> None:
    counts, zero_pad_keys = call.counts()
    got, got_zero_pad_keys = torch.zeros_like(counts[0]), torch.zeros_like(zero_pad_keys[0])
    for tile in plan_of(call, tile_size, bands).tiles:
        for partial in tile.partials:
            for rows, heads in problems(partial):
                queries = partial.query_row + rows + partial.step * torch.arange(partial.num_queries)
                head = partial.head + heads
                assert tile.query_rows[0] <= queries.min()
                assert queries.max() < tile.query_rows[1]
                assert tile.kv_heads[0] <= head < tile.kv_heads[1]
                if partial.zero_pad_keys:
                    got_zero_pad_keys[head, queries] += partial.zero_pad_keys
                    continue
                keys = partial.key_row + rows + partial.step * torch.arange(partial.num_keys)
                assert tile.key_rows[0] <= keys.min()
                assert keys.max() < tile.key_rows[1]
                block = torch.ones(len(queries), len(keys), dtype=torch.long)
                low, high = partial.band or (-len(queries), 0 if partial.is_causal else len(keys))
                got[head, queries[:, None], keys] += block.triu(low).tril(high)
    assert torch.equal(got, counts[0])
    assert torch.equal(got_zero_pad_keys, zero_pad_keys[0])


@examples(150)
@given(calls(with_padding=False), st.integers(1, 3000), BANDS)
def test_no_view_of_a_partial_visits_a_row_twice(call: DrawnCall, tile_size: int, bands: Bands) -> None:
    """Results are merged into views in place, so their rows must be distinct: the queries' and the keys'."""
    for tile in plan_of(call, tile_size, bands).tiles:
        for partial in tile.partials:
            for first, count in ((partial.query_row, partial.num_queries), (partial.key_row, partial.num_keys)):
                visits = [
                    (partial.head + heads, first + rows + partial.step * i)
                    for rows, heads in problems(partial)
                    for i in range(count)
                ]
                assert len(visits) == len(set(visits))


@examples(100)
@given(calls(with_padding=False), st.integers(1, 3000), BANDS)
def test_what_overwrites_its_rows_comes_before_what_merges_into_them(
    call: DrawnCall, tile_size: int, bands: Bands
) -> None:
    for tile in plan_of(call, tile_size, bands).tiles:
        touched: set[tuple[int, int]] = set()
        for partial in tile.partials:
            rows = {
                (partial.head + heads, partial.query_row + row + partial.step * i)
                for row, heads in problems(partial)
                for i in range(partial.num_queries)
            }
            assert not (partial.is_first and rows & touched)
            touched |= rows


@examples(100)
@given(calls(with_padding=False), st.integers(1, 3000), BANDS)
def test_tiles_partition_the_queries_and_stay_within_their_size(call: DrawnCall, tile_size: int, bands: Bands) -> None:
    steps = plan_of(call, tile_size, bands)
    owner = torch.zeros(call.num_queries, call.kv_heads)
    for tile in steps.tiles:
        owner[slice(*tile.query_rows), slice(*tile.kv_heads)] += 1
        heads = tile.kv_heads[1] - tile.kv_heads[0]
        rows = tile.query_rows[1] - tile.query_rows[0]
        assert heads == 1 or rows * heads * call.ratio * steps.batch_step <= max(tile_size, rows * heads * call.ratio)
        assert heads == 1 or rows * heads * call.ratio <= tile_size
    assert (owner == 1).all()
    assert 1 <= steps.batch_step <= call.batch


def test_a_slab_of_a_causal_text_is_one_partial_for_kernels_that_take_bands_and_a_row_is_one_for_all() -> None:
    def partials_of(first: int, count: int, bands: Bands) -> list[tuple[int, int, tuple[int, int] | None]]:
        call = CallShape(DilatedPattern([512], [1]), 1, count, first + count, 4, 4, first, 0, is_causal=True)
        (tile,) = plan(call, 1 << 62, bands=bands).tiles
        return [(x.num_queries, x.num_keys, x.band) for x in tile.partials if isinstance(x, Partial)]

    assert partials_of(700, 100, "whole") == [(100, 288, (-99, 188))]
    assert partials_of(700, 100, "cut") == [(100, 100, None), (100, 188, None)]
    assert partials_of(700, 1, "whole") == partials_of(700, 1, "cut") == [(1, 189, None)]


@examples(60)
@given(calls(with_padding=False))
def test_the_number_of_pairs_is_the_sum_of_the_counts(call: DrawnCall) -> None:
    pairs = int(call.counts()[0].sum()) * call.ratio
    assert plan_of(call, 1 << 20).num_pairs == pairs


@examples(60)
@given(block_calls(with_padding=False), st.integers(1, 3000))
def test_pairs_of_block_patterns_are_counted_once_and_no_two_problems_share_a_row(
    call: DrawnCall, tile_size: int
) -> None:
    steps = plan_of(call, tile_size)
    assert steps.num_pairs == int(call.counts()[0].sum()) * call.ratio
    for tile in steps.tiles:
        for partial in tile.partials:
            if isinstance(partial, Gathered):
                rows = torch.cat(
                    [
                        (alike.query_rows.unsqueeze(-1) + torch.arange(alike.rows_of_range)).view(-1)
                        for alike in partial.lists
                    ]
                )
                assert len(rows.unique()) == len(rows)
                units = torch.cat([alike.units.view(-1) for alike in partial.lists])
                assert (units.min(), units.max()) == (0, partial.num_units - 1)
                assert tile.key_rows[0] <= partial.first_key
                assert partial.first_key + partial.num_units * partial.unit <= tile.key_rows[1]
                assert tile.query_rows[0] <= rows.min()
                assert rows.max() < tile.query_rows[1]
                continue
            for by_query in (True, False):
                number = partial.num_queries if by_query else partial.num_keys
                first = partial.query_row if by_query else partial.key_row
                rows = [
                    (head, first + row + partial.step * index)
                    for row, head in problems(partial)
                    for index in range(number)
                ]
                assert len(set(rows)) == len(rows)
