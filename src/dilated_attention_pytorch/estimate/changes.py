"""Changes of a run's settings that save memory or time, each planned to find its effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training.settings import TrainSettings

from .measure import measure_here
from .run import Device, RunPlan, plan_run

_LEAST_GAIN = 0.01
"""Smallest gain that counts, as a fraction of the tokens per second or of the memory."""


class Change(NamedTuple):
    """A changed run, with its effect on memory and speed."""

    words: str
    """Flags that make the change, or a description of it."""
    bytes: int
    """Additional bytes per process; negative if it takes less."""
    speed: float
    """Tokens per second, relative to the current run."""
    processes: int
    plan: RunPlan

    def describe(self) -> str:
        """The effect as a sentence."""
        from dilated_attention_pytorch.memory import in_bytes

        memory = f"{'+' if self.bytes >= 0 else '-'}{in_bytes(abs(self.bytes))} a process"
        return f"{self.words}: {memory}, {self.speed:.2f} x tokens a second{', fits' if self.plan.fits else ''}"


def changes_that_help(settings: TrainSettings, num_processes: int, device: Device, now: RunPlan) -> list[Change]:
    """Return at most three changes, the best first.

    For a run that does not fit: the changes that make it fit, the fastest first, then others that save memory, the
    smallest first. For a run that fits: changes that fit, too, and process more tokens per second and device; then
    those that save memory at the same pace; then those that are faster only because of more devices. On this machine,
    each change is measured as the run was.

    Args:
        settings, num_processes, device: the run.
        now: its plan, which says whether it fits.
    """
    found, fits = [], now.fits
    for words, changed, processes in _candidates(settings, num_processes):
        try:
            plan = plan_run(changed, processes, _measured(device, changed, processes))
        except (RunError, ValueError, NotImplementedError):
            continue  # changes that are impossible for the run are left out
        speed = plan.rates.tokens_per_second / now.rates.tokens_per_second
        found.append(Change(words, plan.footprint.total - now.footprint.total, speed, processes, plan))
    if not fits:
        helping = [one for one in found if one.bytes < -_LEAST_GAIN * now.footprint.total]
        helping.sort(key=lambda one: (not one.plan.fits, -one.speed if one.plan.fits else one.plan.footprint.total))
        return helping[:3]
    faster = [one for one in found if one.plan.fits and one.speed > 1 + _LEAST_GAIN]
    larger = [one for one in faster if one.speed * num_processes / one.processes <= 1 + _LEAST_GAIN]
    smaller = [
        one
        for one in found
        if one not in faster and one.bytes < -_LEAST_GAIN * now.footprint.total and one.speed > 1 - _LEAST_GAIN
    ]
    faster = [one for one in faster if one not in larger]
    faster.sort(key=lambda one: -one.speed / one.processes)
    smaller.sort(key=lambda one: one.bytes)
    larger.sort(key=lambda one: -one.speed)
    return [*faster, *smaller, *larger][:3]


def _measured(device: Device, changed: TrainSettings, processes: int) -> Device:
    """The device; if it is this machine, with measurements of a run with these settings."""
    if device.here is None:
        return device
    here = measure_here(changed, processes, device.here.kind)
    return dataclasses.replace(device, sheet=here.sheet, here=here)


def _candidates(settings: TrainSettings, num_processes: int) -> Iterator[tuple[str, TrainSettings, int]]:
    """Description, settings and number of processes of every change that is tried."""
    model = settings.model

    def of_model(**values: Any) -> TrainSettings:
        return dataclasses.replace(settings, model=dataclasses.replace(model, **values))

    def changed(**values: Any) -> TrainSettings:
        return dataclasses.replace(settings, **values)

    if model.gradient_checkpointing:
        yield (
            "without --model.gradient-checkpointing",
            of_model(gradient_checkpointing=False, checkpoint_every=1),
            (num_processes),
        )
        if model.checkpoint_every == 1 and model.num_layers > 1:
            yield "--model.checkpoint-every 2", of_model(checkpoint_every=2), num_processes
    else:
        yield "--model.gradient-checkpointing", of_model(gradient_checkpointing=True), num_processes
    if settings.optimizer != "adamw-bf16":
        yield "--optimizer adamw-bf16", changed(optimizer="adamw-bf16"), num_processes
    if settings.precision == "float32":
        yield "--precision bfloat16", changed(precision="bfloat16"), num_processes
    if not settings.max_tokens:
        yield f"--batch-size {2 * settings.batch_size}", changed(batch_size=2 * settings.batch_size), num_processes
        if settings.batch_size > 1:
            half = settings.batch_size // 2
            yield f"--batch-size {half}", changed(batch_size=half), num_processes
    if num_processes > 1 and settings.data_parallel == "ddp":
        yield "--data-parallel fsdp", changed(data_parallel="fsdp"), num_processes
    yield from _more_processes(settings, num_processes)
    if len(model.segment_lengths) > 1:
        rates = tuple(
            min(2 * rate, length) for rate, length in zip(model.dilation_rates, model.segment_lengths, strict=True)
        )
        rates = (model.dilation_rates[0], *rates[1:])
        yield (
            f"--model.dilation-rates {' '.join(map(str, rates))} (another pattern, another model)",
            of_model(dilation_rates=rates),
            num_processes,
        )
        yield (
            "without the longest segment (another pattern, another model)",
            of_model(segment_lengths=model.segment_lengths[:-1], dilation_rates=model.dilation_rates[:-1]),
            num_processes,
        )


def _more_processes(settings: TrainSettings, num_processes: int) -> Iterator[tuple[str, TrainSettings, int]]:
    more = 2 * num_processes
    yield f"{more} processes", settings, more
    # Batches of documents have other lengths every time, which processes cannot share.
    if settings.tensor_parallel == 1 and not settings.max_tokens:
        context = dataclasses.replace(settings, context_parallel=2 * settings.context_parallel)
        yield f"{more} processes, --context-parallel {context.context_parallel}", context, more
        if settings.data_parallel == "ddp":
            split = dataclasses.replace(context, data_parallel="fsdp")
            words = f"{more} processes, --context-parallel {context.context_parallel} --data-parallel fsdp"
            yield words, split, more
