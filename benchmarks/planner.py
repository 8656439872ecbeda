"""Memory and seconds of randomly drawn training steps, and memory of generations: planned first, then measured.

    python -m benchmarks.planner [--tiny] [--cases N] [--decoding N] [--again | --replan] [--output FILE]

A case is a LongNet, an optimizer, a precision, recomputation or not, and one process, or two to four that share rows of
text, weights or sequences. The peak memory of a process is planned (`estimate.plan_run`). Then a separate program
takes three steps and reads its peak memory from Linux, above the level after two steps of the model's first layer
alone, which load the libraries and compile their products. glibc is set to return large blocks when they are freed,
which takes time: seconds are therefore measured by a second program without that. Those of one process are compared
with the prediction from measurements of this machine (`estimate.measure_here`), taken by another program just before.

Bytes sent by the processes are counted in the first step, as the sum over rows and operands of collectives, and
compared with the planned bytes.

A decoding case is a LongNet, a pattern of groups or of windows, a prompt, a chunk size and new tokens. Bytes of the
cache and peak memory are planned by `estimate.generation_footprint` and measured in a program in which glibc writes
into all memory that it allocates, because a cache has slots that nothing has been written into yet.

The same command continues after the cases in the file, each of which names its machine; --again starts from scratch.
--replan plans the measured cases of the file once more, with the measurements of their machine that the file contains,
and measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.data_sheets import DataSheet
from dilated_attention_pytorch.estimate import Device, Generation, Here, footprint, generation_footprint, plan_run
from dilated_attention_pytorch.estimate.exchange import exchanges
from dilated_attention_pytorch.estimate.generation import cache_bytes
from dilated_attention_pytorch.estimate.measure import StepPoint
from dilated_attention_pytorch.training import TrainSettings

from .measured_code import is_stale, read_all
from .planner_cases import draw, draw_decoding, machine
from .study import file_of_results, write_results

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
FILLED = BOUNDED | {"MALLOC_PERTURB_": "1"}
"""Environments of the programs that measure seconds, memory, and memory including allocated but unused memory: glibc
writes into all memory that it allocates, so that empty slots of a cache are resident."""


def measured(
    told: dict[str, Any], processes: int, environment: dict[str, str], number: int, folder: Path | None = None
) -> list[dict[str, Any]]:
    """Results that a program of ``processes`` processes prints for a case; with a folder, it stores measurements there.

    Raises:
        SystemExit: the program fails.
    """
    given = [told, processes] if folder is None else [told, processes, str(folder)]
    words = ["-m", "benchmarks.planner_cases", json.dumps(given, default=str)]
    is_launched = folder is None and processes > 1
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    program = subprocess.run(
        [sys.executable, *(launch if is_launched else []), *words],
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


def here_of(case: dict[str, Any]) -> Here | None:
    """The machine's measurements stored with a case of one process."""
    if case["processes"] > 1:
        return None
    told = case["here"]
    sheet = {field.name: told["sheet"][field.name] for field in dataclasses.fields(DataSheet)}
    return Here(
        **{field.name: told[field.name] for field in dataclasses.fields(Here)}
        | {
            "sheet": DataSheet(**sheet),
            "points": tuple(StepPoint(*point) for point in told["points"]),
            "attention": tuple(map(tuple, told["attention"])),
            "attention_forward": tuple(map(tuple, told["attention_forward"])),
        }
    )


_SENT_NAMES = {"rows": "rows", "weights and gradients": "collectives"}
"""Kinds of traffic, by the planner's names, with the names in :mod:`.sent_bytes`."""


_OF_SECONDS = ("here", "planned_seconds", "seconds_ratio")


def planned_case(case: dict[str, Any], settings: TrainSettings, here: Here | None) -> dict[str, Any]:
    """A measured case with its plan added; seconds where the machine was measured."""
    planned = footprint(settings, case["processes"])
    seconds: dict[str, Any] = {}
    if here is not None:
        of_step = plan_run(settings, 1, Device(sheet=here.sheet, here=here)).seconds
        values = (dataclasses.asdict(here), dataclasses.asdict(of_step), of_step.total / case["seconds"])
        seconds = dict(zip(_OF_SECONDS, values, strict=True))
    return {name: value for name, value in case.items() if name not in _OF_SECONDS} | {
        "planned_bytes": planned.total,
        "planned": dataclasses.asdict(planned),
        "ratio": planned.total / case["measured_bytes"],
        "planned_sent_bytes": {
            _SENT_NAMES[one.name]: one.bytes
            for one in exchanges(settings, case["processes"])
            if one.name in _SENT_NAMES
        },
        **seconds,
    }


def shrunk(settings: TrainSettings) -> TrainSettings:
    """A case of seconds, for ``--tiny``."""
    model = dataclasses.replace(settings.model, num_layers=2, vocab_size=256)
    return dataclasses.replace(settings, model=model, context_length=256)


def run(number: int, folder: Path, *, is_tiny: bool) -> dict[str, Any]:
    """Plan and measure a training case; measurements of this machine are kept in ``folder``."""
    settings, processes = draw(number)
    settings = shrunk(settings) if is_tiny else settings
    told = settings.to_dict() | {"data": []}
    here = None
    if processes == 1:
        measured(told, processes, PLAIN, number, folder)
        here = machine(settings, folder, is_kept=True)
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


def replanned(kept: dict[str, Any]) -> dict[str, Any]:
    """The file's contents with every case planned again, without measuring."""
    cases = [planned_case(case, settings_of(case), here_of(case)) for case in kept["cases"]]
    decoding = [
        planned_decoding(case, settings_of(case), Generation(**case["generation"])) for case in kept["decoding"]
    ]
    return kept | {"cases": cases, "decoding": decoding}


def settings_of(case: dict[str, Any]) -> TrainSettings:
    """The settings of a case in the file."""
    return TrainSettings.from_dict(case["settings"] | {"tokenizer": "tokens"})


def planned_decoding(case: dict[str, Any], settings: TrainSettings, generation: Generation) -> dict[str, Any]:
    """A measured decoding case with its plan added."""
    planned = generation_footprint(settings, generation)
    return case | {
        "planned_bytes": planned.total,
        "planned": dataclasses.asdict(planned),
        "ratio": planned.total / case["measured_bytes"],
        "planned_cache_bytes": cache_bytes(settings, generation),
    }


def run_decoding(number: int, *, is_tiny: bool) -> dict[str, Any]:
    """Plan and measure a decoding case."""
    settings, generation = draw_decoding(number)
    if is_tiny:
        settings, generation = shrunk(settings), Generation(prompt=300, new_tokens=4, chunk_size=128)
    told = settings.to_dict() | {"data": [], "generation": dataclasses.asdict(generation)}
    (memory,) = measured(told, 1, FILLED, number)
    case = {
        "case": number,
        "machine": origin(module_command()),
        "settings": settings.to_dict() | {"data": [], "tokenizer": None},
        "generation": dataclasses.asdict(generation),
        "measured_bytes": memory["peak_bytes"],
        "cache_bytes": memory["cache_bytes"],
    }
    return planned_decoding(case, settings, generation)


def summary(ratios: list[float], within: float) -> dict[str, float]:
    """Distribution of ratios of planned to measured values."""
    ordered = sorted(ratios)
    places = {f"percentile {percent}": ordered[round(percent / 100 * (len(ordered) - 1))] for percent in PERCENTILES}
    return {
        "cases": len(ordered),
        f"within {within:.0%}": sum(abs(ratio - 1) <= within for ratio in ordered),
        f"planned too low by more than {within:.0%}": sum(ratio < 1 - within for ratio in ordered),
        **places,
    }


def summaries(kept: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Summaries of the ratios of memory and seconds, for the kinds that have cases."""
    cases, decoding = kept["cases"], kept["decoding"]
    found = {
        "memory of steps": ([case["ratio"] for case in cases], WITHIN),
        "seconds of steps": ([case["seconds_ratio"] for case in cases if "here" in case], WITHIN_SECONDS),
        "memory of decoding": ([case["ratio"] for case in decoding], WITHIN),
        "bytes of the cache": ([case["planned_cache_bytes"] / case["cache_bytes"] for case in decoding], 0.0),
    }
    exchanging = [case for case in cases if case["processes"] > 1]
    for name in ("rows", "collectives"):
        both = [(case["planned_sent_bytes"].get(name, 0), case["sent_bytes"][name]) for case in exchanging]
        found[f"bytes sent: {name}"] = ([planned / sent for planned, sent in both if sent], 0.0)
    return {name: summary(ratios, within) for name, (ratios, within) in found.items() if ratios}


def main() -> None:
    """Print one line per case; write all cases with the machine and the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one small case of each kind: checks the benchmark")
    parser.add_argument("--output", type=Path, help="file of the results; default: benchmarks/results")
    parser.add_argument("--if-stale", action="store_true", help="measure nothing if the results are of today's code")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--decoding", type=int, default=50)
    parser.add_argument("--again", action="store_true", help="leave what is in the file, and begin anew")
    parser.add_argument("--replan", action="store_true", help="plan the cases of the file anew, and measure nothing")
    arguments = parser.parse_args()
    read_all()
    arguments.output = file_of_results(
        arguments.output, "planner.json", is_tiny=arguments.tiny, is_if_stale=arguments.if_stale
    )
    import torch

    torch.set_num_threads(1)
    kept: dict[str, Any] = {"machine": origin(module_command()), "cases": [], "decoding": []}
    if arguments.output.exists() and not arguments.again:
        earlier = json.loads(arguments.output.read_text())
        # Cases of other code are measured again.
        kept |= earlier if arguments.replan or not is_stale(earlier) else {}
    if arguments.replan:
        kept = replanned(kept)
        write_json(arguments.output, kept | {"summary": summaries(kept)})
        say(kept, arguments.output)
        return
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 if arguments.tiny else arguments.cases):
            if number not in {one["case"] for one in kept["cases"]}:
                case = run(number, Path(folder), is_tiny=arguments.tiny)
                kept["cases"].append(case)
                told = case["settings"]
                print(
                    f"case {number:3}: {case['processes']} x {told['optimizer']:10} {told['precision']:8} planned "
                    f"{case['planned_bytes'] / 1e6:6.1f} MB, measured {case['measured_bytes'] / 1e6:6.1f} MB, ratio "
                    f"{case['ratio']:.3f}" + (f"; of seconds {case['seconds_ratio']:.2f}" if "here" in case else ""),
                    flush=True,
                )
                write_results(arguments.output, "planner", kept | {"summary": summaries(kept)})
        for number in range(1 if arguments.tiny else arguments.decoding):
            if number not in {one["case"] for one in kept["decoding"]}:
                case = run_decoding(number, is_tiny=arguments.tiny)
                kept["decoding"].append(case)
                print(
                    f"decoding {number:3}: planned {case['planned_bytes'] / 1e6:6.1f} MB, measured "
                    f"{case['measured_bytes'] / 1e6:6.1f} MB, ratio {case['ratio']:.3f}; cache "
                    f"{'the same' if case['planned_cache_bytes'] == case['cache_bytes'] else 'OTHER BYTES'}",
                    flush=True,
                )
                write_results(arguments.output, "planner", kept | {"summary": summaries(kept)})
    say(kept, arguments.output)


def say(kept: dict[str, Any], file: Path) -> None:
    """Print the summaries."""
    for name, values in summaries(kept).items():
        print(f"{name}: " + ", ".join(f"{word} {value:.4g}" for word, value in values.items()))
    print(f"written: {file}")


if __name__ == "__main__":
    main()
