"""The report of a run in Markdown: printed while it runs, and written beside its results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .results import Row

HEAD = """# Attention, timed

On {device}, {date}: `{command}`

{versions}.
{notes}
{legend}
"""
LEGEND = """\
Every time is the median of calls whose sampled rows, and gradients where they are timed, had just been compared with
the definition; *error* is the largest relative error there. *spread* is the interquartile range over the median. On a
GPU the time is the device's own: it sleeps until the call has been launched; *launch* is the time on the host, with !
where the device waited for it. *published route* is the algorithm of the authors' code, a call of dense attention per
group and a merge; *all pairs* computes dense attention, more than the pattern. *relative time* is the time over that
of our fastest implementation; *peak* memory has operands and results; *extra memory / q* is temporary memory over
that of the query."""
_COLUMNS = (
    "N",
    "implementation",
    "time",
    "spread",
    "launch",
    "relative time",
    "GFLOP/s",
    "extra memory / q",
    "peak MB",
    "error",
)


def print_page(values: Mapping[str, Any], rows: Sequence[Row], console: Console) -> None:
    """Print the whole report of a results file."""
    machine, notes = values["machine"], []
    if values["dry_run"]:
        notes.append("**A dry run: no number means anything.**")
    if not values["complete"]:
        notes.append("**Not complete**: `--resume` continues it.")
    text = HEAD.format(
        device=", ".join(machine["cuda_devices"]) or f"{machine['threads']} threads of {machine['processor']}",
        date=machine["date"],
        command=machine["command"],
        versions=", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        notes="".join(f"\n{note}\n" for note in notes),
        legend=LEGEND,
    )
    console.print(text)
    by_series: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_series[row.case.series].append(row)
    for one in by_series.values():
        print_series(one, console)
    print_absences(rows, console)


def print_series(rows: Sequence[Row], console: Console) -> None:
    """Print the table of one series, followed by those that were wrong or failed."""
    table = Table(*_COLUMNS, box=box.MARKDOWN)
    for row in sorted(rows, key=lambda row: row.case.rows):
        if row.status == "timed":
            ours = [one.seconds for one in rows if one.case == row.case and _is_ours(one)]
            table.add_row(
                f"{row.case.rows:,}",
                row.contestant + (" (all pairs)" if row.computes == "dense" else ""),
                duration(row.seconds),
                f"{row.spread / row.seconds:.0%}",
                "" if row.host_seconds is None else duration(row.host_seconds) + ("" if row.is_hidden else " !"),
                f"{row.seconds / min(ours):.2f}" if ours else "",
                f"{row.flops / row.seconds / 1e9:,.0f}",
                _transient(row),
                "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:,.0f}",
                f"{max(row.errors.values()):.0e}",
            )
    console.print(f"## {rows[0].case.series}", soft_wrap=True)
    if table.row_count:
        console.print(table)
    for row in rows:
        if row.status in ("wrong", "failed"):
            sentence = f"{row.contestant}, N = {row.case.rows:,}: {row.status}: {row.reason}"
            console.print(sentence, style="red", soft_wrap=True)


def print_absences(rows: Sequence[Row], console: Console) -> None:
    """Print missing times with reasons; reasons common to several cases are printed once."""
    cases: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row.status != "timed":
            where = f"{row.case.shape} {row.case.mode}, N={row.case.rows:,}"
            cases[row.contestant, row.status, row.reason].append(where)
    if not cases:
        return
    console.print("## Without a time\n")
    for (contestant, status, reason), names in sorted(cases.items()):
        where = f"{len(names)} cases" if len(names) > 3 else "; ".join(dict.fromkeys(names))
        console.print(f"- {contestant} ({where}): {status}: {reason}", soft_wrap=True)


def _is_ours(row: Row) -> bool:
    return row.status == "timed" and row.contestant.startswith("ours")


def _transient(row: Row) -> str:
    case = row.case
    # Relative to the single query of a decoding step everything is large.
    if row.transient_bytes is None or case.mode == "decode":
        return ""
    query = case.batch * case.num_queries * case.heads * case.head_dim * case.torch_dtype.itemsize
    return f"{row.transient_bytes / query:.2f}"


def duration(seconds: float) -> str:
    """Format a time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1e} s"
