"""Diagnosis of a run's time and memory from its log and a measured step, with recommended settings."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import in_bytes

from .callbacks import read_metrics
from .checkpoint import SETTINGS_NAME
from .data.run_data import read_data, read_tokenizer, verify_tokenizer
from .failures import Found, known_failures
from .faults import cost_of_faults, read_faults
from .footprint import footprint
from .lifecycle import check_same_corpus
from .manifest import read_sealed
from .preflight import choose_device
from .profiled_step import StepCost, alternatives, measure_step, slowest_operators
from .settings import Optimizer, TrainSettings
from .stages import Stages
from .stragglers import Straggler, is_straggler

_REMEDY = "name the --output of a `train` or `extend` command"
_LEAST_EFFECT = 0.01
"""Smallest relative saving of time or memory to report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A recommended change of a setting."""

    what: str
    time: float = 0.0
    """Fraction of the run's or step's time that it saves; negative if it costs time."""
    memory: int = 0
    """Bytes per process that it saves; negative if it costs memory."""
    by: Literal["the log", "estimate", "measured"]
    """Source of the numbers."""


@dataclass(kw_only=True, slots=True)
class Diagnosis:
    """Result of a diagnosis."""

    time: dict[str, float] = field(default_factory=dict)
    """Seconds by component."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes per process by component."""
    peak: int = 0
    """Peak memory of the first process in bytes, from the log."""
    changes: list[Change] = field(default_factory=list)
    """Recommended changes, largest effect first."""
    operators: list[tuple[str, float]] = field(default_factory=list)
    """PyTorch operators with their fraction of a measured step."""
    failures: list[Found] = field(default_factory=list)
    """Known failures that match the last error of the run."""

    def sort(self) -> None:
        """Sort the changes by the larger of their fractions of time and memory."""
        whole = max(1, sum(self.memory.values()))
        self.changes = [
            change
            for change in sorted(self.changes, key=lambda change: -max(change.time, change.memory / whole))
            if max(change.time, change.memory / whole) >= _LEAST_EFFECT
        ]


def diagnose_run(folder: Path, *, step: bool = False) -> Diagnosis:
    """Diagnose a run folder.

    Args:
        folder: run folder of `train` or `extend`, finished or not.
        step: also measure a step of the run on its own data, and of the same run with other settings.

    Raises:
        RunError: the folder is not a run folder, its record is damaged, or a step cannot be measured here.
    """
    if not folder.is_dir():
        raise RunError(f"diagnose: {folder} is no run folder; {_REMEDY}")
    record = read_sealed(folder / SETTINGS_NAME, what="diagnose", remedy=_REMEDY)
    try:
        settings = None if "kind" in record else TrainSettings.from_dict(record["settings"])
        processes, told = int(record.get("processes", 1)), dict(record["settings"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"diagnose: {folder / SETTINGS_NAME} describes no run ({error}); {_REMEDY}") from error
    found = Diagnosis()
    failed = read_faults(folder, "failed")
    found.failures = known_failures(failed[-1]["reason"]) if failed else []
    _read_log(found, folder, record, told)
    if settings is None:
        if step:
            raise RunError("--step measures runs of `train`, and this one is of `extend`; leave it out")
    elif step:
        _measure(found, folder, settings, record)
    else:
        _estimate(found, settings, processes)
    found.sort()
    return found


def _read_log(found: Diagnosis, folder: Path, record: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Time by component, and savings, from the log."""
    entries = read_metrics(folder)
    step_seconds = seconds_per_step(entries)
    evaluating = sum(evaluation_seconds(entries, step_seconds))
    at_end = float((record.get("result") or {}).get("evaluation_seconds", 0.0))
    logged = max((entry["seconds"] for entry in entries), default=0.0)
    lost = cost_of_faults(folder).seconds_lost
    parts = {
        "steps": max(0.0, logged - evaluating),
        "evaluations on the way": evaluating,
        "evaluation at the end": at_end,
        "lost by faults": lost,
    }
    found.time = {name: seconds for name, seconds in parts.items() if seconds > 0}
    found.peak = int(max((entry.get("peak_memory_bytes", 0) for entry in entries), default=0))
    whole = max(sum(parts.values()), 1e-9)
    found.changes.append(
        Change(what=f"--eval-steps {2 * int(told['eval_steps'])}", time=evaluating / 2 / whole, by="the log")
    )
    redone = sum(fault["redone_seconds"] for fault in read_faults(folder, "resumed"))
    fewer = max(1, int(told["save_steps"]) // 2)
    found.changes.append(
        Change(what=f"--save-steps {fewer}, as faults come again", time=redone / 2 / whole, by="the log")
    )
    slow = next((entry for entry in reversed(entries) if "slowest_rank" in entry), None)
    if slow is not None:
        rank = Straggler(int(slow["slowest_rank"]), slow["slowest_rank_seconds"], slow["other_ranks_seconds"])
        if is_straggler(rank, step_seconds):
            waited = (rank.seconds - rank.others) / step_seconds
            what = f"a machine for rank {rank.rank} as fast as those of the others, which wait for it"
            found.changes.append(Change(what=what, time=waited, by="the log"))


def seconds_per_step(entries: Sequence[Mapping[str, float]]) -> float:
    """Median seconds per step between entries of the training loss; 0 without any."""
    seconds = [
        (after["seconds"] - before["seconds"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(entries)
        if "loss" in after and after["step"] > before["step"]
    ]
    return statistics.median(seconds) if seconds else 0.0


def evaluation_seconds(entries: Sequence[Mapping[str, float]], step_seconds: float) -> Iterator[float]:
    """Duration of each evaluation during training: time since the previous entry minus the steps in between."""
    for before, after in itertools.pairwise(entries):
        if "eval_bits_per_byte" in after:
            steps = after["step"] - before["step"]
            yield max(0.0, after["seconds"] - before["seconds"] - steps * step_seconds)


def _estimate(found: Diagnosis, settings: TrainSettings, processes: int) -> None:
    """Memory estimates for the run's settings and for alternatives, by the formula that rejects too large runs."""
    least = footprint(settings, processes)
    found.memory = {
        "weights, gradients and optimizer, at least": least.weights,
        "activations and logits, at least": least.activations,
    }
    for what, other in _smaller(settings, processes):
        saved = least.total - footprint(other, processes).total
        found.changes.append(Change(what=what, memory=saved, by="estimate"))


def _smaller(settings: TrainSettings, processes: int) -> Iterator[tuple[str, TrainSettings]]:
    model = settings.model
    if not model.gradient_checkpointing:
        checkpointing = dataclasses.replace(model, gradient_checkpointing=True)
        yield "--model.gradient-checkpointing", dataclasses.replace(settings, model=checkpointing)
    smaller: tuple[Optimizer, ...] = ("adamw-bf16", "adamw-8bit")
    for optimizer in smaller:
        if settings.optimizer != optimizer and not settings.data_parallel.startswith("zero"):
            yield f"--optimizer {optimizer}", dataclasses.replace(settings, optimizer=optimizer)
    if settings.batch_size > 1:
        half, twice = settings.batch_size // 2, 2 * settings.gradient_accumulation
        yield (
            f"--batch-size {half} --gradient-accumulation {twice}",
            dataclasses.replace(settings, batch_size=half, gradient_accumulation=twice),
        )
    if processes > 1 and settings.data_parallel == "ddp":
        yield "--data-parallel fsdp", dataclasses.replace(settings, data_parallel="fsdp")
    if settings.precision in ("float32", "tf32"):
        yield "--precision bfloat16", dataclasses.replace(settings, precision="bfloat16")


def _measure(found: Diagnosis, folder: Path, settings: TrainSettings, record: Mapping[str, Any]) -> None:
    """Measure a step of the run, and of the same run with other settings, in this process."""
    if settings.context_parallel > 1 or settings.tensor_parallel > 1 or settings.max_tokens:
        raise RunError(
            "--step measures a step in one process, and this run shares its sequences or matrices among several, or "
            "has batches of any length (--max-tokens); leave it out"
        )
    device = choose_device(record["settings"]["device"])
    verify_tokenizer(folder, dict(record))
    data = read_data(settings, read_tokenizer(settings, folder), lambda line: None)
    check_same_corpus(data.figures, record["corpus"], folder)
    stages = Stages.of(settings.stages, settings.model, context_length=settings.context_length, steps=settings.steps)
    samples = data.training(stages, settings.batch_size * settings.gradient_accumulation)
    batch = data.collate([samples[len(samples) - 1 - row] for row in range(settings.batch_size)])  # type: ignore[arg-type]
    now = measure_step(settings, batch, device)
    found.memory = {
        "weights": now.weights,
        "gradients": now.gradients,
        "optimizer": now.moments,
        "kept for the backward pass": now.saved,
    }
    found.operators = slowest_operators(settings, batch, device)
    found.time |= {"a step: forward": now.forward, "a step: backward": now.backward, "a step: optimizer": now.optimizer}
    others = alternatives(settings).items()
    found.changes += [_compared(what, now, measure_step(other, batch, device)) for what, other in others]


def _compared(what: str, now: StepCost, other: StepCost) -> Change:
    time = 1 - other.seconds / now.seconds
    return Change(what=what, time=time, memory=now.bytes - other.bytes, by="measured")


def in_words(found: Diagnosis) -> Iterator[str]:
    """The diagnosis as text lines."""
    for failure in found.failures:
        yield from failure_in_words(failure)
    whole = sum(seconds for name, seconds in found.time.items() if not name.startswith("a step"))
    yield "Where the time goes:"
    for name, seconds in found.time.items():
        part = "" if name.startswith("a step") else f"  {seconds / whole:6.1%}"
        yield f"  {name:<44}{seconds:>12,.3f} s{part}"
    yield "Where the memory goes, in one process:"
    for name, size in found.memory.items():
        yield f"  {name:<44}{in_bytes(size):>14}"
    if found.peak:
        yield f"  {'the most that the first process has had':<44}{in_bytes(found.peak):>14}"
    if found.operators:
        yield "Operators, by their own part of a step:"
        yield from (f"  {name:<44}{share:>14.1%}" for name, share in found.operators)
    yield (
        "What to change, the largest effect first:" if found.changes else "No setting is known to save 1 % of anything."
    )
    for change in found.changes:
        yield f"  {change.what}: {', '.join(_effects(change))} ({change.by})"


def failure_in_words(found: Found) -> Iterator[str]:
    """A known failure with cause and remedy, as text lines."""
    yield f"{found.failure.name}: {found.line}"
    yield f"  why: {found.failure.cause}"
    yield f"  what to do: {found.failure.remedy}"


def _effects(change: Change) -> Iterator[str]:
    if change.time:
        yield f"{abs(change.time):.1%} {'less' if change.time > 0 else 'more'} time"
    if change.memory:
        yield f"{in_bytes(abs(change.memory))} {'less' if change.memory > 0 else 'more'} memory"
