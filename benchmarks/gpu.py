"""All checks that need a GPU, in one command: correctness, speed, memory accesses.

    python -m benchmarks.gpu             # make gpu
    python -m benchmarks.gpu --dry-run   # the same steps at a few rows, on a CPU too

Steps come in the order of their importance: the gate of the kernels, the first cases of the benchmark, the tests on the
device, the other gates, memory accesses, the rest of the benchmark. Every step is a separate process, and the record is
written after each. The same command resumes an earlier run in the same folder, or in a copy of it: steps that passed
are not repeated, and the benchmark continues where --seconds cut it off. Four files hold everything: gpu.json, log.txt,
bench/bench.json, bench/page.md. Exit code: 0 if everything is done and correct, 3 if something is left, 1 if something
is wrong, 2 if the folder holds another run.
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
from dilated_attention_pytorch.benchmarks.measure import OUT_OF_TIME
from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.benchmarks.run import RESULTS_NAME, SAME_MACHINE
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.output import check_free_folder

from .gpu_gate import LEAVES_WHEN_REFUSED
from .measured_code import code, read_all

ROOT = Path(__file__).parent.parent
RECORD, LOG = "gpu.json", "log.txt"
TESTS = Path("tests/kernels/triton")
FIRST_CASES = 10
"""Cases of the benchmark that a first run times, with those that the README names."""
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
    result: Path | None = None
    """File that it writes, moved to the record."""
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
    result: dict[str, Any] | None = None
    code: int | None = None
    """Exit code; None if the process was killed."""


def steps(output: Path, *, is_dry: bool, seconds: float) -> list[Step]:
    """The steps in order, for a run of ``seconds``.

    The benchmark also checks every call against the definition: a wrong contestant affects its own figures only. So the
    gates of other contestants than the kernels can wait.
    """
    output = output.relative_to(ROOT) if output.is_relative_to(ROOT) else output
    has_gpu = torch.cuda.is_available()
    no_gpu = (
        None if has_gpu or is_dry else "PyTorch finds no CUDA device here; --dry-run goes through the steps without"
    )
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    not_installed = f"{' and '.join(missing)} not installed: pip install -e .[dev]" if missing else None
    sanitizer = shutil.which("compute-sanitizer")
    drawn = "--calls 1 --dtypes bfloat16 --most-rows 70" if is_dry else "--calls 8 --dtypes bfloat16 float16"
    bench, result = output / "bench", output / "step.json"

    def gate(who: str) -> Step:
        command = _python(f"benchmarks.gpu_gate {drawn}", "--contestants", _GATE[who])
        return Step(
            name=f"gate, {who}",
            command=(*command, "--output", str(result)),
            most_seconds=min(120.0, seconds),
            refusal=no_gpu,
            result=ROOT / result,
        )

    def benchmark(name: str, most_seconds: float, most_cases: int | None) -> Step:
        rows = ROOT / bench / RESULTS_NAME
        limit = f"--time-limit {0.8 * most_seconds:.0f}"
        options = (*(("--resume",) if rows.exists() else ()), *(("--dry-run",) if is_dry else ()))
        module = f"dilated_attention_pytorch.benchmarks --preset gpu {limit}"
        return Step(
            name=name,
            command=_python(module, "--output", str(bench), *options),
            most_seconds=most_seconds,
            refusal=no_gpu,
            begun_anew=LEAVES_WHEN_LOST,
            is_done=lambda: _is_complete(rows, most_cases),
        )

    def tests(name: str, *words: str) -> Step:
        return Step(
            name=f"tests, {name}",
            command=_python("pytest -q -p no:benchmark", *words, *(("--collect-only",) if is_dry else ())),
            most_seconds=seconds,
            environment={"TRITON_INTERPRET": "0"} if has_gpu else {},
            refusal=no_gpu or not_installed,
        )

    def checked(tool: str) -> Step:
        module = _python("benchmarks.gpu_gate --calls 2 --most-rows 200 --dtypes bfloat16", "--contestants", *_WATCHED)
        prefix = (sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
        return Step(
            name=tool,
            command=(*prefix, *module, "--output", str(result)),
            most_seconds=min(240.0, seconds),
            # PyTorch's allocator keeps freed memory: every tensor must be a separate allocation.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_INTERPRET": "0"},
            refusal=no_gpu
            or (None if has_gpu else "it watches a GPU")
            or (None if sanitizer else "compute-sanitizer is not on the PATH (it comes with the CUDA toolkit)"),
            result=ROOT / result,
        )

    if is_dry and not has_gpu:
        return [gate("aten"), benchmark("benchmark", seconds, None), tests("all", str(TESTS))]
    files = [file.relative_to(ROOT) for file in sorted((ROOT / TESTS).glob("test_*.py"))]
    return [
        gate("triton"),
        benchmark("benchmark, first cases", min(240.0, seconds), FIRST_CASES),
        # One process for each file: what a time limit cuts off is the rest of a file.
        *(tests(file.stem, str(file), "-k", "not drawn") for file in files if file.stem != "test_compiled"),
        gate("aten"),
        gate("published"),
        *map(checked, ("memcheck", "racecheck")),
        tests("drawn calls", str(TESTS), "-k", "drawn"),
        benchmark("benchmark", seconds, None),
    ]


def _python(line: str, *words: str) -> tuple[str, ...]:
    """The command of a module, from its name with options, and further words."""
    return (sys.executable, "-m", *line.split(), *words)


def _shown(step: Step) -> str:
    """The command of a step, for the record."""
    return shlex.join("python" if part == sys.executable else part for part in step.command)


def _is_complete(file: Path, most_cases: int | None) -> bool:
    """Whether the time limit left nothing out of the first ``most_cases`` cases of a benchmark, or of all."""
    values = json.loads(file.read_text(encoding="utf-8"))
    if most_cases is None:
        return bool(values["complete"])
    cases = {json.dumps(row["case"]): None for row in values["rows"]}
    first = list(cases)[:most_cases]
    return not any(row["reason"] == OUT_OF_TIME for row in values["rows"] if json.dumps(row["case"]) in first)


def run_step(step: Step, seconds: float, log: Path) -> Outcome:
    """Run a step for at most ``seconds``; its output is appended to a file, and the end of it is printed."""
    outcome = Outcome(name=step.name, status="skipped", reason=step.refusal or "", command=_shown(step))
    if step.refusal is not None:
        return outcome
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **step.environment}
    started, limit = time.monotonic(), min(step.most_seconds, seconds)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as said:
        print(f"== {step.name}: {outcome.command}", file=said, flush=True)
        begin = said.tell()
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
    outcome.tail = log.read_bytes()[begin:].decode(errors="replace")[-_TAIL:]
    print(outcome.tail, flush=True)
    if step.result is not None and step.result.exists():
        outcome.result = json.loads(step.result.read_text(encoding="utf-8"))
        step.result.unlink()
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


def earlier(output: Path, record: dict[str, Any]) -> dict[str, Outcome]:
    """Steps that passed in earlier runs of the command.

    Raises:
        RunError: the folder holds something else, or a run of other code or another machine.
    """
    file = output / RECORD
    if not file.exists():
        check_free_folder(output)
        return {}
    values = json.loads(file.read_text(encoding="utf-8"))
    facts = [("dry_run", values, record), ("code", values, record)]
    facts += [(name, values["machine"], record["machine"]) for name in SAME_MACHINE]
    for name, before, now in facts:
        if before.get(name) != now[name]:
            raise RunError(
                f"--output {output} holds a run with {name} {before.get(name)!r}, and here it is {now[name]!r}; name "
                "another --output"
            )
    return {one["name"]: Outcome(**one) for one in values["steps"] if one["status"] == "passed"}


def run(output: Path, *, is_dry: bool, seconds: float, only: Sequence[str] = ()) -> list[Outcome]:
    """Run what has not passed yet, within ``seconds``, and write the record after every step.

    Raises:
        RunError: the folder holds another run.
    """
    ends_at = time.monotonic() + seconds
    read_all()
    found = {"machine": origin(module_command()), "code": code("triton"), "dry_run": is_dry, "complete": False}
    record: dict[str, Any] = json.loads(json.dumps(found))
    passed = earlier(output, record)
    names = [step.name for step in steps(output, is_dry=is_dry, seconds=seconds)]
    outcomes = {name: Outcome(name=name, status="cut off", reason="no time was left to begin it") for name in names}
    outcomes |= passed

    def write() -> None:
        record["steps"] = [asdict(one) for one in outcomes.values()]
        record["complete"] = all(one.status in ("passed", "skipped") for one in outcomes.values())
        write_json(output / RECORD, record)

    write()
    for index, name in enumerate(names):
        if name in passed:
            continue
        if only and name not in only:
            outcomes[name].reason = "--only leaves it out"
            continue
        for _ in range(_MOST_PROCESSES):
            left = ends_at - time.monotonic()
            if left < _LEAST_SECONDS:
                break
            step = steps(output, is_dry=is_dry, seconds=left)[index]
            print(f"== {name}: {_shown(step)}", flush=True)
            outcomes[name] = run_step(step, left, output / LOG)
            write()
            if step.begun_anew is None or outcomes[name].code != step.begun_anew:
                break
    write()
    return list(outcomes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="the same steps at a few rows; measures nothing")
    parser.add_argument("--seconds", type=float, default=560.0, help="after so many, what runs is cut off")
    parser.add_argument("--only", nargs="+", default=[], help="steps by name")
    parser.add_argument("--output", type=Path, help="folder of the results; default runs/gpu")
    words = parser.parse_args()
    output = (words.output or ROOT / ("runs/gpu-dry" if words.dry_run else "runs/gpu")).resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the process of a step ends too
    try:
        outcomes = run(output, is_dry=words.dry_run, seconds=words.seconds, only=words.only)
    except RunError as error:
        print(f"gpu: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    for outcome in outcomes:
        reason = f": {outcome.reason}" if outcome.reason else ""
        print(f"{outcome.name:>42} {outcome.seconds:5.0f} s  {outcome.status}{reason}")
    print(f"written: {output / RECORD}")
    if any(one.status == "failed" for one in outcomes) or all(one.status == "skipped" for one in outcomes):
        raise SystemExit(1)
    if any(one.status == "cut off" for one in outcomes):
        raise SystemExit(3)


if __name__ == "__main__":
    main()
