"""The runs of windows, blocks and global tokens, as the device plans them: every pair once, no mask too few."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    DilatedPattern,
    Pattern,
    from_block_mask,
    global_tokens,
    local_window,
    random_blocks,
    strided_blocks,
)
from dilated_attention_pytorch.kernels.triton import sides
from dilated_attention_pytorch.kernels.triton.plan import plan_of
from dilated_attention_pytorch.kernels.triton.problem import Problem
from support.drawn import DrawnCall, Sizes, block_calls, examples
from support.planned import check_runs, planned
from support.triton_calls import DEVICE

# The interpreter takes milliseconds to write a run.
SMALL = Sizes(st.integers(1, 90), batch=1, kv_heads=2, head_dims=(5,), groups=2, summands=(1,))


def problem_of(call: DrawnCall) -> Problem:
    boundaries = call.options.get("cu_seqlens")
    query = torch.zeros(1, call.num_queries, call.kv_heads, 16, device=DEVICE)
    key = torch.zeros(1, call.num_keys, call.kv_heads, 16, device=DEVICE)
    return Problem(
        query,
        key,
        key,
        call.pattern.groups,
        call.is_causal,
        1.0,
        int(call.options.get("query_offset", 0)),
        int(call.options.get("key_offset", 0)),
        None if boundaries is None else torch.as_tensor(boundaries).to(DEVICE),
        rules=call.pattern.rules,
    )


def test_the_runs_of_drawn_patterns_hold_every_pair_and_need_no_other_mask(figure: Any) -> None:
    drawn = runs = 0

    @examples(12, is_shrunk=False)
    @given(block_calls(with_padding=False, sizes=SMALL), st.sampled_from([16, 21, 32, 64]), st.booleans())
    def draw(call: DrawnCall, tile_rows: int, of_queries: bool) -> None:
        nonlocal drawn, runs
        if any(group.tail == "zero_padded" for group in call.pattern.groups):
            return
        call.batch = 1
        drawn += 1
        runs += check_runs(problem_of(call), call.counts()[0][0], tile_rows, of_queries=of_queries)

    draw()
    figure("Triton, drawn block patterns, their runs", f"{drawn} calls, {runs} runs")
    assert drawn >= 8


PATTERNS = {
    "narrow window": local_window(5, 3),
    "wide window": local_window(90, 70),
    "window of its own row": local_window(0),
    "blocks of a tile": random_blocks(0.4, block_size=64),
    "blocks of nine": strided_blocks(3, block_size=9),
    "sum": local_window(20) + global_tokens(4) + DilatedPattern([64, 257], [1, 5]),
    "first tokens beyond a window": local_window(20) + global_tokens(4, beyond=20),
}


@pytest.mark.parametrize(
    ("name", "rows"),
    [*itertools.product(PATTERNS, [1, 7, 63]), ("narrow window", 257), ("wide window", 257), ("sum", 100)],
)
def test_the_runs_of_ragged_lengths_hold_every_pair(name: str, rows: int) -> None:
    pattern, position = PATTERNS[name], torch.arange(rows)
    query = torch.zeros(1, rows, 1, 16, device=DEVICE)
    for is_causal, of_queries in itertools.product((False, True), (False, True)):
        problem = Problem(query, query, query, pattern.groups, is_causal, 1.0, rules=pattern.rules)
        counts = pattern.counts(position, position, 1, is_causal=is_causal)
        check_runs(problem, counts, 64, of_queries=of_queries)


def counts_of_documents(pattern: Pattern, boundaries: list[int]) -> torch.Tensor:
    """``c[head, p, t]`` of one head: every document by itself."""
    counts = torch.zeros(1, boundaries[-1], boundaries[-1], dtype=torch.int64)
    for begin, end in itertools.pairwise(boundaries):
        position = torch.arange(end - begin)
        counts[:, begin:end, begin:end] = pattern.counts(position, position, 1, is_causal=False)
    return counts


@pytest.mark.parametrize("step", [1, 13])
def test_documents_of_few_rows_fit_the_table_of_runs(step: int) -> None:
    rows = 16
    bounds = torch.tensor([*range(0, rows, step), rows], dtype=torch.int32, device=DEVICE)
    query = torch.zeros(1, rows, 1, 16, device=DEVICE)
    for pattern in (local_window(9, 9), random_blocks(0.5, block_size=2)):
        for of_queries in {step == 1, pattern.rules[0].block_size is None}:
            whole = pattern + global_tokens(2)
            problem = Problem(query, query, query, (), False, 1.0, cu_seqlens=bounds, rules=whole.rules)
            check_runs(problem, counts_of_documents(whole, bounds.tolist()), 16, of_queries=of_queries)


def test_a_step_of_decoding_makes_no_table_of_its_own() -> None:
    pattern = local_window(100) + strided_blocks(4)
    tables = set()
    for position in range(5000, 5050):
        q = torch.zeros(1, 1, 2, 16)
        k = torch.zeros(1, position + 1, 2, 16)
        problem = Problem(q, k, k, (), True, 1.0, position, 0, rules=pattern.rules)
        tables.add(plan_of(problem).rules)
    assert len(tables) == 1


def test_a_window_of_few_keys_walks_over_few_blocks() -> None:
    """A tile of 64 rows meets 64 + 32 keys of a window of 33: no run holds more."""
    query = torch.zeros(1, 512, 1, 16, device=DEVICE)
    problem = Problem(query, query, query, (), True, 1.0, rules=local_window(32).rules)
    for of_queries in (False, True):
        runs = planned(problem, (64,), of_queries=of_queries)
        assert int(runs.ranges[..., 1].max()) == 1
        assert max(int(runs.runs(0, tile)[0, 2]) for tile in range(8)) <= 96


@pytest.mark.parametrize(
    ("pattern", "is_ordered"),
    [
        (DilatedPattern([1024, 4096, 16384], [1, 4, 16]) + local_window(64), True),
        (DilatedPattern([64, 256], [1, 4]) + random_blocks(0.5, block_size=64), False),
        (DilatedPattern([64], [1]) + local_window(64), False),
    ],
)
def test_rows_are_ordered_where_that_leaves_less_to_compute(pattern: Pattern, is_ordered: bool) -> None:
    query = torch.zeros(1, 4096, 1, 16)
    problem = Problem(query, query, query, pattern.groups, True, 1.0, rules=pattern.rules)
    plan = plan_of(problem)
    assert sides._is_order_worth_it(plan.kind, plan.rules, 4096, 128, 2048) == is_ordered


def test_heads_that_see_alike_share_their_spans() -> None:
    mask = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    q = torch.zeros(1, 64, 3, 16)
    for pattern, lists in ((from_block_mask(mask, 16), 1), (random_blocks(0.5, block_size=16), 3)):
        problem = Problem(q, q, q, (), True, 1.0, rules=pattern.rules)
        table = plan_of(problem).rules
        assert table is not None
        assert len(table.lists[0, :, 0].unique()) == lists
