"""Generation over ranks gives what one process gives, and every row of the cache is on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilated_attention_pytorch.models import generate_naive
from dilated_attention_pytorch.plan.layout import Layout
from parallel.generation_cases import CASES, LONG, OPTIONS, SIZES, draw, held_bytes, model_of, run_all
from parallel.ranks import run_ranks

TOLERANCE = 1e-10

Results = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[3, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 4))])
def ranks(request: pytest.FixtureRequest) -> Results:
    """What every rank returns from all cases, in one launch for each number of ranks."""
    return run_ranks(request.param, run_all)


@pytest.mark.parametrize("name", CASES)
def test_logits_over_ranks_equal_those_of_the_whole_text_in_one_call(ranks: Results, name: str) -> None:
    assert max(rank["cases"][name]["error"] for rank in ranks) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_every_row_alive_is_held_by_one_rank(ranks: Results, name: str) -> None:
    for heads in zip(*(rank["cases"][name]["rows"] for rank in ranks), strict=True):
        assert sorted(row for held, _ in heads for row in held) == heads[0][1]


def test_groups_of_ranks_generate_by_themselves_also_of_one_rank(ranks: Results) -> None:
    assert max(rank["in groups"] for rank in ranks) < TOLERANCE


@pytest.mark.parametrize("layout", OPTIONS)
def test_tokens_over_ranks_are_those_of_one_process_in_every_turn(ranks: Results, layout: Layout) -> None:
    alone = draw(layout, None)
    assert all(rank["drawn"][layout] == alone for rank in ranks)


def test_tokens_of_one_process_are_those_of_naive_generation() -> None:
    naive = list(generate_naive(model_of({}), torch.randint(29, (2, 19)), 11, temperature=0.0))
    assert torch.stack(naive).tolist() == draw("contiguous", None)[:11]


def test_padded_and_reordered_rows_go_on_as_alone(ranks: Results) -> None:
    assert max(rank["padded"] for rank in ranks) < TOLERANCE


def test_rows_before_each_row_of_a_prompt_and_its_last_rows_are_those_of_the_whole(ranks: Results) -> None:
    assert not any(rank["rows of prompts"] for rank in ranks)


def test_a_token_costs_one_message_to_each_other_rank_and_layer(ranks: Results) -> None:
    batch, heads = 2, SIZES["num_heads"]
    numbers, messages = batch * heads * (SIZES["embed_dim"] // heads + 1), SIZES["num_layers"] * (len(ranks) - 1)
    assert all(rank["bytes"] == {"sent": messages * numbers * 8, "messages": messages} for rank in ranks)


def test_a_rank_allocates_its_part_of_the_cache_and_a_block(ranks: Results, figure: Any) -> None:
    largest, alone = max(max(rank["held bytes"]) for rank in ranks), max(held_bytes(None))
    row = 2 * SIZES["num_kv_heads"] * SIZES["embed_dim"] // SIZES["num_heads"] * 8
    block = max(LONG["dilation_rates"]) * len(LONG["dilation_rates"]) * SIZES["num_layers"] * row
    assert largest <= alone / len(ranks) + block
    figure(
        f"cache over {len(ranks)} ranks, largest rank over all / {len(ranks)}", f"{largest * len(ranks) / alone:.3f}"
    )


def test_what_cannot_be_done_is_said_on_every_rank(ranks: Results) -> None:
    for rank in ranks:
        words = rank["refusals"]
        assert float(words["error after refusals"]) < TOLERANCE
        for name, parts in {
            "mesh": ["one dimension", f"(1, {len(ranks)})"],
            "layout": ["layout", "contiguous", "zigzag", "striped"],
            "strategy": ["strategy", "ring", "gather", "heads", "star"],
            "seen": ["first tokens", "has seen 19", "without sequence_length"],
            "rows": ["of 19 tokens this rank has", "got input_ids with 19", "share.rows"],
            "padding": ["attention_mask", "sequence_length", "pass one of them"],
            "prompt": ["same tokens", "rank 1", "(2, 19)", "rank 0"],
        }.items():
            assert all(part in words[name] for part in parts), words[name]
