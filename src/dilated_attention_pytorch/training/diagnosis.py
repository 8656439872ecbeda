"""What the log of a run shows, in sentences: time, throughput, memory, slow ranks, faults."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dilated_attention_pytorch.estimate.memory import footprint
from dilated_attention_pytorch.memory import in_bytes

from .callbacks import read_metrics
from .checkpoint import WEIGHTS_NAME
from .faults import cost_of_faults, read_faults
from .prolongation import describe_changes
from .record import recorded, train_settings
from .stragglers import stragglers

_REMEDY = "name the --output of a `train` or `extend` command; docs/troubleshooting.md explains messages of errors"
_FAULTS = {
    "skipped": "The batch of step {step} was left out",
    "broken": "The run rewound after step {step}",
}


def diagnose(folder: Path) -> Iterator[str]:
    """Sentences on what the log of the run in ``folder`` shows, finished or not.

    Raises:
        RunError: the folder is not a run folder, or its record is damaged.
    """
    with recorded(folder, "diagnose", _REMEDY) as record:
        settings = train_settings(record)
    entries = read_metrics(folder)
    done = max((entry["step"] for entry in entries), default=0)
    state = "finished" if (folder / WEIGHTS_NAME).exists() else "not finished"
    yield f"The run is {state}: the log has {done:,} of {record['settings']['steps']:,} steps."
    for line in describe_changes(record):
        yield f"{line[0].upper()}{line[1:]}."
    at_end = (record.get("result") or {}).get("evaluation_seconds", 0.0)
    yield from _time(entries, at_end, cost_of_faults(folder).seconds_lost)
    yield from _throughput(entries)
    least = None if settings is None else footprint(settings, record["processes"]).total
    yield from _memory(entries, least)
    for slow in stragglers(entries):
        yield f"Slow rank: {slow.describe()}."
    yield from _faults(folder)


def _time(entries: Sequence[Mapping[str, float]], at_end: float, lost: float) -> Iterator[str]:
    between_losses = [
        (after["seconds"] - before["seconds"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(entries)
        if "loss" in after and after["step"] > before["step"]
    ]
    if not between_losses:  # steps and evaluations cannot be told apart
        return
    step_seconds = statistics.median(between_losses)
    evaluating = sum(
        max(0.0, after["seconds"] - before["seconds"] - (after["step"] - before["step"]) * step_seconds)
        for before, after in itertools.pairwise(entries)
        if "eval_bits_per_byte" in after
    )
    logged = max((entry["seconds"] for entry in entries), default=0.0)
    parts = {
        "in steps and their checkpoints": max(0.0, logged - evaluating),
        "in evaluations on the way": evaluating,
        "in the evaluation at the end": at_end,
        "lost by restarts": lost,
    }
    total = sum(parts.values())
    if total:
        words = [f"{seconds:,.1f} s {name} ({seconds / total:.0%})" for name, seconds in parts.items() if seconds]
        yield f"Time: {', '.join(words)}; {step_seconds:.3g} s a step (median)."


def _throughput(entries: Sequence[Mapping[str, float]]) -> Iterator[str]:
    rates = [entry["tokens_per_second"] for entry in entries if "tokens_per_second" in entry]
    if len(rates) > 1:
        halves = rates[: len(rates) // 2], rates[len(rates) // 2 :]
        before, after = map(statistics.median, halves)
        yield f"Throughput: {before:,.0f} tokens/s in the first half of the log, {after:,.0f} in the second (medians)."


def _memory(entries: Sequence[Mapping[str, float]], least: int | None) -> Iterator[str]:
    peak = max((entry.get("peak_memory_bytes", 0) for entry in entries), default=0)
    if peak:
        planned = "" if least is None else f"; its settings need at least {in_bytes(least)}"
        yield f"Memory: {in_bytes(int(peak))} at the peak of the first process{planned}."


def _faults(folder: Path) -> Iterator[str]:
    faults = read_faults(folder)
    cost = cost_of_faults(folder).describe()
    if cost:
        yield f"{cost[0].upper()}{cost[1:]}."
    overflows = {fault["step"] for fault in faults if fault["kind"] == "overflow"}
    if overflows:
        yield f"Gradients overflowed in {len(overflows)} steps, which were repeated with a lower scale of the loss."
    for fault in faults:
        if fault["kind"] in _FAULTS:
            yield f"{_FAULTS[fault['kind']].format(**fault)}: {fault['reason']}."
    if faults and faults[-1]["kind"] == "failed":
        yield f"The run ended after step {faults[-1]['step']}: {faults[-1]['reason']}."
