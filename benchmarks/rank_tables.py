"""Tables of the figures of several ranks, measured and planned."""

from __future__ import annotations

from .markdown import Values, markdown


def parallel_bytes(values: Values) -> str:
    """Planned bytes that the busiest rank sends, beside a dense ring's."""
    by_case = {(one["ranks"], one["causal"]): one for one in values["planned"]}
    rows = []
    for ranks in (4, 8, 64, 256, 1024):
        one, causal = by_case[ranks, False], by_case[ranks, True]
        found = (one["ring"], causal["ring_mean"], one["dense_ring"])
        cells = (f"{count / 1e6:,.1f} MB" for count in found)
        rows.append((f"{ranks:,}", f"{8192 * ranks:,}", *cells, f"{one['dense_ring'] / one['ring']:.1f}"))
    head = ("ranks p", "rows", "ring = gather", "ring, causal, mean of the ranks", "dense ring", "dense ring / ring")
    return markdown(head, rows)


def parallel_memory(values: Values) -> str:
    """Peak memory of a rank by series and number of ranks."""
    rows = []
    for series, slope in values["slopes"].items():
        points = [one for one in values["points"] if one["series"] == series]
        alone = next(one for one in points if one["way"] == "alone")
        cells = []
        for one in points:
            if one is not alone:
                share = alone["peak_bytes"] * one["rows"] / alone["rows"] / one["ranks"]
                cells.append(f"{one['peak_bytes'] / 1e6:,.0f} MB ({one['peak_bytes'] / share:.3f})")
        rows.append((series.replace("not causal, ", ""), *cells, f"p^{slope:.2f}"))
    return markdown(("", "p = 1", "p = 2", "p = 4", "slope"), rows)


def parallel_balance(values: Values) -> str:
    """FLOPs of the busiest rank over the mean, and measured processor seconds."""
    rows: list[tuple[str, ...]] = [
        (f"{one['ranks']}", f"{one['zigzag']['imbalance']:.4f}", f"{one['contiguous']['imbalance']:.4f}")
        for one in values["planned"]
    ]
    cells = []
    for layout in ("zigzag", "contiguous"):
        one = values["measured"][layout]
        seconds = ", ".join(f"{found:.2f}" for found in one["processor_seconds"])
        cells.append(f"{one['imbalance']:.3f} ({seconds})")
    rows.append(("4, processor seconds measured, forward + backward", *cells))
    return markdown(("p", "zigzag", "contiguous"), rows)


def scale_plan(values: Values) -> str:
    """Plans of one layer on a billion tokens with contiguous rows, by ranks and strategy."""
    rows = []
    for line in values["lines"]:
        for one in sorted(line["estimates"], key=lambda one: one["strategy"], reverse=True):
            sizes = (f"{one[name] / 1e6:.1f} MB" for name in ("forward_bytes", "backward_bytes", "link_bytes"))
            messages = f"{one['messages']:,}, {one['backward_messages']:,}"
            seconds = (f"{1e3 * one[name]:.1f} ms" for name in ("compute_seconds", "seconds"))
            rows.append((f"{line['ranks']:,}", one["strategy"], *sizes, messages, f"{one['imbalance']:.4f}", *seconds))
    of_bytes = ("forward", "backward", "one link")
    head = ("ranks", "strategy", *of_bytes, "messages forward, backward", "imbalance", "computation", "both passes")
    return markdown(head, rows)


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.tables --help")
