"""What is planned for many ranks is what every pair of ranks, asked by itself, says; and planning takes neighbours."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import DilatedPattern, global_tokens, hierarchical, local_window, parallel, per_head
from dilated_attention_pytorch.plan.layout import Layout, Shards, shard_runs
from dilated_attention_pytorch.plan.pairs import num_pairs
from dilated_attention_pytorch.plan.seen_rows import neighbours, seen_rows
from dilated_attention_pytorch.plan.shards import ShardedCall
from dilated_attention_pytorch.plan.traffic import sent_rows
from support.dense_traffic import figures, ring_rows, sharded
from support.drawn import DENSE, DrawnCall, block_calls, calls, examples

LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")


@st.composite
def whole_calls(draw: st.DrawFn) -> DrawnCall:
    """Calls of self-attention with ragged tails, of dilated patterns and of rules beside them."""
    call = draw(st.one_of(calls(sizes=DENSE), block_calls(sizes=DENSE)))
    call.num_keys = call.num_queries
    call.options.pop("key_offset", None)
    if "key_padding_mask" in call.options:
        call.options["key_padding_mask"] = torch.zeros(call.batch, call.num_queries, dtype=torch.bool)
    if "query_offset" in call.options:
        call.options["key_offset"] = call.options["query_offset"]
    return call


def is_ragged(call: DrawnCall) -> bool:
    return all(group.tail == "ragged" for group in call.pattern.groups)


@examples(25)
@given(whole_calls().filter(is_ragged), st.sampled_from([1, 2, 3, 5, 8, 13, 17]))
def test_every_figure_of_a_plan_is_that_of_all_pairs_of_ranks(call: DrawnCall, world: int) -> None:
    heads = call.kv_heads * call.ratio
    plan = parallel.plan_parallel(
        call.pattern,
        (call.batch, call.num_queries, heads, call.head_dim),
        world,
        num_kv_heads=call.kv_heads,
        dtype=torch.float64,
        is_causal=call.is_causal,
        query_offset=call.options.get("query_offset", 0),
        cu_seqlens=call.options.get("cu_seqlens"),
        is_padded="key_padding_mask" in call.options,
    )
    assert {(e.strategy, e.layout) for e in plan.estimates} >= {("ring", layout) for layout in LAYOUTS}
    for estimate in plan.estimates:
        expected = figures(call, world, estimate.strategy, estimate.layout)
        assert {name: getattr(estimate, name) for name in expected} == expected, (estimate.strategy, estimate.layout)


@examples(25)
@given(whole_calls(), st.sampled_from([2, 3, 7, 16]), st.sampled_from(LAYOUTS))
def test_neighbours_are_all_ranks_that_exchange_anything(call: DrawnCall, world: int, layout: Layout) -> None:
    shards = Shards(call.num_queries, world, layout)
    sends = ring_rows(sharded(call), shards) > 0
    for rank in range(world):
        sources, targets = neighbours(sharded(call), shards, rank)
        assert set(sends[:, rank].nonzero().flatten().tolist()) <= sources
        assert set(sends[rank].nonzero().flatten().tolist()) <= targets


@given(st.integers(0, 90), st.integers(1, 24), st.sampled_from(LAYOUTS), st.integers(0, 90), st.integers(0, 90))
@examples(200)
def test_runs_by_number_are_the_runs_of_all_ranks_in_order(
    num_rows: int, size: int, layout: Layout, start: int, stop: int
) -> None:
    shards = Shards(num_rows, size, layout)
    runs = sorted((run, rank) for rank in range(size) for run in shard_runs(num_rows, size, rank, layout))
    assert [run for run, _ in runs] == list(zip(*(bound.tolist() for bound in shards.bounds()), strict=True))
    assert [rank for _, rank in runs] == [shards.owner(run) for run in range(shards.num_runs)]
    between = [i for i, (run, _) in enumerate(runs) if max(run[0], start) < min(run[1], stop)]
    assert list(shards.runs_between(start, stop)) == between
    assert shards.owners(shards.runs_between(start, stop)) == {runs[i][1] for i in between}


def rows_shown(call: ShardedCall, shards: Shards, source: int, target: int) -> int:
    blocks = seen_rows(call, shards[source], shards[target]).blocks if source != target else ()
    return sum(block.count * block.num_heads for block in blocks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("offset", [0, 3])
def test_rows_and_pairs_of_a_window_with_global_tokens_are_those_of_every_pair_of_ranks(
    layout: Layout, is_causal: bool, offset: int
) -> None:
    """Global tokens are counted for many ranks at once, a window pair by pair; each head kind by itself."""
    of_some = per_head([global_tokens(29), local_window(11, 2), local_window(1) + global_tokens(7)])
    for pattern in (local_window(11, 2) + global_tokens(29), of_some, global_tokens(5, beyond=11) + global_tokens(40)):
        call = ShardedCall(pattern, 3, is_causal, offset, None)
        (whole,) = num_pairs(call, Shards(211, 1, "contiguous"))
        positions = torch.arange(offset, offset + 211)
        dense = pattern.counts(positions, positions, 3, is_causal=is_causal)
        assert whole == int(dense.sum())
        for world in (2, 5, 16):
            shards = Shards(211, world, layout)
            sent = sent_rows(call, shards)
            rows = [[rows_shown(call, shards, source, target) for target in range(world)] for source in range(world)]
            assert sent.given.tolist() == [sum(of_source) for of_source in rows]
            assert sent.taken.tolist() == [sum(to_target) for to_target in zip(*rows, strict=True)]
            assert sum(num_pairs(call, shards)) == whole


def paper_up_to(rows: int) -> DilatedPattern:
    groups = [(2048, 1), (4096, 2), (8192, 4), (16384, 6), (32768, 12)]
    while groups[-1][0] < rows:
        groups.append((2 * groups[-1][0], 2 * groups[-1][1]))
    return DilatedPattern([w for w, _ in groups], [r for _, r in groups])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_of_1024_sends_what_each_pair_says(layout: Layout) -> None:
    world = 1024
    call = ShardedCall(paper_up_to(1 << 24), 4, True, 0, None)
    shards = Shards(1 << 24, world, layout)
    sent = sent_rows(call, shards)
    rank = 401
    _, targets = neighbours(call, shards, rank)
    assert int(sent.given[rank]) == sum(rows_shown(call, shards, rank, target) for target in targets)
    assert int(sent.given.sum()) == int(sent.taken.sum())


def test_planning_for_many_ranks_holds_no_table_of_all_pairs(figure: Any) -> None:
    world = 2048  # whose table of all pairs alone is 34 MB, of which there were several
    pattern = paper_up_to(1 << 24)
    tracemalloc.start()
    try:
        plan = parallel.plan_parallel(pattern, (1, 1 << 24, 4, 64), world, is_causal=True)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(plan.estimates) == 4
    figure("objects of Python that planning for 2,048 ranks holds", f"{held:,} bytes")
    assert held < 32 << 20


def test_a_rank_asks_its_neighbours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks there are, a window's rank looks at the rows of two others."""
    asked: list[int] = []
    runs_of = Shards.__getitem__

    def counted(shards: Shards, rank: int) -> Any:
        asked.append(rank)
        return runs_of(shards, rank)

    monkeypatch.setattr(Shards, "__getitem__", counted)
    found = []
    for world in (16, 1024, 1 << 20):
        call = ShardedCall(local_window(30, 30) + DilatedPattern([64, 256], [1, 4]), 3, False, 0, None)
        asked.clear()
        neighbours(call, Shards(world * 100, world, "zigzag"), world // 3)
        found.append(len(asked))
    assert found[0] == found[1] == found[2] == 1


def test_a_rule_with_a_bounded_reach_is_not_looked_for_beyond_it() -> None:
    """Blocks by levels reach 16 blocks; on 1,024 ranks of 8,192 rows every rank sends to the one after it alone."""
    call = ShardedCall(hierarchical(), 12, True, 0, None)
    shards = Shards(1024 * 8192, 1024, "contiguous")
    assert int(sent_rows(call, shards).messages.max()) == 1
    (of_one,) = num_pairs(call, Shards(8 * 8192, 1, "contiguous"))
    assert sum(num_pairs(call, Shards(8 * 8192, 8, "zigzag"))) == of_one
