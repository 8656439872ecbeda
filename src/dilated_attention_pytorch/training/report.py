"""A comparison page of runs: charts of their logs, differing settings, and results.

The page is made from the files of the run folders, also of unfinished runs, and is self-contained.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.html_page import COLORS, LAYOUT, MISSING, drawn, page, table
from dilated_attention_pytorch.machine import require
from dilated_attention_pytorch.output import check_new_file, write_text

from .callbacks import read_metrics
from .checkpoint import WEIGHTS_NAME
from .prolongation import describe_changes
from .record import recorded
from .stragglers import stragglers

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_REMEDY = "name the --output of a `train` or `extend` command"
_RANGES = {"free": "normal", "from 0": "tozero", "logarithmic": "normal"}


@dataclass(frozen=True, slots=True)
class Chart:
    """A logged figure over the optimizer steps."""

    name: str
    """Name in the log."""
    title: str
    unit: str
    scale: float = 1.0
    """Factor from the log's unit to the chart's."""
    held_out: str = ""
    """Name of the held-out figure drawn with it."""
    scale_of_axis: Literal["free", "from 0", "logarithmic"] = "free"


CHARTS = (
    Chart("loss", "Training loss", "nats per token"),
    Chart("bits_per_byte", "Bits per byte, training and held-out", "bits per byte", held_out="eval_bits_per_byte"),
    Chart("tokens_per_second", "Tokens a second", "tokens / s", scale_of_axis="from 0"),
    Chart("mfu", "Model FLOP utilisation", "% of the matrix-product rate", 100.0, scale_of_axis="from 0"),
    Chart("peak_memory_bytes", "Peak memory of the first process", "GB", 1e-9, scale_of_axis="from 0"),
    Chart("grad_norm", "Norm of the gradient", "before clipping", scale_of_axis="logarithmic"),
    Chart("learning_rate", "Learning rate", "of the first parameter group"),
)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run as recorded in its folder."""

    name: str
    """The folder as given."""
    command: str
    settings: Mapping[str, str]
    """Settings by name as text; those of the model start with ``model.``."""
    figures: Mapping[str, str]
    """Results, or progress."""
    entries: Sequence[Mapping[str, float]]
    """Entries of its log."""


def write_report(runs: Sequence[Path], output: Path) -> list[RecordedRun]:
    """Write the comparison page of ``runs`` to the new file ``output``; returns the recorded runs.

    Raises:
        RunError: no run is given, a folder is not a run folder, or the file exists; nothing is written.
    """
    require("the report", ("plotly",), "report")
    if not runs:
        raise RunError("report needs the folder of at least one run: dilated-attention report runs/one runs/other")
    check_new_file(output)
    recorded = [read_run(run) for run in runs]
    write_text(output, page("Training runs", _parts(recorded)))
    return recorded


def read_run(folder: Path) -> RecordedRun:
    """Read a run of `train` or `extend`, finished or not.

    Raises:
        RunError: the folder is not a run folder, or its record is damaged.
    """
    with recorded(folder, "report", _REMEDY) as record:
        entries = read_metrics(folder)
        settings = dict(_flat(record["settings"]))
        figures = dict(_figures(folder, record, entries))
    return RecordedRun(str(folder), "extend" if "kind" in record else "train", settings, figures, entries)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _figures(
    folder: Path, record: Mapping[str, Any], entries: Sequence[Mapping[str, float]]
) -> Iterator[tuple[str, str]]:
    steps = int(record["settings"]["steps"])
    done = int(max((entry["step"] for entry in entries), default=0))
    is_finished = (folder / WEIGHTS_NAME).exists()
    yield "state", "finished" if is_finished else "not finished"
    yield "steps", f"{done:,} of {steps:,}"
    yield "changes of the number of steps", "; ".join(describe_changes(record)) or MISSING
    yield "training, s", f"{max((entry['seconds'] for entry in entries), default=0.0):,.0f}"
    for name, words in (("bits_per_byte", "training"), ("eval_bits_per_byte", "held-out, on the way")):
        yield f"last bits per byte, {words}", _last(entries, name, "{:.3f}")
    result = record.get("result") or {}
    yield "bits per byte, held-out, at the end", _number(result.get("bits_per_byte"), "{:.3f}")
    yield "xz -9e on the same bytes", _number(result.get("xz_bits_per_byte"), "{:.3f}")
    yield "last quarter of the context", _number((result.get("bits_per_byte_by_quarter") or [None])[-1], "{:.3f}")
    yield "the same without what is before it", _number(result.get("last_quarter_alone"), "{:.3f}")
    for state, measured in record.get("measured", {}).items():
        for context, bits in measured["bits_per_byte"].items():
            yield f"bits per byte, {state}, reading {int(context):,} tokens", f"{bits:.3f}"
    yield "tokens a second, median", _median(entries, "tokens_per_second", "{:,.0f}")
    yield "model FLOP utilisation, median", _median(entries, "mfu", "{:.1%}")
    yield "matrix products of the machine, GFLOP/s", _last(entries, "matrix_product_flops", "{:,.0f}", 1e-9)
    yield "peak memory, GB", _last(entries, "peak_memory_bytes", "{:.2f}", 1e-9)
    slow = [f"{slow.rank} ({slow.seconds:.3g} s)" for slow in stragglers(entries)]
    yield "slow ranks, and seconds of their own a step", ", ".join(slow) or MISSING
    yield "restarts", _last(entries, "restarts", "{:.0f}")
    yield "seconds lost by restarts", _last(entries, "seconds_lost", "{:,.1f}")
    machine = record["machine"]
    yield "machine", ", ".join(machine["cuda_devices"]) or f"{machine['cores']} cores, {machine['processor']}"
    yield "torch", str(machine["versions"]["torch"])


def _values(entries: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [entry[name] for entry in entries if name in entry]


def _last(entries: Sequence[Mapping[str, float]], name: str, form: str, scale: float = 1.0) -> str:
    return _number(next((value * scale for value in reversed(_values(entries, name))), None), form)


def _median(entries: Sequence[Mapping[str, float]], name: str, form: str) -> str:
    values = _values(entries, name)
    return _number(statistics.median(values) if values else None, form)


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else form.format(value)


def _parts(runs: Sequence[RecordedRun]) -> Iterator[str]:
    yield "<h2>Figures</h2>" + _table(
        runs,
        [(name, [run.figures.get(name, MISSING) for run in runs]) for name in _names([run.figures for run in runs])],
    )
    yield "<h2>Over the steps</h2><p>Touch or point at a chart to read it.</p><main>"
    for chart in CHARTS:
        if any(chart.name in entry or chart.held_out in entry for run in runs for entry in run.entries):
            yield drawn(_figure(chart, runs), chart.name, chart.title)
    yield "</main>"
    if len(runs) > 1:
        rows = [
            (name, [run.settings.get(name, MISSING) for run in runs]) for name in _names([run.settings for run in runs])
        ]
        yield "<h2>Settings that differ</h2>"
        differing = [(name, values) for name, values in rows if len(set(values)) > 1]
        yield _table(runs, differing) if differing else "<p>None.</p>"


def _names(tables: Sequence[Mapping[str, str]]) -> list[str]:
    """Names in any of the tables that have a value in at least one, in order."""
    return [
        name
        for name in dict.fromkeys(name for table in tables for name in table)
        if any(table.get(name, MISSING) != MISSING for table in tables)
    ]


def _table(runs: Sequence[RecordedRun], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = [
        f'<i style="background:{COLORS[index % len(COLORS)]}"></i>{html.escape(run.name)}'
        f"<br><small>{run.command}</small>"
        for index, run in enumerate(runs)
    ]
    return table(head, rows)


def _figure(chart: Chart, runs: Sequence[RecordedRun]) -> Figure:
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for index, run in enumerate(runs):
        color = COLORS[index % len(COLORS)]
        for name, of_what in ((chart.name, ""), (chart.held_out, ", held-out")):
            points = [(entry["step"], entry[name] * chart.scale) for entry in run.entries if name and name in entry]
            if points:
                steps, values = zip(*points, strict=True)
                line = {"color": color, "width": 1.5, **({"dash": "dot"} if of_what else {})}
                figure.add_trace(
                    Scatter(
                        x=steps,
                        y=values,
                        name=html.escape(run.name) + of_what,
                        line=line,
                        mode="lines+markers" if of_what or len(points) < 40 else "lines",
                        marker={"size": 5},
                    )
                )
    figure.update_layout(
        **LAYOUT,
        xaxis={"title": {"text": "optimizer step"}},
        yaxis={
            "title": {"text": chart.unit},
            "hoverformat": ".4~g",
            "rangemode": _RANGES[chart.scale_of_axis],
            "type": "log" if chart.scale_of_axis == "logarithmic" else "linear",
        },
    )
    return figure
