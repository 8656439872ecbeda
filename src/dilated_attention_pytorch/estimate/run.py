"""Plan of one run on devices of one kind: memory, operations and seconds by part, and the rates that follow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from dilated_attention_pytorch.data_sheets import DataSheet, Link, link_of
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training.preflight import check_processes
from dilated_attention_pytorch.training.run_settings import Precision
from dilated_attention_pytorch.training.settings import TrainSettings

from .batch import models_of_steps, rows_of_batch, with_length
from .exchange import SentBytes, exchanges
from .flops import FORWARD_AND_BACKWARD, StepWork, forward_work, step_work
from .generation import Generation, generation_footprint
from .measure import Here
from .memory import Footprint, evaluation_footprint, footprint
from .seconds import StepRates, StepSeconds, sheet_seconds

Purpose = Literal["training", "forward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The device that a run is planned on."""

    sheet: DataSheet
    link: Link | None = None
    """Link between the devices; None takes the one that the data sheet names."""
    price_per_hour: float | None = None
    """Price of one device; None if it is not known."""
    here: Here | None = None
    """Measurements of training steps of one process, if the device is this machine."""

    @property
    def connection(self) -> Link | None:
        """The link, given or named by the data sheet."""
        return link_of(self.sheet.link) if self.link is None and self.sheet.link else self.link


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Memory of each process of a run."""

    purpose: Literal["training", "forward", "generation"]
    footprint: Footprint
    """Peak bytes of a process, by part."""
    memory_bytes: int
    """Memory of the device."""
    tokens: int
    """Tokens of a step, over all processes; for a generation, the new tokens."""

    @property
    def fits(self) -> bool:
        """Whether the peak is less than the memory of the device."""
        return self.footprint.total < self.memory_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan(MemoryPlan):
    """Resources of each process of a run in a training step or a forward pass."""

    model_flops: int
    """Operations of the model in a step, over all processes, as model FLOP utilisation counts them."""
    computed_flops: int
    """Operations of a step including recomputation, over all processes."""
    exchanges: tuple[SentBytes, ...]
    """Traffic of the process that sends most."""
    seconds: StepSeconds
    """Seconds of a step, by part."""
    rates: StepRates
    """Rates that follow from the seconds."""

    @property
    def bounded_by(self) -> str:
        """Bottleneck: "memory" if the run does not fit, otherwise the part of the step that takes longest."""
        return self.seconds.bounded_by if self.fits else "memory"


def plan_run(
    settings: TrainSettings,
    num_processes: int,
    device: DataSheet | Device,
    *,
    purpose: Purpose = "training",
) -> RunPlan:
    """Plan a run on ``num_processes`` devices of one kind.

    Args:
        settings: settings of the run. Precision "auto" is bfloat16 where the device has a rate for it, else float32.
        num_processes: number of devices, each with one process.
        device: a data sheet, or a device with link, price and measurements.
        purpose: a training step, or a forward pass with the loss as in a run's evaluation.

    Raises:
        RunError: the settings do not fit the number of processes, the device, or the purpose; or several processes on
            a device with measurements.
    """
    if purpose not in get_args(Purpose):
        raise RunError(
            f'purpose must be "training" or "forward", got {purpose!r}; plan_generation plans a generation\'s memory'
        )
    device = Device(sheet=device) if isinstance(device, DataSheet) else device
    settings = _checked(settings, num_processes, device.sheet)
    if device.here is not None and num_processes > 1:
        raise RunError(
            f"this machine was measured for one process, got {num_processes}; plan several by a data sheet alone"
        )
    is_training = purpose == "training"
    if not is_training:
        # An evaluation takes rows of the context length, where training takes batches of documents, too, and has the
        # model's own windows.
        settings = with_length(settings, settings.context_length, gradient_accumulation=1, random_local_windows=())
    sharing = settings.context_parallel * settings.tensor_parallel
    batches = num_processes // sharing * settings.gradient_accumulation
    forward = forward_work(settings)
    work = step_work(settings) if is_training else forward
    sent = exchanges(settings, num_processes, is_training=is_training)
    memory = footprint(settings, num_processes) if is_training else evaluation_footprint(settings, num_processes)
    return plan_of_work(
        purpose,
        device,
        memory,
        work,
        precision=settings.precision,
        tokens=rows_of_batch(settings) * batches,
        forward_flops=int(forward.total) * batches,
        sent=sent,
        seconds=device.here.seconds(settings) if device.here is not None and is_training else None,
        num_processes=num_processes,
        sharing=sharing,
    )


def seconds_of_steps(settings: TrainSettings, num_processes: int, device: Device, plan: RunPlan) -> float:
    """Seconds of all steps of a run: in each stage those of steps on its windows, with their patterns.

    Args:
        settings, num_processes, device: see :func:`plan_run`.
        plan: what it returns for them; the steps of a run without stages take as long.

    Raises:
        RunError: see :func:`plan_run`.
    """
    if not settings.stages.lengths:
        return settings.steps * plan.seconds.total
    stages, model = settings.stages_by_step, settings.model
    models = [
        dataclasses.replace(model, segment_lengths=one.segment_lengths, dilation_rates=one.dilation_rates)
        for one in settings.stages.read_patterns()
    ]
    starts = (0, *stages.ends[:-1])
    seconds = 0.0
    for stage, (start, end) in enumerate(zip(starts, stages.ends, strict=True)):
        for number, of_steps in models_of_steps(settings, models[stage] if models else model, start, end):
            of_stage = with_length(
                settings,
                stages.lengths[stage],
                batch_size=stages.windows[stage] * settings.batch_size,
                model=of_steps,
                random_local_windows=(),
            )
            seconds += number * plan_run(of_stage, num_processes, device).seconds.total
    return seconds


def plan_of_work(
    purpose: Purpose,
    device: Device,
    memory: Footprint,
    work: StepWork,
    *,
    precision: str,
    tokens: int,
    forward_flops: int,
    sent: tuple[SentBytes, ...] = (),
    seconds: StepSeconds | None = None,
    num_processes: int = 1,
    sharing: int = 1,
) -> RunPlan:
    """The plan of a run of which memory, operations and traffic are known.

    Args:
        purpose, device: what is planned, and where.
        memory: bytes of a process.
        work: operations of the batches that ``sharing`` of the ``num_processes`` processes share.
        precision: precision whose nominal rate applies.
        tokens: tokens of a step, over all processes.
        forward_flops: operations of a forward pass on these, without recomputation.
        sent: traffic of the process that sends most.
        seconds: predicted seconds; None takes the bound of the data sheet.
        num_processes, sharing: see ``work``.
    """
    sheet, is_training = device.sheet, purpose == "training"
    if seconds is None:
        of_process = work.over(sharing)
        seconds = sheet_seconds(of_process, memory, sent, sheet, precision, device.connection, is_training=is_training)
    model_flops, peak = (FORWARD_AND_BACKWARD if is_training else 1) * forward_flops, sheet.flops[precision]
    price = device.price_per_hour
    return RunPlan(
        purpose=purpose,
        footprint=memory,
        memory_bytes=sheet.memory_bytes,
        tokens=tokens,
        model_flops=model_flops,
        computed_flops=int(work.total) * (num_processes // sharing),
        exchanges=sent,
        seconds=seconds,
        rates=StepRates(
            seconds=seconds.total,
            tokens_per_second=tokens / seconds.total,
            utilisation=model_flops / seconds.total / num_processes / peak,
            joules_per_token=sheet.watts * num_processes * seconds.total / tokens if sheet.watts else None,
            price_per_million_tokens=(
                None if price is None else price * num_processes * seconds.total / 3600 / tokens * 1e6
            ),
        ),
    )


def plan_generation(
    settings: TrainSettings, num_processes: int, sheet: DataSheet, generation: Generation
) -> MemoryPlan:
    """Plan the memory of a generation in one process. Its seconds are not predicted.

    Args:
        settings: settings of which model, batch size and precision are used, the precision as in :func:`plan_run`.
        num_processes: number of devices; only 1 can be planned.
        sheet: data sheet of the device.
        generation: lengths of the texts.

    Raises:
        RunError: several processes, or a precision that the device has no rate for.
    """
    settings = _checked(settings, num_processes, sheet)
    if num_processes > 1:
        raise RunError(
            f"generation is planned for one process that holds all weights and the whole cache, got {num_processes}; "
            "leave --processes out: processes that each generate other texts take as much each, and those that share a "
            "cache (parallel.RankShare) have all weights and about their part of the cache that is planned for one"
        )
    return MemoryPlan(
        purpose="generation",
        footprint=generation_footprint(settings, generation),
        memory_bytes=sheet.memory_bytes,
        tokens=settings.batch_size * generation.new_tokens,
    )


def _checked(settings: TrainSettings, num_processes: int, sheet: DataSheet) -> TrainSettings:
    """The settings with their parallelism as it is, and a precision of the device."""
    if num_processes < 1:
        raise RunError(f"a run takes at least 1 process, got {num_processes}")
    settings = dataclasses.replace(settings, parallel="manual", precision=_precision(settings, sheet))
    check_processes(settings, num_processes, launch="plan for {0} processes (--processes {0})")
    return settings


def _precision(settings: TrainSettings, sheet: DataSheet) -> Precision:
    chosen = settings.precision
    if chosen == "auto":
        return "bfloat16" if "bfloat16" in sheet.flops else "float32"
    check_precision(chosen, sheet)
    return chosen


def check_precision(precision: str, sheet: DataSheet) -> None:
    """Raise :class:`RunError` if the device has no rate for a precision."""
    if precision not in sheet.flops:
        raise RunError(
            f"--precision {precision}: {sheet.name} has no rate of it; take one of {', '.join(sorted(sheet.flops))}"
        )
