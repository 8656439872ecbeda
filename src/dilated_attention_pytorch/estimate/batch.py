"""What estimates read of a run's settings: texts and rows of a batch, heads, layers; and settings with other values."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from dilated_attention_pytorch.models.config import CYCLED, LongNetConfig
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.patterns.blocks import with_local_window
from dilated_attention_pytorch.training.autocast import computing_dtype
from dilated_attention_pytorch.training.settings import TrainSettings
from dilated_attention_pytorch.training.stages import StageSettings, steps_with_drawn_windows

from .parallel import ParallelEstimate, plan_parallel
from .workload import Workload


def texts_of_batch(settings: TrainSettings) -> dict[int, int]:
    """The number of texts of each length in a batch, over the processes that share it.

    Windows have ``context_length`` tokens. Documents are taken as long as they may be: a batch has then the most rows,
    and as pairs grow faster than lengths, the most pairs of attention (up to the rounding of dilated segments).

    >>> from dilated_attention_pytorch.training import PRESETS
    >>> texts_of_batch(dataclasses.replace(PRESETS["tiny"](), batch_size=3))
    {256: 3}
    >>> texts_of_batch(dataclasses.replace(PRESETS["tiny"](), batch_size=1, packing="documents", max_tokens=600))
    {256: 2, 88: 1}
    """
    length = settings.context_length
    if not settings.max_tokens:
        return {length: settings.batch_size}
    tokens = settings.max_tokens
    if settings.max_batch_size:
        tokens = min(tokens, settings.max_batch_size * length)
    whole, rest = divmod(tokens, length)
    return {length: whole, rest: 1} if rest else {length: whole}


def rows_of_batch(settings: TrainSettings, processes: int = 1) -> int:
    """Most rows of a batch in one of ``processes`` that share each of its texts."""
    return sum(count * -(-length // processes) for length, count in texts_of_batch(settings).items())


def heads_of(model: LongNetConfig) -> tuple[int, int]:
    """Key/value heads of a layer, and the width of a head."""
    assert model.num_kv_heads is not None
    return model.num_kv_heads, model.embed_dim // model.num_heads


def period_of_positions(model: LongNetConfig) -> int:
    """Period in layers of the rotary bases and of the scaled scores."""
    return math.lcm(len(model.layer_rope_thetas) or 1, len(model.layer_scale_lengths) or 1)


def with_num_layers(model: LongNetConfig, num_layers: int) -> LongNetConfig:
    """The model with so many layers, and of its lists for the layers the entries that they read."""
    lists = {name: getattr(model, name)[:num_layers] for name in CYCLED}
    return dataclasses.replace(model, num_layers=num_layers, **lists)


def recomputed_layers(model: LongNetConfig) -> list[int]:
    """Layers that are computed again in the backward pass."""
    layers = range(model.num_layers if model.gradient_checkpointing else 0)
    return [layer for layer in layers if model.is_recomputed(layer)]


def patterns_of_steps(settings: TrainSettings, pattern: Pattern) -> Counter[Pattern]:
    """The patterns that a layer with ``pattern`` has in the steps of the run, in proportion to their expected steps."""
    sizes = settings.random_local_windows
    if not sizes:
        return Counter({pattern: 1})
    drawn = steps_with_drawn_windows(settings.steps)
    numbers = Counter({pattern: len(sizes) * (settings.steps - drawn)})
    for before in sizes:
        numbers[with_local_window(pattern, before)] += drawn
    return numbers


def mean_of_steps(settings: TrainSettings, pattern: Pattern, number: Callable[[Pattern], int]) -> int:
    """The mean of ``number`` over :func:`patterns_of_steps`, rounded down."""
    patterns = patterns_of_steps(settings, pattern)
    return sum(times * number(one) for one, times in patterns.items()) // patterns.total()


def models_of_steps(
    settings: TrainSettings, model: LongNetConfig, start: int, end: int
) -> Iterator[tuple[float, LongNetConfig]]:
    """Models with the patterns of the steps from ``start`` to ``end``, and the expected number of steps of each."""
    sizes = settings.random_local_windows
    drawn_until = steps_with_drawn_windows(settings.steps) if sizes else 0
    drawn = max(0, min(end, drawn_until) - start)
    if drawn:
        for before, times in Counter(sizes).items():
            patterns = (with_local_window(one, before) for one in model.different_patterns)
            yield drawn * times / len(sizes), dataclasses.replace(model, layer_patterns=tuple(map(repr, patterns)))
    if drawn < end - start:
        yield end - start - drawn, model


def sharing_of(settings: TrainSettings, pattern: Pattern) -> ParallelEstimate:
    """What the processes that share a text send for a layer with ``pattern``, in the cheapest way of the settings."""
    model, tensor = settings.model, settings.tensor_parallel
    all_kv_heads, head_dim = heads_of(model)
    kv_heads = all_kv_heads // tensor
    ring = settings.context_parallel // settings.heads_parallel
    plan = plan_parallel(
        pattern.for_heads(range(kv_heads), all_kv_heads),
        (settings.batch_size, settings.context_length, model.num_heads // tensor, head_dim),
        (ring, settings.heads_parallel) if settings.heads_parallel > 1 else ring,
        num_kv_heads=kv_heads,
        is_causal=True,
        dtype=computing_dtype(settings.precision),
    )
    return next(
        estimate
        for estimate in plan.estimates
        if settings.strategy in ("auto", estimate.strategy) and settings.layout in ("auto", estimate.layout)
    )


def way_of(settings: TrainSettings) -> ParallelEstimate:
    """:func:`sharing_of` the layer with most pairs, whose strategy and layout all layers have."""
    kv_heads, _ = heads_of(settings.model)

    def pairs(pattern: Pattern) -> int:
        return pattern.num_pairs(settings.context_length, num_kv_heads=kv_heads, is_causal=True)

    return sharing_of(settings, max(settings.model.different_patterns, key=pairs))


def attention_of(settings: TrainSettings, length: int, batch_size: int, *, is_training: bool = True) -> Workload:
    """A layer's call of attention on a batch of texts of one length."""
    kv_heads, head_dim = heads_of(settings.model)
    return Workload(
        sequence_length=length,
        batch_size=batch_size,
        num_heads=settings.model.num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=computing_dtype(settings.precision),
        is_causal=True,
        is_training=is_training,
    )


def with_length(settings: TrainSettings, length: int, **changes: Any) -> TrainSettings:
    """The settings with batches of ``batch_size`` rows of ``length`` tokens, and other changes.

    Stages and the tokens of a batch are left out, as they are given for the context length of the run.
    """
    return dataclasses.replace(
        settings,
        context_length=length,
        stages=StageSettings(),
        stage_steps=0,
        max_tokens=0,
        max_batch_size=0,
        **changes,
    )


def of_mesh(*, context: int = 1, heads: int = 1, tensor: int = 1, data_parallel: str = "ddp") -> dict[str, Any]:
    """The values of settings with which processes share a run on a mesh, without offloading."""
    alone = {"strategy": "auto", "layout": "auto"} if context == 1 else {}
    return alone | {
        "parallel": "manual",
        "context_parallel": context,
        "heads_parallel": heads,
        "tensor_parallel": tensor,
        "data_parallel": data_parallel,
        "offload": "none",
        "offload_folder": None,
    }
