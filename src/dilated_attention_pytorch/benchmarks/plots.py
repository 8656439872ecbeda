"""Plots of a run: time over rows, and fraction of the machine's limit."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from .contestants import CONTESTANTS
from .results import Row, quartiles

TIME_NAME, LIMIT_NAME = "time.png", "limit.png"
_COLORS = (
    "#d62728",
    "#1f77b4",
    "#9467bd",
    "#e377c2",
    "#ff7f0e",
    "#2ca02c",
    "#7f7f7f",
    "#17becf",
    "#8c564b",
    "#bcbd22",
    "#000000",
    "#aec7e8",
    "#ffbb78",
    "#98df8a",
    "#c5b0d5",
    "#ff9896",
    "#c49c94",
)
_MARKERS = "osD^vP*Xp<>hd8H"


def write_plots(rows: Sequence[Row], output: Path) -> list[Path]:
    """Plot the timed rows into ``output``; empty plots are skipped."""
    timed = [row for row in rows if row.status == "timed"]
    written = []
    series = _by_series(timed)
    with_growth = {name: of_name for name, of_name in series.items() if len({row.case.rows for row in of_name}) > 1}
    if with_growth:
        written.append(_draw_times(with_growth, output / TIME_NAME))
    if series:
        written.append(_draw_limits(series, output / LIMIT_NAME))
    return written


def _by_series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    series = defaultdict(list)
    for row in rows:
        series[row.case.series].append(row)
    return dict(series)


def _style(contestant: str) -> tuple[str, str]:
    """Color and marker, the same in every plot."""
    index = [entry.name for entry in CONTESTANTS].index(contestant)
    return _COLORS[index % len(_COLORS)], _MARKERS[index % len(_MARKERS)]


def _draw_times(series: dict[str, list[Row]], file: Path) -> Path:
    # Without pyplot: needs no display, and leaves no global figures.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    columns = min(3, len(series))
    lines = math.ceil(len(series) / columns)
    figure = Figure(figsize=(5.0 * columns, 3.9 * lines + 0.5), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    handles = {}
    for axes, (name, rows) in zip(grid.flat, series.items(), strict=False):
        for contestant in dict.fromkeys(row.contestant for row in rows):
            of_one = sorted((row for row in rows if row.contestant == contestant), key=lambda row: row.case.rows)
            color, marker = _style(contestant)
            medians = [row.seconds for row in of_one]
            below, above = zip(*(quartiles(row.samples) for row in of_one), strict=True)
            reach = [
                [median - low for median, low in zip(medians, below, strict=True)],
                [high - median for median, high in zip(medians, above, strict=True)],
            ]
            handles[contestant] = axes.errorbar(
                [row.case.rows for row in of_one],
                medians,
                yerr=reach,
                color=color,
                marker=marker,
                markersize=5,
                capsize=2,
            )
        sizes = sorted({row.case.rows for row in rows})
        axes.plot(
            sizes,
            [min(row.limit_seconds for row in rows if row.case.rows == size) for size in sizes],
            color="black",
            linestyle=":",
            linewidth=1,
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _seconds(value)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.set_title(textwrap.fill(name, 52), fontsize=9)
        axes.set_xlabel("rows N")
        axes.set_ylabel("time of a call")
    for axes in list(grid.flat)[len(series) :]:
        axes.set_visible(False)
    (dotted,) = grid.flat[0].plot([], [], color="black", linestyle=":", linewidth=1)
    figure.legend(
        [*handles.values(), dotted],
        [*handles, "limit of the machine for the pattern"],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.savefig(file, dpi=110)
    return file


def _seconds(value: float) -> str:
    if value >= 1.0:
        return f"{value:g} s"
    return f"{value * 1e3:g} ms" if value >= 1e-3 else f"{value * 1e6:g} µs"


def _draw_limits(series: dict[str, list[Row]], file: Path) -> Path:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # The largest timed size of every contestant; smaller sizes are in the table.
    bars: list[tuple[str, list[Row]]] = []
    for name, rows in series.items():
        largest = max(row.case.rows for row in rows)
        bars.append((f"{name}, N={largest:,}", [row for row in rows if row.case.rows == largest]))
    height = sum(len(rows) for _, rows in bars) + len(bars)
    figure = Figure(figsize=(10.5, 0.24 * height + 1.3), layout="constrained")
    axes = figure.subplots()
    position, ticks, used = 0.0, [], dict[str, str]()
    for name, rows in bars:
        middle = position + (len(rows) - 1) / 2
        ticks.append((middle, textwrap.fill(name, 62)))
        for row in rows:
            who = row.contestant + (" (all pairs)" if row.computes == "dense" else "")
            used[who] = _style(row.contestant)[0]
            axes.barh(position, row.of_limit, height=0.85, color=used[who])
            axes.text(row.of_limit, position, f" {row.of_limit:.0%}", va="center", fontsize=7)
            position += 1
        position += 1
    axes.set_yticks([tick for tick, _ in ticks], [label for _, label in ticks], fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.axvline(1.0, color="black", linestyle=":", linewidth=1)
    axes.set_xlim(0, max(1.1, 1.1 * max(row.of_limit for _, rows in bars for row in rows)))
    axes.set_xlabel(
        "least time at the rates of this machine / time: 1 is a matrix product (or a copy, where that is longer)"
    )
    figure.legend(
        [Patch(color=color) for color in used.values()],
        list(used),
        loc="outside upper center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    axes.grid(visible=True, axis="x", alpha=0.3)
    figure.savefig(file, dpi=110)
    return file
