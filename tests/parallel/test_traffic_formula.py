"""The traffic of one group is its closed formula, and that of very many ranks is what each two of them exchange."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import DilatedPattern, Pattern, global_tokens, local_window, parallel, random_blocks
from dilated_attention_pytorch.parallel import ring
from dilated_attention_pytorch.planning import Layout, ShardedCall, exchange, shard_runs
from dilated_attention_pytorch.planning.traffic import num_pairs, sent_rows

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


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_between_a_thousand_ranks_are_those_of_the_exchange(layout: str, is_causal: bool) -> None:
    world, rows_each = 1024, 8192
    lengths = [2048 << level for level in range(13)]
    rates = [1, 2, 4, 6, *(12 << level for level in range(9))]
    call = ShardedCall(DilatedPattern(lengths, rates), HEADS, is_causal, 0, None)
    shards = tuple(shard_runs(world * rows_each, world, rank, layout) for rank in range(world))
    sent, pairs = sent_rows(call, shards), num_pairs(call, shards)
    generator = torch.Generator().manual_seed(0)
    sources = torch.randint(world, (150,), generator=generator).tolist()
    distances = torch.randint(1, 32, (150,), generator=generator).tolist()
    for source, distance in zip(sources, distances, strict=True):
        target = (source + distance * distance) % world
        blocks = exchange(call, shards[source], shards[target]).blocks
        assert sent[source, target] == sum(block.count * block.num_heads for block in blocks), (source, target)
    # All pairs that any rank computes are those of the whole sequence on one.
    (of_one,) = num_pairs(call, (((0, world * rows_each),),))
    assert sum(pairs) == of_one


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_all_ranks_send_their_batches_in_one_order(world: int, layout: Layout, is_causal: bool) -> None:
    """A transport that works batches off one by one would otherwise have two ranks wait for each other's later one."""
    pairs = ((16, 1), (24, 3), (48, 2), (100, 7), (16 * world, 5))
    patterns: list[Pattern] = [DilatedPattern([w], [r], segment_shift=[0, 5]) for w, r in pairs]
    patterns += [
        local_window(3, 20),
        local_window(40) + patterns[0],
        global_tokens(5),
        random_blocks(0.1, block_size=4),
    ]
    for pattern in patterns:
        call = ShardedCall(pattern, 4, is_causal, 0, None)
        shards = tuple(shard_runs(16 * world + 3, world, rank, layout) for rank in range(world))
        orders = {
            tuple((rank - step.source) % world for step in ring.steps(call, shards, rank)) for rank in range(world)
        }
        assert len(orders) == 1, (pattern, orders)
