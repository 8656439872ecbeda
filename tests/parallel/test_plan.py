"""What ``plan_parallel`` says a call sends and computes is what it sends and computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention_pytorch import parallel
from dilated_attention_pytorch.planning import shard_runs
from drawn_shards import ShardedCase, counted_traffic, draw_cases
from ranks import run_ranks


def planned(case: ShardedCase) -> parallel.Estimate:
    call = case.call
    heads = call.kv_heads * call.ratio
    plan = parallel.plan_parallel(
        call.pattern, (call.batch, call.num_queries, heads, call.head_dim), case.mesh, num_kv_heads=call.kv_heads,
        dtype=torch.float64, is_causal=call.is_causal, query_offset=call.options.get("query_offset", 0),
        cu_seqlens=call.options.get("cu_seqlens"), is_padded="key_padding_mask" in call.options,
    )  # fmt: skip
    (estimate,) = (e for e in plan.estimates if (e.strategy, e.layout) == (case.strategy, case.layout))
    return estimate


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_on_the_wire_are_the_planned_ones(world: int, figure: Any) -> None:
    cases = draw_cases(world, 50, where=lambda case: case.is_whole)
    ranks = run_ranks(world, counted_traffic, cases)
    for index, case in enumerate(cases):
        estimate = planned(case)
        sent, received, sent_back, received_back = zip(*(of_rank[index] for of_rank in ranks), strict=True)
        assert sent == estimate.forward_bytes, case
        assert sent_back == estimate.backward_bytes, case
        assert sum(received) == sum(sent), case
        assert sum(received_back) == sum(sent_back), case
    moved = sum(sum(of_rank[index][0] for of_rank in ranks) > 0 for index in range(len(cases)))
    figure(f"bytes sent equal the planned ones, {world} ranks", f"{len(cases)} drawn calls, {moved} that send any")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_operations_of_every_rank_are_the_pairs_of_its_rows(world: int) -> None:
    """By the dense count of the definition; padded keys count, as kernels compute with them."""

    def is_comparable(case: ShardedCase) -> bool:
        by_rows = case.strategy != "heads" and len(case.mesh) == 1
        return case.is_whole and by_rows and "key_padding_mask" not in case.call.options

    for case in draw_cases(world, 30, where=is_comparable):
        call = case.call
        pairs = call.counts()[0].sum(dim=(0, 1, 3)) * call.ratio  # of every row
        shards = [shard_runs(call.num_queries, world, rank, case.layout) for rank in range(world)]
        of_rank = tuple(sum(int(pairs[start:stop].sum()) for start, stop in runs) for runs in shards)
        assert planned(case).flops == tuple(4 * call.head_dim * number for number in of_rank), case
