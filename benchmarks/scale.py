"""Planning and simulating one sequence over thousands of ranks: what that takes, and what it says.

    python -m benchmarks.scale [--only plan call ring links] [--output FILE]

Only the sections that are measured are written anew. Planning is measured in processes of its own. ``links`` puts
ranks of this machine into network namespaces (root, iproute2) with a set bandwidth.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch import Pattern, local_window, parallel
from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.parallel import ring
from dilated_attention_pytorch.planning import ShardedCall, Shards

from .links import links
from .parallel import HEAD_DIM, HEADS, paper_up_to

ROWS = 1 << 30
WORLDS = (64, 256, 1024, 4096, 8192)
RINGS = (64, 1024, 8192)
NOISE = 0.05


def plan_once(world: int) -> dict[str, Any]:
    """One plan of 2^30 tokens over ``world`` ranks, in a process that has planned nothing before."""
    torch.set_num_threads(1)
    pattern = paper_up_to(ROWS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, cpu = time.perf_counter(), time.process_time()
    plan = parallel.plan_parallel(pattern, (1, ROWS, HEADS, HEAD_DIM), world, is_causal=True)
    taken, of_cpu = time.perf_counter() - begin, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "ranks": world, "seconds": taken, "processor_seconds": of_cpu, "peak_bytes": peak << 10,
        "peak_bytes_before": before << 10,
        "estimates": [
            {"strategy": e.strategy, "layout": e.layout, "forward_bytes": max(e.forward_bytes),
             "backward_bytes": max(e.backward_bytes), "link_bytes": e.link_bytes, "messages": e.messages,
             "flops": max(e.flops), "imbalance": e.imbalance, "dense_ring_bytes": e.dense_ring_bytes}
            for e in plan.estimates
        ],
    }  # fmt: skip


def plan() -> dict[str, Any]:
    """Seconds and peak memory of planning, and the plan: bytes, messages, imbalance."""
    lines = [_in_a_process("plan_once", world) for world in WORLDS]
    for line in lines:
        best = line["estimates"][0]
        print(
            f"p={line['ranks']:>5} planned in {line['seconds']:.2f} s ({line['processor_seconds']:.2f} s of a core), "
            f"peak {line['peak_bytes'] / 1e6:.0f} MB ({line['peak_bytes_before'] / 1e6:.0f} before): "
            f"{best['strategy']}, {best['layout']}, {best['forward_bytes']:,} B forward, {best['backward_bytes']:,} B "
            f"backward, {best['messages']:,} messages, imbalance {best['imbalance']:.4f}"
        )
    return {"tokens": ROWS, "heads": HEADS, "head_dim": HEAD_DIM, "causal": True, "lines": lines}


def _in_a_process(function: str, world: int) -> dict[str, Any]:
    code = f"import json; from benchmarks import scale; print(json.dumps(scale.{function}({world})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def call() -> dict[str, Any]:
    """Seconds that one rank plans for its own call, median of 15 ranks: a new one, the same again, new boundaries."""
    lines = []
    patterns: dict[str, Pattern] = {
        "window of 4,096": local_window(4096), "groups up to 65,536 tokens": paper_up_to(1 << 16)
    }  # fmt: skip
    for name, pattern in patterns.items():
        for world in (64, 1024, 8192):
            rows = world * 8192
            boundaries = (*range(0, rows, rows // 16 - 5), rows)
            shards, samples = Shards(rows, world, "contiguous"), []
            for rank in range(world // 2, world // 2 + 15):
                seconds = []
                for documents in (None, None, boundaries):
                    begin = time.perf_counter()
                    made = ring.steps(ShardedCall(pattern, HEADS, True, 0, documents), shards, rank)
                    seconds.append(time.perf_counter() - begin)
                samples.append((len(made), *seconds))
            steps, first, again, new = zip(*samples, strict=True)
            line: dict[str, Any] = {
                "pattern": name, "ranks": world, "most_steps": max(steps), "first": statistics.median(first),
                "again": statistics.median(again), "new_boundaries": statistics.median(new),
            }  # fmt: skip
            lines.append(line)
            print(
                f"{name}, p={world:>5}: {line['most_steps']} steps at most; first {1e3 * line['first']:.2f} ms, again "
                f"{1e3 * line['again']:.3f} ms, new boundaries {1e3 * line['new_boundaries']:.2f} ms"
            )
    return {"rows_of_a_rank": 8192, "lines": lines}


def ring_once(world: int) -> dict[str, Any]:
    """Both passes of one layer over 2^30 tokens, simulated at the plan's assumed rates, without noise and with it."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"ranks": world}
    begin = time.perf_counter()
    for name in ("forward", "backward"):
        run, noisy = (
            parallel.simulate_ring(
                paper_up_to(ROWS), (1, ROWS, HEADS, HEAD_DIM), world, is_causal=True,
                is_backward=name == "backward", noise=noise,
            )
            for noise in (0.0, NOISE)
        )  # fmt: skip
        slowest = run.seconds.index(run.step_seconds)
        found[name] = {
            "seconds": run.step_seconds, "compute": run.compute_seconds[slowest],
            "imbalance": run.imbalance, "bytes": max(run.bytes),
            "messages": max(run.messages), "noisy_seconds": noisy.step_seconds,
            "busiest_distances": sorted(run.distances, key=lambda one: -one[2])[:3],
        }  # fmt: skip
    found["simulated_in"] = time.perf_counter() - begin
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return found


def simulated() -> dict[str, Any]:
    """The ring of thousands of ranks, event by event."""
    lines = [_in_a_process("ring_once", world) for world in RINGS]
    for line in lines:
        for name, run in line.items():
            if isinstance(run, dict):
                print(
                    f"p={line['ranks']:>5} {name:8} {1e3 * run['seconds']:.2f} ms (with noise "
                    f"{1e3 * run['noisy_seconds']:.2f}), computation {1e3 * run['compute']:.2f} ms, "
                    f"{run['messages']:,} messages, {run['bytes']:,} B"
                )
        print(f"p={line['ranks']:>5} simulated in {line['simulated_in']:.1f} s, {line['peak_bytes'] / 1e6:.0f} MB")
    machine = parallel.Machine()
    rates = {name: getattr(machine, name) for name in ("flops_per_second", "bytes_per_second", "message_seconds")}
    return {"tokens": ROWS, "heads": HEADS, "head_dim": HEAD_DIM, "noise": NOISE, "assumed": rates, "lines": lines}


def main() -> None:
    """Measure, print, and write what was measured beside what the file already holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "plan": plan, "call": call, "ring": simulated, "links": links
    }  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections), help="which sections to measure")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/scale.json"))
    arguments = parser.parse_args()
    for name in arguments.only:
        print(f"--- {name}: {(sections[name].__doc__ or '').strip().splitlines()[0]}", flush=True)
        section = {"machine": origin(module_command()), **sections[name]()}
        results = json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.exists() else {}
        write_json(arguments.output, {**results, name: section})
        print(f"written: {arguments.output}, {name}", flush=True)


if __name__ == "__main__":
    main()
