"""Picture of the study of several ranks: bytes over ranks, memory over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(results: dict[str, Any], file: Path) -> None:
    """Plot planned bytes sent per rank (left) and measured peak memory per rank (right)."""
    # Without pyplot: needs no display, and leaves no global figures.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    planned = results["traffic"]["planned"]
    whole, causal = ([line for line in planned if line["causal"] is masked] for masked in (False, True))
    ranks = [line["ranks"] for line in whole]
    # If segments end at shard boundaries, gather and ring move the same rows without a mask.
    for label, lines, name, style in (
        ("dense ring", whole, "dense_ring", "k^-"),
        ("gather", whole, "gather", "C0s-"),
        ("ring", whole, "ring", "C3o--"),
        ("ring, causal, mean over ranks", causal, "ring_mean", "C1D-"),
    ):
        points = [(line["ranks"], line[name]) for line in lines if line[name]]
        left.plot(*zip(*points, strict=True), style, label=label, markersize=5)
    left.set_title(
        "sent by a rank, forward, bfloat16\n8,192 rows of every rank, the paper's pattern continued", fontsize=10
    )
    left.set_ylabel("bytes")
    left.set_yscale("log")

    points = results["memory"]["points"]
    shown = sorted({point["ranks"] for point in points})
    for number, series in enumerate(dict.fromkeys(point["series"] for point in points)):
        of_series = [point for point in points if point["series"] == series]
        ring = [(point["ranks"], point["peak_bytes"] / 1e6) for point in of_series if point["way"] == "ring"]
        (alone,) = (point["peak_bytes"] / 1e6 for point in of_series if point["way"] == "alone")
        right.plot(*zip(*ring, strict=True), f"C{number}o-", label=series, markersize=5)
        is_growing = len({point["rows"] for point in of_series}) > 1
        right.plot(shown, [alone if is_growing else alone / ranks for ranks in shown], f"C{number}:")
    right.plot([], [], "k:", label="one process: with as many rows as a rank, or 1/p")
    right.set_title(
        "peak memory of a rank, forward and backward, float32\nall operands and gradients included", fontsize=10
    )
    right.set_ylabel("MB")
    right.set_yscale("log")
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    right.set_yticks([100, 200, 300, 500, 700, 1000])
    right.set_ylim(100, 1400)
    left.legend(fontsize=8, frameon=False)
    right.legend(fontsize=8, frameon=False, loc="lower left")
    for axes, ticks in ((left, ranks), (right, shown)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("ranks p")
        axes.grid(visible=True, which="major", alpha=0.3)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.parallel --help")
