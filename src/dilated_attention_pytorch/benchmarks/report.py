"""The printed report of a run: tables per series, missing times, growth, limits."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .limits import Limits
from .results import Row, growth

_DRIFT = 0.1
"""Relative difference between cases' matrix-product rates above which the report warns."""


def print_series(rows: Sequence[Row], console: Console) -> None:
    """Print the table of one series, followed by missing times and reasons."""
    table = Table(title=rows[0].case.series, title_justify="left")
    for name, justify in (
        ("N", "right"),
        ("who", "left"),
        ("time", "right"),
        ("spread", "right"),
        ("launch", "right"),
        ("x ours", "right"),
        ("GFLOP/s", "right"),
        ("of limit", "right"),
        ("transient / q", "right"),
        ("peak MB", "right"),
        ("error", "right"),
    ):
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    before: int | None = None
    for row in rows:
        if row.status != "timed":
            continue
        if before is not None and row.case.rows != before:
            table.add_section()
        ours = [other.seconds for other in rows if other.case == row.case and _is_ours(other)]
        table.add_row(
            f"{row.case.rows:,}" if row.case.rows != before else "",
            row.contestant + (" (all pairs)" if row.computes == "dense" else ""),
            duration(row.seconds),
            f"{row.spread / row.seconds:.0%}",
            _launch(row),
            f"{row.seconds / min(ours):.2f}" if ours else "",
            f"{row.flops / row.seconds / 1e9:,.0f}",
            f"{row.of_limit:.0%}",
            _transient(row),
            "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:,.0f}",
            f"{max(row.errors.values()):.0e}",
        )
        before = row.case.rows
    if table.row_count:
        console.print(table)
    else:
        console.print(rows[0].case.series, highlight=False)
    for row in rows:
        if row.status in ("wrong", "failed"):
            sentence = f"  {row.contestant}, N = {row.case.rows:,}: {row.status}: {row.reason}"
            console.print(sentence, style="red", highlight=False, soft_wrap=True)


def print_absences(rows: Sequence[Row], console: Console) -> None:
    """Print missing times with reasons; reasons common to several cases are printed once."""
    cases: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row.status != "timed":
            where = f"{row.case.shape} {row.case.mode}, N={row.case.rows:,}"
            cases[row.contestant, row.status, row.reason].append(where)
    table = Table(title="without a time", title_justify="left")
    for name in ("who", "where", "why"):
        table.add_column(name, ratio={"who": 2, "where": 3, "why": 6}[name])
    for (contestant, status, reason), names in sorted(cases.items()):
        where = f"{len(names)} cases" if len(names) > 3 else "\n".join(dict.fromkeys(names))
        table.add_row(contestant, where, f"{status}: {reason}")
    if cases:
        console.print(table)


def _is_ours(row: Row) -> bool:
    return row.status == "timed" and row.contestant.startswith("ours")


def _launch(row: Row) -> str:
    """Host time of a launch on a GPU, marked if the time next to it includes waiting for it."""
    if row.host_seconds is None:
        return ""
    return duration(row.host_seconds) + ("" if row.is_hidden else " !")


def _transient(row: Row) -> str:
    if row.transient_bytes is None:
        return ""
    case = row.case
    query = case.batch * case.num_queries * case.heads * case.head_dim * case.torch_dtype.itemsize
    # Relative to the single query of a decoding step everything is large.
    return "" if case.mode == "decode" else f"{row.transient_bytes / query:.2f}"


def duration(seconds: float) -> str:
    """Format a time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1e} s"


def print_report(rows: Sequence[Row], console: Console, *, device: str, is_dry: bool) -> None:
    """Print missing times, growth exponents and machine limits."""
    print_absences(rows, console)
    exponents = {} if is_dry else growth(rows)
    if exponents:
        table = Table("series", "who", "x", title="growth: time ~ N ** x", title_justify="left")
        before = ""
        for (series, contestant), exponent in exponents.items():
            table.add_row(series if series != before else "", contestant, f"{exponent:.2f}")
            before = series
        console.print(table)
    print_limits(rows, device, console, is_dry=is_dry)
    if any(not row.is_hidden for row in rows):
        console.print("! the device waited for the host in such a call: its time is not that of the kernels alone")
    if is_dry:
        console.print("this was a dry run: everything works, and no number above means anything", highlight=False)


def print_limits(rows: Sequence[Row], device: str, console: Console, *, is_dry: bool) -> None:
    """Print the machine's rates by dtype, measured between the calls of every case, and their variation."""
    by_dtype: dict[str, dict[str, Limits]] = defaultdict(dict)
    for row in rows:
        if row.limits is not None:
            by_dtype[row.case.dtype][row.case.name] = row.limits
    table = Table(
        "dtype",
        "operations, GFLOP/s",
        "memory, GB/s",
        title="limits: highest rates measured around a case, median (lowest to highest case)",
        title_justify="left",
    )
    restless = []
    for dtype, limits in by_dtype.items():
        products = [entry.matrix_product_flops / 1e9 for entry in limits.values()]
        copies = [entry.copy_bytes / 1e9 for entry in limits.values()]
        table.add_row(dtype, _median_and_range(products), _median_and_range(copies))
        if max(products) > (1 + _DRIFT) * min(products) and not is_dry:
            restless.append(dtype)
    if table.row_count:
        console.print(table)
    console.print(f"on {device}", highlight=False, soft_wrap=True)
    if restless:
        console.print(
            f"the machine was not quiet, or changed its clock: its rate in {', '.join(restless)} wandered by more than "
            f"{_DRIFT:.0%} between cases; run again before a time is quoted",
            highlight=False,
            soft_wrap=True,
        )


def _median_and_range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"
