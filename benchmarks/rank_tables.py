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


def parallel_overlap(values: Values) -> str:
    """Seconds of the ring with delayed messages."""
    rows = []
    for one in values["lines"]:
        mode = one["pass"].replace("_", " + ")
        delay = f"{one['messages']} x {1e3 * one['delay']:.0f} ms"
        seconds = [f"{one[name]:.2f} s" for name in ("compute", "communication", "ring")]
        ratios = (f"{one['ratio']:.2f}", f"{one['limit']:.2f} s", f"{one['awaited_ratio']:.2f}")
        rows.append((str(one["ranks"]), mode, delay, *seconds, *ratios))
    head = ("p", "pass", "delay", "computation", "communication", "ring", "/ longer", "limit", "awaited, / longer")
    return markdown(head, rows)


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
    """The ring that is planned for one layer on a billion tokens, by ranks and layout."""
    rows = []
    for line in values["lines"]:
        for one in line["estimates"]:
            if one["strategy"] == "ring":
                found = (one["forward_bytes"], one["backward_bytes"], one["link_bytes"])
                cells = (*(f"{count / 1e6:.1f} MB" for count in found), f"{one['messages']:,}")
                dense = f"{one['dense_ring_bytes'] / 1e12:.2f} TB"
                rows.append((f"{line['ranks']:,}", one["layout"], *cells, f"{one['imbalance']:.4f}", dense))
    head = ("ranks", "layout", "forward", "backward", "one link", "messages forward", "imbalance", "dense ring")
    return markdown(head, rows)


def scale_planning(values: Values) -> str:
    """What planning for many ranks takes."""
    rows = []
    for one in values["lines"]:
        seconds = (f"{one[name]:.2f} s" for name in ("processor_seconds", "seconds"))
        peaks = (one["peak_bytes"] - one["peak_bytes_before"], one["peak_bytes"])
        rows.append((f"{one['ranks']:,}", *seconds, *(f"{peak / 1e6:.0f} MB" for peak in peaks)))
    return markdown(("ranks", "processor time", "seconds", "memory beyond the imports", "peak memory"), rows)


def scale_calls(values: Values) -> str:
    """What a rank's plan of its own call takes."""
    rows = []
    for one in values["lines"]:
        cells = (
            f"{1e3 * one['first']:.2f} ms",
            f"{1e3 * one['again']:.3f} ms",
            f"{1e3 * one['new_boundaries']:.2f} ms",
        )
        rows.append((one["pattern"], f"{one['ranks']:,}", str(one["most_steps"]), *cells))
    return markdown(("pattern", "ranks", "steps", "first", "again", "new boundaries"), rows)


def scale_rounds(values: Values) -> str:
    """All-gathers by rounds and directly, in milliseconds."""
    rows = []
    for one in values["lines"]:
        rounds, direct = one["messages"]
        names = ("passed_on_seconds", "at_once_seconds", "passed_on_processor_seconds", "at_once_processor_seconds")
        cells = (f"{1e3 * one[name]:.2f} ms" for name in names)
        rows.append((str(one["ranks"]), f"{one['bytes']:,}", f"{rounds}, {direct}", *cells))
    ways = ("forwarded", "direct", "forwarded, processor time", "direct, processor time")
    return markdown(("ranks", "bytes", "messages forwarded, direct", *ways), rows)


def scale_simulating(values: Values) -> str:
    """What simulating a pass takes."""
    rows = []
    for one in values["lines"]:
        seconds = (f"{one[mode]['simulated_in']:.2f} s" for mode in ("forward", "backward"))
        rows.append((f"{one['ranks']:,}", one["strategy"], *seconds, f"{one['peak_bytes'] / 1e6:.0f} MB"))
    return markdown(("ranks", "strategy", "forward", "backward", "peak memory"), rows)


def scale_links(values: Values) -> str:
    """Predicted and measured seconds of calls between ranks in network namespaces."""
    rows = []
    for one in values["lines"]:
        seconds = (f"{one[name]:.2f} s" for name in ("compute", "link", "predicted", "measured"))
        error = f"{one['predicted'] / one['measured'] - 1:+.0%}".replace("%", " %")
        overlaps = (f"{one['overlap']:.2f}", f"{one['measured_overlap']:.2f}")
        rows.append(
            (str(one["ranks"]), f"{one['megabits']} Mbit/s", one["strategy"], one["pass"], *seconds, error, *overlaps)
        )
    head = ("ranks", "link", "strategy", "pass", "computation", "link alone", "predicted", "measured", "error")
    return markdown((*head, "overlap predicted", "measured"), rows)


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.tables --help")
