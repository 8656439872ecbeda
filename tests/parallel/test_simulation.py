"""A simulated strategy takes the steps of the real one: its bytes and operations, and times that follow from them."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import pytest
import torch

from dilated_attention_pytorch import DilatedPattern, local_window, parallel
from dilated_attention_pytorch.parallel import Machine, ring, simulate
from dilated_attention_pytorch.parallel.heads import Heads
from dilated_attention_pytorch.planning.layout import Layout, Shards
from dilated_attention_pytorch.planning.pairs import num_pairs
from dilated_attention_pytorch.planning.shards import Block, GatherGroup, ShardedCall, gather_groups

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
        run = simulate(
            pattern,
            shape,
            world,
            num_kv_heads=HEADS,
            dtype=torch.float32,
            is_causal=is_causal,
            layout=layout,
            machine=MACHINE,
            is_backward=is_backward,
        )
        plan = parallel.plan_parallel(
            pattern, shape, world, num_kv_heads=HEADS, dtype=torch.float32, is_causal=is_causal
        )
        (planned,) = (e for e in plan.estimates if (e.strategy, e.layout) == ("ring", layout))
        assert run.bytes == (planned.backward_bytes if is_backward else planned.forward_bytes)
        assert max(run.messages) == (planned.backward_messages if is_backward else planned.messages)
        times = 2.5 if is_backward else 1
        expected = [times * flops / MACHINE.flops_per_second for flops in planned.flops]
        assert run.compute_seconds == pytest.approx(expected, rel=1e-6)
        call = ShardedCall(pattern, HEADS, is_causal, 0, None)
        by_rank = seconds_by_rank(call, Shards(rows, world, layout), is_backward=is_backward)
        assert run.seconds == pytest.approx(by_rank, rel=1e-6), world
        assert sum(messages for _, messages, _ in run.distances) == sum(run.messages)
        assert sum(total for _, _, total in run.distances) == sum(run.bytes)


class Links:
    """Ranks one by one: when each is ready, and until when it sends and receives."""

    def __init__(self, world: int) -> None:
        self.ready, self.sending, self.receiving = [0.0] * world, [0.0] * world, [0.0] * world

    def exchange(self, members: tuple[int, ...], num_bytes: dict[tuple[int, int], int]) -> None:
        """Every member sends to every other: the next one first."""
        self.messages(members, num_bytes, list(range(1, len(members))))

    def gather(self, members: tuple[int, ...], message: int, *, is_sum: bool) -> None:
        """Up to 1 MiB of 16 members or more are passed on to the one 1, 2, 4 ... places before; sums come back."""
        size, sign = len(members), 1 if is_sum else -1
        if size < 16 or message > 1 << 20:
            every = {(source, target): message for source in members for target in members}
            self.messages(members, every, [sign * step for step in range(1, size)])
            return
        distances = [1 << index for index in range(math.ceil(math.log2(size)))]
        for distance in reversed(distances) if is_sum else distances:
            some = min(distance, size - distance) * message
            one = {(member, members[(i + sign * distance) % size]): some for i, member in enumerate(members)}
            self.messages(members, one, [sign * distance])

    def messages(self, members: tuple[int, ...], num_bytes: dict[tuple[int, int], int], steps: list[int]) -> None:
        """All at once, one after the other on each link: to the members some places after the sender."""
        posted, count = list(self.ready), len(members)
        for step in steps:
            for index, source in enumerate(members):
                target = members[(index + step) % count]
                if num_bytes[source, target]:
                    begin = max(posted[source], posted[target], self.sending[source], self.receiving[target])
                    at = begin + num_bytes[source, target] / MACHINE.bytes_per_second + MACHINE.message_seconds
                    self.sending[source] = self.receiving[target] = at
                    self.ready[source], self.ready[target] = max(self.ready[source], at), max(self.ready[target], at)


def gathered_by_rank(call: ShardedCall, shards: Shards, *, is_backward: bool) -> list[float]:
    """What each rank's own gather groups say, in the order of their members."""
    world, flops = len(shards), 4 * HEAD_DIM * BATCH * RATIO * (2.5 if is_backward else 1)
    of_rank = [
        {gather_group.members: gather_group for gather_group in gather_groups(call, shards, rank)}
        for rank in range(world)
    ]

    def pairs(rank: int, gather_group: GatherGroup) -> int:
        return sum(
            seen.queries.count * seen.queries.num_heads * gather_group.blocks[member][seen.block].count
            for member, rectangles in enumerate(gather_group.rectangles)
            for seen in rectangles
        )

    remote = [sum(pairs(rank, gather_group) for gather_group in of_rank[rank].values()) for rank in range(world)]
    links = Links(world)
    for rank, total in enumerate(num_pairs(call, shards)):
        links.ready[rank] += (total - remote[rank]) * flops / MACHINE.flops_per_second
    for members in sorted({members for own in of_rank for members in own}, key=lambda one: (len(one), one)):
        rows = max(sum(b.count * b.num_heads for b in blocks) for blocks in of_rank[members[0]][members].blocks)
        message = rows * 2 * BATCH * HEAD_DIM * 4
        links.gather(members, message, is_sum=False)
        for rank in members:
            links.ready[rank] += pairs(rank, of_rank[rank][members]) * flops / MACHINE.flops_per_second
        if is_backward:
            links.gather(members, message, is_sum=True)  # in float32, as wide as the operands
    return links.ready


def of_heads_by_rank(call: ShardedCall, shards: Shards, flops: tuple[int, ...], *, is_backward: bool) -> list[float]:
    """Rows of query, key and value to the ranks of their heads, and the output's home; or their gradients."""
    world, row = len(shards), BATCH * HEAD_DIM * 4
    heads = Heads.split(HEADS * RATIO, HEADS, world)
    held = [sum(stop - start for start, stop in runs) for runs in shards]
    ranks, links = tuple(range(world)), Links(world)

    def there(of: tuple[tuple[int, ...], ...]) -> dict[tuple[int, int], int]:
        return {(i, j): held[i] * len(of[j]) * row for i in ranks for j in ranks}

    def home(of: tuple[tuple[int, ...], ...]) -> dict[tuple[int, int], int]:
        return {(i, j): held[j] * len(of[i]) * row for i in ranks for j in ranks}

    for table in [there(heads.queries)] if is_backward else [there(x) for x in (heads.queries, heads.kv, heads.kv)]:
        links.exchange(ranks, table)
    for rank in ranks:
        links.ready[rank] += flops[rank] * (2.5 if is_backward else 1) / MACHINE.flops_per_second
    for table in [home(x) for x in (heads.queries, heads.kv, heads.kv)] if is_backward else [home(heads.queries)]:
        links.exchange(ranks, table)
    return links.ready


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("strategy", ["gather", "heads"])
def test_exchanges_of_all_at_once_take_what_rank_by_rank_takes(
    name: str, layout: Layout, is_causal: bool, is_backward: bool, strategy: Literal["gather", "heads"]
) -> None:
    pattern, rows = PATTERNS[name], 331
    for world in (1, 2, 3, 7, 17) if strategy == "gather" else (1, 2, 5):
        shape = (BATCH, rows, HEADS * RATIO, HEAD_DIM)
        run = simulate(
            pattern,
            shape,
            world,
            strategy=strategy,
            num_kv_heads=HEADS,
            dtype=torch.float32,
            is_causal=is_causal,
            layout=layout,
            machine=MACHINE,
            is_backward=is_backward,
        )
        plan = parallel.plan_parallel(
            pattern, shape, world, num_kv_heads=HEADS, dtype=torch.float32, is_causal=is_causal
        )
        (planned,) = (e for e in plan.estimates if (e.strategy, e.layout) == (strategy, layout))
        assert run.bytes == (planned.backward_bytes if is_backward else planned.forward_bytes)
        assert max(run.messages) == (planned.backward_messages if is_backward else planned.messages)
        assert sum(total for _, _, total in run.distances) == sum(run.bytes)
        times = 2.5 if is_backward else 1
        expected = [times * flops / MACHINE.flops_per_second for flops in planned.flops]
        assert run.compute_seconds == pytest.approx(expected, rel=1e-6)
        call, shards = ShardedCall(pattern, HEADS, is_causal, 0, None), Shards(rows, world, layout)
        if strategy == "gather":
            by_rank = gathered_by_rank(call, shards, is_backward=is_backward)
        else:
            by_rank = of_heads_by_rank(call, shards, planned.flops, is_backward=is_backward)
        assert run.seconds == pytest.approx(by_rank, rel=1e-6), world


def test_two_ranks_wait_for_what_takes_longer() -> None:
    """One segment over both: own rows beside the message, then the other's rows with what came."""
    pattern, rows = DilatedPattern([64], [1]), 64
    for rate in (1e3, 1e5, 1e9):
        machine = Machine(flops_per_second=1e6, bytes_per_second=rate, message_seconds=0.01)
        run = simulate(pattern, (1, rows, 1, 8), 2, dtype=torch.float32, machine=machine)
        part, message = 4 * 8 * 32 * 32 / 1e6, 32 * 2 * 8 * 4 / rate + 0.01
        assert run.seconds == pytest.approx([max(part, message) + part] * 2)
        assert run.overlap == pytest.approx(min(1.0, part / message))


def test_noise_is_drawn_by_its_seed_and_goes_around_what_it_is_given() -> None:
    pattern, shape = DilatedPattern([64, 512], [1, 4]), (1, 512, 4, 8)
    runs = [simulate(pattern, shape, 8, noise=0.2, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    quiet = simulate(pattern, shape, 8)
    assert runs[0].bytes == quiet.bytes
    assert runs[0].seconds != quiet.seconds


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r'"ring" is simulated for dilation groups .*BlockPattern with rules'):
        simulate(local_window(3), (1, 64, 2, 8), 4)
    assert simulate(local_window(3), (1, 64, 2, 8), 2, strategy="heads").messages == (4, 4)
    with pytest.raises(ValueError, match="strategy must be one of ring, gather, heads, got 'auto'"):
        simulate(DilatedPattern([4], [1]), (1, 64, 2, 8), 2, strategy="auto")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one query head for every rank"):
        simulate(DilatedPattern([4], [1]), (1, 64, 2, 8), 4, strategy="heads")
    with pytest.raises(ValueError, match="noise must be a finite number, at least 0, got -1"):
        simulate(DilatedPattern([4], [1]), (1, 64, 2, 8), 4, noise=-1)
    with pytest.raises(ValueError, match="layout must be one of"):
        simulate(DilatedPattern([4], [1]), (1, 64, 2, 8), 4, layout="striped")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mesh must be one or two numbers of ranks"):
        simulate(DilatedPattern([4], [1]), (1, 64, 2, 8), 0)
