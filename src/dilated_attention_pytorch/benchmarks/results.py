"""What a run leaves behind: rows with every sample, the machine they came from, written whole or not at all."""

from __future__ import annotations

import datetime
import json
import math
import os
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from dilated_attention_pytorch.machine import machine
from dilated_attention_pytorch.output import write_text

from .limits import Limits
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
    """Only "timed" has a time. "wrong": the gate found errors; "skipped": takes no part; "failed": it raised."""
    reason: str = ""
    """Why there is no time."""
    errors: dict[str, float] = field(default_factory=dict)
    """Relative errors that the gate found, of output and gradients."""
    samples: list[float] = field(default_factory=list)
    """Seconds of every call."""
    host_samples: list[float] = field(default_factory=list)
    """Seconds that the host took to launch every call on a GPU; a sample leaves them out where ``is_hidden``."""
    is_hidden: bool = True
    """Whether every call was launched before the device began with it: else the samples hold waits for the host."""
    preparation_seconds: float = 0.0
    """What is done once for the shape: block masks, filling a cache. Not part of the samples."""
    limits: Limits | None = None
    """Rates of the machine, measured between the calls."""
    limit_seconds: float = 0.0
    """The least time of what it computes, at these rates."""
    flops: int = 0
    """Operations of what it computes: of the pattern, or of attention of all to all."""
    peak_bytes: int | None = None
    """Memory at the peak of a call: operands, results and everything between."""
    transient_bytes: int | None = None
    """The part of it that is neither operands nor results."""

    @property
    def seconds(self) -> float:
        """The median time."""
        return statistics.median(self.samples)

    @property
    def host_seconds(self) -> float | None:
        """The median time of a launch; None where the host computes."""
        return statistics.median(self.host_samples) if self.host_samples else None

    @property
    def spread(self) -> float:
        """The interquartile range of the samples, in seconds."""
        first, third = quartiles(self.samples)
        return third - first

    @property
    def of_limit(self) -> float:
        """The least time over the median time: 1 is what the machine can do."""
        return self.limit_seconds / self.seconds

    @property
    def key(self) -> tuple[str, str]:
        """The same for the same contestant in the same case of another run."""
        return self.case.name, self.contestant

    def to_dict(self) -> dict[str, Any]:
        """As values that JSON holds, with what readers of the file would compute from the samples."""
        values = {**asdict(self), "name": self.case.name}
        if self.status == "timed":
            values |= {
                "median_seconds": self.seconds, "interquartile_seconds": self.spread, "of_limit": self.of_limit,
                "flops_per_second": self.flops / self.seconds, "host_seconds": self.host_seconds,
            }  # fmt: skip
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Row:
        """What :meth:`to_dict` made; what an older file does not have is as by default."""
        known = {entry.name: values[entry.name] for entry in fields(Row) if entry.name in values}
        lists = {name: tuple(value) for name, value in known["case"].items() if isinstance(value, list)}
        limits = known["limits"]
        return Row(**{
            **known, "case": Case(**{**known["case"], **lists}), "limits": None if limits is None else Limits(**limits),
        })  # fmt: skip


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    if len(samples) == 1:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


def growth(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """For every series and contestant with two sizes or more: x of ``time ~ rows ** x``, by least squares."""
    points = defaultdict(list)
    for row in rows:
        if row.status == "timed":
            points[row.case.series, row.contestant].append((math.log(row.case.rows), math.log(row.seconds)))
    return {
        key: statistics.linear_regression(*zip(*of_key, strict=True)).slope
        for key, of_key in points.items()
        if len({rows for rows, _ in of_key}) > 1
    }


def origin(command: str) -> dict[str, Any]:
    """The machine with its state, and the command."""
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
    """The command line of this process, for a module that was started with ``python -m``."""
    package = "" if __package__ is None else __package__
    main = sys.modules["__main__"].__spec__
    name = package if main is None else main.name.removesuffix(".__main__")
    return shlex.join(["python", "-m", name, *sys.argv[1:]])


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Write JSON whole or not at all: a reader, or a stop in the middle, never meets half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(values, indent=1) + "\n")
