"""The rows before each row of a sharded sequence are those of the whole, and so are their gradients."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch import parallel
from dilated_attention_pytorch.plan.layout import Layout
from ranks import mesh_of, run_ranks
from support.drawn import examples


class Case(NamedTuple):
    """A sequence, and how it is spread over the ranks."""

    mesh: tuple[int, ...]
    layout: Layout
    length: int
    count: int
    rest: tuple[int, ...]


def draw_cases(world: int, number: int) -> list[Case]:
    """That many cases, most of them with runs shorter than the rows asked for, or none; ten times as many in the
    sweep."""
    found: list[Case] = []
    meshes = [(world,), *([(2, world // 2)] if world % 2 == 0 else [])]

    @examples(number)
    @given(
        st.builds(
            Case,
            mesh=st.sampled_from(meshes),
            layout=st.sampled_from(["contiguous", "zigzag"]),
            length=st.integers(0, 30),
            count=st.integers(1, 5),
            rest=st.sampled_from([(), (3,), (2, 5)]),
        )
    )
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def integers(*shape: int, seed: int) -> Tensor:
    """Whole numbers in float64: their sums are exact in any order."""
    return torch.randint(-99, 100, shape, generator=torch.Generator().manual_seed(seed)).double()


def shifted(whole: Tensor, j: int) -> Tensor:
    """Row t - j of ``[B, N, ...]`` at each t."""
    return torch.cat([torch.zeros_like(whole[:, :j]), whole[:, : max(0, whole.shape[1] - j)]], dim=1)


def compare(cases: list[Case]) -> None:
    for case in cases:
        mesh, layout, length, count, rest = mesh_of(case.mesh), case.layout, case.length, case.count, case.rest
        whole = integers(2, length, *rest, seed=0).requires_grad_()
        factors = [integers(2, length, *rest, seed=j) for j in range(1, count + 1)]
        expected = [shifted(whole, j) for j in range(1, count + 1)]
        sum((factor * row).sum() for factor, row in zip(factors, expected, strict=True)).backward()

        rows = parallel.shard(whole.detach(), mesh, layout=layout).requires_grad_()
        known = None if length % mesh.size() == 0 else length
        found = parallel.previous_rows(rows, count, mesh=mesh, layout=layout, sequence_length=known)
        assert len(found) == count
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, parallel.shard(theirs, mesh, layout=layout)), case
        loss = sum(
            (parallel.shard(factor, mesh, layout=layout) * row).sum()
            for factor, row in zip(factors, found, strict=True)
        )
        loss.backward()
        assert torch.equal(rows.grad, parallel.shard(whole.grad, mesh, layout=layout)), case
    one_dimension = mesh_of((dist.get_world_size(),))
    add_up_in_float32(one_dimension)
    send_the_last_rows_alone(one_dimension)
    differ(one_dimension)


def add_up_in_float32(mesh: DeviceMesh) -> None:
    """256 + 1 + 1 is 256 in bfloat16, added one by one."""
    rows = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
    first, second, third = parallel.previous_rows(rows, 3, mesh=mesh)
    assert first.dtype == torch.bfloat16
    (256 * first + second + third).sum().backward()
    expected = torch.full((1, 4 * mesh.size()), 258.0)
    expected[0, -3:] = torch.tensor([256.0, 256.0, 0.0])
    assert torch.equal(rows.grad, parallel.shard(expected, mesh).bfloat16())


def send_the_last_rows_alone(mesh: DeviceMesh) -> None:
    rows = torch.ones(2, 50, 7, dtype=torch.bfloat16, requires_grad=True)
    with parallel.count_traffic() as forward:
        found = parallel.previous_rows(rows, 3, mesh=mesh)
    with parallel.count_traffic() as backward:
        found[0].sum().backward()
    numbers = (mesh.size() - 1) * 2 * 3 * 7
    assert (forward.sent, forward.received) == (2 * numbers, 2 * numbers)
    assert (backward.sent, backward.received) == (4 * numbers, 4 * numbers)


def differ(mesh: DeviceMesh) -> None:
    rows = torch.ones(1, 4)
    with pytest.raises(parallel.RankFailure, match="count"):
        parallel.previous_rows(rows, 1 + mesh.get_local_rank() % 2, mesh=mesh)
    parallel.previous_rows(rows, 1, mesh=mesh)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_previous_rows_and_their_gradients_are_those_of_the_whole(world: int) -> None:
    run_ranks(world, compare, draw_cases(world, 40))
