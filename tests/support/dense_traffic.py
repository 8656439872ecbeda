"""Traffic and operations of a call by brute force: tables of all pairs of ranks, each pair computed separately."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.plan import gather_rounds
from dilated_attention_pytorch.plan.heads import Heads
from dilated_attention_pytorch.plan.layout import Layout, Shards
from dilated_attention_pytorch.plan.seen_rows import seen_rows
from dilated_attention_pytorch.plan.shards import ShardedCall, gather_groups
from support.drawn import DrawnCall


def sharded(call: DrawnCall) -> ShardedCall:
    documents = call.options.get("cu_seqlens")
    return ShardedCall(
        call.pattern,
        call.kv_heads,
        call.is_causal,
        call.options.get("query_offset", 0),
        None if documents is None else tuple(documents.tolist()),
    )


def ring_rows(call: ShardedCall, shards: Shards) -> Tensor:
    """Rows, counted per head, that rank s sends to rank t, ``[ranks, ranks]``."""
    rows = torch.zeros(len(shards), len(shards), dtype=torch.int64)
    for source in range(len(shards)):
        for target in range(len(shards)):
            if source != target:
                blocks = seen_rows(call, shards[source], shards[target]).blocks
                rows[source, target] = sum(block.count * block.num_heads for block in blocks)
    return rows


def gather_rows(call: ShardedCall, shards: Shards, row_bytes: int) -> tuple[Tensor, list[int]]:
    """Rows that rank s sends to rank t under gather, and the messages of each rank.

    Every member of a gather group sends as many rows as the member with the most. In groups with enough members,
    tensors of up to 1 MiB are forwarded round by round.
    """
    rows, messages = torch.zeros(len(shards), len(shards), dtype=torch.int64), [0] * len(shards)
    for gather_group in {
        gather_group.members: gather_group
        for rank in range(len(shards))
        for gather_group in gather_groups(call, shards, rank)
    }.values():
        members = gather_group.members
        most = max(sum(block.count * block.num_heads for block in blocks) for blocks in gather_group.blocks)
        if not most:
            continue
        if len(members) < gather_rounds.FEWEST_MEMBERS or most * row_bytes > 1 << 20:
            for source in members:
                messages[source] += len(members) - 1
                for target in members:
                    rows[source, target] += most * (source != target)
            continue
        held = [{member} for member in members]
        while any(len(of_member) < len(members) for of_member in held):
            behind = len(held[0])  # every member holds equally many
            before = [set(of_member) for of_member in held]
            for place, source in enumerate(members):
                target = (place - behind) % len(members)
                missing = before[place] - before[target]
                held[target] |= missing
                messages[source] += 1
                rows[source, members[target]] += most * len(missing)
    return rows, messages


def heads_bytes(call: DrawnCall, world: int, layout: Layout) -> tuple[Tensor, Tensor, int, int]:
    """Bytes of the all-to-all in float64, forward and backward, and the most messages of a rank in each pass."""
    heads = Heads.split(call.kv_heads * call.ratio, call.kv_heads, world)
    held = [sum(stop - start for start, stop in runs) for runs in Shards(call.num_queries, world, layout)]
    row = call.batch * call.head_dim * 8
    sent, back = torch.zeros(world, world, dtype=torch.int64), torch.zeros(world, world, dtype=torch.int64)
    messages, back_messages = [0] * world, [0] * world
    for s in range(world):
        for t in range(world):
            if s != t:
                all_of_s, all_of_t = (len(heads.queries[one]) + 2 * len(heads.kv[one]) for one in (s, t))
                mask = held[s] * call.batch if "key_padding_mask" in call.options else 0
                sent[s, t] = held[s] * all_of_t * row + mask + held[t] * len(heads.queries[s]) * row
                back[s, t] = held[s] * len(heads.queries[t]) * row + held[t] * all_of_s * row
                # Query, key, value and mask are sent, the output returns; its gradient is sent, three gradients return.
                of_s, of_t = held[s] > 0, held[t] > 0
                messages[s] += (3 + (mask > 0)) * of_s + of_t
                back_messages[s] += of_s + 3 * of_t
    return sent, back, max(messages), max(back_messages)


def figures(call: DrawnCall, world: int, strategy: str, layout: Layout) -> dict[str, Any]:
    """The expected estimate of a call in float64 on one axis of ranks."""
    shards = Shards(call.num_queries, world, layout)
    row = 2 * call.batch * call.head_dim * 8
    with_mask = row + (call.batch * 8 if "key_padding_mask" in call.options else 0)
    if strategy == "heads":
        sent, back, messages, back_messages = heads_bytes(call, world, layout)
    elif strategy == "ring":
        rows = ring_rows(sharded(call), shards)
        sent, back = rows * with_mask, rows * with_mask + rows.T * row
        links, answers = (rows > 0).sum(1), (rows > 0).sum(0)
        messages, back_messages = int(links.max()), int((links + answers).max())
    else:
        rows, there = gather_rows(sharded(call), shards, with_mask)
        sums, home = gather_rows(sharded(call), shards, row)
        sent, back = rows * with_mask, rows * with_mask + sums * row
        messages, back_messages = max(there), max(map(sum, zip(there, home, strict=True)))
    return {
        "forward_bytes": tuple(sent.sum(1).tolist()), "backward_bytes": tuple(back.sum(1).tolist()),
        "link_bytes": int(sent.max()), "messages": messages, "backward_messages": back_messages,
        "flops": flops(call, world, strategy, layout),
    }  # fmt: skip


def flops(call: DrawnCall, world: int, strategy: str, layout: Layout) -> tuple[int, ...]:
    """Operations of each rank: 4 D for every pair that the definition counts in the rank's rows, or heads."""
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
