"""Comparison of two runs, with changes judged by the spread of both."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from dilated_attention_pytorch.errors import RunError

from .report import duration
from .results import FORMAT, Row, quartiles

FLOOR = 0.05
"""Relative difference below which nothing counts as changed: repeated runs on a quiet machine differ by as much."""

_MACHINE = ("processor", "cores", "threads", "cuda_devices")


class TimePair(NamedTuple):
    """An earlier run's timing of one contestant in one case."""

    samples: Sequence[float]
    """Seconds of its calls."""
    limit_seconds: float
    """Lower bound of the time at that run's machine rates."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """Results of an earlier run."""

    file: Path
    machine: dict[str, Any]
    rates: dict[str, float]
    """Matrix-product rate by dtype."""
    timings: dict[tuple[str, str], TimePair]
    """By case and contestant."""

    def check(self, machine: Mapping[str, Any], names: set[str], *, any_machine: bool) -> None:
        """Raise :class:`RunError` unless the runs have common cases and the same machine."""
        if not names & {name for name, _ in self.timings}:
            raise RunError(
                f"--compare {self.file} holds no time of any case that is about to be run; give the same --preset and "
                '--shapes as its run (they are under "settings" in it)'
            )
        different = [name for name in _MACHINE if self.machine.get(name) != machine[name]]
        if different and not any_machine:
            found = "; ".join(f"{name} {self.machine.get(name)!r} there, {machine[name]!r} here" for name in different)
            raise RunError(
                f"--compare {self.file} is of another machine ({found}): the difference would be the machines', not "
                "the code's. Compare with a run of this machine, or add --compare-any-machine to see it all the same"
            )


def read_earlier(file: Path) -> Earlier:
    """Read ``bench.json`` of an earlier run.

    Raises:
        RunError: it cannot be read, or has another format.
    """
    remedy = "name the bench.json of an earlier `dilated-attention bench`"
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise RunError(f"--compare {file} is no regular file; {remedy}")
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"--compare {file} does not exist; {remedy}") from error
    except OSError as error:
        raise RunError(f"--compare {file} cannot be read ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise RunError(f"--compare {file} is no JSON ({error}); {remedy}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise RunError(f"--compare {file} is not written by this version of the benchmark ({FORMAT!r}); {remedy}")
    if values["dry_run"]:
        raise RunError(f"--compare {file} is of a dry run, which measures nothing; {remedy}")
    timings = {
        (row["name"], row["contestant"]): TimePair(row["samples"], row["limit_seconds"])
        for row in values["rows"]
        if row["samples"]
    }
    rates: dict[str, list[float]] = {}
    for row in values["rows"]:
        if row["limits"] is not None:
            rates.setdefault(row["case"]["dtype"], []).append(row["limits"]["matrix_product_flops"])
    return Earlier(file, values["machine"], {name: statistics.median(of) for name, of in rates.items()}, timings)


@dataclass(frozen=True, slots=True)
class Move:
    """Change of one contestant's time in one case."""

    name: str
    contestant: str
    before: float
    after: float
    spread: float
    """Difference of two medians, in seconds, that is explained by their spread."""
    drift: float
    """Ratio of the machine's rates around the two measurements, at least 1."""

    @property
    def noise(self) -> float:
        """Change of the median, in seconds, explained without a code change, in the observed direction.

        The earlier time varies within its spread, and the machine's drift multiplies or divides that: it never
        explains a faster time entirely.
        """
        if self.after > self.before:
            return (self.before + self.spread) * self.drift - self.before
        return self.before - (self.before - self.spread) / self.drift

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the change exceeds the noise."""
        return abs(self.after - self.before) > self.noise

    @property
    def change(self) -> float:
        """Relative change: 0.1 is 10 % slower."""
        return self.after / self.before - 1.0


def judge_moves(before: Mapping[tuple[str, str], TimePair], rows: Sequence[Row]) -> list[Move]:
    """The changes of everything timed in both runs.

    Two medians differ beyond noise if their distance exceeds the sum of both interquartile ranges and
    :data:`FLOOR` of the earlier one, by more than the measured drift of the machine's rates explains.
    """
    moves = []
    for row in rows:
        if row.status == "timed" and row.key in before:
            samples, limit_seconds = before[row.key]
            median, (first, third) = statistics.median(samples), quartiles(samples)
            drift = row.limit_seconds / limit_seconds
            spread = max(third - first + row.spread, FLOOR * median)
            moves.append(Move(*row.key, median, row.seconds, spread, max(drift, 1.0 / drift)))
    return moves


def compare(earlier: Earlier, rows: Sequence[Row], machine: Mapping[str, Any], console: Console) -> None:
    """Print changes beyond noise, and the machine's own drift."""
    moves = judge_moves(earlier.timings, rows)
    moved = sorted((move for move in moves if move.is_beyond_noise), key=lambda move: -abs(move.change))
    table = Table(
        "case",
        "who",
        "before",
        "now",
        "change",
        "noise",
        title=f"moved since {earlier.file}",
        title_justify="left",
        caption=f"noise: both interquartile ranges together, at least {FLOOR:.0%} of the time before, and by how much "
        "the rates of the machine itself differed around the two measurements; what moved less is not listed",
        caption_justify="left",
    )
    for move in moved:
        color = "red" if move.change > 0 else "green"
        table.add_row(
            move.name,
            move.contestant,
            duration(move.before),
            duration(move.after),
            f"[{color}]{move.change:+.0%}[/]",
            f"{move.noise / move.before:.0%}",
        )
    if moved:
        console.print(table)
    console.print(
        f"compared with {earlier.file}: {len(moved)} of {len(moves)} times moved beyond noise",
        highlight=False,
        soft_wrap=True,
    )
    if any(earlier.machine.get(name) != machine[name] for name in _MACHINE):
        console.print("the two runs are of different machines: the changes are the machines' too", highlight=False)
    for dtype, rate in earlier.rates.items():
        now = [row.limits.matrix_product_flops for row in rows if row.limits is not None and row.case.dtype == dtype]
        ratio = statistics.median(now) / rate if now else 1.0
        if abs(ratio - 1.0) > FLOOR:
            console.print(
                f"the machine itself multiplies {dtype} matrices at {ratio:.0%} of its rate in the earlier run: one of "
                "the two was not quiet",
                highlight=False,
                soft_wrap=True,
            )
