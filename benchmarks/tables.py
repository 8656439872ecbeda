"""Tables of the README and the docs, written from the files of results.

    python -m benchmarks.tables [--output FOLDER]

A table stands between ``<!-- table NAME -->`` and ``<!-- end of table -->``, with the machine that measured it; the
text around them is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .measured_code import is_stale

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_MARKED = re.compile(r"(<!-- table (?P<name>[\w-]+) -->\n\n).*?(?=\n\n<!-- end of table -->)", re.DOTALL)
DTYPES = ("float32", "bfloat16")
Values = dict[str, Any]
"""A file of results, or a section of one."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (head, *rows)]
    return "\n".join(f"|{line}" for line in (lines[0], "---|" * len(head), *lines[1:]))


def times_of_dense(values: Values) -> str:
    """For the README: bfloat16, forward and backward, beside dense attention at its rate at 8,192 rows."""
    rows = []
    for one in values["speed"]:
        if one["dtype"] == "bfloat16":
            both = one["forward_backward"]
            pairs = one["rows"] * (one["rows"] + 1) // 2 if one["causal"] else one["rows"] ** 2
            # 14 operations for each pair and number of a head: two products forward, five backward.
            flops = 14 * one["head_dim"] * one["heads"] * pairs
            dense = flops / (both["dense_rate_gflops"] * 1e9)
            mask = "causal" if one["causal"] else "none"
            cells = (f"{dense:.3g} s", f"{both['seconds']:.3g} s", f"{dense / both['seconds']:.0f}")
            rows.append((f"{one['rows']:,}", mask, *cells))
    return markdown(("rows", "mask", "dense", "dilated", "times faster"), rows)


def attention(values: Values) -> str:
    """Seconds and their ratios to the bound."""
    rows = []
    for one in values["speed"]:
        cells = [f"{one['rows']:,}", one["dtype"], "yes" if one["causal"] else "no"]
        for mode in ("forward", "forward_backward"):
            cells += [f"{one[mode]['seconds']:.2f} s", f"{one[mode]['ratio_to_bound']:.2f}"]
        rows.append(cells)
    return markdown(("rows", "dtype", "causal", "forward", "x bound", "forward + backward", "x bound"), rows)


def head_dims(values: Values) -> str:
    """Ratios to the bound by the width of the heads."""
    found = values["speed"]
    widths = sorted({one["head_dim"] for one in found})
    by_case = {(one["dtype"], one["causal"], one["head_dim"]): one for one in found}
    rows = []
    for dtype in DTYPES:
        for is_causal in (False, True):
            of_widths = [by_case[dtype, is_causal, width] for width in widths]
            cells = [_both(one, "ratio_to_bound") for one in of_widths]
            rows.append((f"{dtype}, causal" if is_causal else dtype, *cells))
    return markdown((f"{found[0]['rows']:,} rows, {found[0]['heads']} heads of", *map(str, widths)), rows)


def _both(one: dict[str, Any], name: str) -> str:
    return f"{one['forward'][name]:.2f} / {one['forward_backward'][name]:.2f}"


def blocks(values: Values) -> str:
    """Ratios to density times dense attention's time, by pattern, dtype and nominal density."""
    cases = [one for one in values["speed"] if not one["causal"] and one["kv_heads"] == one["heads"]]
    names = list(dict.fromkeys(one["pattern"] for one in cases))
    rows = []
    for name in names:
        of_name = {dtype: [one for one in cases if (one["pattern"], one["dtype"]) == (name, dtype)] for dtype in DTYPES}
        label = "`from_block_mask`, random per head" if name.startswith("from_block_mask") else f"`{name}`"
        if name == "hierarchical":
            densities = ", ".join(f"{one['density']:.2f}" for one in of_name["float32"])
            label += f" (densities {densities})"
        rows.append((label, *(_both(one, "ratio_to_density") for dtype in DTYPES for one in of_name[dtype])))
    head = ("pattern, blocks of 128", "float32, density 0.05", "0.1", "0.2", "bfloat16, 0.05", "0.1", "0.2")
    return markdown(head, rows)


def slide_encoder(values: Values) -> str:
    """Median seconds and peak memory of each model."""
    found = values["points"]
    names = list(dict.fromkeys(point["model"] for point in found))
    rows = []
    for length in dict.fromkeys(point["rows"] for point in found):
        points = {point["model"]: point for point in found if point["rows"] == length}
        rows.append((f"{length:,}", *(_seconds_and_bytes(points[name]) if name in points else "" for name in names)))
    return markdown(("rows", *names), rows)


def _seconds_and_bytes(point: dict[str, Any]) -> str:
    seconds = statistics.median(point["seconds"])
    digits = 2 if seconds < 10 else 1
    return f"{seconds:.{digits}f} s, {point['peak_bytes'] / 1e6:,.0f} MB"


def slide_study(values: Values) -> str:
    """AUROC and balanced accuracy of both trainings, and the tiles that maps find."""
    rows = []
    for name, what in (("classifier", "`--freeze`"), ("encoder", "the encoder")):
        metrics = [values[name][metric] for metric in ("auroc", "balanced_accuracy")]
        rows.append((what, *(f"{one['value']:.2f} ({one['low']:.2f} to {one['high']:.2f})" for one in metrics)))
    found = [*values["tiles found"].items(), ("chance", values["tiles found by chance"])]
    maps = markdown(
        ("the 6 tiles with the largest", *(name for name, _ in found)),
        [("are among the 6 that decide", *(f"{share:.1%}" for _, share in found))],
    )
    return f"{markdown(('trained', 'AUROC (95 %)', 'balanced accuracy (95 %)'), rows)}\n\n{maps}"


def slide_training(values: Values) -> str:
    """Peak memory of a training step on one slide, in one process and in the rank that takes most."""
    ranks = values["ranks"]
    cases = {
        "one process": values["one_process"],
        f"{len(ranks)} ranks, each": max(ranks, key=lambda rank: rank["peak_bytes"]),
    }
    rows = []
    for name, one in cases.items():
        cells = (f"{one[key] / 1e9:.2f} GB" for key in ("peak_bytes", "process_bytes"))
        rows.append((name, *cells, f"{one['peak_bytes'] / values['one_process']['peak_bytes']:.3f}"))
    head = (f"{values['tiles']:,} tiles, {values['layers']} layers", "the step", "the process", "step / one process")
    return markdown(head, rows)


def slide_maps(values: Values) -> str:
    """Seconds of embedding a slide without and with maps, and what they add to its memory."""
    rows = []
    for one in values["maps"]:
        cells = (f"{one[name]['seconds']:.0f} s, {one[name]['peak_bytes'] / 1e9:.2f} GB" for name in ("plain", "maps"))
        rows.append((f"{one['tiles']:,}", *cells, f"{one['seconds_ratio']:.2f}"))
    return markdown(("tiles", "without maps", "with `--maps`", "times as long"), rows)


def training_memory(values: Values) -> str:
    """Peak of a step, by what is recomputed."""
    labels = {
        "nothing": "activations of all blocks kept, all logits at once",
        "recomputation": "blocks recomputed",
        "loss by blocks of rows": "loss by blocks of rows",
        "both": "both",
        "both, every second block": "both, every second block recomputed",
        "both, adamw-8bit": "both, `adamw-8bit`",
    }
    rows = []
    for point in values["points"]:
        label = labels.get(point["case"], f"the last on {point['tokens']:,} tokens")
        rows.append((label, f"{point['peak_bytes'] / 1e9:.1f} GB"))
    return markdown(("", "peak"), rows)


def gpu(values: Values) -> str:
    """Milliseconds of each contestant on a GPU."""
    timed = [one for one in values["rows"] if one["status"] == "timed"]
    names = list(dict.fromkeys(one["contestant"] for one in timed))
    rows = []
    for case in dict.fromkeys(one["name"] for one in timed):
        found = {one["contestant"]: one for one in timed if one["name"] == case}
        cells = [f"{1e3 * found[name]['median_seconds']:.3g}" if name in found else "" for name in names]
        rows.append((case.replace("bfloat16, ", "").replace("not causal, ", ""), *cells))
    return markdown(("milliseconds, bfloat16", *names), rows)


def host(values: Values) -> str:
    """Microseconds of a call over a few rows."""
    rows = [
        (one["dtype"], one["mode"], *(f"{found:.0f}" for found in one["microseconds"].values()))
        for one in values["points"]
    ]
    return markdown(("dtype", "microseconds", *values["points"][0]["microseconds"]), rows)


def recall(values: Values) -> str:
    """Questions answered, and those whose answer is visible."""
    labels = {
        "adaptive": f"adaptive blocks, {values['blocks_per_query']} of {values['length'] // values['block_size']}",
        "window": f"window of {values['blocks_per_query'] * values['block_size']}",
    }
    rows = [
        (labels[one["contestant"]], str(one["seed"]), f"{one['accuracy']:.1%}", f"{one['in_reach']:.1%}")
        for one in values["scores"]
    ]
    return markdown(("attention", "seed", "answered", "answer visible"), rows).replace("%", " %")


def transformers_memory(values: Values) -> str:
    """Peak memory and seconds of a call, by attention."""
    attentions = ("dilated", "sdpa")
    by_case = {(one["tokens"], one["call"], one["attention"]): one for one in values["points"]}
    rows = []
    for tokens, call in dict.fromkeys((tokens, call) for tokens, call, _ in sorted(by_case)):
        cells = []
        for attention in attentions:
            one = by_case.get((tokens, call, attention))
            cells.append(f"{one['peak_bytes'] / 1e6:,.0f} MB, {one['seconds']:.2f} s" if one else "not measured")
        rows.append((f"{tokens:,}", call, *cells))
    return markdown(("tokens", "call", *attentions), rows)


def planner(values: Values) -> str:
    """Planned over measured memory and seconds of training steps and of decoding."""
    ratios_of = {
        ("peak memory of a step", 0.1): [case["ratio"] for case in values["cases"]],
        ("seconds of a step", 0.2): [case["seconds_ratio"] for case in values["cases"] if "here" in case],
        ("peak memory of decoding", 0.1): [case["ratio"] for case in values["decoding"]],
        ("bytes of the cache", 0.0): [case["planned_cache_bytes"] / case["cache_bytes"] for case in values["decoding"]],
    }
    rows = []
    for (name, within), ratios in ratios_of.items():
        near = sum(abs(ratio - 1) <= within for ratio in ratios)
        figures = (min(ratios), statistics.median(ratios), max(ratios))
        rows.append((name, f"{near} of {len(ratios)} within {within:.0%}", *(f"{ratio:.2f}" for ratio in figures)))
    return markdown(("planned / measured", "", "least", "median", "largest"), rows).replace("%", " %")


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
    """FLOPs of the busiest rank over the mean."""
    rows = [
        (f"{one['ranks']}", f"{one['zigzag']['imbalance']:.4f}", f"{one['contiguous']['imbalance']:.4f}")
        for one in values["planned"]
    ]
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


LENGTHS = (1024, 8192)
DISTANCES = ((8, 127), (128, 1023), (1024, 8191))
NEEDLES = (1920, 8064)
"""Distances of :func:`hybrids_code`, in tokens."""


def by_contestant(values: Values, text: str) -> dict[str, list[Values]]:
    """Results of :mod:`.hybrids` for a text: those of each seed, by contestant."""
    found: dict[str, list[Values]] = {}
    for key, result in values.items():
        of_text, _, rest = key.partition(": ")
        if of_text == text:
            found.setdefault(rest.rpartition(": ")[0], []).append(result)
    return found


def hybrids_code(values: Values) -> str:
    """Bits per byte of source code by the tokens read, and bits per letter of random strings that come again.

    Means of the seeds, with half of their range.
    """
    rows = []
    for name, runs in by_contestant(values, "code").items():
        bits = [with_spread([one["bits_per_byte"][str(length)] for one in runs]) for length in LENGTHS]
        needles = [{row["distance"]: row for row in one["needle"]} for one in runs]
        letters = [[one[NEEDLES[0]]["first"] for one in needles]]
        letters += [[one[distance]["again"] for one in needles] for distance in NEEDLES]
        cells = (*bits, *(f"{statistics.mean(one):.2f}" for one in letters))
        rows.append((name, f"{len(runs)}", f"{runs[0]['steps']}", *cells))
    head = (*(f"reading {one:,}" for one in LENGTHS), "letters", *(f"{one:,} later" for one in NEEDLES))
    return markdown(("model", "seeds", "steps", *head), rows)


def hybrids_made(values: Values) -> str:
    """Values recalled in made texts, by distance, and their bits per byte."""
    rows = []
    for name, runs in by_contestant(values, "made").items():
        cells = []
        for low, high in DISTANCES:
            shares = []
            for one in runs:
                found = [row for row in one["recall"] if low <= row["from"] <= high]
                number = sum(row["values"] for row in found)
                shares.append(100 * sum(row["values"] * row["right"] for row in found) / number)
            cells.append(f"{statistics.mean(shares):.1f} %")
        rows.append((name, *cells, with_spread([one["bits_per_byte"][str(LENGTHS[-1])] for one in runs])))
    head = ("model", *(f"distance {low:,} to {high:,}" for low, high in DISTANCES), "bits per byte")
    return markdown(head, rows)


def long_context(values: Values) -> str:
    """Bits per byte of an extended model by its attention, at each length before and after training.

    Best first after training at the longest. The layers that a candidate names differ between lengths, so a row has
    their number.
    """
    states = ("replaced", "trained")
    runs = values["runs"]
    before: list[str] = []
    rows: dict[str, list[tuple[Any, ...]]] = {}
    for length, of_length in runs.items():
        first = next(iter(of_length.values()))
        before += ["100", f"{first['measured']['before']['bits_per_byte'][length]:.3f}", ""]
        for name, run in of_length.items():
            row = re.sub(r"layers (\d[\d, ]*\d|\d)", lambda found: f"{found[1].count(',') + 1} layers", name)
            bits = [run["measured"][state]["bits_per_byte"][length] for state in states]
            share = f"{100 * run['density']:.0f}"
            rows.setdefault(row, []).append((share, *bits, run is first))
    table = [("dense, positions not scaled", *before)]
    for name, found in sorted(rows.items(), key=lambda one: one[1][-1][2]):
        cells = [f"{cell:.3f}" if isinstance(cell, float) else cell for one in found for cell in one[:3]]
        chosen = [f"{int(length):,}" for length, one in zip(runs, found, strict=True) if one[3]]
        where = "" if len(chosen) == len(runs) else f" at {', '.join(chosen)}"
        where = f" (chosen{where})" if chosen else ""
        table.append((f"{name}{where}", *cells))
    columns = (" tokens: pairs, %", ": before training", ": after")
    head = [f"{int(length):,}{column}" for length in runs for column in columns]
    return markdown(("attention", *head), table)


def with_spread(values: Sequence[float]) -> str:
    """The mean, with half of the range if there are several."""
    spread = f" ± {(max(values) - min(values)) / 2:.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


TABLES: dict[str, tuple[str, Callable[[Values], str]]] = {
    "times-of-dense": ("attention_cpu.json", times_of_dense),
    "attention-native": ("attention_cpu.json", attention),
    "attention-aten": ("attention.json", attention),
    "head-dims": ("attention_head_dims.json", head_dims),
    "blocks": ("blocks.json", blocks),
    "slide-encoder": ("slide_encoder.json", slide_encoder),
    "slide-training": ("slide_training.json", slide_training),
    "slide-study": ("slide_study.json", slide_study),
    "slide-maps": ("slide_maps.json", slide_maps),
    "training-memory": ("training_memory.json", training_memory),
    "gpu": ("gpu/bench/bench.json", gpu),
    "host": ("host.json", host),
    "recall": ("recall.json", recall),
    "transformers-memory": ("transformers_memory.json", transformers_memory),
    "parallel-bytes": ("parallel.json#traffic", parallel_bytes),
    "parallel-memory": ("parallel.json#memory", parallel_memory),
    "parallel-balance": ("parallel.json#balance", parallel_balance),
    "planner": ("planner.json", planner),
    "hybrids-code": ("hybrids.json", hybrids_code),
    "hybrids-made": ("hybrids.json", hybrids_made),
    "long-context": ("long_context.json", long_context),
    "scale-plan": ("parallel.json#billion", scale_plan),
}
"""File of results, with its section, and what writes the table."""
OLDER = "older-figures"
"""Name of the table of the files that were measured with other code than today's."""


def read(name: str) -> Values:
    """The results of a table."""
    file, _, section = TABLES[name][0].partition("#")
    values: Values = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return {"machine": values.get("machine"), **values[section]} if section else values


def pages() -> list[Path]:
    """The README and the pages of the docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def older_figures() -> str:
    """The files of results that were measured with other code than today's, with their days."""
    rows = []
    for file in sorted(RESULTS.rglob("*.json")):
        text = file.read_text(encoding="utf-8")
        if is_stale(json.loads(text)):
            days = re.findall(r'"date": "([^"]+)"', text) or ["not recorded"]
            name = file.relative_to(RESULTS).as_posix()
            rows.append((f"[{name}](../benchmarks/results/{name})", span(days)))
    return markdown(("results", "measured"), rows)


def machine_of(values: Values) -> str:
    """The machines and the days of a file of results, or of its sections."""
    parts = [values] if "machine" in values or "origin" in values else values.values()
    origins = [part["machine"] if "machine" in part else part["origin"] for part in parts]
    setups = dict.fromkeys(map(setup_of, origins))
    return f"{'; '.join(setups)}, {span([one['date'] for one in origins])}."


def setup_of(found: Values) -> str:
    """The machine and the versions of a measurement."""
    if "gpu" in found["command"]:
        versions = (f"{name} {found['versions'][key]}" for name, key in (("PyTorch", "torch"), ("Triton", "triton")))
        return ", ".join((found["cuda_devices"][0], *versions))
    threads = f"{found['threads']} thread{'s' if found['threads'] > 1 else ''} of {found['processor']}"
    return f"{threads}, {found['vector_instructions']}, PyTorch {found['versions']['torch']}"


def span(days: Sequence[str]) -> str:
    """The first and the last of some days."""
    return " to ".join(dict.fromkeys((min(days), max(days))))


def written(text: str) -> str:
    """A page's text with its tables written anew; the first of a file of results has the machines below it."""
    described = set()

    def table(name: str) -> str:
        if name == OLDER:
            return older_figures()
        values = read(name)
        file, make = TABLES[name]
        machines = "" if file in described else f"\n\n{machine_of(values)}"
        described.add(file)
        return f"{make(values)}{machines}"

    return _MARKED.sub(lambda found: found.group(1) + table(found["name"]), text)


def main() -> None:
    """Write the tables of all pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="write nothing without --output")
    parser.add_argument("--output", type=Path, help="folder to write the changed pages to, instead of their places")
    arguments = parser.parse_args()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if written(text) != text and not (arguments.tiny and arguments.output is None):
            file = page if arguments.output is None else arguments.output / page.name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(written(text), encoding="utf-8")
            print(f"written: {file}")
    for name, (results, _) in TABLES.items():
        if is_stale(read(name)):
            print(f"table {name} is of other code: {results}")


if __name__ == "__main__":
    main()
