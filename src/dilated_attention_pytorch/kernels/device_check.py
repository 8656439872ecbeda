"""Whether the Triton kernels are right on a device: checked once per machine, in a process of its own, and kept.

Compilers have miscompiled attention, and these kernels ran on few devices. So ``impl="auto"`` takes them where
:mod:`.triton.check` found them right. A process of its own keeps a kernel that breaks the device, hangs or changes a
global state away from the user's, and may start in any state of it: while a graph is traced or captured.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dilated_attention_pytorch.tracing import constant_of_graph

from .compilation import may_pass
from .once_per_machine import file_of, keep, once_per_machine, read_kept
from .triton.target import ptxas_version, target_of

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDTHS = (64, 128, 256)
"""Widths of heads that have configurations of their own, which narrower heads share."""
_PROGRAM = ("-m", f"{__package__}.triton.check")
_SECONDS = 300.0
"""Time limit of a check, most of which compiles kernels, and a little less than that of waiting for another process."""
_ENDING_SECONDS = 10.0
"""How long to wait for the end of a killed process: a driver may hold it."""
_DRIVER = Path("/proc/driver/nvidia/version")
_FROM_OUTSIDE = ("SIGINT", "SIGTERM", "SIGKILL")
_EXCEPTION = re.compile(r"[\w.]+: ")
_SHOWN = 300
"""Number of characters of an error to show."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a check is of."""

    device: torch.device
    dtype: torch.dtype
    width: int
    """Of heads: 64, 128 or 256."""

    @property
    def machine(self) -> dict[str, str]:
        """See :func:`machine_of`."""
        return machine_of(self.device)

    @property
    def dtype_name(self) -> str:
        """The dtype without its module."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def file(self) -> Path | None:
        """The file of the kept check."""
        return file_of("check-triton", *self.machine.values(), self.dtype_name, str(self.width))

    def describe(self) -> str:
        """The device, the dtype and the width."""
        return f"{self.machine['device']} in {self.dtype_name} with heads up to {self.width} wide"


class ComputedCall(NamedTuple):
    """A call of the check that was computed to its end."""

    name: str
    found: str
    """Its largest errors, and what rounding explains."""
    passes: bool


class DeviceCheck(NamedTuple):
    """What a check found."""

    machine: dict[str, str]
    calls: list[ComputedCall]
    problem: str
    """What is wrong; empty if the kernels are right."""
    is_kept: bool
    """Whether the verdict holds for other processes: not if the check could not start, was stopped from outside, or
    failed for a reason that may pass."""

    def describe(self) -> str:
        """What is wrong, or that nothing is."""
        return self.problem or "right"


def subjects(device: torch.device) -> list[Subject]:
    """All that can be checked on a device; Triton's interpreter compiles nothing, so that there one width is enough."""
    widths = _WIDTHS if device.type == "cuda" else _WIDTHS[:1]
    return [Subject(device, dtype, width) for dtype in _DTYPES for width in widths]


def trusts_triton(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the Triton kernels were seen to be right on a device; checks them if nothing is kept.

    The first time in a process that they were not, it warns.
    """
    return _is_right(device, dtype, 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256)


@constant_of_graph
def _is_right(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    return not _checked(Subject(device, dtype, width)).problem


@functools.cache
def _checked(subject: Subject) -> DeviceCheck:
    def find() -> DeviceCheck:
        print(
            f"dilated-attention: checking its Triton kernels on {subject.describe()}, once; this compiles them",
            file=sys.stderr,
            flush=True,
        )
        return run_check(subject)

    check = once_per_machine(
        subject.file,
        find,
        decode=lambda kept: _decode(kept, subject.machine),
        encode=_encode,
        waiting_seconds=1.1 * _SECONDS,
    )
    if check.problem:
        _warn(
            f'impl="auto" computes by PyTorch\'s kernels (impl="aten") on {subject.describe()}, since the check of the '
            f'Triton kernels failed: {check.problem}. impl="triton" takes them all the same; `dilated-attention info '
            "--check` checks again and prints a record for a report"
        )
    return check


def kept_check(subject: Subject) -> DeviceCheck | None:
    """The check that is kept; None if there is none."""
    return read_kept(subject.file, lambda kept: _decode(kept, subject.machine))


def check_again(subject: Subject) -> DeviceCheck:
    """Check whatever is kept, and keep the verdict."""
    check = run_check(subject)
    keep(subject.file, _encode(check))
    return check


_said: list[str] = []


def _warn(sentence: str) -> None:
    """Warn once per process."""
    if not _said:
        _said.append(sentence)
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)


@functools.cache
def machine_of(device: torch.device) -> dict[str, str]:
    """Everything that determines the compiled kernels; a CPU is the device of Triton's interpreter."""
    import triton

    name, capability, driver = "the CPU, in Triton's interpreter", "none", "none"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, capability = properties.name, f"{properties.major}.{properties.minor}"
        driver = _DRIVER.read_text().partition("\n")[0].strip() if _DRIVER.exists() else "unknown"
    sources = hashlib.blake2b(digest_size=8)
    for source in sorted((Path(__file__).parent / "triton").glob("*.py")):
        sources.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return {
        "device": name,
        "compute capability": capability,
        "driver": driver,
        "PyTorch": str(torch.__version__),
        "Triton": triton.__version__,
        "ptxas": _assembler(target_of(device)),
        "kernels": sources.hexdigest(),
    }


def _assembler(target: str) -> str:
    if not target.startswith("sm_"):
        return "none"  # of AMD GPUs it is a part of Triton
    try:
        return "{}.{}".format(*ptxas_version(target))
    except RuntimeError as error:  # the check will say that nothing compiles
        return str(error)


def _encode(check: DeviceCheck) -> dict[str, Any] | None:
    return {**check._asdict(), "calls": [call._asdict() for call in check.calls]} if check.is_kept else None


def _decode(kept: Any, machine: dict[str, str]) -> DeviceCheck | None:
    calls = [ComputedCall(str(call["name"]), str(call["found"]), bool(call["passes"])) for call in kept["calls"]]
    is_whole = kept["machine"] == machine and isinstance(kept["problem"], str)
    # A right verdict has calls, and all of them pass.
    is_whole = is_whole and (bool(kept["problem"]) or (bool(calls) and all(call.passes for call in calls)))
    return DeviceCheck(machine, calls, kept["problem"], is_kept=True) if is_whole else None


def run_check(subject: Subject) -> DeviceCheck:
    """Run the program of the check and judge what it printed."""
    machine = subject.machine
    words = str(subject.device), subject.dtype_name, str(subject.width)
    command = [sys.executable, "-P", "-W", "ignore", *_PROGRAM, *words]
    # The import paths of this process, whatever the program that it runs has made of them.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )
    except OSError as error:
        return DeviceCheck(machine, [], f"{sys.executable} does not start: {error.strerror}", is_kept=False)
    said, complained, is_late = _output(process)
    return _judged(machine, said, complained, process.returncode, is_late=is_late)


def _output(process: subprocess.Popen[str]) -> tuple[str, str, bool]:
    """Standard output and error of the process, which is killed at the time limit, and whether it was."""
    try:
        return *process.communicate(timeout=_SECONDS), False
    except subprocess.TimeoutExpired as late:
        captured = late.stdout, late.stderr  # bytes, or None for nothing
        os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it started
        with contextlib.suppress(subprocess.TimeoutExpired):
            return *process.communicate(timeout=_ENDING_SECONDS), True
        out, error = (text.decode(errors="replace") if isinstance(text, bytes) else "" for text in captured)
        return out, error, True
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _judged(machine: dict[str, str], out: str, error: str, code: int | None, *, is_late: bool) -> DeviceCheck:
    lines = _lines_of_json(out)
    machines = [line["machine"] for line in lines if "machine" in line]
    calls = [ComputedCall(line["call"], line["found"], line["passes"]) for line in lines if "found" in line]
    wrong = next((call for call in calls if not call.passes), None)
    begun = next((f"call {line['call']!r}" for line in reversed(lines) if "call" in line), "the first call")
    end, may_change = _end(error, code, is_late=is_late)
    problem, is_kept = f"{begun} {end}", not may_change
    if machines != [machine]:
        problem, is_kept = f"it could not start: {f'it ran on {machines[0]}' if machines else f'it {end}'}", False
    elif wrong is not None:
        problem, is_kept = f"call {wrong.name!r}: {wrong.found}", True
    elif {"complete": True} in lines and code == 0:
        problem, is_kept = "", True
    return DeviceCheck(machine, calls, problem, is_kept)


def _end(error: str, code: int | None, *, is_late: bool) -> tuple[str, bool]:
    """How the program ended, and whether another attempt may end otherwise."""
    if is_late:
        return f"was not done after {_SECONDS:.0f} s", False
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"was ended by {name}", name in _FROM_OUTSIDE
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [f"exit code {code}"]
    # Messages of PyTorch and Triton go on after their first line.
    reason = next(filter(_EXCEPTION.match, reversed(lines)), lines[-1])
    return f"failed: {reason[:_SHOWN]}", may_pass(reason)


def _lines_of_json(text: str) -> list[dict[str, Any]]:
    """What the check printed, among what compilers did."""
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict)]
