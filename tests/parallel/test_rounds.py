"""Rows that ranks pass on are the rows that each sends to each: all arrive, once, and sums are those of all ranks."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dilated_attention_pytorch import parallel
from dilated_attention_pytorch.parallel.communicator import communicator_of
from dilated_attention_pytorch.plan import gather_rounds as messages
from dilated_attention_pytorch.plan.gather_rounds import (
    FEWEST_MEMBERS,
    PASSED_ON_BYTES,
    Hop,
    around,
    gather_rounds,
    num_messages,
)
from drawn_shards import ShardedCase, draw_cases, largest_error, mesh_of, whole_by_oracle, whole_by_ranks
from ranks import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 100])
@pytest.mark.parametrize("num_bytes", [1, PASSED_ON_BYTES, PASSED_ON_BYTES + 1])
def test_every_member_gets_what_all_others_have_once(size: int, num_bytes: int) -> None:
    held = [[member] for member in range(size)]
    for hops in gather_rounds(size, num_bytes):
        before = [list(of_member) for of_member in held]
        for hop in hops:
            for member in range(size):
                held[(member - hop.distance) % size] += [(member + row) % size for row in range(hop.num_tensors)]
                assert {(member + row) % size for row in range(hop.num_tensors)} <= set(before[member])
    assert all(sorted(of_member) == list(range(size)) for of_member in held)
    is_passed = size >= FEWEST_MEMBERS and num_bytes <= PASSED_ON_BYTES
    assert num_messages(size, num_bytes) == (math.ceil(math.log2(size)) if is_passed else size - 1)


def test_nothing_is_sent_of_no_bytes() -> None:
    assert gather_rounds(20, 0) == ()
    assert gather_rounds(2, 5) == ((Hop(1, 1),),)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_places_around_are_those_modulo_the_number(size: int) -> None:
    members = torch.arange(size)
    for first in range(-size, 2 * size):
        for count in range(1, size + 1):
            parts = around(first, count, size)
            assert torch.cat([members[rows] for rows, _ in parts]).tolist() == [
                (first + i) % size for i in range(count)
            ]
            assert torch.cat([torch.arange(count)[place] for _, place in parts]).tolist() == list(range(count))


def gathered_and_added(cases: list[ShardedCase]) -> dict[str, Any]:
    """Calls passed on and at once: what they differ by, errors of the first, and messages; and plain tensors."""
    size, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, Any] = {"unlike": [], "gradients": [], "errors": [], "messages": [], "sums": []}
    for case in cases:
        with mock.patch.object(messages, "FEWEST_MEMBERS", 4), parallel.count_traffic() as passed:
            mine = whole_by_ranks(case)
        with parallel.count_traffic() as at_once:
            theirs = whole_by_ranks(case)
        found["messages"].append((passed.messages, at_once.messages))
        assert (passed.sent, passed.received) == (at_once.sent, at_once.received), case
        if not all(torch.equal(a, b) for a, b in zip(mine[:2], theirs[:2], strict=True)):
            found["unlike"].append(case)
        found["gradients"].append(max(map(largest_error, mine[2:], theirs[2:])))
        if rank == 0:
            found["errors"].append(max(map(largest_error, mine, whole_by_oracle(case))))
    communicator = communicator_of(mesh_of((size,)))
    for members in (range(size), [member for member in range(size) if member != 1 or size < 3]):
        if rank in members:
            tensors = torch.arange(len(members) * 3.0).view(len(members), 3) + 100 * rank
            with mock.patch.object(messages, "FEWEST_MEMBERS", 4):
                gathered = communicator.all_gather(torch.tensor([rank, 7]), list(members), tag=2)
                added = communicator.reduce_scatter(tensors, list(members), tag=3)
            assert gathered.tolist() == [[member, 7] for member in members]
            expected = sum(torch.arange(len(members) * 3.0).view(len(members), 3) + 100 * member for member in members)
            assert torch.equal(added, expected[list(members).index(rank)])
    return found


@pytest.mark.parametrize("world", [4, 7, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 3, 5, 8))])
def test_passed_on_rows_give_the_outputs_of_rows_sent_at_once_and_the_gradients_of_the_oracle(
    world: int, figure: Any
) -> None:
    cases = draw_cases(world, 8, where=lambda case: case.strategy == "gather")
    ranks = run_ranks(world, gathered_and_added, cases)
    assert not any(found["unlike"] for found in ranks)
    gradients = max(max(found["gradients"]) for found in ranks)
    errors = max(ranks[0]["errors"])
    assert gradients <= 1e-12
    assert errors <= 1e-10
    fewer = sum(passed < at_once for passed, at_once in ranks[0]["messages"])
    if world >= 7:
        assert fewer
    figure(
        f"rows passed on, {world} ranks, {len(cases)} drawn calls, {fewer} of fewer messages",
        f"gradients differ from those at once by {gradients:.1e}, all from the oracle by {errors:.1e}",
    )
