"""A simulated ring takes the steps of the ring: its bytes and operations, and times that follow from them."""

from __future__ import annotations

import itertools

import pytest
import torch

from dilated_attention_pytorch import DilatedPattern, local_window, parallel
from dilated_attention_pytorch.parallel import Machine, ring, simulate_ring
from dilated_attention_pytorch.planning import Block, Layout, ShardedCall, Shards
from dilated_attention_pytorch.planning.pairs import num_pairs

HEADS, RATIO, HEAD_DIM, BATCH = 3, 2, 5, 2
MACHINE = Machine(flops_per_second=3e6, bytes_per_second=7e6, message_seconds=1e-3)
PATTERNS = {
    "segments of a few ranks": DilatedPattern([16, 96], [1, 3]),
    "segments across shards": DilatedPattern([24, 100, 331], [1, 2, 7], segment_shift=[0, 5]),
    "rates beyond a rank's rows": DilatedPattern([40, 700], [2, 60]),
}


def seconds_by_rank(call: ShardedCall, shards: Shards, *, is_backward: bool) -> list[float]:
    """Rank by rank and step by step, each as soon as all that it waits for is known; from each pair of ranks alone."""
    world = len(shards)
    steps = [ring.steps(call, shards, rank) for rank in range(world)]
    flops = 4 * HEAD_DIM * BATCH * RATIO * (2.5 if is_backward else 1)

    def of_message(blocks: tuple[Block, ...]) -> float:
        rows = sum(block.count * block.num_heads for block in blocks)
        return rows * 2 * BATCH * HEAD_DIM * 4 / MACHINE.bytes_per_second + MACHINE.message_seconds if rows else 0.0

    def of_partial(step: ring._Step) -> float:
        seen = step.wanted
        pairs = sum(r.queries.count * r.queries.num_heads * seen.blocks[r.block].count for r in seen.rectangles)
        return pairs * flops / MACHINE.flops_per_second

    remote = [sum(of_partial(step) for step in of_rank) for of_rank in steps]
    ready = [
        pairs * flops / MACHINE.flops_per_second - others
        for pairs, others in zip(num_pairs(call, shards), remote, strict=True)
    ]
    posted, returned = [0.0] * world, [0.0] * world
    sending, receiving = [0.0] * world, [0.0] * world
    distances = sorted({step.distance for of_rank in steps for step in of_rank})

    def send(distance: int, blocks_of: dict[int, tuple[Block, ...]], sign: int, asked: list[float]) -> dict[int, float]:
        through: dict[int, float] = {}
        taken: dict[tuple[int, int], float] = {}
        for rank, blocks in blocks_of.items():
            other = (rank + sign * distance) % world
            if blocks:
                begin = max(asked[rank], asked[other], sending[rank], receiving[other])
                taken[rank, other] = begin + of_message(blocks)
        for (rank, other), at in taken.items():
            sending[rank] = receiving[other] = at
            through[rank], through[other] = max(through.get(rank, 0.0), at), max(through.get(other, 0.0), at)
        return through

    def step_at(rank: int, distance: int) -> ring._Step | None:
        return next((step for step in steps[rank] if step.distance == distance), None)

    def keys(distance: int) -> dict[int, float]:
        served = {rank: step.served for rank in range(world) if (step := step_at(rank, distance))}
        return send(distance, served, 1, posted)

    arrived = keys(distances[0]) if distances else {}
    for distance, following in itertools.zip_longest(distances, distances[1:]):
        taking = {rank: step for rank in range(world) if (step := step_at(rank, distance))}
        for rank in taking:
            ready[rank] = posted[rank] = max(ready[rank], arrived[rank])
        if following is not None:
            arrived = keys(following)
        for rank, step in taking.items():
            ready[rank] += of_partial(step)
        if is_backward:
            for rank in taking:
                ready[rank] = max(ready[rank], returned[rank])
            for rank, at in send(distance, {r: s.wanted.blocks for r, s in taking.items()}, -1, ready).items():
                returned[rank] = at
    return [max(times) for times in zip(ready, returned, strict=True)]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_backward", [False, True])
def test_times_bytes_and_operations_are_those_of_every_pair_of_ranks(
    name: str, layout: Layout, is_causal: bool, is_backward: bool
) -> None:
    pattern, rows = PATTERNS[name], 331
    for world in (1, 2, 3, 7):
        shape = (BATCH, rows, HEADS * RATIO, HEAD_DIM)
        run = simulate_ring(
            pattern, shape, world, num_kv_heads=HEADS, dtype=torch.float32, is_causal=is_causal, layout=layout,
            machine=MACHINE, is_backward=is_backward,
        )  # fmt: skip
        plan = parallel.plan_parallel(
            pattern, shape, world, num_kv_heads=HEADS, dtype=torch.float32, is_causal=is_causal
        )
        (planned,) = (e for e in plan.estimates if (e.strategy, e.layout) == ("ring", layout))
        assert run.bytes == (planned.backward_bytes if is_backward else planned.forward_bytes)
        times = 2.5 if is_backward else 1
        expected = [times * flops / MACHINE.flops_per_second for flops in planned.flops]
        assert run.compute_seconds == pytest.approx(expected, rel=1e-6)
        call = ShardedCall(pattern, HEADS, is_causal, 0, None)
        by_rank = seconds_by_rank(call, Shards(rows, world, layout), is_backward=is_backward)
        assert run.seconds == pytest.approx(by_rank, rel=1e-6), world
        assert sum(messages for _, messages, _ in run.distances) == sum(run.messages)
        assert sum(total for _, _, total in run.distances) == sum(run.bytes)


def test_two_ranks_wait_for_what_takes_longer() -> None:
    """One segment over both: own rows beside the message, then the other's rows with what came."""
    pattern, rows = DilatedPattern([64], [1]), 64
    for rate in (1e3, 1e5, 1e9):
        machine = Machine(flops_per_second=1e6, bytes_per_second=rate, message_seconds=0.01)
        run = simulate_ring(pattern, (1, rows, 1, 8), 2, dtype=torch.float32, machine=machine)
        part, message = 4 * 8 * 32 * 32 / 1e6, 32 * 2 * 8 * 4 / rate + 0.01
        assert run.seconds == pytest.approx([max(part, message) + part] * 2)
        assert run.overlap == pytest.approx(min(1.0, part / message))


def test_noise_is_drawn_by_its_seed_and_goes_around_what_it_is_given() -> None:
    pattern, shape = DilatedPattern([64, 512], [1, 4]), (1, 512, 4, 8)
    runs = [simulate_ring(pattern, shape, 8, noise=0.2, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    quiet = simulate_ring(pattern, shape, 8)
    assert runs[0].bytes == quiet.bytes
    assert runs[0].seconds != quiet.seconds


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"simulated for dilation groups .*got BlockPattern with rules"):
        simulate_ring(local_window(3), (1, 64, 2, 8), 4)
    with pytest.raises(ValueError, match="noise must be a finite number, at least 0, got -1"):
        simulate_ring(DilatedPattern([4], [1]), (1, 64, 2, 8), 4, noise=-1)
    with pytest.raises(ValueError, match="layout must be one of"):
        simulate_ring(DilatedPattern([4], [1]), (1, 64, 2, 8), 4, layout="striped")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mesh must be one or two numbers of ranks"):
        simulate_ring(DilatedPattern([4], [1]), (1, 64, 2, 8), 0)
