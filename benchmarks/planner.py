"""Memory of training steps, planned first and measured after, for configurations drawn at random.

    python -m benchmarks.planner [--quick] [--cases N] [--output FILE]

A case is a LongNet, an optimizer, a precision, blocks that are recomputed or not, and one process or two to four that
split rows of text, weights or sequences. What a process has at its peak is planned (`training.footprint`); then a
program of its own takes three steps and reads from Linux what its memory was at its highest, beyond what the libraries
had taken after a step of a small model. glibc is told to give large blocks back when they are freed. The same command
again goes on after the cases that are in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.benchmarks.clock import begin_peak, resident
from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.footprint import footprint, least_footprint

LEAST_BYTES, MOST_BYTES = 80e6, 700e6
"""Of a process: below, what libraries take would be a part of it; above, several would not fit into this machine."""
WITHIN = 0.05
STEPS = 3
SPREADS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}), (1, {}), (2, {}), (2, {"data_parallel": "fsdp"}), (3, {"data_parallel": "fsdp"}),
    (2, {"context_parallel": 2, "strategy": "ring"}), (4, {"context_parallel": 2, "strategy": "ring"}),
    (2, {"context_parallel": 2, "strategy": "heads"}),
)  # fmt: skip
"""Processes, and how they share a step."""


def draw(number: int) -> tuple[TrainSettings, int]:
    """Settings of a case, and its number of processes: the same for the same number."""
    attempt = 0
    while True:
        choose = random.Random(f"planner {number} {attempt}")
        processes, spread = choose.choice(SPREADS)
        heads = choose.choice([2, 4])
        model = LongNetConfig(
            vocab_size=choose.choice([256, 4099, 16381]), embed_dim=heads * choose.choice([32, 64]),
            num_layers=choose.randint(2, 8), num_heads=heads, num_kv_heads=choose.choice([heads, heads // 2]),
            activation=choose.choice(["swiglu", "gelu"]), segment_lengths=(512, 4096), dilation_rates=(1, 4),
            gradient_checkpointing=choose.random() < 0.5,
        )  # fmt: skip
        settings = dataclasses.replace(
            PRESETS["tiny"](), model=model, tokenizer=Path("tokens"), context_length=choose.randint(1000, 12000),
            batch_size=choose.choice([1, 2]), precision=choose.choice(["float32", "bfloat16"]), **spread,
            optimizer=choose.choice(["adamw", "muon", "adamw-bf16"]),
        )  # fmt: skip
        if LEAST_BYTES < least_footprint(settings, processes).total < MOST_BYTES:
            return settings, processes
        attempt += 1


def take_steps(settings: TrainSettings, processes: int) -> None:
    """In a process of the case: take steps, and print what they took."""
    import torch
    import torch.distributed as dist

    from dilated_attention_pytorch.models import LongNetForCausalLM
    from dilated_attention_pytorch.training.distribution import Distribution
    from dilated_attention_pytorch.training.optimizer import build_optimizer

    torch.set_num_threads(1)
    if processes > 1:
        dist.init_process_group("gloo")
    small = dataclasses.replace(settings, model=dataclasses.replace(settings.model, num_layers=1), context_length=600)

    def steps(given: TrainSettings, count: int) -> list[float]:
        distribution, seconds = Distribution(given, "cpu"), []
        model = LongNetForCausalLM.from_longnet_config(given.model).train()
        distribution.apply(model)
        optimizer = build_optimizer(model, given)
        wrapped = distribution.wrap(model)
        whole = torch.zeros(given.batch_size, given.context_length, dtype=torch.int64)
        rows = distribution.rows({"input_ids": whole, "labels": whole})
        for _ in range(count):
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=given.precision == "bfloat16"):
                loss = wrapped(**rows, num_items_in_batch=whole.numel(), skip_logits=True).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), given.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            del loss
            seconds.append(time.perf_counter() - start)
        return seconds

    steps(small, 2)
    begin_peak()
    before = resident("VmRSS")
    seconds = steps(settings, STEPS)
    found: list[Any] = [{"peak_bytes": resident("VmHWM") - before, "seconds": statistics.median(seconds[1:])}]
    if processes > 1:
        mine, found = found[0], [None] * processes
        dist.all_gather_object(found, mine)
    if processes == 1 or dist.get_rank() == 0:
        print("measured " + json.dumps(found), flush=True)
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()


def run(number: int) -> dict[str, Any]:
    """Plan a case, then measure it.

    Raises:
        SystemExit: its program fails.
    """
    settings, processes = draw(number)
    planned, told = footprint(settings, processes), settings.to_dict() | {"data": []}
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    )
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0",
    }  # fmt: skip
    program = subprocess.run(
        [sys.executable, *launch, "-m", "benchmarks.planner", "--told", json.dumps([told, processes])],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in program.stdout.splitlines() if line.startswith("measured ")]
    if program.returncode or not lines:
        raise SystemExit(f"case {number} failed: {program.stderr[-2000:]}")
    measured = json.loads(lines[-1].removeprefix("measured "))
    peak = max(one["peak_bytes"] for one in measured)
    return {
        "case": number, "processes": processes, "settings": told | {"tokenizer": None},
        "planned_bytes": planned.total, "planned": dataclasses.asdict(planned), "measured_bytes": peak,
        "ratio": planned.total / peak, "seconds": max(one["seconds"] for one in measured),
    }  # fmt: skip


def main() -> None:
    """Print a line for each case and write all, with the machine and the command they came from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 cases: checks")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--told", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "planner.json")
    arguments = parser.parse_args()
    if arguments.told is not None:
        told, processes = json.loads(arguments.told)
        take_steps(TrainSettings.from_dict(told), processes)
        return
    kept: dict[str, Any] = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    here, cases = origin(module_command()), list(kept.get("cases", []))
    done = {one["case"] for one in cases}
    for number in range(2 if arguments.quick else arguments.cases):
        if number not in done:
            case = run(number)
            cases.append(case)
            told = case["settings"]
            print(
                f"case {number:3}: {case['processes']} x {told['optimizer']:10} {told['precision']:8} planned "
                f"{case['planned_bytes'] / 1e6:6.1f} MB, measured {case['measured_bytes'] / 1e6:6.1f} MB, ratio "
                f"{case['ratio']:.3f}",
                flush=True,
            )  # fmt: skip
            write_json(arguments.output, {"machine": kept.get("machine", here), "cases": cases})
    near = sum(abs(case["ratio"] - 1) <= WITHIN for case in cases)
    low = sum(case["ratio"] < 1 - WITHIN for case in cases)
    print(f"{near} of {len(cases)} within {WITHIN:.0%}; {low} planned too low by more; written: {arguments.output}")


if __name__ == "__main__":
    main()
