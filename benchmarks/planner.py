"""Memory and seconds of training steps and of generations, planned first and measured after, drawn at random.

    python -m benchmarks.planner [--quick] [--cases N] [--decoding N] [--again | --replan] [--output FILE]

A case is a LongNet, an optimizer, a precision, blocks that are recomputed or not, and one process or two to four that
split rows of text, weights or sequences. What a process has at its peak is planned (`training.footprint`); then a
program of its own takes three steps and reads from Linux what its memory was at its highest, beyond what the libraries
had taken after two steps of the model's first layer alone, whose products are compiled then. glibc is told to give
large blocks back when they are freed, which takes time: so seconds are those of a second program without that. They
are held against what is predicted from measurements of this machine (`capacity.measure_here`) of the same run.

What the processes send is counted in the first step, in which rows and operands of collectives are added up, and held
against the planned bytes.

A case of decoding is a LongNet, a pattern of groups or of windows, a prompt, a chunk and new tokens: the bytes of the
cache, and the peak of the process, planned by `capacity.generation_footprint`.

The same command again goes on after the cases that are in the file, each of which names its machine; --again begins
anew. --replan plans the measured cases of the file once more, with what was measured of their machine then, which the
file keeps, and measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.capacity import Device, Generation, generation_footprint, plan_run
from dilated_attention_pytorch.capacity.exchanged import exchanges
from dilated_attention_pytorch.capacity.generation import cache_bytes
from dilated_attention_pytorch.capacity.here import Here, StepPoint, measure_here
from dilated_attention_pytorch.data_sheets import DataSheet
from dilated_attention_pytorch.training import TrainSettings
from dilated_attention_pytorch.training.footprint import footprint

from .planner_cases import draw, draw_decoding

WITHIN = 0.05
WITHIN_SECONDS = 0.2
PERCENTILES = (0, 10, 50, 90, 100)
PLAIN = {"OMP_NUM_THREADS": "1"}
BOUNDED = PLAIN | {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}
"""Environments of the programs that measure seconds, and memory."""


def measured(told: dict[str, Any], processes: int, environment: dict[str, str], number: int) -> list[dict[str, Any]]:
    """What a program of so many processes prints of a case.

    Raises:
        SystemExit: it fails.
    """
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    )
    program = subprocess.run(
        [sys.executable, *launch, "-m", "benchmarks.planner_cases", json.dumps([told, processes], default=str)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in program.stdout.splitlines() if line.startswith("measured ")]
    if program.returncode or not lines:
        raise SystemExit(f"case {number} failed: {program.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(lines[-1].removeprefix("measured "))
    return found


def here_to_dict(here: Here) -> dict[str, Any]:
    """What was measured of this machine, for the file."""
    return dataclasses.asdict(here)


def here_of(told: dict[str, Any]) -> Here:
    """What :func:`here_to_dict` wrote."""
    return Here(
        **told
        | {
            "sheet": DataSheet(**told["sheet"]),
            "points": tuple(StepPoint(*point) for point in told["points"]),
            "attention": tuple(map(tuple, told["attention"])),
            "attention_forward": tuple(map(tuple, told["attention_forward"])),
            "exchange": tuple(told["exchange"]),
        }
    )


_SENT_NAMES = {"rows": "rows", "weights and gradients": "collectives"}
"""What is sent, in the planner's words and in those of :mod:`.sent_bytes`."""


def planned_case(case: dict[str, Any], settings: TrainSettings, here: Here | None) -> dict[str, Any]:
    """A case with its plan, beside what was measured of it."""
    processes = case["processes"]
    planned = footprint(settings, processes)
    found = case | {
        "planned_bytes": planned.total,
        "planned": dataclasses.asdict(planned),
        "ratio": planned.total / case["measured_bytes"],
        "planned_sent_bytes": {
            _SENT_NAMES[one.name]: one.bytes for one in exchanges(settings, processes) if one.name in _SENT_NAMES
        },
    }
    if here is not None:
        seconds = plan_run(settings, processes, Device(sheet=here.sheet, here=here)).seconds
        found |= {
            "here": here_to_dict(here),
            "planned_seconds": dataclasses.asdict(seconds),
            "seconds_ratio": seconds.total / case["seconds"],
        }
    return found


def run(number: int, folder: Path) -> dict[str, Any]:
    """Plan a case of training and measure it; what is measured of this machine is kept in ``folder``."""
    settings, processes = draw(number)
    told = settings.to_dict() | {"data": []}
    here = measure_here(settings, processes, "cpu", is_quiet=True, folder=folder, seconds=math.inf)
    memory, times = (measured(told, processes, environment, number) for environment in (BOUNDED, PLAIN))
    case = {
        "case": number,
        "machine": origin(module_command()),
        "processes": processes,
        "settings": told | {"tokenizer": None},
        "measured_bytes": max(one["peak_bytes"] for one in memory),
        "seconds": max(one["seconds"] for one in times),
        "sent_bytes": {name: max(one[f"{name}_sent"] for one in memory) for name in ("rows", "collectives")},
    }
    return planned_case(case, settings, here)


def replanned(kept: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """What the file holds, every case planned anew: nothing is measured.

    Args:
        kept: the file.
        folder: measurements of this machine, for cases without them; their seconds stay as they were planned without.
    """
    cases, decoding = [], []
    for case in kept["cases"]:
        here, settings = None, settings_of(case)
        if "here" in case:
            here = here_of(case["here"])
        elif folder is not None:
            here = measure_here(settings, case["processes"], "cpu", is_quiet=True, folder=folder, seconds=0)
        cases.append(planned_case(case, settings, here))
    for case in kept["decoding"]:
        decoding.append(planned_decoding(case, settings_of(case), Generation(**case["generation"])))
    return kept | {"cases": cases, "decoding": decoding}


def settings_of(case: dict[str, Any]) -> TrainSettings:
    """Those of a case of the file."""
    return TrainSettings.from_dict(case["settings"] | {"tokenizer": "tokens"})


def planned_decoding(case: dict[str, Any], settings: TrainSettings, generation: Generation) -> dict[str, Any]:
    """A case of decoding with its plan, beside what was measured of it."""
    planned = generation_footprint(settings, generation)
    return case | {
        "planned_bytes": planned.total,
        "planned": dataclasses.asdict(planned),
        "ratio": planned.total / case["measured_bytes"],
        "planned_cache_bytes": cache_bytes(settings, generation),
    }


def run_decoding(number: int) -> dict[str, Any]:
    """Plan a case of decoding and measure it."""
    settings, generation = draw_decoding(number)
    told = settings.to_dict() | {"data": []}
    (found,) = measured(told | {"generation": dataclasses.asdict(generation)}, 1, BOUNDED, number)
    case = {
        "case": number,
        "machine": origin(module_command()),
        "settings": told | {"tokenizer": None},
        "generation": dataclasses.asdict(generation),
        "measured_bytes": found["peak_bytes"],
        "cache_bytes": found["cache_bytes"],
        "prompt_seconds": found["prompt_seconds"],
        "token_seconds": found["token_seconds"],
    }
    return planned_decoding(case, settings, generation)


def summary(ratios: list[float], within: float) -> dict[str, float]:
    """How ratios of planned over measured are spread."""
    ordered = sorted(ratios)
    places = {f"percentile {percent}": ordered[round(percent / 100 * (len(ordered) - 1))] for percent in PERCENTILES}
    return {
        "cases": len(ordered),
        f"within {within:.0%}": sum(abs(ratio - 1) <= within for ratio in ordered),
        f"planned too low by more than {within:.0%}": sum(ratio < 1 - within for ratio in ordered),
        **places,
    }


def summaries(kept: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of memory and seconds of steps, and of memory of decoding, as far as there are cases."""
    cases, decoding = kept["cases"], kept["decoding"]
    found = {
        "memory of steps": ([case["ratio"] for case in cases], WITHIN),
        "seconds of steps": ([case["seconds_ratio"] for case in cases if "seconds_ratio" in case], WITHIN_SECONDS),
        "memory of decoding": ([case["ratio"] for case in decoding], WITHIN),
        "bytes of the cache": ([case["planned_cache_bytes"] / case["cache_bytes"] for case in decoding], 0.0),
    }
    exchanging = [case for case in cases if case["processes"] > 1 and "sent_bytes" in case]
    for name in ("rows", "collectives"):
        both = [(case["planned_sent_bytes"].get(name, 0), case["sent_bytes"][name]) for case in exchanging]
        found[f"bytes sent: {name}"] = ([planned / sent for planned, sent in both if sent], 0.0)
    return {name: summary(ratios, within) for name, (ratios, within) in found.items() if ratios}


def main() -> None:
    """Print a line for each case and write all, with the machine and the command they came from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 cases of each: checks")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--decoding", type=int, default=50)
    parser.add_argument("--again", action="store_true", help="leave what is in the file, and begin anew")
    parser.add_argument("--replan", action="store_true", help="plan the cases of the file anew, and measure nothing")
    parser.add_argument("--measurements", type=Path, help="folder of measurements for --replan, beside the file's")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "planner.json")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    kept: dict[str, Any] = {"machine": origin(module_command()), "cases": [], "decoding": []}
    if arguments.output.exists() and not arguments.again:
        kept |= json.loads(arguments.output.read_text())
    if arguments.replan:
        kept = replanned(kept, arguments.measurements)
        write_json(arguments.output, kept | {"summary": summaries(kept)})
        say(kept, arguments.output)
        return
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2 if arguments.quick else arguments.cases):
            if number not in {one["case"] for one in kept["cases"]}:
                case = run(number, Path(folder))
                kept["cases"].append(case)
                told = case["settings"]
                print(
                    f"case {number:3}: {case['processes']} x {told['optimizer']:10} {told['precision']:8} planned "
                    f"{case['planned_bytes'] / 1e6:6.1f} MB, measured {case['measured_bytes'] / 1e6:6.1f} MB, ratio "
                    f"{case['ratio']:.3f}; of seconds {case['seconds_ratio']:.2f}",
                    flush=True,
                )
                write_json(arguments.output, kept | {"summary": summaries(kept)})
    for number in range(2 if arguments.quick else arguments.decoding):
        if number not in {one["case"] for one in kept["decoding"]}:
            case = run_decoding(number)
            kept["decoding"].append(case)
            print(
                f"decoding {number:3}: planned {case['planned_bytes'] / 1e6:6.1f} MB, measured "
                f"{case['measured_bytes'] / 1e6:6.1f} MB, ratio {case['ratio']:.3f}; cache "
                f"{'the same' if case['planned_cache_bytes'] == case['cache_bytes'] else 'OTHER BYTES'}",
                flush=True,
            )
            write_json(arguments.output, kept | {"summary": summaries(kept)})
    say(kept, arguments.output)


def say(kept: dict[str, Any], file: Path) -> None:
    """Print the summaries."""
    for name, values in summaries(kept).items():
        print(f"{name}: " + ", ".join(f"{word} {value:.4g}" for word, value in values.items()))
    print(f"written: {file}")


if __name__ == "__main__":
    main()
