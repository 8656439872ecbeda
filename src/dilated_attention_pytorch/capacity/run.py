"""Plan of one run on devices of one kind: memory, operations and seconds by part, and the rates that follow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from dilated_attention_pytorch.data_sheets import DataSheet, Link, link_of
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training.autocast import computing_dtype
from dilated_attention_pytorch.training.batch_rows import rows_of_batch, with_length
from dilated_attention_pytorch.training.flops import longnet_flops
from dilated_attention_pytorch.training.footprint import Footprint, evaluation_footprint, footprint, least_footprint
from dilated_attention_pytorch.training.preflight import check_processes
from dilated_attention_pytorch.training.run_settings import Precision
from dilated_attention_pytorch.training.settings import TrainSettings

from .exchanged import Exchange, exchanges, forward_rows
from .generation import Generation, generation_footprint
from .generation_here import GenerationHere
from .here import Here
from .seconds import Rates, StepSeconds, rates, sheet_seconds
from .work import StepWork, forward_work, generation_work, step_work

Purpose = Literal["training", "forward", "generation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The device that a run is planned on."""

    sheet: DataSheet
    link: Link | None = None
    """Link between the devices; None takes the one that the data sheet names."""
    price_per_hour: float | None = None
    """Price of one device; None if it is not known."""
    here: Here | None = None
    """Measurements of training steps, if the device is this machine."""
    generation_here: GenerationHere | None = None
    """Measurements of generation, if the device is this machine."""

    @property
    def connection(self) -> Link | None:
        """The link, given or named by the data sheet."""
        return link_of(self.sheet.link) if self.link is None and self.sheet.link else self.link


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Resources of each process of a run in a training step, a forward pass, or the generation of some texts."""

    purpose: Purpose
    footprint: Footprint
    """Peak bytes of a process, by part."""
    memory_bytes: int
    """Memory of the device."""
    tokens: int
    """Tokens of a step, over all processes; for a generation, the new tokens."""
    model_flops: int
    """Operations of the model in a step, over all processes, as model FLOP utilisation counts them."""
    computed_flops: int
    """Operations of a step including recomputation, over all processes."""
    least_seconds: float
    """Time of one process's operations at the nominal rate of dense products. No step is faster; real ones reach a
    part of that rate, and wait for memory, for other processes and for the host."""
    exchanges: tuple[Exchange, ...]
    """Traffic of the process that sends most."""
    seconds: StepSeconds
    """Seconds of a step, by part."""
    rates: Rates
    """Rates that follow from the seconds."""

    @property
    def fits(self) -> bool:
        """Whether the peak is less than the memory of the device."""
        return self.footprint.total < self.memory_bytes

    @property
    def bounded_by(self) -> str:
        """Bottleneck: "memory" if the run does not fit, otherwise the part of the step that takes longest."""
        return self.seconds.bounded_by if self.fits else "memory"


def computed_flops(settings: TrainSettings) -> int:
    """Operations of the matrix products of a step, as ``FlopCounterMode`` counts them: :mod:`.work`."""
    return int(step_work(settings).total)


def plan_run(
    settings: TrainSettings,
    num_processes: int,
    device: DataSheet | Device,
    *,
    purpose: Purpose = "training",
    generation: Generation | None = None,
    is_quick: bool = False,
) -> RunPlan:
    """Plan a run on ``num_processes`` devices of one kind.

    Args:
        settings: settings of the run. Precision "auto" is bfloat16 where the device has a rate for it, else float32.
        num_processes: number of devices, each with one process.
        device: a data sheet, or a device with link, price and measurements.
        purpose: a training step, a forward pass with the loss as in a run's evaluation, or a generation.
        generation: lengths of the texts; for the purpose "generation" only.
        is_quick: count split weights by each process's share alone, which is fast, instead of in a program that splits
            them; the peak then lacks gathered weights.

    Raises:
        RunError: the settings do not fit the number of processes, the device, or the purpose.
    """
    device = Device(sheet=device) if isinstance(device, DataSheet) else device
    if num_processes < 1:
        raise RunError(f"a run takes at least 1 process, got {num_processes}")
    settings = dataclasses.replace(settings, parallel="told", precision=_precision(settings, device.sheet))
    check_processes(settings, num_processes, launch="plan for {0} processes (--processes {0})")
    if purpose == "generation":
        return _plan_generation(settings, num_processes, device, generation)
    if generation is not None:
        raise RunError(f"lengths of a generation are for that purpose, got them beside purpose {purpose!r}")
    return _plan_step(settings, num_processes, device, purpose, is_quick=is_quick)


def _plan_step(
    settings: TrainSettings, num_processes: int, device: Device, purpose: Purpose, *, is_quick: bool
) -> RunPlan:
    is_training = purpose == "training"
    if not is_training:
        # An evaluation takes rows of the context length, where training takes batches of documents, too.
        settings = with_length(settings, settings.context_length, gradient_accumulation=1)
    sharing = settings.context_parallel * settings.tensor_parallel
    batches = num_processes // sharing
    if is_training:
        found = (least_footprint if is_quick else footprint)(settings, num_processes)
    else:
        found = evaluation_footprint(settings, num_processes)
    work = step_work(settings) if is_training else forward_work(settings)
    sent = exchanges(settings, num_processes) if is_training else _of_rows(settings)
    rate = device.sheet.flops[settings.precision]
    if device.here is not None and is_training:
        seconds = device.here.seconds(settings, num_processes, sent)
    else:
        seconds = sheet_seconds(
            work.over(sharing),
            found,
            sent,
            device.sheet,
            settings.precision,
            device.connection,
            is_training=is_training,
        )
    taken = batches * settings.gradient_accumulation
    tokens = rows_of_batch(settings) * taken
    model_flops = (3 if is_training else 1) * int(forward_work(settings).total) * taken
    return RunPlan(
        purpose=purpose,
        footprint=found,
        memory_bytes=device.sheet.memory_bytes,
        tokens=tokens,
        model_flops=model_flops,
        computed_flops=int(work.total) * batches,
        least_seconds=work.total / sharing / rate,
        exchanges=sent,
        seconds=seconds,
        rates=rates(
            seconds.total,
            tokens,
            model_flops,
            num_processes,
            peak=rate,
            watts=device.sheet.watts,
            price=device.price_per_hour,
        ),
    )


def _of_rows(settings: TrainSettings) -> tuple[Exchange, ...]:
    """Traffic of a forward pass: rows of shared sequences, without their gradients."""
    return () if settings.context_parallel == 1 else (forward_rows(settings),)


def _plan_generation(
    settings: TrainSettings, num_processes: int, device: Device, generation: Generation | None
) -> RunPlan:
    if generation is None:
        raise RunError(
            'the purpose "generation" needs the lengths of the texts: pass generation=Generation(prompt=...)'
        )
    check_generation(num_processes)
    work = generation_work(settings, generation)
    rate = device.sheet.flops[settings.precision]
    if device.generation_here is not None:
        seconds = device.generation_here.seconds(settings, generation)
    else:
        model = settings.model
        # Of an embedding that is not the output matrix, too, a token reads one row.
        unread = 0 if model.tie_embeddings else (model.vocab_size - 1) * model.embed_dim
        seconds = generation_bound(
            work,
            generation,
            device.sheet,
            settings.precision,
            of_token=longnet_flops(model).per_token * settings.batch_size,
            weights=(model.num_parameters - unread) * computing_dtype(settings.precision).itemsize,
        )
    tokens = settings.batch_size * generation.new_tokens
    return RunPlan(
        purpose="generation",
        footprint=generation_footprint(settings, generation),
        memory_bytes=device.sheet.memory_bytes,
        tokens=tokens,
        model_flops=int(work.total),
        computed_flops=int(work.total),
        least_seconds=work.total / rate,
        exchanges=(),
        seconds=seconds,
        rates=rates(
            seconds.total,
            tokens,
            int(work.total),
            1,
            peak=rate,
            watts=device.sheet.watts,
            price=device.price_per_hour,
        ),
    )


def check_generation(num_processes: int) -> None:
    """Raise RunError unless one process generates."""
    if num_processes > 1:
        raise RunError(
            f"generation is planned for one process that holds all weights and the whole cache, got {num_processes}; "
            "leave --processes out: processes that each generate other texts take as much each, and those that share a "
            "cache (parallel.RankShare) have all weights and about their part of the cache that is planned for one"
        )


def generation_bound(
    work: StepWork, generation: Generation, sheet: DataSheet, precision: str, *, of_token: float, weights: float
) -> StepSeconds:
    """Lower bound: operations at the rate of dense products, and reading the weights for each new token from memory.

    Args:
        work: operations of the generation.
        generation: lengths.
        sheet: data sheet of the device.
        precision: precision whose rate applies.
        of_token: operations of the products of a token of every text.
        weights: bytes of the weights that a token reads.
    """
    rate = sheet.flops[precision]
    return StepSeconds(
        products=work.products / rate,
        attention=work.attention / rate,
        optimizer=0.0,
        exchange=0.0,
        overlapped=0.0,
        reading=max(0.0, (generation.new_tokens - 1) * (weights / sheet.bytes_per_second - of_token / rate)),
        is_bound=True,
    )


def _precision(settings: TrainSettings, sheet: DataSheet) -> Precision:
    chosen = settings.precision
    if chosen == "auto":
        return "bfloat16" if "bfloat16" in sheet.flops else "float32"
    if chosen not in sheet.flops:
        raise RunError(
            f"--precision {chosen}: {sheet.name} has no rate of it; take one of {', '.join(sorted(sheet.flops))}"
        )
    return chosen
