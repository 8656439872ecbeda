"""A benchmark run: checks in advance, then case after case, with results saved after each."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import choose_device, set_threads
from dilated_attention_pytorch.memory import check_memory
from dilated_attention_pytorch.output import check_free_folder, make_output
from dilated_attention_pytorch.progress import progress_bar
from dilated_attention_pytorch.terminal import plain_console

from .clock import Clock
from .contestants import Contestant, find_contestants
from .measure import OUT_OF_TIME, Budget, DeviceLostError, measure_case
from .presets import PRESETS, planned_cases
from .report import LEGEND, print_absences, print_page, print_series
from .results import FORMAT, Row, origin, write_json
from .settings import BenchSettings
from .shapes import Case

RESULTS_NAME, PAGE_NAME = "bench.json", "page.md"
_PAGE_WIDTH = 10_000
"""Columns of the page: no cell of a table is wrapped."""
SAME_MACHINE = ("processor", "cores", "threads", "cuda_devices", "versions")
"""What a run and its resumption have in common, by the names of :func:`.origin`."""
_MAY_DIFFER = ("resume", "time_limit", "output")
"""Settings that a resumed run may change."""


@dataclass(slots=True)
class BenchOutcome:
    """Results of a run."""

    output: Path
    machine: dict[str, Any]
    settings: BenchSettings
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds of the whole run, including resumed parts."""
    is_complete: bool = False
    """Whether it finished without being cut off by the time limit."""

    def to_dict(self) -> dict[str, Any]:
        """The results so far, as JSON-serialisable values."""
        return {
            "format": FORMAT,
            "complete": self.is_complete,
            "dry_run": self.settings.dry_run,
            "seconds": self.seconds,
            "machine": self.machine,
            "settings": self.settings.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
        }

    def write(self) -> None:
        """Write the results so far."""
        write_json(self.output / RESULTS_NAME, self.to_dict())


def run(settings: BenchSettings, console: Console, command: str) -> BenchOutcome:
    """Check the settings, time every case, print the tables, write the results and the page.

    Args:
        settings: settings of the run.
        console: console for progress bar and tables.
        command: the command line, for the record.

    Raises:
        RunError: the machine or the files do not allow the settings. Nothing was timed or written.
    """
    device = torch.device(choose_device(settings.device))
    name = ("gpu" if device.type == "cuda" else "cpu") if settings.preset == "auto" else settings.preset
    preset, output = PRESETS[name], settings.output or Path(f"runs/bench-{name}")
    cases = planned_cases(settings, preset)
    if not settings.resume:
        check_free_folder(output)
    check_case_memory(list(cases), device)
    set_threads(settings.threads)
    outcome = BenchOutcome(output, origin(command), settings)
    if settings.resume:
        outcome.rows, outcome.seconds = rows_to_keep(output / RESULTS_NAME, outcome.machine, settings)
    else:
        make_output(output)
    started, before = time.monotonic(), outcome.seconds
    time_limit = _or(settings.time_limit, preset.time_limit)
    budget = Budget(
        seconds_each=0.0 if settings.dry_run else _or(settings.seconds_each, preset.seconds_each),
        call_limit=_or(settings.call_limit, preset.call_limit),
        ends_at=started + time_limit,
        is_dry=settings.dry_run,
    )
    contestants = find_contestants(settings.contestants, device)
    number = "1 case" if len(cases) == 1 else f"{len(cases)} cases"
    sentence = f"{number}; no call starts after {time_limit:.0f} s; --resume continues with what is left\n"
    console.print(sentence, soft_wrap=True)
    _time_cases(outcome, cases, contestants, Clock(device), budget, console)
    outcome.seconds = before + time.monotonic() - started
    outcome.is_complete = all(row.reason != OUT_OF_TIME for row in outcome.rows)
    outcome.write()
    _conclude(outcome, console)
    return outcome


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def rows_to_keep(file: Path, machine: Mapping[str, Any], settings: BenchSettings) -> tuple[list[Row], float]:
    """The final rows of an earlier part of this run, and its duration in seconds.

    Rows cut off by the time limit are not final; failed, wrong and skipped rows are.

    Raises:
        RunError: there is no such run, or its settings or machine differ.
    """
    remedy = "name its --output and settings, or start a new run without --resume"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"--resume: {file} cannot be read ({error}); {remedy}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise RunError(f"--resume: {file} is not written by this version of the benchmark ({FORMAT!r}); {remedy}")
    now = json.loads(json.dumps(settings.to_dict()))
    for name, value in now.items():
        if name not in _MAY_DIFFER and values["settings"].get(name) != value:
            raise RunError(
                f"--resume: the run in {file.parent} has {name}={values['settings'].get(name)!r}, this one {value!r}; "
                f"{remedy}"
            )
    for name in SAME_MACHINE:
        if values["machine"].get(name) != json.loads(json.dumps(machine[name])):
            raise RunError(
                f"--resume: the run in {file.parent} is of another machine or installation ({name} "
                f"{values['machine'].get(name)!r}, here {machine[name]!r}); start a new run without --resume"
            )
    rows = [Row.from_dict(row) for row in values["rows"] if row["reason"] != OUT_OF_TIME]
    return rows, float(values["seconds"])


def _time_cases(
    outcome: BenchOutcome,
    cases: Mapping[Case, Sequence[str]],
    contestants: Sequence[Contestant],
    clock: Clock,
    budget: Budget,
    console: Console,
) -> None:
    rates = {case.dtype: clock.product_rate(case.torch_dtype, is_dry=budget.is_dry) for case in cases}
    kept: dict[Case, list[Row]] = defaultdict(list)
    for row in outcome.rows:
        kept[row.case].append(row)
    order = list(cases)
    with progress_bar(console, "measurements") as show:
        done, total = 0, len(cases) * len(contestants) - len(outcome.rows)

        def begin(what: str) -> Callable[[], None]:
            show(what, done, total)
            return lambda: finish(what)

        def finish(what: str) -> None:
            nonlocal done
            done += 1
            show(what, done, total)

        series: list[Row] = []
        for index, case in enumerate(order):
            known = {row.contestant for row in kept[case]}
            wanted = [entry for entry in contestants if entry.name not in known]
            try:
                rows = measure_case(case, wanted, clock, rates[case.dtype], budget, begin, cases[case])
            except DeviceLostError as error:
                outcome.rows += error.rows
                outcome.write()
                raise
            outcome.rows += rows
            series += kept[case] + rows
            if rows:
                outcome.write()
            if index + 1 == len(order) or order[index + 1].series != case.series:
                print_series(series, console)
                series = []


def _conclude(outcome: BenchOutcome, console: Console) -> None:
    print_absences(outcome.rows, console)
    if any(not row.is_hidden for row in outcome.rows):
        console.print("! the device waited for the host in such a call: its time is not that of the kernels alone")
    if outcome.settings.dry_run:
        console.print("this was a dry run: everything works, and no number above means anything")
    if not outcome.is_complete:
        console.print("the time limit cut off some of it: --resume continues there")
    page = outcome.output / PAGE_NAME
    with page.open("w", encoding="utf-8") as opened:
        print_page(outcome.to_dict(), outcome.rows, plain_console(_PAGE_WIDTH, opened))
    console.print(f"\n{LEGEND}\n", soft_wrap=True)
    written = f"{outcome.output / RESULTS_NAME}, {page}"
    console.print(f"{outcome.seconds:.0f} s; written: {written}", soft_wrap=True)


def check_case_memory(cases: Sequence[Case], device: torch.device) -> None:
    """Raise :class:`RunError` if the operands and results of a case exceed free memory."""
    largest = max(cases, key=lambda case: case.held_bytes)
    check_memory(
        largest.held_bytes,
        device,
        what=f"{largest.name}",
        remedy="take fewer --sequence-lengths, a smaller --batch, or a narrower head",
    )
