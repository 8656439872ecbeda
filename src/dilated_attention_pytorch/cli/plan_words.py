"""Text output of ``dilated-attention plan``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dilated_attention_pytorch.memory import in_bytes
from dilated_attention_pytorch.readable import in_time, in_words

if TYPE_CHECKING:
    from dilated_attention_pytorch.estimate import Device, MemoryPlan
    from dilated_attention_pytorch.training import TrainSettings

_PARTS: Mapping[str, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "loss": "logits and loss",
    "temporaries": "temporaries",
    "attention": "attention itself",
    "exchange": "exchange",
    "cache": "key/value cache",
}
"""Labels of the parts of memory."""
_SECONDS: Mapping[str, str] = {
    "products": "matrix products",
    "attention": "attention",
    "rest": "norms, activations, loss, copies, waiting",
    "optimizer": "optimizer",
    "exchange": "exchange",
    "overlapped": "of it hidden",
    "host": "host",
}
"""Labels of the parts of a step's time."""
_UNITS = {"training": "a step", "forward": "a forward pass", "generation": "the generation"}
MEASURED_SPEED = "time `dilated-attention generate` on a run folder, or models.generate on a model of this shape"
"""How to measure the speed of a generation, which is not predicted."""


def print_plan(plan: MemoryPlan, device: Device, processes: int) -> None:
    """Print the plan: tables of memory and, except for a generation, of seconds, and sentences.

    Args:
        plan, device, processes: the plan, and what it is for.
    """
    from rich.table import Table

    from dilated_attention_pytorch.estimate import RunPlan
    from dilated_attention_pytorch.terminal import plain_console

    console = plain_console()
    unit, name = _UNITS[plan.purpose], device.sheet.name
    devices = f"{processes} x {name}" if processes > 1 else name
    table = Table(f"memory of a process at the peak of {unit}", "", title=devices)
    table.title_justify = "left"
    for name, words in _PARTS.items():
        if getattr(plan.footprint, name) or (plan.purpose == "training" and name != "cache"):
            table.add_row(words, in_bytes(getattr(plan.footprint, name)))
    table.add_section()
    table.add_row("all", in_bytes(plan.footprint.total))
    table.add_row("the device has", in_bytes(plan.memory_bytes))
    console.print(table)
    if isinstance(plan, RunPlan):
        times = Table(f"time of {unit}{', at least' if plan.seconds.is_bound else ', predicted'}", "")
        for name, words in _SECONDS.items():
            if getattr(plan.seconds, name):
                times.add_row(words, in_time(getattr(plan.seconds, name)))
        times.add_section()
        times.add_row("all", in_time(plan.seconds.total))
        console.print(times)
    for sentence in _sentences(plan, device.sheet.name):
        console.print(sentence, highlight=False, soft_wrap=True)


def steps_in_words(settings: TrainSettings, seconds: float, *, is_bound: bool) -> str:
    """What all steps of a run take, in a sentence."""
    lengths = ", ".join(f"{length:,}" for length in settings.stages.lengths)
    windows = f" on windows of {lengths} tokens" if lengths else ""
    least = "at least " if is_bound else ""
    return f"{settings.steps:,} steps{windows} take {least}{in_time(seconds)}, without evaluations and checkpoints"


def _sentences(plan: MemoryPlan, device: str) -> Iterator[str]:
    """Sentences about what follows from the tables."""
    from dilated_attention_pytorch.estimate import RunPlan

    left = plan.memory_bytes - plan.footprint.total
    yield f"fits, with {in_bytes(left)} left" if plan.fits else f"does not fit: {in_bytes(-left)} are missing"
    unit = _UNITS[plan.purpose]
    if not isinstance(plan, RunPlan):
        yield f"{plan.tokens:,} new tokens in {unit}; its seconds are not predicted: {MEASURED_SPEED}"
        return
    least, at_most = ("at least ", "at most ") if plan.seconds.is_bound else ("", "")
    yield (
        f"{plan.tokens:,} tokens in {unit}, {in_words(plan.computed_flops)} operations of matrix products, "
        f"{in_words(plan.model_flops)} of them counted for model FLOP utilisation"
    )
    if plan.seconds.is_bound:
        yield f"lower bound: {unit} takes {in_time(plan.seconds.total)} at the rates of {device}; a real one takes more"
    yield f"what bounds it: {_SECONDS.get(plan.bounded_by, plan.bounded_by)}"
    rates = plan.rates
    speed = in_words(rates.tokens_per_second)
    yield f"{at_most}{speed} tokens a second, model FLOP utilisation {rates.utilisation:.1%}"
    if rates.joules_per_token is not None:
        yield f"at full power {least}{in_words(rates.joules_per_token)} J a token"
    if rates.price_per_million_tokens is not None:
        yield f"{least}{in_words(rates.price_per_million_tokens)} for a million tokens, at the price that was given"
    for sent in plan.exchanges:
        yield f"{in_bytes(sent.bytes)} of {sent.name} sent by the process that sends most"
