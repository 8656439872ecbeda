"""All checks that need a GPU, in one command: correctness, speed, memory accesses.

    python -m benchmarks.gpu             # make gpu
    python -m benchmarks.gpu --dry-run   # the same steps at a few rows, on a CPU too

Every step is a separate process, and the record is written after each. The same command continues an earlier run: steps
that passed are not repeated, and the benchmark continues where --seconds cut it off. Exit code: 0 if everything is done
and correct, 3 if something is left, 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dilated_attention_pytorch.benchmarks.__main__ import LEAVES_WHEN_LOST
from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json

from .gpu_gate import LEAVES_WHEN_REFUSED

ROOT = Path(__file__).parent.parent
RECORD = "gpu.json"
Status = Literal["passed", "failed", "skipped", "cut off"]
_TAIL = 4000
_MOST_PROCESSES = 8
"""Maximum number of processes per step, each after the previous one lost the device."""
_LEAST_SECONDS = 10.0
"""No step starts with less time left."""
_GATE = {"triton": "ours, triton", "aten": "ours, aten", "published": "published route"}
"""Checks against the definition, each in its own process: one that breaks the device does not affect the others."""
_WATCHED = ("ours, triton", "ours, aten")
"""Contestants checked with compute-sanitizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One process of the run."""

    name: str
    command: tuple[str, ...]
    most_seconds: float
    """Time limit."""
    environment: dict[str, str] = field(default_factory=dict)
    refusal: str | None = None
    """Reason for not running it; None if it runs."""
    is_done: Callable[[], bool] = lambda: True
    """Whether a process that ended with success has done everything."""
    begun_anew: int | None = None
    """Exit code after which a new process continues."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Result of a step."""

    name: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    command: str = ""
    tail: str = ""
    """End of its output."""
    code: int | None = None
    """Exit code; None if the process was killed."""


def steps(output: Path, *, is_dry: bool, seconds: float) -> list[Step]:
    """The steps in order, for a run of ``seconds``.

    The benchmark also checks every call against the definition: a wrong contestant affects its own figures only.
    """
    output = output.relative_to(ROOT) if output.is_relative_to(ROOT) else output
    has_gpu = torch.cuda.is_available()
    no_gpu = (
        None if has_gpu or is_dry else "PyTorch finds no CUDA device here; --dry-run goes through the steps without"
    )
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    sanitizer = shutil.which("compute-sanitizer")
    drawn = "--calls 1 --dtypes bfloat16 --most-rows 70" if is_dry else "--calls 8 --dtypes bfloat16 float16"
    bench = output / "bench"
    options: tuple[str, ...] = ("--resume",) if (ROOT / bench / "bench.json").exists() else ()
    options += ("--dry-run",) if is_dry else ()

    def gate(who: str) -> Step:
        command = _python(f"benchmarks.gpu_gate {drawn}", "--contestants", _GATE[who])
        return Step(
            name=f"gate, {who}",
            command=(*command, "--output", str(output / f"gate-{who}.json")),
            most_seconds=180.0,
            refusal=no_gpu,
        )

    def checked(tool: str) -> Step:
        module = _python("benchmarks.gpu_gate --calls 2 --most-rows 200 --dtypes bfloat16", "--contestants", *_WATCHED)
        prefix = (sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
        return Step(
            name=tool,
            command=(*prefix, *module, "--output", str(output / f"{tool}.json")),
            most_seconds=240.0,
            # PyTorch's allocator keeps freed memory: every tensor must be a separate allocation.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_INTERPRET": "0"},
            refusal=no_gpu
            or (None if has_gpu else "it watches a GPU")
            or (None if sanitizer else "compute-sanitizer is not on the PATH (it comes with the CUDA toolkit)"),
        )

    benchmark = f"dilated_attention_pytorch.benchmarks --preset gpu --time-limit {0.8 * seconds:.0f}"
    tests = "pytest -q -p no:benchmark tests/kernels/triton --ignore tests/kernels/triton/test_compiled.py"
    return [
        *map(gate, ("aten",) if is_dry and not has_gpu else _GATE),
        Step(
            name="benchmark",
            command=_python(benchmark, "--output", str(bench), *options),
            most_seconds=seconds,
            refusal=no_gpu,
            begun_anew=LEAVES_WHEN_LOST,
            is_done=lambda: _is_complete(ROOT / bench / "bench.json"),
        ),
        *map(checked, ("memcheck", "racecheck")),
        Step(
            name="tests",
            command=_python(tests, *(("--collect-only",) if is_dry else ())),
            most_seconds=seconds,
            environment={"TRITON_INTERPRET": "0"} if has_gpu else {},
            refusal=no_gpu or (f"{' and '.join(missing)} not installed: pip install -e .[dev]" if missing else None),
        ),
    ]


def _python(line: str, *words: str) -> tuple[str, ...]:
    """The command of a module, from its name with options, and further words."""
    return (sys.executable, "-m", *line.split(), *words)


def _shown(step: Step) -> str:
    """The command of a step, for the record."""
    return shlex.join("python" if part == sys.executable else part for part in step.command)


def _is_complete(file: Path) -> bool:
    return bool(json.loads(file.read_text(encoding="utf-8"))["complete"])


def run_step(step: Step, seconds: float, log: Path) -> Outcome:
    """Run a step for at most ``seconds``; its output goes to a file, and the end of it is printed."""
    outcome = Outcome(name=step.name, status="skipped", reason=step.refusal or "", command=_shown(step))
    if step.refusal is not None:
        return outcome
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **step.environment}
    started, limit = time.monotonic(), min(step.most_seconds, seconds)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as said:
        # A separate process group, so that its children end with it.
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    outcome.seconds, outcome.code = time.monotonic() - started, code
    outcome.tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
    print(outcome.tail, flush=True)
    if code is None:
        outcome.status, outcome.reason = "cut off", f"not done after {limit:.0f} s"
    elif code == step.begun_anew:
        outcome.status, outcome.reason = "cut off", "the device was lost to the process"
    elif code == LEAVES_WHEN_REFUSED:
        outcome.status, outcome.reason = (
            "skipped",
            "everything is refused on this device, with the sentences of its log",
        )
    elif code != 0:
        outcome.status, outcome.reason = "failed", f"it left with {code}"
    elif not step.is_done():
        outcome.status, outcome.reason = "cut off", "its time limit left something out"
    else:
        outcome.status = "passed"
    return outcome


def earlier(file: Path, *, is_dry: bool) -> dict[str, Outcome]:
    """Steps that passed in earlier runs of the command."""
    if not file.exists():
        return {}
    values = json.loads(file.read_text(encoding="utf-8"))
    if values["dry_run"] != is_dry:
        raise SystemExit(f"{file} is of {'a dry' if values['dry_run'] else 'another'} run; name another --output")
    return {one["name"]: Outcome(**one) for one in values["steps"] if one["status"] == "passed"}


def run(output: Path, *, is_dry: bool, seconds: float, only: Sequence[str] = ()) -> list[Outcome]:
    """Run what has not passed yet, within ``seconds``, and write the record after every step."""
    record: dict[str, Any] = {"machine": origin(module_command()), "dry_run": is_dry, "complete": False}
    ends_at = time.monotonic() + seconds
    passed = earlier(output / RECORD, is_dry=is_dry)
    outcomes: list[Outcome] = []
    for index, name in enumerate(step.name for step in steps(output, is_dry=is_dry, seconds=seconds)):
        left = ends_at - time.monotonic()
        if name in passed:
            outcome = passed[name]
        elif only and name not in only:
            outcome = Outcome(name=name, status="cut off", reason="--only leaves it out")
        elif left < _LEAST_SECONDS:
            outcome = Outcome(name=name, status="cut off", reason="no time was left to begin it")
        else:
            outcome = Outcome(name=name, status="cut off")
            for _ in range(_MOST_PROCESSES):
                left = ends_at - time.monotonic()
                step = steps(output, is_dry=is_dry, seconds=left)[index]
                print(f"== {name}: {_shown(step)}", flush=True)
                outcome = run_step(step, left, output / f"{name}.txt")
                if (
                    outcome.code is None
                    or outcome.code != step.begun_anew
                    or ends_at - time.monotonic() < _LEAST_SECONDS
                ):
                    break
        outcomes.append(outcome)
        record["steps"] = [asdict(one) for one in outcomes]
        record["complete"] = all(one.status in ("passed", "skipped") for one in outcomes)
        write_json(output / RECORD, record)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="the same steps at a few rows; measures nothing")
    parser.add_argument("--seconds", type=float, default=560.0, help="after so many, what runs is cut off")
    parser.add_argument("--only", nargs="+", default=[], help="steps by name")
    parser.add_argument("--output", type=Path, help="folder of the results; default benchmarks/results/gpu")
    words = parser.parse_args()
    default = ROOT / ("runs/gpu-dry" if words.dry_run else "benchmarks/results/gpu")
    output = (words.output or default).resolve()
    outcomes = run(output, is_dry=words.dry_run, seconds=words.seconds, only=words.only)
    for outcome in outcomes:
        reason = f": {outcome.reason}" if outcome.reason else ""
        print(f"{outcome.name:>10} {outcome.seconds:5.0f} s  {outcome.status}{reason}")
    print(f"written: {output / RECORD}")
    if any(one.status == "failed" for one in outcomes) or all(one.status == "skipped" for one in outcomes):
        raise SystemExit(1)
    if any(one.status == "cut off" for one in outcomes):
        raise SystemExit(3)


if __name__ == "__main__":
    main()
