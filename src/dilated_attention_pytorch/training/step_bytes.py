"""What a training step has alive at its peak, for any number of layers and tokens: few of both are traced."""

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

from .live_bytes import PARTS, Counts, Series
from .settings import TrainSettings

if TYPE_CHECKING:
    from .distribution import Distribution
    from .traced_step import Trace

_LOSS_BLOCKS = 5
"""The blocks of the loss that a shorter text has at least."""
_LOSS_BLOCKS_AT_EITHER_END = 2


class Moment(NamedTuple):
    """What is alive after one operation of a step."""

    counts: Counts
    """By part."""
    attention: str | None
    """The name of the operation if it is attention: what that takes by itself is not counted."""


class _Key(NamedTuple):
    """A phase by its place from the beginning (0, 1, ...) or from the end (-1, -2, ...)."""

    name: str
    place: int


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Layers and tokens of what is traced, and by how much each is made larger for a second trace."""

    num_layers: int
    layer_step: int
    length: int
    length_step: int


def moments(settings: TrainSettings, distribution: Distribution | None = None) -> Iterator[Moment]:
    """Every operation of a step in which memory may be at its peak.

    What is alive after an operation grows by as much with every layer as with the one before, and by as much with every
    block of the loss. So steps of a few layers and a few blocks of the loss are traced, and one more of each; the
    others follow by the differences, exactly.
    """
    model = settings.model
    sizes = _sizes_to_trace(settings)
    # A difference is multiplied by so many steps.
    layers = (model.num_layers - sizes.num_layers) // sizes.layer_step if sizes.layer_step else 0
    lengths = (settings.context_length - sizes.length) // sizes.length_step if sizes.length_step else 0
    traced: Callable[[int, int], dict[_Key, Series]]
    if distribution is None:
        traced = functools.partial(_traced_whole, _without_sizes(settings))
    else:
        traced = functools.partial(_traced, settings, distribution)
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
    # The first and the last blocks of a trace are other blocks.
    fewest = 2 * period + 2
    fewest += (model.num_layers - fewest) % period
    is_deep = model.num_layers > fewest + period
    rows, of_block = settings.batch_size * settings.context_length, rows_at_once(model.vocab_size)
    # A text shorter by this has a whole number of blocks less.
    step = of_block // math.gcd(of_block, settings.batch_size)
    blocks = settings.batch_size * step // of_block
    surplus = (rows // of_block - _LOSS_BLOCKS) // blocks
    is_long = surplus > 1
    return _Sizes(
        fewest if is_deep else model.num_layers, period if is_deep else 0,
        settings.context_length - surplus * step if is_long else settings.context_length, step if is_long else 0,
    )  # fmt: skip


def _period(model: LongNetConfig) -> int:
    """After how many layers what is recomputed is again."""
    return model.checkpoint_every if model.gradient_checkpointing else 1


def _traced(
    settings: TrainSettings, distribution: Distribution | None, num_layers: int, length: int
) -> dict[_Key, Series]:
    """The phases of a trace by their places; those in the middle, which are never a peak, are left out."""
    from .traced_step import trace_step  # transformers, which a command line that is only read does not need

    model = dataclasses.replace(settings.model, num_layers=num_layers)
    trace = trace_step(dataclasses.replace(settings, model=model, context_length=length), distribution)
    found = {}
    for (name, number), series in trace.series.items():
        key = _key(name, number, trace, _period(model))
        if key is not None:
            found[key] = _highest(series) if name == "optimizer" else series
    return found


def _without_sizes(settings: TrainSettings) -> str:
    """Settings as text, with the layers and the length that a trace replaces left the same."""
    model = dataclasses.replace(settings.model, num_layers=1)
    same = dataclasses.replace(settings, model=model, context_length=8, max_tokens=0)
    return json.dumps({**same.to_dict(), "data": []}, default=str)


@functools.lru_cache(maxsize=16)
def _traced_whole(settings: str, num_layers: int, length: int) -> dict[_Key, Series]:
    """:func:`_traced` of one process. Texts that differ by whole blocks of the loss have the same traces."""
    return _traced(TrainSettings.from_dict(json.loads(settings)), None, num_layers, length)


def _key(name: str, number: int, trace: Trace, period: int) -> _Key | None:
    is_loss = name.startswith("loss")
    last = trace.num_loss_blocks if is_loss else trace.num_layers - 1
    # Blocks are alike after as many as are recomputed in turn, beside the first and the last.
    near = _LOSS_BLOCKS_AT_EITHER_END if is_loss else period + 1
    if name == "optimizer" or number < near:
        return _Key(name, number)
    return _Key(name, number - last - 1) if number > last - near else None


def _highest(series: Series) -> Series:
    """The operation with most alive: matrices are stepped one after the other, in as many operations as there are."""
    return Series([max(series.counts, key=sum)])


def highest(of: Iterator[Moment], attention: dict[str, int]) -> tuple[dict[str, int], int]:
    """The parts of the moment with most alive, and what attention takes by itself then.

    Args:
        of: every moment.
        attention: bytes that each operation of attention takes by itself, by its name.
    """
    counts, own = max(
        ((moment.counts, attention.get(moment.attention or "", 0)) for moment in of),
        key=lambda one: sum(one[0]) + one[1],
    )
    return dict(zip(PARTS, counts, strict=True)), own
