"""One run on devices of one kind: memory by part, operations, the least time of a step, the longest text that fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from dilated_attention_pytorch.data_sheets import DataSheet
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models.token_loss import rows_at_once
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.patterns.pattern import MOST_POSITIONS
from dilated_attention_pytorch.training.flops import longnet_flops
from dilated_attention_pytorch.training.footprint import Footprint, footprint
from dilated_attention_pytorch.training.preflight import check_processes
from dilated_attention_pytorch.training.run_settings import Precision
from dilated_attention_pytorch.training.settings import TrainSettings

_SHORTEST = 64
"""Tokens by which lengths differ that are tried where not even one block of the loss fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """What each process of a run takes in a step."""

    footprint: Footprint
    """Bytes at the peak, by part."""
    memory_bytes: int
    """Of the device."""
    tokens: int
    """Of a step, of all processes together."""
    model_flops: int
    """Operations of the model in a step, of all processes: what model FLOP utilisation counts."""
    computed_flops: int
    """Operations of a step with what is computed again, of all processes."""
    least_seconds: float
    """What those of one process take at the data sheet's rate of dense products. No step is faster; real ones reach a
    part of that rate, and wait for memory, for other processes and for the host."""

    @property
    def fits(self) -> bool:
        """Whether the peak is less than the memory of the device."""
        return self.footprint.total < self.memory_bytes


def computed_flops(settings: TrainSettings) -> int:
    """Operations of the matrix products of a step on one batch, as ``FlopCounterMode`` counts them.

    Three products for every one of the forward pass, seven for the two of attention; once more the forward pass of a
    block that is computed again, and the logits where the loss takes several blocks of them.
    """
    model = settings.model
    flops = longnet_flops(model)
    length, rows = settings.context_length, settings.batch_size * settings.context_length
    head = 2 * model.vocab_size * model.embed_dim * rows
    matrices = flops.per_token * rows - head
    pairs = [
        pattern.num_pairs(length, num_kv_heads=flops.num_kv_heads, is_causal=True) * settings.batch_size
        for pattern in _distinct(flops.patterns)
    ]
    of_layer = dict(zip(_distinct(flops.patterns), pairs, strict=True))
    again = model.gradient_checkpointing
    recomputed = [layer for layer in range(model.num_layers) if again and model.is_recomputed(layer)]
    attention = sum(of_layer[pattern] for pattern in flops.patterns) * flops.per_pair * 14 // 4
    attention += sum(of_layer[flops.patterns[layer]] for layer in recomputed) * flops.per_pair
    # What is computed again stops where nothing more is read: before the last product, unless dropout
    # follows it.
    assert model.ffn_dim is not None
    last = 0 if model.dropout else 2 * model.ffn_dim * model.embed_dim * rows
    products = 3 * matrices + (matrices // model.num_layers - last) * len(recomputed)
    return products + attention + head * (4 if rows > rows_at_once(model.vocab_size) else 3)


def _distinct(values: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
    return tuple(dict.fromkeys(values))


def plan_run(settings: TrainSettings, num_processes: int, sheet: DataSheet) -> RunPlan:
    """What a step of a run takes on ``num_processes`` devices of one kind.

    Args:
        settings: of the run. Precision "auto" is bfloat16 where the data sheet has a rate of it, else float32.
        num_processes: devices.
        sheet: of the device.

    Raises:
        RunError: the settings do not go with so many processes, or with the device.
    """
    if num_processes < 1:
        raise RunError(f"a run takes at least 1 process, got {num_processes}")
    settings = dataclasses.replace(settings, parallel="told", precision=_precision(settings, sheet))
    check_processes(settings, num_processes)
    sharing = settings.context_parallel * settings.tensor_parallel
    batches = num_processes // sharing
    computed = computed_flops(settings)
    rate = sheet.flops[settings.precision]
    return RunPlan(
        footprint=footprint(settings, num_processes), memory_bytes=sheet.memory_bytes,
        tokens=settings.batch_size * settings.context_length * batches,
        model_flops=3 * longnet_flops(settings.model).of_text(settings.context_length) * settings.batch_size * batches,
        computed_flops=computed * batches, least_seconds=computed / sharing / rate,
    )  # fmt: skip


def _precision(settings: TrainSettings, sheet: DataSheet) -> Precision:
    chosen = settings.precision
    if chosen == "auto":
        return "bfloat16" if "bfloat16" in sheet.flops else "float32"
    if chosen not in sheet.flops:
        raise RunError(
            f"--precision {chosen}: {sheet.name} has no rate of it; take one of {', '.join(sorted(sheet.flops))}"
        )
    return chosen


def longest_context(settings: TrainSettings, num_processes: int, memory_bytes: int) -> int:
    """The longest ``context_length`` whose step fits into ``memory_bytes``; 0 if none does.

    It is a multiple of the rows of a block of the loss (16,384 of 256 tokens to choose from, 256 of 32,768), or of 64
    tokens where fewer rows fit than such a block has, and at most 2,147,483,648.
    """
    told = dataclasses.replace(settings, stages=type(settings.stages)())

    def fits(length: int) -> bool:
        return footprint(dataclasses.replace(told, context_length=length), num_processes).total < memory_bytes

    of_block = rows_at_once(settings.model.vocab_size)
    step = of_block // math.gcd(of_block, settings.batch_size) * settings.context_parallel
    if not fits(step):
        return _most(lambda times: fits(times * _SHORTEST), step // _SHORTEST) * _SHORTEST
    return _most(lambda times: fits(times * step), MOST_POSITIONS // step) * step


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest of 0 to ``most`` that fits, of which all smaller ones do."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
