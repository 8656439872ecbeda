"""What a plan says of a call, by brute force: tables of all pairs of ranks, each pair asked by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.parallel.heads import Heads
from dilated_attention_pytorch.planning import Layout, ShardedCall, Shards, exchange, teams
from drawn import DrawnCall


def sharded(call: DrawnCall) -> ShardedCall:
    documents = call.options.get("cu_seqlens")
    return ShardedCall(
        call.pattern, call.kv_heads, call.is_causal, call.options.get("query_offset", 0),
        None if documents is None else tuple(documents.tolist()),
    )  # fmt: skip


def ring_rows(call: ShardedCall, shards: Shards) -> Tensor:
    """Rows of one head each that rank s sends to rank t, ``[ranks, ranks]``."""
    rows = torch.zeros(len(shards), len(shards), dtype=torch.int64)
    for source in range(len(shards)):
        for target in range(len(shards)):
            if source != target:
                blocks = exchange(call, shards[source], shards[target]).blocks
                rows[source, target] = sum(block.count * block.num_heads for block in blocks)
    return rows


def gather_rows(call: ShardedCall, shards: Shards) -> Tensor:
    """The same where every member of a team sends as many rows as the one with most."""
    rows = torch.zeros(len(shards), len(shards), dtype=torch.int64)
    for rank in range(len(shards)):
        for team in teams(call, shards, rank):
            most = max(sum(block.count * block.num_heads for block in blocks) for blocks in team.blocks)
            for member in team.members:
                if member != rank:
                    rows[rank, member] += most
    return rows


def heads_bytes(call: DrawnCall, world: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """Bytes there and home, forward and backward, in float64."""
    heads = Heads.split(call.kv_heads * call.ratio, call.kv_heads, world)
    held = [sum(stop - start for start, stop in runs) for runs in Shards(call.num_queries, world, layout)]
    row = call.batch * call.head_dim * 8
    sent, back = torch.zeros(world, world, dtype=torch.int64), torch.zeros(world, world, dtype=torch.int64)
    for s in range(world):
        for t in range(world):
            if s != t:
                all_of_s, all_of_t = (len(heads.queries[one]) + 2 * len(heads.kv[one]) for one in (s, t))
                mask = held[s] * call.batch if "key_padding_mask" in call.options else 0
                sent[s, t] = held[s] * all_of_t * row + mask + held[t] * len(heads.queries[s]) * row
                back[s, t] = held[s] * len(heads.queries[t]) * row + held[t] * all_of_s * row
    return sent, back


def figures(call: DrawnCall, world: int, strategy: str, layout: Layout) -> dict[str, Any]:
    """What an estimate of a call in float64 on one axis of ranks has to say."""
    shards = Shards(call.num_queries, world, layout)
    row = 2 * call.batch * call.head_dim * 8
    with_mask = row + (call.batch * 8 if "key_padding_mask" in call.options else 0)
    if strategy == "heads":
        sent, back = heads_bytes(call, world, layout)
        messages = 4 * (world - 1)
    else:
        rows = (ring_rows if strategy == "ring" else gather_rows)(sharded(call), shards)
        sent, returned = rows * with_mask, rows * row
        back = sent + (returned.T if strategy == "ring" else returned)
        messages = int((rows > 0).sum(1).max())
    return {
        "forward_bytes": tuple(sent.sum(1).tolist()), "backward_bytes": tuple(back.sum(1).tolist()),
        "link_bytes": int(sent.max()), "messages": messages, "flops": flops(call, world, strategy, layout),
    }  # fmt: skip


def flops(call: DrawnCall, world: int, strategy: str, layout: Layout) -> tuple[int, ...]:
    """4 D for every pair that the definition counts of a rank's rows, or heads."""
    options = {name: value for name, value in call.options.items() if name != "key_padding_mask"}
    unmasked = DrawnCall(**{name: getattr(call, name) for name in call.__dataclass_fields__} | {"options": options})
    counts = unmasked.counts()[0].sum((0, 3)).repeat_interleave(call.ratio, 0)  # query head, row
    if strategy == "heads":
        heads = Heads.split(call.kv_heads * call.ratio, call.kv_heads, world)
        return tuple(4 * call.head_dim * int(counts[list(some)].sum()) for some in heads.queries)
    of_row = counts.sum(0)
    return tuple(
        4 * call.head_dim * sum(int(of_row[start:stop].sum()) for start, stop in runs)
        for runs in Shards(call.num_queries, world, layout)
    )
