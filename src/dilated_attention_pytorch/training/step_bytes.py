"""Peak memory of a training step for any number of layers and tokens, extrapolated from small traces."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.token_loss import rows_at_once

from .batch_rows import rows_of_batch, with_length
from .live_bytes import PARTS, Counts, Series
from .settings import TrainSettings

if TYPE_CHECKING:
    from .distribution import Distribution
    from .traced_step import Trace

_LOSS_BLOCKS = 5
"""Minimum number of loss blocks in a traced sequence."""
_LOSS_BLOCKS_AT_EITHER_END = 2


class Moment(NamedTuple):
    """Live memory after one operation of a step."""

    counts: Counts
    """Bytes by category."""
    attention: str | None
    """Name of the operation if it is attention, whose temporary memory is not included."""
    own: int = 0
    """What the operation takes by itself, where that is known of it."""


class _Key(NamedTuple):
    """A phase by its index from the start (0, 1, ...) or from the end (-1, -2, ...)."""

    name: str
    place: int


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Numbers of layers and tokens to trace, and the increments for a second trace."""

    num_layers: int
    layer_step: int
    length: int
    length_step: int


def moments(
    settings: TrainSettings, distribution: Distribution | None = None, *, is_training: bool = True
) -> Iterator[Moment]:
    """All operations of a step, or of its forward pass alone, at which memory may peak.

    Live memory after an operation is linear in the number of layers and in the number of loss
    blocks. So steps with few layers and few loss blocks are traced, and one with more of each; the
    rest follows exactly by linear extrapolation.
    """
    model = settings.model
    sizes = _sizes_to_trace(settings)
    # Number of increments.
    layers = (model.num_layers - sizes.num_layers) // sizes.layer_step if sizes.layer_step else 0
    lengths = (settings.context_length - sizes.length) // sizes.length_step if sizes.length_step else 0
    traced: Callable[[int, int], dict[_Key, Series]]
    if distribution is None:
        traced = functools.partial(_traced_whole, _without_sizes(settings), is_training)
    else:
        traced = functools.partial(_traced, settings, distribution, is_training)
    base = traced(sizes.num_layers, sizes.length)
    deeper = traced(sizes.num_layers + sizes.layer_step, sizes.length) if layers else base
    longer = traced(sizes.num_layers, sizes.length + sizes.length_step) if lengths else base
    both = base
    if layers and lengths:
        both = traced(sizes.num_layers + sizes.layer_step, sizes.length + sizes.length_step)
    elif layers or lengths:
        both = deeper if layers else longer
    for key, series in base.items():
        four = (series, deeper[key], longer[key], both[key])
        assert len({len(one.counts) for one in four}) == 1, f"phase {key} is not the same in all traces"
        for place, of_four in enumerate(zip(*(one.counts for one in four), strict=True)):
            counts = tuple(
                a + layers * (b - a) + lengths * (c - a) + layers * lengths * (d - b - c + a)
                for a, b, c, d in zip(*of_four, strict=True)
            )
            yield Moment(counts, series.attention.get(place))


def _sizes_to_trace(settings: TrainSettings) -> _Sizes:
    model = settings.model
    period = _period(model)
    # The first and last blocks differ from those in between.
    fewest = 2 * period + 2
    fewest += (model.num_layers - fewest) % period
    is_deep = model.num_layers > fewest + period
    rows, of_block = rows_of_batch(settings), rows_at_once(model.vocab_size)
    # Lengths that differ by this have a whole number of blocks more or less.
    step = of_block // math.gcd(of_block, settings.batch_size)
    blocks = settings.batch_size * step // of_block
    surplus = (rows // of_block - _LOSS_BLOCKS) // blocks
    is_long = surplus > 1
    return _Sizes(
        fewest if is_deep else model.num_layers,
        period if is_deep else 0,
        settings.context_length - surplus * step if is_long else settings.context_length,
        step if is_long else 0,
    )


def _period(model: LongNetConfig) -> int:
    """Period in layers of the recomputation."""
    return model.checkpoint_every if model.gradient_checkpointing else 1


def _traced(
    settings: TrainSettings, distribution: Distribution | None, is_training: bool, num_layers: int, length: int
) -> dict[_Key, Series]:
    """The phases of a trace by index; those in the middle, which never peak, are left out."""
    from .traced_step import trace_step  # imports transformers, which parsing a command line does not need

    model = dataclasses.replace(settings.model, num_layers=num_layers)
    trace = trace_step(with_length(settings, length, model=model), distribution, is_training=is_training)
    found = {}
    for (name, number), series in trace.series.items():
        key = _key(name, number, trace, _period(model))
        if key is not None:
            found[key] = _highest(series) if name == "optimizer" else series
    return found


def _without_sizes(settings: TrainSettings) -> str:
    """Settings as text, with the layers and the length that a trace replaces removed."""
    model = dataclasses.replace(settings.model, num_layers=1)
    return json.dumps({**with_length(settings, 8, model=model).to_dict(), "data": []}, default=str)


@functools.lru_cache(maxsize=16)
def _traced_whole(settings: str, is_training: bool, num_layers: int, length: int) -> dict[_Key, Series]:
    """:func:`_traced` for one process. Lengths that differ by whole loss blocks share their traces."""
    return _traced(TrainSettings.from_dict(json.loads(settings)), None, is_training, num_layers, length)


def _key(name: str, number: int, trace: Trace, period: int) -> _Key | None:
    is_loss = name.startswith("loss")
    last = trace.num_loss_blocks if is_loss else trace.num_layers - 1
    # Blocks repeat with the period of the recomputation, except the first and the last.
    near = _LOSS_BLOCKS_AT_EITHER_END if is_loss else period + 1
    if name == "optimizer" or number < near:
        return _Key(name, number)
    return _Key(name, number - last - 1) if number > last - near else None


def _highest(series: Series) -> Series:
    """The operation with the most live memory; an optimizer steps matrices one by one, in a varying number of
    operations."""
    return Series([max(series.counts, key=sum)])


def highest(of: Iterator[Moment], attention: dict[str, int]) -> tuple[dict[str, int], int]:
    """Memory by category at the peak, and the temporary memory of attention at that moment.

    Args:
        of: all moments.
        attention: temporary bytes of each attention operation, by name.
    """
    counts, own = max(
        ((moment.counts, moment.own + attention.get(moment.attention or "", 0)) for moment in of),
        key=lambda one: sum(one[0]) + one[1],
    )
    return dict(zip(PARTS, counts, strict=True)), own
