"""Plans of other runs: the longest context, the fewest devices, the best mesh, the largest model, changes that help."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import in_bytes
from dilated_attention_pytorch.models.config import CYCLED, LongNetConfig
from dilated_attention_pytorch.models.token_loss import rows_at_once
from dilated_attention_pytorch.patterns.pattern import MOST_POSITIONS
from dilated_attention_pytorch.readable import in_words
from dilated_attention_pytorch.training.preflight import heads_sharing
from dilated_attention_pytorch.training.settings import TrainSettings

from .batch import of_mesh, with_length
from .measure import measure_here
from .memory import footprint
from .run import Device, RunPlan, plan_run

_SHORTEST = 64
"""Granularity of context lengths in tokens where whole blocks of the loss are too coarse."""
_MANY_BLOCKS = 64
"""Number of loss blocks to which one more adds little."""
_ROOM = 100
"""One part in this many of the memory is left free."""
_MOST_TENSOR = 8
"""Largest number of tensor-parallel processes, those of one node."""
_MOST_LAYERS = 4096
_LEAST_GAIN = 0.01
"""Smallest gain of a change that counts, as a fraction of the tokens per second or of the memory."""
MOST_PROCESSES = 8192
"""Largest number of devices that is tried."""


class Mesh(NamedTuple):
    """A mesh of processes that share a run, and its plan."""

    data: int
    context: int
    heads: int
    tensor: int
    data_parallel: str
    plan: RunPlan

    @property
    def flags(self) -> str:
        """Flags of ``train`` for this mesh."""
        sizes = {"context": self.context, "heads": self.heads, "tensor": self.tensor}
        flags = [f"--{name}-parallel {size}" for name, size in sizes.items() if size > 1]
        return " ".join([*flags, *([f"--data-parallel {self.data_parallel}"] if self.data_parallel != "ddp" else [])])

    def describe(self) -> str:
        """Sizes, flags, whether it fits, and speed."""
        parts = {"data": self.data, "context": self.context, "tensor": self.tensor}
        sizes = " x ".join(f"{size} {name}" for name, size in parts.items() if size > 1)
        return (
            f"{self.data * self.context * self.tensor}{f' = {sizes}' if sizes else ''} ({self.flags or 'no flags'}): "
            f"{in_bytes(self.plan.footprint.total)} a process, {'fits' if self.plan.fits else 'does not fit'}; "
            f"at most {in_words(self.plan.rates.tokens_per_second)} tokens a second"
        )

    def values(self) -> dict[str, Any]:
        """Sizes, bytes and speed, for a file."""
        plan = self.plan
        sizes = self._asdict()
        del sizes["plan"]
        return sizes | {
            "total_bytes": plan.footprint.total,
            "fits": plan.fits,
            "tokens_per_second": plan.rates.tokens_per_second,
        }


class LargestModel(NamedTuple):
    """A model scaled from another, and its plan."""

    model: LongNetConfig
    plan: RunPlan

    def describe(self) -> str:
        """Sizes and memory."""
        model = self.model
        return (
            f"{in_words(model.num_parameters)} weights ({model.num_layers} layers, width {model.embed_dim}, "
            f"{model.num_heads} heads), {in_bytes(self.plan.footprint.total)}"
        )


def longest_context(settings: TrainSettings, num_processes: int, memory_bytes: int) -> int:
    """The longest ``context_length`` whose step fits into ``memory_bytes``; 0 if none does.

    Batches are ``batch_size`` rows of that length, where ``max_tokens`` is set, too. Lengths are multiples of 64 tokens
    per process. Where 64 blocks of the loss fit, they are multiples of whole blocks instead (16,384 rows for a
    vocabulary of 256, 256 rows for one of 32,768). They are at most 2,147,483,648. A hundredth of the memory is left
    free for what is not counted, such as scratch memory of threads.
    """

    def fits(length: int) -> bool:
        needed = footprint(with_length(settings, length), num_processes).total
        return needed < memory_bytes - memory_bytes // _ROOM

    of_block = rows_at_once(settings.model.vocab_size)
    step = of_block // math.gcd(of_block, settings.batch_size) * settings.context_parallel
    finer = _SHORTEST * settings.context_parallel
    if not fits(step):
        return _largest(lambda times: fits(times * finer), step // finer) * finer
    blocks = _largest(lambda times: fits(times * step), MOST_POSITIONS // step)
    if blocks >= _MANY_BLOCKS:
        return blocks * step
    # Lengths that are no multiple of a block are traced one by one: only where one block more matters.
    longest = blocks * step // finer * finer
    return longest + _largest(lambda times: fits(longest + times * finer), step // finer) * finer


def meshes(settings: TrainSettings, num_processes: int, device: Device) -> list[Mesh]:
    """Meshes of ``num_processes`` devices that can share the run: those that fit first, then by tokens per second.

    Covers data, context and tensor parallel sizes whose product is the number of devices, with weights whole or split
    (fsdp); for the best three, also the number of processes of a sequence that split heads.
    """
    possible = [mesh for sizes in _sizes(num_processes) if (mesh := _mesh(settings, num_processes, device, sizes))]
    possible.sort(key=_rank)
    for mesh in possible[:3]:
        for heads in (2, 4, 8):
            if mesh.context % heads == 0 and mesh.context > heads:
                sizes = {"context": mesh.context, "tensor": mesh.tensor, "data_parallel": mesh.data_parallel}
                other = _mesh(settings, num_processes, device, sizes | {"heads": heads})
                possible += [other] if other is not None else []
    return sorted(possible, key=_rank)


def _rank(mesh: Mesh) -> tuple[bool, float, int]:
    return *_nearest_to_fitting(mesh), mesh.tensor


def _sizes(num_processes: int) -> Iterator[dict[str, Any]]:
    for tensor in (size for size in range(1, _MOST_TENSOR + 1) if num_processes % size == 0):
        rest = num_processes // tensor
        for context in (size for size in range(1, rest + 1) if rest % size == 0):
            yield {"context": context, "tensor": tensor, "data_parallel": "ddp"}
            if num_processes > tensor:
                yield {"context": context, "tensor": tensor, "data_parallel": "fsdp"}


def _mesh(settings: TrainSettings, num_processes: int, device: Device, sizes: dict[str, Any]) -> Mesh | None:
    plan = _plan_if_possible(lambda: dataclasses.replace(settings, **of_mesh(**sizes)), num_processes, device)
    if plan is None:
        return None
    data = num_processes // sizes["context"] // sizes["tensor"]
    return Mesh(**{"data": data, "heads": 1, **sizes}, plan=plan)


def _plan_if_possible(settings: Callable[[], TrainSettings], num_processes: int, device: Device) -> RunPlan | None:
    """The plan of a run; None if its settings are impossible together or on these devices."""
    try:
        return plan_run(settings(), num_processes, device)
    except (RunError, ValueError, NotImplementedError):
        return None


def fewest_processes(settings: TrainSettings, device: Device) -> Mesh | None:
    """The fewest devices on which a mesh fits, with the best mesh; None if :data:`MOST_PROCESSES` are too few.

    Powers of two are tried until one fits, then numbers between it and the one before, by bisection.
    """
    best: dict[int, Mesh] = {}

    def is_too_few(number: int) -> bool:
        fitting = [mesh for mesh in meshes(settings, number, device) if mesh.plan.fits]
        if fitting:
            best[number] = fitting[0]
        return not fitting

    return best.get(_largest(is_too_few, MOST_PROCESSES) + 1)


def largest_model(settings: TrainSettings, num_processes: int, device: Device) -> LargestModel | None:
    """The deepest model that fits, scaled from the run's: width and feed-forward size grow with the layers.

    Head width, the ratio of query heads to key/value heads, and the pattern stay the same. The processes that split
    heads have as many each, and one at least. None if not even a layer for each entry of the longest list fits that is
    cycled over the layers.
    """
    plans: dict[int, LargestModel] = {}
    fewest = max(len(getattr(settings.model, name)) for name in CYCLED)

    def fits(number: int) -> bool:
        layers = fewest - 1 + number
        model = with_layers(settings.model, layers, tensor=settings.tensor_parallel, sharing=heads_sharing(settings))
        plan = plan_run(dataclasses.replace(settings, model=model), num_processes, device)
        plans[number] = LargestModel(model, plan)
        return plan.fits

    most = _largest(fits, _MOST_LAYERS + 1 - fewest)
    return plans[most] if most else None


def with_layers(model: LongNetConfig, layers: int, *, tensor: int = 1, sharing: int = 1) -> LongNetConfig:
    """Scale a model to ``layers`` layers; its heads, width and feed-forward size grow in proportion.

    Args:
        model: the model.
        layers: number of layers.
        tensor: number of processes that split its matrices; divides the key/value heads and the feed-forward size.
        sharing: number of processes that split the heads of each of these; at most as many as there are.

    >>> model = LongNetConfig(
    ...     embed_dim=512, num_layers=8, num_heads=8, num_kv_heads=4, segment_lengths=[64], dilation_rates=[1]
    ... )
    >>> larger = with_layers(model, 16)
    >>> larger.embed_dim, larger.num_heads, larger.num_kv_heads, larger.ffn_dim == 2 * model.ffn_dim
    (1024, 16, 8, True)
    """
    assert model.num_kv_heads is not None
    assert model.ffn_dim is not None
    ratio, head_dim = model.num_heads // model.num_kv_heads, model.embed_dim // model.num_heads
    scale, step = layers / model.num_layers, math.lcm(64, tensor)
    kv_heads = tensor * max(-(-sharing // ratio), round(model.num_kv_heads * scale / tensor))
    heads = kv_heads * ratio
    inner = step * max(1, round(model.ffn_dim * heads / model.num_heads / step))
    return dataclasses.replace(
        model,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        embed_dim=heads * head_dim,
        ffn_dim=inner,
    )


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """Largest number from 0 to ``most`` for which a condition holds that holds for all smaller ones, by bisection."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


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
        memory = f"{'+' if self.bytes >= 0 else '-'}{in_bytes(abs(self.bytes))} a process"
        return f"{self.words}: {memory}, {self.speed:.2f} x tokens a second{', fits' if self.plan.fits else ''}"

    def values(self) -> dict[str, Any]:
        """The effect, for a file."""
        return {"change": self.words, "bytes": self.bytes, "speed": self.speed, "fits": self.plan.fits}


def changes_that_help(settings: TrainSettings, num_processes: int, device: Device, now: RunPlan) -> list[Change]:
    """Return at most three changes, the best first.

    For a run that does not fit: the changes that make it fit, the fastest first, then others that save memory, the
    smallest first. For a run that fits: changes that fit, too, and process more tokens per second and device; then
    those that save memory at the same pace; then those that are faster only because of more devices. On this machine,
    each change for one process is measured as the run was.

    Args:
        settings, num_processes, device: the run.
        now: its plan, which says whether it fits.
    """
    possible = []
    for words, changed, processes in _candidates(settings, num_processes):
        try:
            plan = plan_run(changed, processes, _measured(device, changed))
        except (RunError, ValueError, NotImplementedError):
            continue  # changes that are impossible for the run are left out
        speed = plan.rates.tokens_per_second / now.rates.tokens_per_second
        possible.append(Change(words, plan.footprint.total - now.footprint.total, speed, processes, plan))
    smaller = [change for change in possible if change.bytes < -_LEAST_GAIN * now.footprint.total]
    if not now.fits:
        return sorted(smaller, key=_nearest_to_fitting)[:3]
    faster = [change for change in possible if change.plan.fits and change.speed > 1 + _LEAST_GAIN]
    smaller = [change for change in smaller if change not in faster and change.speed > 1 - _LEAST_GAIN]
    larger = [change for change in faster if change.speed * num_processes / change.processes <= 1 + _LEAST_GAIN]
    faster = [change for change in faster if change not in larger]
    faster.sort(key=lambda change: -change.speed / change.processes)
    smaller.sort(key=lambda change: change.bytes)
    larger.sort(key=lambda change: -change.speed)
    return [*faster, *smaller, *larger][:3]


def _nearest_to_fitting(one: Mesh | Change) -> tuple[bool, float]:
    """Order of plans: those that fit, the fastest first, then the others, the smallest first."""
    plan = one.plan
    return not plan.fits, -plan.rates.tokens_per_second if plan.fits else plan.footprint.total


def _measured(device: Device, changed: TrainSettings) -> Device:
    """The device; if it is this machine, with measurements of a run with these settings."""
    if device.here is None:
        return device
    here = measure_here(changed, device.here.kind)
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
            num_processes,
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
