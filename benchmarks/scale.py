"""Planning one sequence over thousands of ranks: cost and results, and the plan compared with measurements.

    python -m benchmarks.scale [--only plan call rounds links] [--output FILE]

Only the sections that are measured are rewritten. Planning is measured in separate processes. ``links``, which runs
only where it is named, puts ranks of this machine into network namespaces (needs root and iproute2) with limited
bandwidth.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch import Pattern, local_window, parallel
from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.parallel import ring
from dilated_attention_pytorch.parallel.communicator import communicator_of
from dilated_attention_pytorch.patterns.flops import BACKWARD_PRODUCTS, FORWARD_PRODUCTS
from dilated_attention_pytorch.plan import rounds as planned_rounds
from dilated_attention_pytorch.plan.layout import Shards
from dilated_attention_pytorch.plan.shards import ShardedCall

from .links import links
from .measured_code import code
from .options import parse, parser_of
from .parallel import HEAD_DIM, HEADS, paper_up_to
from .ranks import on_ranks

ROWS = 1 << 30
WORLDS = (64, 256, 1024, 4096, 8192)
ROUNDS = (4, 8, 16)
GATHERED_BYTES = (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
GATHERS = 15


def plan_once(world: int) -> dict[str, Any]:
    """Plan 2^30 tokens over ``world`` ranks, in a process that has planned nothing before."""
    torch.set_num_threads(1)
    pattern, machine = paper_up_to(ROWS), parallel.Machine()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, cpu = time.perf_counter(), time.process_time()
    plan = parallel.plan_parallel(pattern, (1, ROWS, HEADS, HEAD_DIM), world, is_causal=True, machine=machine)
    taken, of_cpu = time.perf_counter() - begin, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "ranks": world,
        "seconds": taken,
        "processor_seconds": of_cpu,
        "peak_bytes": peak << 10,
        "peak_bytes_before": before << 10,
        "estimates": [
            {
                "strategy": e.strategy,
                "layout": e.layout,
                "forward_bytes": max(e.forward_bytes),
                "backward_bytes": max(e.backward_bytes),
                "link_bytes": e.link_bytes,
                "messages": e.messages,
                "backward_messages": e.backward_messages,
                "seconds": e.seconds,
                "compute_seconds": (1 + BACKWARD_PRODUCTS / FORWARD_PRODUCTS) * max(e.flops) / machine.flops_per_second,
                "flops": max(e.flops),
                "imbalance": e.imbalance,
                "dense_ring_bytes": e.dense_ring_bytes,
            }
            for e in plan.estimates
        ],
    }


def plan(*, is_tiny: bool) -> dict[str, Any]:
    """Seconds and peak memory of planning, and the planned bytes, messages, imbalance and seconds."""
    lines = []
    for world in WORLDS[:1] if is_tiny else WORLDS:
        program = f"import json; from benchmarks import scale; print(json.dumps(scale.plan_once({world})))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        lines.append(line := json.loads(done.stdout.splitlines()[-1]))
        best = line["estimates"][0]
        print(
            f"p={line['ranks']:>5} planned in {line['seconds']:.2f} s ({line['processor_seconds']:.2f} s of a core), "
            f"peak {line['peak_bytes'] / 1e6:.0f} MB ({line['peak_bytes_before'] / 1e6:.0f} before): "
            f"{best['strategy']}, {best['layout']}, {best['forward_bytes']:,} B forward, {best['backward_bytes']:,} B "
            f"backward, {best['messages']:,} messages, imbalance {best['imbalance']:.4f}, "
            f"{1e3 * best['seconds']:.1f} ms planned",
            flush=True,
        )
    rates = dataclasses.asdict(parallel.Machine())
    return {"tokens": ROWS, "heads": HEADS, "head_dim": HEAD_DIM, "causal": True, "assumed": rates, "lines": lines}


def call(*, is_tiny: bool) -> dict[str, Any]:
    """Seconds of planning one rank's own call, median of 15 ranks: a new call, the same again, new boundaries."""
    lines = []
    patterns: dict[str, Pattern] = {
        "window of 4,096": local_window(4096),
        "groups up to 65,536 tokens": paper_up_to(1 << 16),
    }
    for name, pattern in patterns.items():
        for world in (64,) if is_tiny else (64, 1024, 8192):
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
                "pattern": name,
                "ranks": world,
                "most_steps": max(steps),
                "first": statistics.median(first),
                "again": statistics.median(again),
                "new_boundaries": statistics.median(new),
            }
            lines.append(line)
            print(
                f"{name}, p={world:>5}: {line['most_steps']} steps at most; first {1e3 * line['first']:.2f} ms, again "
                f"{1e3 * line['again']:.3f} ms, new boundaries {1e3 * line['new_boundaries']:.2f} ms"
            )
    return {"rows_of_a_rank": 8192, "lines": lines}


def rounds(*, is_tiny: bool) -> dict[str, Any]:
    """All-gathers over gloo on this machine: passed on, compared with direct messages."""
    lines = []
    for world in ROUNDS[:1] if is_tiny else ROUNDS:
        of_ranks = on_ranks(world, _gather_both_ways)
        for index, line in enumerate(of_ranks[0]):
            mean = {
                f"{way}_processor_seconds": statistics.fmean(of_rank[index][way][1] for of_rank in of_ranks)
                for way in ("passed_on", "at_once")
            }
            slowest = {
                f"{way}_seconds": max(of_rank[index][way][0] for of_rank in of_ranks)
                for way in ("passed_on", "at_once")
            }
            lines.append({"ranks": world, "bytes": line["bytes"], "messages": line["messages"], **slowest, **mean})
            print(
                f"p={world} {line['bytes']:>9,} B of a rank: {line['messages']} messages, passed on "
                f"{1e3 * slowest['passed_on_seconds']:.2f} ms ({1e3 * mean['passed_on_processor_seconds']:.2f} ms of a "
                f"core), at once {1e3 * slowest['at_once_seconds']:.2f} ms "
                f"({1e3 * mean['at_once_processor_seconds']:.2f} ms of a core)",
                flush=True,
            )
    return {"lines": lines, "repeats": GATHERS, "load": os.getloadavg()[0]}


def _gather_both_ways() -> list[dict[str, Any]]:
    """On each rank: median wall-clock and processor seconds of all-gathers of both kinds, in turn, by size."""
    communicator = communicator_of(init_device_mesh("cpu", (dist.get_world_size(),)))
    lines: list[dict[str, Any]] = []
    for num_bytes in GATHERED_BYTES:
        tensor = torch.full((num_bytes,), communicator.rank, dtype=torch.uint8)
        samples: dict[str, list[tuple[float, float]]] = {"passed_on": [], "at_once": []}
        messages = []
        for _ in range(GATHERS):
            for way, limit in (("passed_on", num_bytes), ("at_once", -1)):
                dist.barrier()
                limits = {"PASSED_ON_BYTES": limit, "FEWEST_MEMBERS": 4}
                with mock.patch.dict(vars(planned_rounds), limits), parallel.count_traffic() as traffic:
                    begin, cpu = time.perf_counter(), time.process_time()
                    gathered = communicator.all_gather(tensor, tag=4)
                    samples[way].append((time.perf_counter() - begin, time.process_time() - cpu))
                if gathered[:, 0].tolist() != list(range(communicator.size)):
                    raise SystemExit("not timed: what was gathered is not what the ranks have")
                messages.append(traffic.messages)
        medians = {way: tuple(map(statistics.median, zip(*taken, strict=True))) for way, taken in samples.items()}
        lines.append({"bytes": num_bytes, "messages": messages[:2], **medians})
    return lines


def main() -> None:
    """Measure, print, and write the results, keeping other sections of the file."""
    parser = parser_of(__doc__)
    sections: dict[str, Callable[..., dict[str, Any]]] = {
        "plan": plan,
        "call": call,
        "rounds": rounds,
        "links": links,
    }
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sections,
        default=[name for name in sections if name != "links"],
        help="which sections to measure",
    )
    arguments = parse(parser, "scale.json")
    for name in arguments.only:
        print(f"--- {name}: {(sections[name].__doc__ or '').strip().splitlines()[0]}", flush=True)
        section = {
            "machine": origin(module_command()),
            "code": code("parallel"),
            **(links() if name == "links" else sections[name](is_tiny=arguments.tiny)),
        }
        results = json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.exists() else {}
        write_json(arguments.output, {**results, name: section})
        print(f"written: {arguments.output}, {name}", flush=True)


if __name__ == "__main__":
    main()
