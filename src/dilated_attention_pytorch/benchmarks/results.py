"""Results of a run: rows with all samples and the machine's record, written atomically."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from dilated_attention_pytorch.machine import machine
from dilated_attention_pytorch.output import write_text

from .shapes import Case, Computes

FORMAT = "dilated-attention-pytorch benchmark 1"

Status = Literal["timed", "wrong", "skipped", "failed"]


@dataclass(kw_only=True, slots=True)
class Row:
    """One contestant in one case."""

    case: Case
    contestant: str
    computes: Computes
    status: Status
    """Only "timed" has a time. "wrong": failed the gate; "skipped": does not take part; "failed": raised an error."""
    reason: str = ""
    """Why there is no time."""
    errors: dict[str, float] = field(default_factory=dict)
    """Relative errors of output and gradients from the gate."""
    samples: list[float] = field(default_factory=list)
    """Seconds of every call."""
    host_samples: list[float] = field(default_factory=list)
    """Host seconds of every launch on a GPU; not included in ``samples`` if ``is_hidden``."""
    is_hidden: bool = True
    """Whether every call was launched before the device started: otherwise samples include waiting for the host."""
    preparation_seconds: float = 0.0
    """Seconds of one-time preparation per shape: block masks, filling a cache. Not included in the samples."""
    flops: int = 0
    """Operations of what it computes: of the pattern, or of dense attention."""
    peak_bytes: int | None = None
    """Peak memory of a call: operands, results and temporaries."""
    transient_bytes: int | None = None
    """Temporaries: the peak without operands and results."""

    @property
    def seconds(self) -> float:
        """Median time in seconds."""
        return statistics.median(self.samples)

    @property
    def host_seconds(self) -> float | None:
        """Median host time of a launch in seconds; None on a CPU."""
        return statistics.median(self.host_samples) if self.host_samples else None

    @property
    def spread(self) -> float:
        """Interquartile range of the samples, in seconds."""
        first, _, third = _quartiles(self.samples)
        return third - first

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable values, including the median of the samples."""
        median = {"median_seconds": self.seconds} if self.status == "timed" else {}
        return {**asdict(self), "name": self.case.name, **median}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Row:
        """The inverse of :meth:`to_dict`; fields missing in older files get their defaults."""
        known = {entry.name: values[entry.name] for entry in fields(Row) if entry.name in values}
        lists = {name: tuple(value) for name, value in known["case"].items() if isinstance(value, list)}
        return Row(**{**known, "case": Case(**{**known["case"], **lists})})


def _quartiles(samples: Sequence[float]) -> list[float]:
    return statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3


def origin(command: str) -> dict[str, Any]:
    """The machine's record and the command."""
    return {
        **machine(),
        "threads": torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "load_at_start": os.getloadavg()[0],
        "date": datetime.date.today().isoformat(),
        "command": command,
    }


def module_command() -> str:
    """The command line of this process, for a module started with ``python -m``."""
    package = "" if __package__ is None else __package__
    main = sys.modules["__main__"].__spec__
    name = package if main is None else main.name.removesuffix(".__main__")
    return shlex.join(["python", "-m", name, *sys.argv[1:]])


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Write JSON atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(values, indent=1) + "\n")
