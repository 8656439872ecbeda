"""What a call launches is derived once, and for nothing but what it depends on."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import DilatedPattern, Pattern, attend_with_lse, global_tokens, local_window
from dilated_attention_pytorch.kernels.triton import launch, plan
from dilated_attention_pytorch.kernels.triton.configurations import BlockSizes
from dilated_attention_pytorch.kernels.triton.problem import Problem
from dilated_attention_pytorch.kernels.triton.table import COVERING_LENGTH, group_numbers
from support.planned import with_candidates
from support.triton_calls import DEVICE

PATTERN = DilatedPattern([16, 48], [1, 3]) + local_window(5)


@pytest.fixture(autouse=True)
def _own_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    with_candidates(monkeypatch, BlockSizes(16, 16, 4, 1))


def problem(rows: int = 7, pattern: Pattern = PATTERN, heads: int = 2, **options: Any) -> Problem:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, rows, heads, 16, generator=generator).to(DEVICE) for _ in range(3))
    options = {"is_causal": True, "scale": 0.25, **options}
    return Problem(q, k, v, pattern.groups, rules=pattern.rules, **options)


def test_a_training_step_derives_its_tables_once(monkeypatch: pytest.MonkeyPatch) -> None:
    derived: list[bool] = []

    def rule_table(*operands: Any, of_queries: bool, **options: Any) -> Any:
        derived.append(of_queries)
        return made(*operands, of_queries=of_queries, **options)

    made = plan.rule_table
    monkeypatch.setattr(plan, "rule_table", rule_table)
    for step in range(2):
        call = problem(scale=0.25)
        out, lse = launch.forward(call)
        launch.backward(call, out, lse, torch.ones_like(out), None)
        assert derived == [False, True], step
    assert plan._plan.cache_info().misses == 1


def test_calls_share_a_plan_where_all_is_equal_that_it_depends_on() -> None:
    call = problem()
    boundaries, mask = torch.tensor([0, 3, 7], device=DEVICE), torch.zeros(1, 7, dtype=torch.bool, device=DEVICE)
    same = problem()
    assert plan.plan_of(same) is plan.plan_of(call)
    documents = replace(call, cu_seqlens=boundaries)
    assert plan.plan_of(replace(call, cu_seqlens=boundaries + 1)) is plan.plan_of(documents)
    others = [
        documents,
        replace(call, is_causal=False),
        replace(call, scale=0.5),
        replace(call, query_offset=1),
        replace(call, key_offset=1),
        replace(call, dropout_p=0.1),
        replace(call, key_padding_mask=mask),
        replace(call, softcap=2.0),
        replace(call, distance_bias=torch.zeros(2, 13, device=DEVICE)),
        replace(call, distance_bias=torch.zeros(2, 1, device=DEVICE), coordinates=torch.zeros(1, 2, 7, device=DEVICE)),
        replace(call, key_bias=torch.zeros(1, 7, 2, device=DEVICE)),
        replace(call, value=call.value[..., :5]),
        replace(call, groups=call.groups[:1]),
        replace(call, rules=()),
        problem(8),
        replace(call, query=call.query[:, :6]),
        replace(call, key=call.key[:, :6], value=call.value[:, :6]),
        replace(call, key=call.key[:, :, :1], value=call.value[:, :, :1]),
        replace(call, **{name: getattr(call, name).bfloat16() for name in ("query", "key", "value")}),
        replace(call, **{name: getattr(call, name)[..., :8] for name in ("query", "key", "value")}),
    ]
    plans = [plan.plan_of(one) for one in (call, *others)]
    assert len(set(plans)) == len(plans)
    # Operands lie anywhere: strides are no part of a plan.
    apart = torch.empty(1, 9, 3, 20, device=DEVICE)[:, :7, :2, :16]
    assert plan.plan_of(replace(call, query=apart)) is plans[0]


def test_a_plan_that_was_made_before_gives_the_bits_of_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = DilatedPattern([3, 9], [1, 2])
    calls = [
        problem(9, pattern, 1, query_offset=2, dropout_p=0.3, dropout_seed=torch.tensor(5, device=DEVICE)),
        problem(9, pattern, 1, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)),
        problem(9, pattern, 1, cu_seqlens=torch.tensor([0, 6, 9], dtype=torch.int32, device=DEVICE)),
    ]

    def results(call: Problem) -> list[torch.Tensor]:
        out, lse = launch.forward(call)
        return [out, lse, *launch.backward(call, out, lse, torch.ones_like(out), lse.clamp(min=0.0))[:3]]

    alone = []
    for call in calls:
        with_candidates(monkeypatch, BlockSizes(16, 16, 4, 1))
        alone.append(results(call))
    # The last two have one plan: boundaries are no part of it.
    for one, again in zip(alone, [results(call) for call in calls], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert plan._plan.cache_info().misses == 2
    assert not torch.equal(alone[1][0], alone[2][0])


def test_steps_of_decoding_share_their_kind_and_their_tables() -> None:
    pattern = DilatedPattern([16, 600], [1, 3]) + local_window(30) + global_tokens(2)
    whole = problem(500, pattern)
    kinds, tables = set(), set()
    for position in range(100, 500):
        step = replace(
            whole,
            query=whole.query[:, position : position + 1],
            key=whole.key[:, : position + 1],
            value=whole.value[:, : position + 1],
            query_offset=position,
        )
        found = plan.plan_of(step)
        found.forward.walk(found.forward.choice.candidates[0], 2)
        kinds.add(found.kind)
        tables.add((id(found.table), found.rules))
        if position in (133, 499):
            out, lse = launch.forward(step)
            want = attend_with_lse(
                *(x.double() for x in (step.query, step.key, step.value)),
                pattern,
                is_causal=True,
                scale=0.25,
                query_offset=position,
                impl="reference",
            )
            torch.testing.assert_close(out, want.out.float(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(lse, want.lse.float(), rtol=1e-5, atol=1e-6)
    assert len(kinds) == len(tables) == 1
    assert plan._plan.cache_info().currsize <= 64
    ((_, rules),) = tables
    assert rules is not None
    assert len(rules._most_runs) == 1


def test_a_table_of_groups_says_for_every_last_position_what_the_groups_say() -> None:
    groups = (*DilatedPattern([5, 9], [1, 2], segment_shift=(0, 3)).groups, *DilatedPattern([2**30 + 7], [3]).groups)
    positions = (*range(1, 12), 2**30 - 4, 2**30 - 1)
    for last_position, heads in itertools.product(positions, (1, 3)):
        table = group_numbers(groups, heads, last_position)
        for group, lines in zip(groups, table, strict=True):
            for head, (length, rate, offset, shift, _) in enumerate(lines):
                assert (rate, offset) == (group.dilation_rate, group.offset(head, heads))
                if last_position + group.shift(head) <= group.segment_length:
                    assert (length, shift) == (COVERING_LENGTH, group.shift(head) % rate)
                else:
                    assert (length, shift) == (group.segment_length, group.shift(head))
