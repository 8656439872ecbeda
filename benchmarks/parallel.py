"""One sequence over several ranks: bytes that they send, their memory, their balance, and plans of a billion tokens.

    python -m benchmarks.parallel [--only traffic memory balance billion]

Memory is measured on processes of this machine that communicate over gloo; the rest is planned.
"""

from __future__ import annotations

import math
import os
import pickle
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch import DilatedPattern, attend, parallel
from dilated_attention_pytorch.estimate.parallel import ParallelPlan
from dilated_attention_pytorch.memory import begin_peak, resident
from dilated_attention_pytorch.patterns.flops import BACKWARD_PRODUCTS, FORWARD_PRODUCTS
from dilated_attention_pytorch.plan.layout import Layout

from .study import Study, run

PAPER = ((2048, 1), (4096, 2), (8192, 4), (16384, 6), (32768, 12))
HEADS, HEAD_DIM = 12, 64
ROWS = 8192  # per rank
MEMORY_HEADS = 8
BILLION = 1 << 30
Way = Literal["alone", "ring"]
Section = Literal["traffic", "memory", "balance", "billion"]


@dataclass(frozen=True, kw_only=True)
class Parallel(Study):
    """Settings."""

    only: tuple[Section, ...] = ("traffic", "memory", "balance", "billion")
    """What to measure."""
    rows: int = 65536
    """Rows of the sequence whose memory is measured."""
    ranks: tuple[int, ...] = (1, 2, 4)
    """Numbers of ranks whose memory is measured."""
    planned_ranks: tuple[int, ...] = tuple(2**power for power in range(1, 11))
    """Numbers of ranks whose bytes are planned."""
    balanced_ranks: tuple[int, ...] = (4, 8, 64)
    """Numbers of ranks whose balance is planned."""
    billion_ranks: tuple[int, ...] = (64, 256, 1024, 4096, 8192)
    """Numbers of ranks that share 2^30 tokens in a plan."""


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(*args)`` in ``world`` new processes; results by rank. An error in any of them is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_run, (world, folder, function, args), nprocs=world, start_method="spawn")
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(world)]


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}"


def _run(rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    _result(folder, rank).write_bytes(pickle.dumps(function(*args)))
    dist.barrier()
    dist.destroy_process_group()


def paper_up_to(rows: int) -> DilatedPattern:
    """The paper's groups, continued geometrically: both numbers double until a segment is the whole sequence."""
    groups = list(PAPER)
    while groups[-1][0] < rows:
        groups.append((2 * groups[-1][0], 2 * groups[-1][1]))
    return DilatedPattern([w for w, _ in groups], [r for _, r in groups])


def doubling_up_to(rows: int) -> DilatedPattern:
    """Segments from 2,048 rows, doubling up to the whole sequence; the rates double as well."""
    count = (rows // 2048).bit_length()
    return DilatedPattern([2048 << level for level in range(count)], [1 << level for level in range(count)])


def plan(world: int, *, is_causal: bool) -> ParallelPlan:
    """The plan of a call in bfloat16 with 8,192 rows per rank."""
    rows = world * ROWS
    return parallel.plan_parallel(paper_up_to(rows), (1, rows, HEADS, HEAD_DIM), world, is_causal=is_causal)


def traffic(given: Parallel) -> dict[str, Any]:
    """Forward bytes of the rank that sends most, contiguous layout."""
    planned = []
    for is_causal in (False, True):
        for world in given.planned_ranks:
            of = {e.strategy: e for e in plan(world, is_causal=is_causal).estimates if e.layout == "contiguous"}
            planned.append(
                {
                    "ranks": world,
                    "causal": is_causal,
                    "ring": max(of["ring"].forward_bytes),
                    "ring_mean": statistics.mean(of["ring"].forward_bytes),
                    "gather": max(of["gather"].forward_bytes),
                    "dense_ring": of["ring"].dense_ring_bytes,
                }
            )
            print(planned[-1], flush=True)
    return {"planned": planned}


def peak(rows: int, way: Way, layout: Layout, is_causal: bool) -> int:
    """On every rank, in a fresh process: peak bytes of a call above the level after start-up and a small first call.

    Includes query, key, value, output and all gradients.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def call(rows: int) -> None:
        q, k, v, grad = (torch.randn(1, rows // mesh.size(), MEMORY_HEADS, HEAD_DIM) for _ in range(4))
        q, k, v = inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        pattern = doubling_up_to(rows)
        if way == "alone":
            out = attend(q, k, v, pattern, is_causal=is_causal)
        else:
            out = parallel.attend(q, k, v, pattern, mesh=mesh, strategy=way, layout=layout, is_causal=is_causal)
        torch.autograd.grad(out, inputs, grad)

    # The first call loads kernels and connects the ranks.
    call(2048 * mesh.size())
    if not begin_peak():
        raise SystemExit("memory is read from Linux's /proc, which is not here; leave it out with --only")
    before = resident("VmRSS")
    call(rows)
    return resident("VmHWM") - before


def memory(given: Parallel) -> dict[str, Any]:
    """Peak memory per rank for one sequence over more ranks, and for a sequence that grows with them."""
    # glibc keeps freed pages of up to 64 MiB. With a fixed threshold they are returned, and the peak is the memory in
    # use.
    os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
    points, slopes = [], {}
    calls: tuple[tuple[bool, Layout], ...] = ((False, "contiguous"), (True, "zigzag"))
    for causal, layout in calls[: 1 if given.tiny else None]:
        for rows, per_rank in ((given.rows, False), (given.rows // 4, True)):
            series = f"{rows} rows{' of every rank' if per_rank else ''}, {'' if causal else 'not '}causal, {layout}"
            ways: list[tuple[int, Way]] = [(1, "alone"), *((ranks, "ring") for ranks in given.ranks)]
            for ranks, way in ways:
                length = rows * ranks if per_rank else rows
                most = max(on_ranks(ranks, peak, length, way, layout, causal))
                points.append({"series": series, "ranks": ranks, "rows": length, "way": way, "peak_bytes": most})
                print(points[-1], flush=True)
            logs = [(math.log(one["ranks"]), math.log(one["peak_bytes"])) for one in points[-len(given.ranks) :]]
            slopes[series] = statistics.linear_regression(*zip(*logs, strict=True)).slope
    return {"heads": MEMORY_HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "slopes": slopes, "points": points}


def balance(given: Parallel) -> dict[str, Any]:
    """FLOPs of the busiest rank over the mean, planned."""
    planned: list[dict[str, Any]] = []
    for world in given.balanced_ranks:
        ring = {e.layout: e for e in plan(world, is_causal=True).estimates if e.strategy == "ring"}
        planned.append({"ranks": world, **{layout: {"imbalance": e.imbalance} for layout, e in ring.items()}})
        print(planned[-1], flush=True)
    return {"planned": planned}


def billion(given: Parallel) -> dict[str, Any]:
    """Plans of a causal layer on 2^30 tokens with contiguous rows, at the default rates of a machine."""
    machine, lines = parallel.Machine(), []
    backward = 1 + BACKWARD_PRODUCTS / FORWARD_PRODUCTS
    for ranks in given.billion_ranks:
        shape = (1, BILLION, HEADS, HEAD_DIM)
        found = parallel.plan_parallel(paper_up_to(BILLION), shape, ranks, is_causal=True, machine=machine).estimates
        estimates = [
            {
                "strategy": e.strategy,
                "forward_bytes": max(e.forward_bytes),
                "backward_bytes": max(e.backward_bytes),
                "link_bytes": e.link_bytes,
                "messages": e.messages,
                "backward_messages": e.backward_messages,
                "seconds": e.seconds,
                "compute_seconds": backward * max(e.flops) / machine.flops_per_second,
                "imbalance": e.imbalance,
            }
            for e in found
            if e.layout == "contiguous"
        ]
        lines.append({"ranks": ranks, "estimates": estimates})
        print(lines[-1], flush=True)
    return {"tokens": BILLION, "assumed": asdict(machine), "lines": lines}


def measure(given: Parallel) -> dict[str, Any]:
    """The chosen sections."""
    sections = {"traffic": traffic, "memory": memory, "balance": balance, "billion": billion}
    return {name: sections[name](given) for name in given.only}


if __name__ == "__main__":
    tiny = {
        "rows": 8192,
        "ranks": (1, 2),
        "planned_ranks": (2, 4),
        "balanced_ranks": (2,),
        "billion_ranks": (64,),
    }
    run(Parallel, measure, text=__doc__, name="parallel", group="parallel", tiny=tiny)
