"""Plans solved backwards: the longest context, the fewest devices, the best mesh, the largest model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.token_loss import rows_at_once
from dilated_attention_pytorch.patterns.pattern import MOST_POSITIONS
from dilated_attention_pytorch.training.preflight import heads_sharing
from dilated_attention_pytorch.training.settings import TrainSettings

from .batch_rows import with_length
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
        told = {
            "context-parallel": self.context,
            "heads-parallel": self.heads,
            "tensor-parallel": self.tensor,
        }
        words = [f"--{name} {size}" for name, size in told.items() if size > 1]
        return " ".join([*words, *([f"--data-parallel {self.data_parallel}"] if self.data_parallel != "ddp" else [])])


class LargestModel(NamedTuple):
    """A model scaled from another, and its plan."""

    model: LongNetConfig
    plan: RunPlan


def longest_context(settings: TrainSettings, num_processes: int, memory_bytes: int) -> int:
    """The longest ``context_length`` whose step fits into ``memory_bytes``; 0 if none does.

    Batches are ``batch_size`` rows of that length, where ``max_tokens`` is set, too. Lengths are multiples of 64 tokens
    per process. Where 64 blocks of the loss fit, they are multiples of whole blocks instead (16,384 rows for a
    vocabulary of 256, 256 rows for one of 32,768). They are at most 2,147,483,648. A hundredth of the memory is left
    free for what is not counted, such as scratch memory of threads.
    """

    def fits(length: int) -> bool:
        found = footprint(with_length(settings, length), num_processes)
        return found.total < memory_bytes - memory_bytes // _ROOM

    of_block = rows_at_once(settings.model.vocab_size)
    step = of_block // math.gcd(of_block, settings.batch_size) * settings.context_parallel
    finer = _SHORTEST * settings.context_parallel
    if not fits(step):
        return _most(lambda times: fits(times * finer), step // finer) * finer
    blocks = _most(lambda times: fits(times * step), MOST_POSITIONS // step)
    if blocks >= _MANY_BLOCKS:
        return blocks * step
    # Lengths that are no multiple of a block are traced one by one: only where one block more matters.
    longest = blocks * step // finer * finer
    return longest + _most(lambda times: fits(longest + times * finer), step // finer) * finer


def meshes(settings: TrainSettings, num_processes: int, device: Device) -> list[Mesh]:
    """Meshes of ``num_processes`` devices that can share the run: those that fit first, then by tokens per second.

    Covers data, context and tensor parallel sizes whose product is the number of devices, with weights whole or split
    (fsdp); for the best three, also the number of processes of a sequence that split heads.
    """
    found = [
        mesh for sizes in _sizes(num_processes) if (mesh := _mesh(settings, num_processes, device, **sizes)) is not None
    ]
    found.sort(key=_rank)
    for mesh in found[:3]:
        for heads in (2, 4, 8):
            if mesh.context % heads == 0 and mesh.context > heads:
                sizes: dict[str, Any] = {
                    "context": mesh.context,
                    "tensor": mesh.tensor,
                    "data_parallel": mesh.data_parallel,
                }
                other = _mesh(settings, num_processes, device, heads=heads, **sizes)
                found += [other] if other is not None else []
    return sorted(found, key=_rank)


def _rank(mesh: Mesh) -> tuple[bool, float, int]:
    plan = mesh.plan
    # Among those that do not fit, the smallest is first: it is the nearest to fitting.
    return (not plan.fits, -plan.rates.tokens_per_second if plan.fits else plan.footprint.total, mesh.tensor)


def _sizes(num_processes: int) -> Iterator[dict[str, Any]]:
    for tensor in (size for size in range(1, _MOST_TENSOR + 1) if num_processes % size == 0):
        rest = num_processes // tensor
        for context in (size for size in range(1, rest + 1) if rest % size == 0):
            yield {"context": context, "tensor": tensor, "data_parallel": "ddp"}
            if num_processes > tensor:
                yield {"context": context, "tensor": tensor, "data_parallel": "fsdp"}


def _mesh(
    settings: TrainSettings,
    num_processes: int,
    device: Device,
    *,
    context: int,
    tensor: int,
    data_parallel: str,
    heads: int = 1,
) -> Mesh | None:
    changes: dict[str, Any] = {
        "context_parallel": context,
        "tensor_parallel": tensor,
        "data_parallel": data_parallel,
        "heads_parallel": heads,
        "parallel": "manual",
        "offload": "none",
        "offload_folder": None,
    }
    if context == 1:
        changes |= {"strategy": "auto", "layout": "auto"}
    try:
        told = dataclasses.replace(settings, **changes)
        plan = plan_run(told, num_processes, device)
    except (RunError, ValueError, NotImplementedError):
        return None  # impossible on these devices
    return Mesh(num_processes // context // tensor, context, heads, tensor, data_parallel, plan)


def fewest_processes(settings: TrainSettings, device: Device) -> Mesh | None:
    """The fewest devices on which some mesh fits, with the best mesh; None if :data:`MOST_PROCESSES` are too few.

    Powers of two are tried until one fits, then numbers between it and the one before, by bisection.
    """
    best: dict[int, Mesh] = {}

    def fits(number: int) -> bool:
        fitting = [mesh for mesh in meshes(settings, number, device) if mesh.plan.fits]
        if fitting:
            best[number] = fitting[0]
        return bool(fitting)

    high = 1
    while not fits(high):
        if high >= MOST_PROCESSES:
            return None
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return best[high]


def largest_model(settings: TrainSettings, num_processes: int, device: Device) -> LargestModel | None:
    """The deepest model that fits, scaled from the run's: width and feed-forward size grow with the layers.

    Head width, the ratio of query heads to key/value heads, and the pattern stay the same. The processes that split
    heads have as many each, and one at least. None if not even one layer fits.
    """
    plans: dict[int, LargestModel] = {}

    def fits(layers: int) -> bool:
        model = with_layers(settings.model, layers, tensor=settings.tensor_parallel, sharing=heads_sharing(settings))
        plan = plan_run(dataclasses.replace(settings, model=model), num_processes, device)
        plans[layers] = LargestModel(model, plan)
        return plan.fits

    most = _most(fits, _MOST_LAYERS)
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


def _most(fits: Callable[[int], bool], most: int) -> int:
    """Largest number from 0 to ``most`` that fits, by bisection; assumes that all smaller ones fit."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
