"""All checks that need a GPU, in one command: correctness, speed, memory accesses.

    python -m benchmarks.gpu             # make gpu
    python -m benchmarks.gpu --dry-run   # the same steps at a few rows, on a CPU too

First come the checks, several processes at once: random calls of every implementation, the tests of the kernels, memory
accesses. They have at most 55 % of --seconds. Then the benchmark has the device for itself. The record is written after
each step. The same command resumes an earlier run in the same folder, or in a copy of it: steps that passed are not
repeated, and the benchmark continues where --seconds cut it off. Four files hold everything: gpu.json, log.txt,
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
from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.benchmarks.run import RESULTS_NAME, SAME_MACHINE
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.output import check_free_folder

from .gpu_gate import LEAVES_WHEN_REFUSED
from .measured_code import code, read_all

ROOT = Path(__file__).parent.parent
RECORD, LOG = "gpu.json", "log.txt"
TESTS = Path("tests/kernels/triton")
WITHOUT_GPU = {"test_compiled", "test_configurations", "test_hazards", "test_keys_seen", "test_not_finite"}
"""Files of tests that launch nothing on a GPU: they compile for one, or need the interpreter."""
FOR_CHECKS = 0.55
"""Part of the time that checks may take."""
CORES_EACH = 1.25
"""Cores for each process of a check: most of its time, it compiles kernels."""
WITH_DRAWN = {"test_equals_the_oracle", "test_score_terms"}
"""Files of tests whose random calls compile for minutes."""
Status = Literal["passed", "failed", "skipped", "cut off"]
_TAIL = 4000
_MOST_PROCESSES = 8
"""Maximum number of processes per step, each after the previous one lost the device."""
_LEAST_SECONDS = 10.0
"""No step starts with less time left."""
_BETWEEN_LOOKS = 0.05
_GATE = {"triton": "ours, triton", "aten": "ours, aten", "published": "published route"}
"""Checks against the definition, each in its own process: one that breaks the device does not affect the others."""
_WATCHED = ("ours, triton", "ours, aten")
"""Contestants checked with compute-sanitizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One process of the run."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    refusal: str | None = None
    """Reason for not running it; None if it runs."""
    result: Path | None = None
    """File that it writes, moved to the record."""
    is_alone: bool = False
    """Whether nothing else may run at the same time."""
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
    """The steps in order, for a run that has ``seconds`` left."""
    output = output.relative_to(ROOT) if output.is_relative_to(ROOT) else output
    has_gpu = torch.cuda.is_available()
    no_gpu = (
        None if has_gpu or is_dry else "PyTorch finds no CUDA device here; --dry-run goes through the steps without"
    )
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    not_installed = f"{' and '.join(missing)} not installed: pip install -e .[dev]" if missing else None
    sanitizer = shutil.which("compute-sanitizer")
    drawn = "--calls 1 --dtypes bfloat16 --most-rows 70" if is_dry else "--calls 8 --dtypes bfloat16 float16"
    bench = output / "bench"

    def gate(who: str) -> Step:
        command, result = _python(f"benchmarks.gpu_gate {drawn}", "--contestants", _GATE[who]), output / f"{who}.json"
        return Step(
            name=f"gate, {who}",
            command=(*command, "--output", str(result)),
            refusal=no_gpu,
            result=ROOT / result,
        )

    def benchmark() -> Step:
        rows = ROOT / bench / RESULTS_NAME
        options = (*(("--resume",) if rows.exists() else ()), *(("--dry-run",) if is_dry else ()))
        module = f"dilated_attention_pytorch.benchmarks --preset gpu --time-limit {0.8 * seconds:.0f}"
        return Step(
            name="benchmark",
            command=_python(module, "--output", str(bench), *options),
            refusal=no_gpu,
            is_alone=True,
            begun_anew=LEAVES_WHEN_LOST,
            is_done=lambda: bool(json.loads(rows.read_text(encoding="utf-8"))["complete"]),
        )

    def tests(name: str, *words: str) -> Step:
        return Step(
            name=f"tests, {name}",
            command=_python("pytest -q -p no:benchmark", *words, *(("--collect-only",) if is_dry else ())),
            environment={"TRITON_INTERPRET": "0"} if has_gpu else {},
            refusal=no_gpu or not_installed,
        )

    def checked(tool: str) -> Step:
        result = output / f"{tool}.json"
        module = _python("benchmarks.gpu_gate --calls 2 --most-rows 200 --dtypes bfloat16", "--contestants", *_WATCHED)
        prefix = (sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
        return Step(
            name=tool,
            command=(*prefix, *module, "--output", str(result)),
            # PyTorch's allocator keeps freed memory: every tensor must be a separate allocation.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_INTERPRET": "0"},
            refusal=no_gpu
            or (None if has_gpu else "it watches a GPU")
            or (None if sanitizer else "compute-sanitizer is not on the PATH (it comes with the CUDA toolkit)"),
            result=ROOT / result,
        )

    if is_dry and not has_gpu:
        return [gate("aten"), tests("all", str(TESTS)), benchmark()]
    files = [file.relative_to(ROOT) for file in sorted((ROOT / TESTS).glob("test_*.py"))]
    return [
        gate("triton"),
        # Longest first. One process for each file: what a time limit cuts off is the rest of a file.
        *(tests(f"{file.stem}, drawn calls", str(file), "-k", "drawn") for file in files if file.stem in WITH_DRAWN),
        *(
            tests(file.stem, str(file), *(("-k", "not drawn") if file.stem in WITH_DRAWN else ()))
            for file in files
            if file.stem not in WITHOUT_GPU
        ),
        *map(checked, ("memcheck", "racecheck")),
        gate("aten"),
        gate("published"),
        benchmark(),
    ]


def _python(line: str, *words: str) -> tuple[str, ...]:
    """The command of a module, from its name with options, and further words."""
    return (sys.executable, "-m", *line.split(), *words)


def _shown(step: Step) -> str:
    """The command of a step, for the record."""
    return shlex.join("python" if part == sys.executable else part for part in step.command)


@dataclass(kw_only=True, slots=True)
class Running:
    """A step whose process runs, in a process group of its own, so that its children end with it."""

    step: Step
    process: subprocess.Popen[bytes]
    began: float
    limit: float
    said: Path
    """File of its output."""

    @classmethod
    def begin(cls, step: Step, seconds: float, output: Path) -> Running:
        """Start a step that may run for ``seconds`` at most."""
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        said = output / f"{step.name.replace(', ', '-').replace(' ', '-')}.txt"
        print(f"== {step.name}: {_shown(step)}", flush=True)
        with said.open("wb") as file:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, **step.environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(step=step, process=process, began=time.monotonic(), limit=seconds, said=said)

    def has_ended(self) -> bool:
        """Whether its process ended or reached its limit."""
        return self.process.poll() is not None or time.monotonic() - self.began > self.limit

    def end(self, log: Path) -> Outcome:
        """Kill what still runs, append the output to ``log``, and judge the step."""
        step, code = self.step, self.process.poll()
        if code is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        said = self.said.read_bytes().decode(errors="replace")
        self.said.unlink()
        with log.open("a", encoding="utf-8") as file:
            file.write(f"== {step.name}: {_shown(step)}\n{said}")
        seconds = time.monotonic() - self.began
        outcome = Outcome(name=step.name, status="passed", seconds=seconds, command=_shown(step), code=code)
        outcome.tail = said[-_TAIL:]
        if step.result is not None and step.result.exists():
            outcome.result = json.loads(step.result.read_text(encoding="utf-8"))
            step.result.unlink()
        if code is None:
            outcome.status, outcome.reason = "cut off", f"not done after {self.limit:.0f} s"
        elif code == step.begun_anew:
            outcome.status, outcome.reason = "cut off", "the device was lost to the process"
        elif code == LEAVES_WHEN_REFUSED:
            reason = "everything is refused on this device, with the sentences of its log"
            outcome.status, outcome.reason = "skipped", reason
        elif code != 0:
            outcome.status, outcome.reason = "failed", f"it left with {code}"
        elif not step.is_done():
            outcome.status, outcome.reason = "cut off", "its time limit left something out"
        print(f"== {step.name}: {outcome.status} {outcome.reason}\n{outcome.tail}", flush=True)
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
    began = time.monotonic()
    read_all()
    found = {"machine": origin(module_command()), "code": code("triton"), "dry_run": is_dry, "complete": False}
    record: dict[str, Any] = json.loads(json.dumps(found))
    passed = earlier(output, record)
    entries = {step.name: step for step in steps(output, is_dry=is_dry, seconds=seconds)}
    outcomes = {name: Outcome(name=name, status="cut off", reason="no time was left to begin it") for name in entries}
    outcomes |= passed

    def write() -> None:
        record["steps"] = [asdict(one) for one in outcomes.values()]
        record["complete"] = all(one.status in ("passed", "skipped") for one in outcomes.values())
        write_json(output / RECORD, record)

    write()
    waiting = [name for name in entries if name not in passed]
    for name in [name for name in waiting if only and name not in only]:
        outcomes[name].reason = "--only leaves it out"
        waiting.remove(name)
    processes = max(1, int((os.cpu_count() or 1) / CORES_EACH))
    begun: dict[str, int] = dict.fromkeys(entries, 0)
    running: list[Running] = []
    try:
        while waiting or running:
            for one in [one for one in running if one.has_ended()]:
                running.remove(one)
                outcomes[one.step.name] = outcome = one.end(output / LOG)
                write()
                is_lost = outcome.code is not None and outcome.code == one.step.begun_anew
                if is_lost and begun[outcome.name] < _MOST_PROCESSES:
                    waiting.insert(0, outcome.name)
            if not waiting or len(running) >= processes or (running and entries[waiting[0]].is_alone):
                time.sleep(_BETWEEN_LOOKS)
                continue
            name = waiting.pop(0)
            left = began + seconds - time.monotonic()
            # The benchmark is resumed where it was begun, and has the time that is left.
            step = next(one for one in steps(output, is_dry=is_dry, seconds=left) if one.name == name)
            left -= 0.0 if step.is_alone else (1.0 - FOR_CHECKS) * seconds
            if step.refusal is not None:
                outcomes[name] = Outcome(name=name, status="skipped", reason=step.refusal)
            elif left >= _LEAST_SECONDS:
                begun[name] += 1
                running.append(Running.begin(step, left, output))
    finally:
        for one in running:
            outcomes[one.step.name] = one.end(output / LOG)
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
