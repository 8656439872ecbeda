"""Drawn calls of ``parallel.attend``: patterns, lengths, documents and padding that nobody chose, and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import parallel
from dilated_attention_pytorch.plan import gather_rounds
from ranks import mesh_of
from support.drawn import DENSE, DrawnCall, block_calls, calls, examples
from support.oracle import Groups, dense_attention

NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")


@dataclass
class ShardedCase:
    """One call, and how it is spread over the ranks."""

    call: DrawnCall
    mesh: tuple[int, ...]
    strategy: str
    layout: str

    @property
    def is_whole(self) -> bool:
        """Queries and keys are the same rows."""
        call = self.call
        same = call.options.get("query_offset", 0) == call.options.get("key_offset", 0)
        return call.num_queries == call.num_keys and bool(same)


CALLS = {"groups": calls(sizes=DENSE), "rules": block_calls(sizes=DENSE)}
"""Calls with dilated patterns; and with windows, global tokens and blocks, most of them beside dilated patterns."""


def is_ragged(call: DrawnCall) -> bool:
    """No part of the pattern pads its segments."""
    return all(one.tail == "ragged" for one in call.summands if isinstance(one, Groups))


@st.composite
def cases(draw: st.DrawFn, world: int, kind: str) -> ShardedCase:
    """Any call of a kind that some strategy computes on ``world`` ranks."""
    call = draw(CALLS[kind])
    meshes: list[tuple[int, ...]] = [(world,)]
    meshes += [(rows, world // rows) for rows in range(1, world + 1) if world % rows == 0 and world > 1]
    heads = call.kv_heads * call.ratio
    mesh = draw(st.sampled_from([mesh for mesh in meshes if len(mesh) == 1 or heads >= mesh[1]]))
    if "key_offset" in call.options and draw(st.booleans()):
        # The rows of a sequence that begins elsewhere.
        offset = call.options["query_offset"]
        call = replace(call, num_keys=call.num_queries, options={**call.options, "key_offset": offset})
        if "key_padding_mask" in call.options:
            # What is drawn is the same whenever it is drawn again: the global generator goes on from draw to draw.
            generator = torch.Generator().manual_seed(call.seed)
            call.options["key_padding_mask"] = torch.rand(call.batch, call.num_keys, generator=generator) < 0.3
    is_whole = call.options.get("query_offset", 0) == call.options.get("key_offset", 0)
    is_whole = is_whole and call.num_queries == call.num_keys and is_ragged(call)
    by_rows = ["ring", "gather"] if kind == "groups" else ["ring", "ring"]
    strategies = list(by_rows) if is_whole else []
    if heads >= world:
        strategies += ["heads"]
        mesh = (world,) if not is_whole else mesh
    if not strategies:
        call = replace(
            call,
            num_keys=call.num_queries,
            options={},
            summands=tuple(replace(g, tail="ragged") if isinstance(g, Groups) else g for g in call.summands),
        )
        strategies = by_rows
    strategy = draw(st.sampled_from(strategies))
    if strategy == "heads":
        mesh = (world,)
    return ShardedCase(call, mesh, strategy, draw(st.sampled_from(["contiguous", "zigzag"])))


def draw_cases(
    world: int, number: int, *, kind: str = "groups", where: Callable[[ShardedCase], bool] = lambda _: True
) -> list[ShardedCase]:
    """That many cases for which ``where`` is true; ten times as many and new ones in the sweep."""
    found: list[ShardedCase] = []

    @examples(number)
    @given(cases(world, kind).filter(where))
    def collect(case: ShardedCase) -> None:
        found.append(case)

    collect()
    return found


def whole_by_oracle(case: ShardedCase) -> list[Tensor]:
    call = case.call
    q, k, v, grad_out, grad_lse = call.tensors(torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scale = 1.0 / math.sqrt(call.head_dim) if call.scale is None else call.scale
    out, lse = dense_attention(*leaves, *call.counts(), scale)
    finite = lse > float("-inf")
    of_lse = grad_lse if call.seed % 3 else torch.zeros_like(grad_lse)
    ((out * grad_out).sum() + (torch.where(finite, lse, 0.0) * of_lse).sum()).backward()
    return [
        out.detach(),
        lse.detach(),
        *(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves),
    ]


def whole_by_ranks(case: ShardedCase) -> list[Tensor]:
    """What the ranks compute, put together again on every one of them."""
    call = case.call
    mesh = mesh_of(case.mesh)
    q, k, v, grad_out, grad_lse = call.tensors(torch.float64)
    lay = {"layout": case.layout}
    leaves = [parallel.shard(x, mesh, **lay).requires_grad_() for x in (q, k, v)]
    options: dict[str, Any] = {**call.options, "is_causal": call.is_causal, "scale": call.scale}
    if "key_padding_mask" in options:
        options["key_padding_mask"] = parallel.shard(options["key_padding_mask"], mesh, **lay)
    out, lse = parallel.attend_with_lse(
        *leaves,
        call.pattern,
        mesh=mesh,
        strategy=case.strategy,
        sequence_length=call.num_queries,
        key_sequence_length=call.num_keys,
        **lay,
        **options,
    )
    finite = lse > float("-inf")
    g_out, g_lse = parallel.shard(grad_out, mesh, **lay), parallel.shard(grad_lse, mesh, **lay)
    if call.seed % 3:
        ((out * g_out).sum() + (torch.where(finite, lse, 0.0) * g_lse).sum()).backward()
    else:
        (out * g_out).sum().backward()
    results = [out.detach(), lse.detach(), *(leaf.grad for leaf in leaves)]
    lengths = [call.num_queries] * 3 + [call.num_keys] * 2
    return [
        parallel.unshard(x, mesh, sequence_length=length, **lay) for x, length in zip(results, lengths, strict=True)
    ]


def largest_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference; infinities are equal."""
    return float(torch.where(found == expected, 0.0, (found - expected).abs()).max()) if found.numel() else 0.0


def largest_errors(cases: list[ShardedCase]) -> list[dict[str, float]]:
    found = []
    for case in cases:
        computed = whole_by_ranks(case)
        if torch.distributed.get_rank() == 0:
            expected = whole_by_oracle(case)
            errors = {}
            for name, mine, theirs in zip(NAMES, computed, expected, strict=True):
                errors[name] = largest_error(mine, theirs)
            found.append(errors)
    return found


def counted_traffic(
    cases: list[ShardedCase], fewest: int = gather_rounds.FEWEST_MEMBERS
) -> list[tuple[int, int, int, int, int, int]]:
    """Bytes that this rank sends and receives forward, and backward, in every case; and messages that it sends.

    Rows are passed on among as few ranks as ``fewest``.
    """
    gather_rounds.FEWEST_MEMBERS = fewest
    found = []
    for case in cases:
        call, mesh = case.call, mesh_of(case.mesh)
        q, k, v, grad_out, _ = (parallel.shard(x, mesh, layout=case.layout) for x in call.tensors(torch.float64))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        options: dict[str, Any] = {**call.options}
        if "key_padding_mask" in options:
            options["key_padding_mask"] = parallel.shard(options["key_padding_mask"], mesh, layout=case.layout)
        with parallel.count_traffic() as forward:
            out = parallel.attend(
                *leaves,
                call.pattern,
                mesh=mesh,
                strategy=case.strategy,
                layout=case.layout,
                sequence_length=call.num_queries,
                is_causal=call.is_causal,
                **options,
            )
        with parallel.count_traffic() as backward:
            out.backward(grad_out)
        found.append(
            (forward.sent, forward.received, backward.sent, backward.received, forward.messages, backward.messages)
        )
    return found


def planned(case: ShardedCase) -> parallel.ParallelEstimate:
    """What :func:`plan_parallel` says of a case."""
    call = case.call
    heads = call.kv_heads * call.ratio
    plan = parallel.plan_parallel(
        call.pattern,
        (call.batch, call.num_queries, heads, call.head_dim),
        case.mesh,
        num_kv_heads=call.kv_heads,
        dtype=torch.float64,
        is_causal=call.is_causal,
        query_offset=call.options.get("query_offset", 0),
        cu_seqlens=call.options.get("cu_seqlens"),
        is_padded="key_padding_mask" in call.options,
    )
    (estimate,) = (e for e in plan.estimates if (e.strategy, e.layout) == (case.strategy, case.layout))
    return estimate
