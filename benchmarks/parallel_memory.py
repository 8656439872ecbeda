"""Peak memory of every rank, forward and backward, compared with one process that computes the whole."""

from __future__ import annotations

import math
import os
import statistics
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch import DilatedPattern, attend, parallel
from dilated_attention_pytorch.memory import begin_peak, resident
from dilated_attention_pytorch.planning.layout import Layout

from .ranks import on_ranks

HEADS, HEAD_DIM = 8, 64
ROWS = 65536
RANKS = (1, 2, 4)
Way = Literal["alone", "ring"]


def pattern_up_to(rows: int) -> DilatedPattern:
    """Segments from 2,048 rows, doubling up to the whole sequence; the rates double as well."""
    count = (rows // 2048).bit_length()
    return DilatedPattern([2048 << level for level in range(count)], [1 << level for level in range(count)])


def peak(rows: int, way: Way, layout: Layout, *, is_causal: bool) -> int:
    """On every rank, in a fresh process: peak bytes of a call above the level after start-up and a small first call.

    Includes query, key, value, output and all gradients.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def call(rows: int) -> None:
        q, k, v, grad = (torch.randn(1, rows // mesh.size(), HEADS, HEAD_DIM) for _ in range(4))
        q, k, v = inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        if way == "alone":
            out = attend(q, k, v, pattern_up_to(rows), is_causal=is_causal)
        else:
            out = parallel.attend(
                q, k, v, pattern_up_to(rows), mesh=mesh, strategy=way, layout=layout, is_causal=is_causal
            )
        torch.autograd.grad(out, inputs, grad)

    # The first call loads kernels and connects the ranks.
    call(2048 * mesh.size())
    if not begin_peak():
        raise SystemExit("memory is read from Linux's /proc, which is not here; leave it out with --only")
    before = resident("VmRSS")
    call(rows)
    return resident("VmHWM") - before


def memory(*, is_tiny: bool) -> dict[str, Any]:
    """Peak memory per rank for one sequence over more ranks, and for a sequence that grows with them."""
    # glibc keeps freed pages of up to 64 MiB. With a fixed threshold they are returned, and the peak is the memory in
    # use.
    os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
    points: list[dict[str, Any]] = []
    known: dict[tuple[int, int, Way, bool], int] = {}

    def measure(series: str, world: int, rows: int, way: Way, layout: Layout, *, causal: bool) -> int:
        call = (world, rows, way, causal)
        if call not in known:
            known[call] = max(on_ranks(world, measured_peak, rows, way, layout, causal))
        most = known[call]
        message = 0
        if way == "ring":
            plan = parallel.plan_parallel(
                pattern_up_to(rows), (1, rows, HEADS, HEAD_DIM), world, dtype=torch.float32, is_causal=causal
            )
            (estimate,) = (e for e in plan.estimates if (e.strategy, e.layout) == (way, layout))
            message = estimate.link_bytes
        points.append(
            {
                "series": series,
                "ranks": world,
                "rows": rows,
                "way": way,
                "layout": layout,
                "causal": causal,
                "peak_bytes": most,
                "bytes_of_the_operands": 8 * 4 * rows // world * HEADS * HEAD_DIM,
                "largest_message": message,
            }
        )
        return most

    calls: tuple[tuple[bool, Layout], ...] = ((False, "contiguous"), (True, "zigzag"))
    rows, ranks = (8192, (1, 2)) if is_tiny else (ROWS, RANKS)
    for causal, layout in calls[:1] if is_tiny else calls:
        words = f"{'causal' if causal else 'not causal'}, {layout}"
        series = f"{rows} rows, {words}"
        whole = measure(series, 1, rows, "alone", layout, causal=causal)
        print(f"{series}: one process alone {whole / 1e6:,.0f} MB", flush=True)
        for world in ranks:
            most = measure(series, world, rows, "ring", layout, causal=causal)
            print(
                f"  p={world}: {most / 1e6:7,.0f} MB, {most * world / whole:.3f} x 1/p of the one process, largest "
                f"message {points[-1]['largest_message'] / 1e6:.1f} MB",
                flush=True,
            )
        series = f"{rows // 4} rows of every rank, {words}"
        alone = measure(series, 1, rows // 4, "alone", layout, causal=causal)
        for world in ranks:
            most = measure(series, world, rows // 4 * world, "ring", layout, causal=causal)
            print(
                f"{series}: p={world}: {most / 1e6:,.0f} MB, {most / alone:.3f} x one process with its rows", flush=True
            )
    slopes = {series: _slope([point for point in points if point["series"] == series]) for series in _series(points)}
    for series, slope in slopes.items():
        print(f"{series}: peak of a rank ~ p^{slope:.3f}")
    return {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32", "limit": 1.25, "slopes": slopes, "points": points}


def _series(points: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(point["series"] for point in points))


def _slope(points: list[dict[str, Any]]) -> float:
    """Exponent x of ``peak ~ ranks ** x`` of the ring, by least squares."""
    ring = [(math.log(point["ranks"]), math.log(point["peak_bytes"])) for point in points if point["way"] == "ring"]
    return statistics.linear_regression(*zip(*ring, strict=True)).slope


def measured_peak(rows: int, way: Way, layout: Layout, is_causal: bool) -> int:
    """:func:`peak` with positional arguments, as :func:`on_ranks` calls it."""
    return peak(rows, way, layout, is_causal=is_causal)


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.parallel --help")
