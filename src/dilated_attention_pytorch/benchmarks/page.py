"""A page of a run, generated from its results file: the machine, the tables, the plots.

``python -m dilated_attention_pytorch.benchmarks.page runs/bench-gpu/bench.json`` regenerates it.
"""

from __future__ import annotations

import argparse
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.terminal import plain_console

from .plots import write_plots
from .report import duration, print_absences
from .results import Row

PAGE_NAME = "page.md"


def write_page(file: Path) -> list[Path]:
    """Draw the plots of a results file and write the page next to it; returns the written files."""
    values = json.loads(file.read_text(encoding="utf-8"))
    rows = [Row.from_dict(row) for row in values["rows"]]
    pictures = write_plots(rows, file.parent)
    page = file.parent / PAGE_NAME
    page.write_text("\n".join(_lines(values, rows, pictures)) + "\n", encoding="utf-8")
    return [*pictures, page]


def _lines(values: Mapping[str, Any], rows: Sequence[Row], pictures: Sequence[Path]) -> list[str]:
    machine = values["machine"]
    devices = machine["cuda_devices"] or f"{machine['threads']} threads of {machine['processor']}"
    lines = [
        "# Attention, timed",
        "",
        f"On {devices}, {machine['date']}: `{machine['command']}`",
        "",
        ", ".join(f"{name} {version}" for name, version in machine["versions"].items()) + ".",
        "",
    ]
    if values["dry_run"]:
        lines += ["**A dry run: no number means anything.**", ""]
    if not values["complete"]:
        lines += ["**Not complete**: `--resume` goes on with it.", ""]
    lines += [
        "Every time is of a call whose sampled rows, and gradients where they are timed, had just passed against the",
        "definition. On a GPU it is the device's own, launches hidden while it sleeps; *launch* is what the host took.",
        "*of limit*: the least time over the time, at the highest rates of operations (matrix products, dense",
        "attention) and of memory (copies, sums, of the same size) that the run measured.",
        "*all pairs* computes dense attention, which is more than the pattern.",
        "",
    ]
    for picture in pictures:
        lines += [f"![{picture.stem}]({picture.name})", ""]
    series: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.status == "timed":
            series[row.case.series].append(row)
    for name, of_series in series.items():
        lines += [
            f"## {name}",
            "",
            "| N | who | time | launch | TFLOP/s | of limit | error |",
            "|--:|---|--:|--:|--:|--:|--:|",
        ]
        for row in sorted(of_series, key=lambda row: row.case.rows):
            launch = "" if row.host_seconds is None else duration(row.host_seconds) + ("" if row.is_hidden else " !")
            who = row.contestant + (" (all pairs)" if row.computes == "dense" else "")
            rate, error = f"{row.flops / row.seconds / 1e12:.3g}", f"{max(row.errors.values()):.0e}"
            cells = (f"{row.case.rows:,}", who, duration(row.seconds), launch, rate, f"{row.of_limit:.0%}", error)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    if any(row.status != "timed" for row in rows):
        said = io.StringIO()
        print_absences(rows, plain_console(150, said))
        lines += ["## Without a time", "", "```text", said.getvalue().rstrip(), "```"]
    return lines


def main() -> None:
    """Generate the page of a results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="bench.json of a run")
    print("written:", ", ".join(map(str, write_page(parser.parse_args().file))))


if __name__ == "__main__":
    main()
