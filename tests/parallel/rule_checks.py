"""Laws of ``parallel.attend`` under windows, blocks and global tokens: every function runs on all ranks of a group."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import checks
from checks import LAYOUTS, by_one, by_ranks, largest, operands
from dilated_attention_pytorch import (
    DilatedPattern,
    attend,
    global_tokens,
    hierarchical,
    local_window,
    parallel,
    per_head,
    random_blocks,
    strided_blocks,
)
from dilated_attention_pytorch.patterns import SegmentedPattern
from drawn_shards import ShardedCase, counted_traffic, largest_errors
from support.oracle import Groups, Rule

RULES = per_head([local_window(30, 9), random_blocks(0.3, seed=4, block_size=8)]) + global_tokens(3, beyond=30)
PATTERNS = (
    RULES + DilatedPattern([8, 24, 50], [1, 2, 3], segment_shift=[0, 7]),
    strided_blocks(3, block_size=7),
)
ROUTES = [("ring", pattern) for pattern in PATTERNS]
FAR = hierarchical(2, levels=3, block_size=4)
BUDGETED = local_window(30, 9) + strided_blocks(3, block_size=7) + DilatedPattern([24], [2])
SUMMANDS = (Rule("window", (30, 9)), Rule("strided", (3, 7)), Groups((24,), (2,)))


def dropout_of_documents_is_that_of_the_backward_pass(mesh: DeviceMesh) -> float:
    """The output is linear in the values, by the factors with which the gradient of the values is computed too."""
    whole, worst = operands(101, 4, 2, 5), 0.0
    boundaries = torch.tensor([0, 20, 21, 77, 101], dtype=torch.int32)
    for pattern in PATTERNS:
        for layout in LAYOUTS:
            out, _, _, grad_value = by_ranks(
                whole, pattern, mesh, layout, strategy="ring", cu_seqlens=boundaries, dropout_p=0.3
            )
            worst = max(worst, float(((out * whole[3]).sum() - (whole[2] * grad_value).sum()).abs()))
    assert worst < 1e-10
    return worst


def ragged_segments_are_computed_by_heads(mesh: DeviceMesh) -> float:
    whole = operands(73, 2 * mesh.size(), mesh.size(), 5)
    pattern = SegmentedPattern([[0, 9, 40, 51], [0, 60]], [1, 3]) + local_window(3)
    found = by_ranks(whole, pattern, mesh, "zigzag", strategy="heads", is_causal=True)
    worst = largest(found, by_one(whole, pattern, is_causal=True))
    assert worst < 1e-12
    return worst


def auto_takes_a_strategy_that_can(mesh: DeviceMesh) -> None:
    """More ranks than heads leave the ring; without more, all ranks may split the heads."""
    for heads in (1, 2 * mesh.size()):
        q, k, v, _ = operands(40, heads, heads, 5)
        out = parallel.attend(*(parallel.shard(x, mesh) for x in (q, k, v)), RULES, mesh=mesh, sequence_length=40)
        assert largest([parallel.unshard(out, mesh, sequence_length=40)], [attend(q, k, v, RULES)]) < 1e-12


def a_window_sends_its_reach_to_the_next_rank(mesh: DeviceMesh) -> dict[str, int]:
    """``before`` rows of keys and values to the rank after, ``after`` rows to the one before, and back gradients."""
    world, rank = mesh.size(), mesh.get_local_rank()
    before, after, heads, head_dim = 7, 3, 2, 5
    whole = operands(16 * world, 4, heads, head_dim)
    sizes = {}
    for is_causal in (False, True):
        q, k, v, grad = (parallel.shard(x, mesh) for x in whole)
        q.requires_grad_()
        with parallel.count_traffic() as forward:
            out = parallel.attend(q, k, v, local_window(before, after), mesh=mesh, strategy="ring", is_causal=is_causal)
        with parallel.count_traffic() as backward:
            out.backward(grad)
        row = 2 * heads * head_dim * 2 * 8  # batch, heads, key and value, float64
        sent = (before if rank < world - 1 else 0) + (after if rank > 0 and not is_causal else 0)
        received = (before if rank > 0 else 0) + (after if rank < world - 1 and not is_causal else 0)
        assert (forward.sent, forward.received) == (sent * row, received * row)
        assert (backward.sent, backward.received) == ((sent + received) * row,) * 2
        sizes[f"causal {is_causal}"] = forward.sent
    return sizes


def triton_kernels_give_the_same(mesh: DeviceMesh) -> float | None:
    """In Triton's interpreter, which is slow: on two ranks. Grouped heads, padding with NaN in it, every strategy."""
    if mesh.size() > 2:
        return None
    groups = DilatedPattern([4, 9], [1, 3])
    ruled = per_head([local_window(3, 2), random_blocks(0.5, block_size=4)]) + groups
    mask, worst = torch.arange(11)[None] % 7 == 3, 0.0
    for strategy, layout, pattern, kv_heads, padding in (
        ("ring", "zigzag", ruled, 2, mask),
        ("gather", "contiguous", groups, 1, None),
        ("heads", "contiguous", groups, 1, mask),
    ):
        whole = [x[:1] for x in operands(11, 2, kv_heads, 16, torch.float32)]
        options = {"is_causal": padding is not None}
        expected = by_one(whole, pattern, key_padding_mask=padding, **options)
        if padding is not None:
            whole[1][padding], whole[2][padding] = math.nan, math.nan
        found = by_ranks(whole, pattern, mesh, layout, padding, strategy=strategy, impl="triton", **options)
        worst = max(worst, largest(found, expected))
    assert worst < 2e-5
    return worst


CHECKS: list[checks.Check] = [
    partial(checks.dropout_drops_what_one_process_drops, routes=ROUTES),
    dropout_of_documents_is_that_of_the_backward_pass,
    partial(checks.low_precision_stays_within_the_error_budget, routes=[("ring", BUDGETED)], summands=SUMMANDS),
    partial(checks.what_lies_at_padded_keys_is_never_read, routes=ROUTES),
    partial(checks.the_future_changes_nothing_before_it, routes=[*ROUTES, ("ring", FAR)]),
    ragged_segments_are_computed_by_heads,
    auto_takes_a_strategy_that_can,
    a_window_sends_its_reach_to_the_next_rank,
    triton_kernels_give_the_same,
]


def run_all(cases: list[ShardedCase], whole_cases: list[ShardedCase]) -> dict[str, Any]:
    """Everything, in one launch of the ranks."""
    return {
        "errors": largest_errors(cases),
        "traffic": counted_traffic(whole_cases),
        "checks": checks.run_checks(CHECKS),
    }
