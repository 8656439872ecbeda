"""One sequence over several ranks: bytes sent, memory, overlap and balance.

    python -m benchmarks.parallel [--only traffic memory overlap balance] [--output FILE]

Only the sections that are measured are rewritten. The ranks are processes of this machine that communicate over gloo.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch import DilatedPattern, attend, parallel
from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.parallel.plan import Strategy
from dilated_attention_pytorch.planning.layout import Layout

from .measured_code import code
from .options import parse, parser_of
from .parallel_memory import memory
from .parallel_overlap import overlap
from .parallel_picture import draw
from .ranks import on_ranks

PAPER = ((2048, 1), (4096, 2), (8192, 4), (16384, 6), (32768, 12))
HEADS, HEAD_DIM = 12, 64
ROWS = 8192  # per rank
Groups = tuple[tuple[int, int], ...]


def pattern_of(groups: Groups) -> DilatedPattern:
    return DilatedPattern([w for w, _ in groups], [r for _, r in groups])


def paper_up_to(rows: int) -> DilatedPattern:
    """The paper's groups, continued geometrically: both numbers double until a segment is the whole sequence."""
    groups = list(PAPER)
    while groups[-1][0] < rows:
        groups.append((2 * groups[-1][0], 2 * groups[-1][1]))
    return pattern_of(tuple(groups))


def count_groups(rows: int, strategy: Strategy, paper: Groups) -> list[dict[str, Any]]:
    """On every rank: bytes sent and received for every group of the paper's pattern, and for the whole pattern."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for is_causal in (False, True):
        for groups in (*((group,) for group in paper), paper):
            q, k, v, grad = (torch.randn(1, rows // mesh.size(), HEADS, HEAD_DIM) for _ in range(4))
            q, k, v = inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
            with parallel.count_traffic() as forward:
                out = parallel.attend(q, k, v, pattern_of(groups), mesh=mesh, strategy=strategy, is_causal=is_causal)
            with parallel.count_traffic() as backward:
                torch.autograd.grad(out, inputs, grad)
            found.append(
                {
                    "groups": groups,
                    "causal": is_causal,
                    "sent": forward.sent,
                    "received": forward.received,
                    "sent_back": backward.sent,
                    "received_back": backward.received,
                }
            )
    return found


def formula(groups: Groups, rows: int, world: int, rank: int, *, of_earlier_only: bool) -> int:
    """Bytes of keys and values in float32 that a rank receives: ``(w - l) / r`` rows per head.

    Under a causal mask the ring sends only rows of the segment's earlier ranks: ``j l / r`` to the rank at distance j.
    """
    held, total = rows // world, 0
    for w, r in groups:
        others = max(0, w - held)
        total += HEADS * (rank * held % max(w, held) if of_earlier_only else others) * 2 * HEAD_DIM * 4 // r
    return total


def traffic(*, is_tiny: bool) -> dict[str, Any]:
    """Bytes that ranks send: counted in a run and compared with the formula, and planned for many ranks."""
    paper: Groups = PAPER
    worlds: tuple[int, ...] = (2, 4)
    rows, counted, powers = 32768, [], POWERS
    strategies: tuple[Strategy, ...] = ("ring", "gather")
    if is_tiny:
        rows, paper, worlds, powers = 1024, tuple((w // 32, r) for w, r in PAPER), (2,), POWERS[:4]
    for world in worlds:
        for strategy in strategies:
            of_ranks = on_ranks(world, count_groups, rows, strategy, paper)
            for cases in zip(*of_ranks, strict=True):
                groups, is_causal = cases[0]["groups"], cases[0]["causal"]
                expected = [
                    formula(groups, rows, world, rank, of_earlier_only=is_causal and strategy == "ring")
                    for rank in range(world)
                ]
                received = [case["received"] for case in cases]
                if received != expected:
                    raise SystemExit(f"{strategy}, {world} ranks, {groups}: received {received}, formula {expected}")
                dense = (rows - rows // world) * HEADS * 2 * HEAD_DIM * 4
                result = {
                    "ranks": world,
                    "strategy": strategy,
                    "groups": groups,
                    "causal": is_causal,
                    "received": received,
                    **{name: [case[name] for case in cases] for name in ("sent", "sent_back", "received_back")},
                    "formula": expected,
                    "dense_ring": dense,
                }
                counted.append(result)
                most = max(received)
                if len(groups) > 1:
                    print(
                        f"p={world} {strategy:6} causal={is_causal!s:5} the whole pattern: {most:>12,} bytes to a "
                        f"rank at most, a dense ring {dense:,}: {dense / most:.2f} x"
                    )
    print(f"{len(counted)} counts of received bytes, those of every rank equal to the formula")
    planned = [plan_of(world, is_causal=is_causal) for is_causal in (False, True) for world in powers]
    for line in planned:
        ratio = line["dense_ring"] / line["ring"] if line["ring"] else math.inf
        print(
            f"p={line['ranks']:>5} causal={line['causal']!s:5} ring {line['ring']:>12,} B ({line['ring_mean']:>13,.0f} "
            f"mean), gather {line['gather']:>12,} B, dense ring {line['dense_ring']:>15,} B, dense / ring "
            f"{ratio:>6.1f}, planned in {line['seconds']:.1f} s"
        )
    points = [(math.log2(line["ranks"]), line["ring"]) for line in planned if not line["causal"] and line["ranks"] >= 8]
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    worst = max(abs(slope * x + intercept - y) / y for x, y in points)
    print(f"ring: {slope / 1e6:.2f} MB x log2(p) {intercept / 1e6:+.2f} MB, off by {worst:.1%} at most for p >= 8")
    growth = {"bytes_per_doubling": slope, "intercept": intercept, "largest_relative_error": worst, "from_ranks": 8}
    return {"counted": counted, "planned": planned, "growth": growth, "billion": billion(16 if is_tiny else 1024)}


POWERS = tuple(2**power for power in range(1, 11))


def plan_of(world: int, *, is_causal: bool) -> dict[str, Any]:
    """Forward bytes in bfloat16 of the rank that sends most, contiguous layout, 8,192 rows per rank."""
    begin = time.perf_counter()
    rows = world * ROWS
    plan = parallel.plan_parallel(paper_up_to(rows), (1, rows, HEADS, HEAD_DIM), world, is_causal=is_causal)
    taken = time.perf_counter() - begin
    of = {e.strategy: e for e in plan.estimates if e.layout == "contiguous"}
    return {
        "ranks": world,
        "causal": is_causal,
        "ring": max(of["ring"].forward_bytes),
        "ring_mean": statistics.mean(of["ring"].forward_bytes),
        "ring_backward": max(of["ring"].backward_bytes),
        "gather": max(of["gather"].forward_bytes),
        "dense_ring": of["ring"].dense_ring_bytes,
        "seconds": taken,
    }


def billion(world: int) -> dict[str, Any]:
    """One causal layer over 2^20 tokens of every rank, 2^30 for 1,024, by the plan."""
    rows = world << 20
    plan = parallel.plan_parallel(paper_up_to(rows), (1, rows, HEADS, HEAD_DIM), world, is_causal=True)
    best = plan.estimates[0]
    held = 2 * rows // world * HEADS * HEAD_DIM
    result = {
        "tokens": rows,
        "ranks": world,
        "rows_of_a_rank": rows // world,
        "groups": len(paper_up_to(rows).groups),
        "bytes_of_q": held,
        "bytes_of_q_k_v_out_and_their_gradients": 8 * held,
        "strategy": best.strategy,
        "layout": best.layout,
        "forward_bytes": max(best.forward_bytes),
        "backward_bytes": max(best.backward_bytes),
        "dense_ring_bytes": best.dense_ring_bytes,
        "forward_flops": max(best.flops),
        "imbalance": best.imbalance,
        "dense_flops": 2 * HEAD_DIM * HEADS * rows * (rows + 1) // world,
        "messages": best.messages,
    }
    print(f"{rows:,} tokens: {result}")
    return result


def time_rank(layout: Layout, held: int) -> dict[str, float]:
    """On every rank: processor seconds of its own share, causal, forward and backward, after a check."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = held * mesh.size()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, rows, HEADS, HEAD_DIM, generator=generator) for _ in range(4)]
    q, k, v, grad = (parallel.shard(x, mesh, layout=layout) for x in whole)
    q, k, v = inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    pattern = paper_up_to(rows)
    out = parallel.attend(q, k, v, pattern, mesh=mesh, strategy="ring", layout=layout, is_causal=True)
    with torch.no_grad():
        expected = parallel.shard(attend(whole[0], whole[1], whole[2], pattern, is_causal=True), mesh, layout=layout)
    error = float((out.detach() - expected).abs().max())
    if error > 1e-4:
        raise SystemExit(f"not timed, because it is wrong by {error}")
    times = []
    for _ in range(3):
        dist.barrier()
        begin = time.process_time()
        out = parallel.attend(q, k, v, pattern, mesh=mesh, strategy="ring", layout=layout, is_causal=True)
        torch.autograd.grad(out, inputs, grad)
        times.append(time.process_time() - begin)
    return {"seconds": min(times), "error": error}


def balance(*, is_tiny: bool) -> dict[str, Any]:
    """FLOPs of the busiest rank over the mean, planned; processor seconds of every rank, measured."""
    planned = []
    for world in (4,) if is_tiny else (4, 8, 64):
        rows = world * ROWS
        plan = parallel.plan_parallel(paper_up_to(rows), (1, rows, HEADS, HEAD_DIM), world, is_causal=True)
        ring = {e.layout: e for e in plan.estimates if e.strategy == "ring"}
        line: dict[str, Any] = {
            "ranks": world,
            "strategy": plan.strategy,
            "layout": plan.layout,
            "imbalance": plan.estimates[0].imbalance,
            **{
                name: {
                    "imbalance": e.imbalance,
                    "forward_bytes": max(e.forward_bytes),
                    "backward_bytes": max(e.backward_bytes),
                }
                for name, e in ring.items()
            },
        }
        planned.append(line)
        print(
            f"p={world:>3}: picked {plan.strategy}, {plan.layout}: {line['imbalance']:.4f}; "
            + ", ".join(f"{name} {e.imbalance:.4f}" for name, e in ring.items())
        )
    measured: dict[str, Any] = {}
    layouts: tuple[Layout, ...] = ("contiguous", "zigzag")
    for layout in layouts:
        found = on_ranks(2 if is_tiny else 4, time_rank, layout, 128 if is_tiny else ROWS)
        seconds = [of_rank["seconds"] for of_rank in found]
        measured[layout] = {
            "processor_seconds": seconds,
            "imbalance": max(seconds) / statistics.mean(seconds),
            "largest_error": max(of_rank["error"] for of_rank in found),
        }
        print(
            f"p={len(seconds)}, {layout}: processor seconds {', '.join(f'{x:.2f}' for x in seconds)}, largest over "
            f"mean {measured[layout]['imbalance']:.3f}"
        )
    return {"planned": planned, "measured": measured}


def main() -> None:
    """Measure, print, and write the results, keeping other sections of the file."""
    parser = parser_of(__doc__)
    sections: dict[str, Callable[..., dict[str, Any]]] = {
        "traffic": traffic,
        "memory": memory,
        "overlap": overlap,
        "balance": balance,
    }
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections), help="which sections to measure")
    arguments = parse(parser, "parallel.json")
    for name in arguments.only:
        print(f"--- {name}: {(sections[name].__doc__ or '').strip().splitlines()[0]}", flush=True)
        here = origin(module_command())
        section = {"machine": here, "code": code("parallel"), **sections[name](is_tiny=arguments.tiny)}
        results = json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.exists() else {}
        write_json(arguments.output, {**results, name: section})
        print(f"written: {arguments.output}, {name}", flush=True)
    results = json.loads(arguments.output.read_text(encoding="utf-8"))
    if {"traffic", "memory"} <= results.keys():
        picture = arguments.output.with_suffix(".png") if arguments.tiny else Path("docs/parallel.png")
        draw(results, picture)
        print(f"drawn: {picture}")


if __name__ == "__main__":
    main()
