"""What ``plan_parallel`` says a call sends and computes is what it sends and computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.estimate import parallel as plan
from dilated_attention_pytorch.plan import gather_rounds
from dilated_attention_pytorch.plan.layout import Shards, shard_runs
from dilated_attention_pytorch.plan.seen_rows import seen_rows
from dilated_attention_pytorch.plan.shards import ShardedCall
from dilated_attention_pytorch.plan.traffic import gathered_rows, ring_links
from drawn_shards import ShardedCase, counted_traffic, draw_cases, planned
from ranks import run_ranks
from support.oracle import Rule


@pytest.fixture
def passed_on_from_four(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans of which nothing is kept, for sets of ranks that a test can have."""
    for cached in (plan._plan, gathered_rows):
        cached.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(gather_rounds, "FEWEST_MEMBERS", 4)
        yield
    for cached in (plan._plan, gathered_rows):
        cached.cache_clear()


@pytest.mark.usefixtures("passed_on_from_four")
@pytest.mark.parametrize(("world", "number"), [(2, 20), (4, 40), (7, 20)])
def test_sent_bytes_and_messages_are_the_planned_ones(world: int, number: int, figure: Any) -> None:
    cases = draw_cases(world, number, where=lambda case: case.is_whole)
    ranks = run_ranks(world, counted_traffic, cases, 4)
    for index, case in enumerate(cases):
        estimate = planned(case)
        counted = zip(*(of_rank[index] for of_rank in ranks), strict=True)
        sent, received, sent_back, received_back, messages, messages_back = counted
        assert sent == estimate.forward_bytes, case
        assert sent_back == estimate.backward_bytes, case
        assert (max(messages), max(messages_back)) == (estimate.messages, estimate.backward_messages), case
        assert sum(received) == sum(sent), case
        assert sum(received_back) == sum(sent_back), case
    moved = sum(sum(of_rank[index][0] for of_rank in ranks) > 0 for index in range(len(cases)))
    figure(
        f"bytes and messages sent equal the planned ones, {world} ranks",
        f"{len(cases)} drawn calls, {moved} that send any",
    )


@pytest.mark.parametrize("kind", ["groups", "rules"])
@pytest.mark.parametrize("world", [2, 3])
def test_operations_of_every_rank_are_the_pairs_of_its_rows(world: int, kind: str) -> None:
    """By the dense count of the definition; padded keys count, as kernels compute with them."""

    def is_comparable(case: ShardedCase) -> bool:
        by_rows = case.strategy != "heads" and len(case.mesh) == 1
        return case.is_whole and by_rows and "key_padding_mask" not in case.call.options

    for case in draw_cases(world, 30, kind=kind, where=is_comparable):
        call = case.call
        pairs = call.counts()[0].sum(dim=(0, 1, 3)) * call.ratio  # of every row
        shards = [shard_runs(call.num_queries, world, rank, case.layout) for rank in range(world)]
        of_rank = tuple(sum(int(pairs[start:stop].sum()) for start, stop in runs) for runs in shards)
        assert planned(case).flops == tuple(4 * call.head_dim * number for number in of_rank), case


@pytest.mark.parametrize("world", [2, 5])
def test_a_rank_is_sent_the_rows_that_rules_show_to_its_queries_and_no_others(world: int) -> None:
    """By asking the definition for every pair of rows; of each head's rows each goes once."""

    def has_rules_only(case: ShardedCase) -> bool:
        return case.is_whole and all(isinstance(one, Rule) for one in case.call.summands)

    for case in draw_cases(world, 40, kind="rules", where=has_rules_only):
        call = case.call
        documents = call.options.get("cu_seqlens")
        sharded = ShardedCall(
            call.pattern,
            call.kv_heads,
            call.is_causal,
            call.options.get("query_offset", 0),
            None if documents is None else tuple(documents.tolist()),
        )
        call.options.pop("key_padding_mask", None)
        is_seen = call.counts()[0][0] > 0  # head, query, key
        shards = Shards(call.num_queries, world, case.layout)
        sent = torch.zeros(world, world, dtype=torch.int64)
        for sources, targets, number in ring_links(sharded, shards):
            sent[sources.start : sources.stop, targets.start : targets.stop] = number
        for source, key_runs in enumerate(shards):
            rows = torch.cat([torch.arange(*run) for run in key_runs] or [torch.arange(0)])
            for target, query_runs in enumerate(shards):
                if source == target:
                    continue
                queries = torch.cat([torch.arange(*run) for run in query_runs] or [torch.arange(0)])
                expected = is_seen[:, queries][:, :, rows].any(1)  # head, row of the shard
                found = torch.zeros(expected.shape, dtype=torch.int64)
                for block in seen_rows(sharded, key_runs, query_runs).blocks:
                    heads = slice(block.head, block.head + block.num_heads)
                    found[heads, block.row : block.row + block.count] += 1
                assert torch.equal(found, expected.long()), (case, source, target)
                assert sent[source, target] == expected.sum(), (case, source, target)
