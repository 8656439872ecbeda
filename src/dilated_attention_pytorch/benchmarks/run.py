"""A benchmark run: checks in advance, then case after case, with results saved after each."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import processor, require, set_threads
from dilated_attention_pytorch.memory import check_memory
from dilated_attention_pytorch.output import check_free_folder, make_output

from .clock import Clock
from .compare import Earlier, compare, read_earlier
from .contestants import Contestant, find_contestants
from .limits import Probe, limit_by_highest
from .measure import OUT_OF_TIME, Budget, DeviceLostError, measure_case
from .page import write_page
from .presets import PRESETS, planned_cases
from .report import print_report, print_series
from .results import FORMAT, Row, origin, write_json
from .resumption import rows_to_keep
from .schedule import print_schedule, schedule
from .settings import BenchSettings, Device
from .shapes import Case

RESULTS_NAME = "bench.json"


@dataclass(slots=True)
class Outcome:
    """Results of a run."""

    output: Path
    machine: dict[str, Any]
    settings: BenchSettings
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds of the whole run, including resumed parts."""
    is_complete: bool = False
    """Whether it finished without being cut off by the time limit."""

    def write(self) -> None:
        """Write the results so far."""
        write_json(
            self.output / RESULTS_NAME,
            {
                "format": FORMAT,
                "complete": self.is_complete,
                "dry_run": self.settings.dry_run,
                "seconds": self.seconds,
                "machine": self.machine,
                "settings": self.settings.to_dict(),
                "rows": [row.to_dict() for row in self.rows],
            },
        )


def run(settings: BenchSettings, console: Console, command: str) -> Outcome:
    """Check the settings, time every case, print the tables, write results and plots.

    Args:
        settings: settings of the run.
        console: console for progress bar and tables.
        command: the command line, for the record.

    Raises:
        RunError: the machine or the files do not allow the settings. Nothing was timed or written.
    """
    require("the benchmark", ("matplotlib",), "bench")
    device = choose_device(settings.device)
    name = ("gpu" if device.type == "cuda" else "cpu") if settings.preset == "auto" else settings.preset
    preset, output = PRESETS[name], settings.output or Path(f"runs/bench-{name}")
    cases = planned_cases(settings, preset)
    if not settings.resume:
        check_free_folder(output)
    check_case_memory(list(cases), device)
    set_threads(settings.threads)
    outcome = Outcome(output, origin(command), settings)
    if settings.resume:
        outcome.rows, outcome.seconds = rows_to_keep(output / RESULTS_NAME, outcome.machine, settings)
    earlier = None
    if settings.compare is not None:
        earlier = read_earlier(settings.compare)
        earlier.check(outcome.machine, {case.name for case in cases}, any_machine=settings.compare_any_machine)
    if not settings.resume:
        make_output(output)
    started, before = time.monotonic(), outcome.seconds
    time_limit = _or(settings.time_limit, preset.time_limit)
    budget = Budget(
        seconds_each=0.0 if settings.dry_run else _or(settings.seconds_each, preset.seconds_each),
        call_limit=_or(settings.call_limit, preset.call_limit),
        ends_at=started + time_limit,
        is_dry=settings.dry_run,
    )
    clock = Clock(device)
    kept = {row.key for row in outcome.rows}
    left = {case: (*without, *(who for name, who in kept if name == case.name)) for case, without in cases.items()}
    contestants = find_contestants(settings.contestants, device)
    probes: dict[str, Probe] = {case.dtype: Probe(clock, case.torch_dtype, is_dry=budget.is_dry) for case in cases}
    rates = {dtype: probe.at_first for dtype, probe in probes.items()}
    print_schedule(schedule(left, contestants, rates, budget, device), time_limit, console)
    _time_cases(outcome, cases, contestants, clock, probes, budget, console)
    outcome.seconds = before + time.monotonic() - started
    outcome.is_complete = all(row.reason != OUT_OF_TIME for row in outcome.rows)
    outcome.write()
    _conclude(outcome, earlier, device, console)
    return outcome


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _time_cases(
    outcome: Outcome,
    cases: Mapping[Case, Sequence[str]],
    contestants: Sequence[Contestant],
    clock: Clock,
    probes: Mapping[str, Probe],
    budget: Budget,
    console: Console,
) -> None:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    kept: dict[Case, list[Row]] = defaultdict(list)
    for row in outcome.rows:
        kept[row.case].append(row)
    order = list(cases)
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(cases) * len(contestants) - len(outcome.rows))

        def begin(what: str) -> Callable[[], None]:
            progress.update(bar, description=what)
            return lambda: progress.advance(bar)

        series: list[Row] = []
        for index, case in enumerate(order):
            known = {row.contestant for row in kept[case]}
            wanted = [entry for entry in contestants if entry.name not in known]
            try:
                rows = measure_case(case, wanted, clock, probes[case.dtype], budget, begin, cases[case])
            except DeviceLostError as error:
                outcome.rows += error.rows
                outcome.write()
                raise
            outcome.rows += rows
            limit_by_highest(outcome.rows)
            series += kept[case] + rows
            if rows:
                outcome.write()
            if index + 1 == len(order) or order[index + 1].series != case.series:
                print_series(series, console)
                series = []


def _conclude(outcome: Outcome, earlier: Earlier | None, device: torch.device, console: Console) -> None:
    print_report(outcome.rows, console, device=describe(device), is_dry=outcome.settings.dry_run)
    if earlier is not None:
        compare(earlier, outcome.rows, outcome.machine, console)
    results = outcome.output / RESULTS_NAME
    written = [results, *write_page(results)]
    if not outcome.is_complete:
        console.print("the time limit cut off some of it: --resume goes on there", highlight=False)
    console.print(f"{outcome.seconds:.0f} s; written: {', '.join(map(str, written))}", highlight=False, soft_wrap=True)


def describe(device: torch.device) -> str:
    """Description of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads of {processor()}"


def check_case_memory(cases: Sequence[Case], device: torch.device) -> None:
    """Raise :class:`RunError` if the operands and results of a case exceed free memory."""
    largest = max(cases, key=lambda case: case.held_bytes)
    check_memory(
        largest.held_bytes,
        device,
        what=f"{largest.name}",
        remedy="take fewer --rows, a smaller --batch, or a narrower head",
    )


def choose_device(device: Device) -> torch.device:
    """The device to compute on.

    Raises:
        RunError: the requested device is not available.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise RunError(
            "--device cuda: PyTorch finds no CUDA device here; use --device cpu, or install a PyTorch built for CUDA "
            "and its driver (`dilated-attention info` shows what is there)"
        )
    return torch.device("cuda" if available and device != "cpu" else "cpu")
