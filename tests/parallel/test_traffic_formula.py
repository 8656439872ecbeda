"""The traffic of one group is its closed formula, and that of very many ranks is what each two of them exchange."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import DilatedPattern, Pattern, global_tokens, local_window, parallel, random_blocks
from dilated_attention_pytorch.parallel import ring
from dilated_attention_pytorch.parallel.shipment import num_rows
from dilated_attention_pytorch.plan.layout import Layout, Shards
from dilated_attention_pytorch.plan.pairs import num_pairs
from dilated_attention_pytorch.plan.seen_rows import seen_rows
from dilated_attention_pytorch.plan.shards import ShardedCall
from dilated_attention_pytorch.plan.traffic import ring_links, sent_rows

HEADS, HEAD_DIM = 12, 5
ROWS = 384  # of a rank
GROUPS = ((64, 1), (128, 2), (192, 4), (384, 1), (384, 6), (768, 2), (768, 12), (1536, 4), (1536, 12))


@pytest.mark.parametrize(
    ("world", "w", "r"), [(world, w, r) for world in (2, 4) for w, r in GROUPS if world * ROWS % w == 0]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_moves_w_minus_l_over_r_rows_of_each_head_to_every_rank(
    world: int, w: int, r: int, dtype: torch.dtype
) -> None:
    shape = (1, world * ROWS, HEADS, HEAD_DIM)
    plan = parallel.plan_parallel(DilatedPattern([w], [r]), shape, world, dtype=dtype)
    (ring,) = (e for e in plan.estimates if (e.strategy, e.layout) == ("ring", "contiguous"))
    num_bytes = max(0, w - ROWS) // r * HEADS * 2 * HEAD_DIM * dtype.itemsize
    # What a rank gets it gives as well; backward, keys and values travel once more, and their gradients back.
    assert ring.forward_bytes == (num_bytes,) * world
    assert ring.backward_bytes == (2 * num_bytes,) * world


def test_a_rank_of_a_ring_waits_for_the_longer_of_computation_and_transfer() -> None:
    """One segment over two ranks: own rows during the transfer of the other's, then those; backward, gradients too."""
    for rate in (1e3, 1e4, 1e5, 1e9):
        machine = parallel.Machine(flops_per_second=1e6, bytes_per_second=rate, message_seconds=0.01)
        plan = parallel.plan_parallel(DilatedPattern([64], [1]), (1, 64, 1, 8), 2, dtype=torch.float32, machine=machine)
        part, message = 4 * 8 * 32 * 32 / 1e6, 32 * 2 * 8 * 4 / rate + 0.01
        seconds = {(e.strategy, e.layout): e.seconds for e in plan.estimates}
        forward, backward = max(part, message) + part, max(2.5 * part, message) + max(2.5 * part, message)
        assert seconds["ring", "contiguous"] == pytest.approx(forward + backward)
        # Gathered rows are awaited, forward and backward, and so are the sums of gradients.
        assert seconds["gather", "contiguous"] == pytest.approx(3 * message + 2 * 3.5 * part)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_between_a_thousand_ranks_are_those_of_the_exchange(layout: Layout, is_causal: bool) -> None:
    world, rows_each = 1024, 8192
    lengths = [2048 << level for level in range(13)]
    rates = [1, 2, 4, 6, *(12 << level for level in range(9))]
    call = ShardedCall(DilatedPattern(lengths, rates), HEADS, is_causal, 0, None)
    shards = Shards(world * rows_each, world, layout)
    sent = torch.zeros(world, world, dtype=torch.int64)
    for sources, targets, rows in ring_links(call, shards):
        sent[sources.start : sources.stop, targets.start : targets.stop] = rows
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(world, (150,), generator=generator).tolist()
    distances = torch.randint(1, 32, (150,), generator=generator).tolist()
    for source, distance in zip(picked, distances, strict=True):
        target = (source + distance * distance) % world
        blocks = seen_rows(call, shards[source], shards[target]).blocks
        assert sent[source, target] == sum(block.count * block.num_heads for block in blocks), (source, target)
    summed = sent_rows(call, shards)
    assert torch.equal(summed.given, sent.sum(1))
    assert torch.equal(summed.taken, sent.sum(0))
    assert summed.most == int(sent.max())
    assert torch.equal(summed.messages, (sent > 0).sum(1))
    assert torch.equal(summed.messages_taken, (sent > 0).sum(0))
    # All pairs that any rank computes are those of the whole sequence on one.
    (of_one,) = num_pairs(call, Shards(world * rows_each, 1, "contiguous"))
    assert sum(num_pairs(call, shards)) == of_one


class InOrder:
    """The ranks' ends of a transport that works batches off one by one, as far as a :class:`ring.Ring` asks of it."""

    has_tags = False

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.batches: list[set[tuple[int, int, int]]] = []
        """Messages of every batch: from, to, tag."""

    def exchange(self, sends: dict[int, Any], receives: dict[int, Any], tag: int, doing: str) -> InOrder:
        batch = {(self.rank, peer, tag) for peer in sends} | {(peer, self.rank, tag) for peer in receives}
        if batch:
            self.batches.append(batch)
        return self

    def wait(self) -> None:
        """Nothing is sent."""


def batches_of(call: ShardedCall, shards: Shards, rank: int, *, is_backward: bool) -> list[set[tuple[int, int, int]]]:
    """What a rank hands to the transport in one pass."""
    transport = InOrder(rank)
    rows = torch.zeros(1, sum(stop - start for start, stop in shards[rank]), call.num_kv_heads, 1)
    slab = SimpleNamespace(options=SimpleNamespace(call=call), key=rows, value=rows, is_ignored=None)
    pass_of_rank = ring.Ring(transport, shards, slab, 0)  # type: ignore[arg-type]
    pass_of_rank.begin()
    if is_backward:
        pass_of_rank.backward(lambda seen_keys: torch.zeros(2 * num_rows(seen_keys.seen.blocks)), rows, rows)
    else:
        pass_of_rank.forward(lambda seen_keys: None)
    return transport.batches


@pytest.mark.parametrize("world", [2, 3, 5, 9])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_batches_that_are_worked_off_one_by_one_all_get_through(world: int, layout: Layout, is_causal: bool) -> None:
    """Each rank takes the steps that it has rows in alone, and none may wait for a batch that comes later elsewhere."""
    pairs = ((16, 1), (24, 3), (48, 2), (100, 7), (16 * world, 5))
    patterns: list[Pattern] = [DilatedPattern([w], [r], segment_shift=[0, 5]) for w, r in pairs]
    patterns += [
        local_window(3, 20),
        local_window(40) + patterns[0],
        global_tokens(5),
        random_blocks(0.1, block_size=4),
    ]
    for pattern in patterns:
        for documents in (None, (0, 7, 20, 16 * world - 9, 16 * world + 3)):
            call = ShardedCall(pattern, 4, is_causal, 0, documents)
            shards = Shards(16 * world + 3, world, layout)
            for is_backward in (False, True):
                waiting = [batches_of(call, shards, rank, is_backward=is_backward) for rank in range(world)]
                while any(waiting):
                    fronts = [batches[0] if batches else set() for batches in waiting]
                    through = {
                        (a, b, tag) for front in fronts for a, b, tag in front if {(a, b, tag)} <= fronts[a] & fronts[b]
                    }
                    assert through, (pattern, documents, is_backward, fronts)
                    for batches, front in zip(waiting, fronts, strict=True):
                        front -= through
                        if batches and not front:
                            batches.pop(0)
