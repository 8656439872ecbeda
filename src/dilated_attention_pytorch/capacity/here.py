"""What steps take on this machine: a few small ones are known, others follow by layers, rows and pairs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dilated_attention_pytorch.data_sheets import DataSheet
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.selection.fit import fit_seconds
from dilated_attention_pytorch.training.settings import TrainSettings

from .exchanged import Exchange
from .seconds import StepSeconds
from .work import pairs_of, step_work


class StepPoint(NamedTuple):
    """A step of few layers and rows, in seconds."""

    layers: int
    rows: float
    gradients: float
    """Forward and backward, without attention."""
    optimizer: float


@dataclass(frozen=True, slots=True)
class Here:
    """This machine, as far as steps of one kind of model need to know it."""

    sheet: DataSheet
    """Its name, its free memory, and measured rates of products and of memory."""
    kind: str
    """ "cpu" or "cuda"."""
    steps: str
    """Of which steps the measurements are: the shape of the model but for its layers, precision, optimizer, and how
    processes share them."""
    cores: int
    threads: int
    points: tuple[StepPoint, ...]
    """Of two numbers of layers with two numbers of rows each."""
    product_rate: float
    """Operations a second of products of the model's own shapes."""
    attention: tuple[tuple[float, float], ...]
    """Seconds a row and a pair of a step, by pattern in the order of ``different_patterns``."""
    attention_forward: tuple[tuple[float, float], ...]
    """The same of the forward pass alone."""
    exchange: tuple[float, float]
    """Bytes a second and seconds a message; zeros if nothing is sent."""

    def seconds(self, settings: TrainSettings, num_processes: int, sent: tuple[Exchange, ...]) -> StepSeconds:
        """Predicted seconds of a step.

        Layers, rows and their product count, by the four steps that were measured, the nearest of which is met;
        attention by its own rows and pairs. Steps of several processes were measured with what they send and with
        their waiting for each other: what is sent is named by bytes and messages, as far as a step takes that long.

        Raises:
            RunError: these are no such steps.
        """
        if shape_of_steps(settings, num_processes) != self.steps:
            raise RunError(
                "this machine was measured for steps of another shape, precision or optimizer, or of other processes; "
                "measure it"
            )
        sharing = processes_of_a_batch(settings)
        layers, rows = settings.model.num_layers, rows_of(settings)
        gradients = _bilinear(self.points, layers, rows, lambda point: point.gradients)
        gradients *= self._nearest(layers, rows)
        host = min(gradients, _bilinear(self.points, layers, 0, lambda point: point.gradients))
        shared = max(1.0, num_processes * self.threads / self.cores)
        work = step_work(settings).products / sharing
        products = min(work / self.product_rate * shared, gradients - host)
        rate, message = self.exchange
        exchange = sum(one.bytes / rate + one.messages * message for one in sent)
        exchange = min(exchange, gradients - host - products)
        return StepSeconds(
            products=products,
            attention=attention_seconds(settings, self.attention, self.attention_forward) * shared / sharing,
            rest=gradients - host - products - exchange,
            optimizer=_bilinear(self.points, layers, 0, lambda point: point.optimizer),
            host=host,
            exchange=exchange,
            overlapped=0.0,
            is_bound=False,
        )

    def _nearest(self, layers: float, rows: float) -> float:
        """What the nearest of the measured steps takes, over what all of them let expect of it."""
        point = min(self.points, key=lambda one: abs(math.log(one.layers / layers)) + abs(math.log(one.rows / rows)))
        expected = _bilinear(self.points, point.layers, point.rows, lambda one: one.gradients)
        return max(point.gradients, 1e-9) / expected


def processes_of_a_batch(settings: TrainSettings) -> int:
    """Processes that share the rows or the products of one batch."""
    return settings.context_parallel * settings.tensor_parallel


def attention_seconds(
    settings: TrainSettings, step: tuple[tuple[float, float], ...], forward: tuple[tuple[float, float], ...]
) -> float:
    """Of a step of one process, by the seconds of a row and of a pair, of a step and forward, of each pattern."""
    model, rows = settings.model, settings.batch_size * settings.context_length
    pairs, patterns = pairs_of(settings), model.different_patterns
    total = 0.0
    for layer in range(model.num_layers):
        pattern_index = patterns.index(model.pattern(layer))
        passes = [step[pattern_index]]
        if model.gradient_checkpointing and model.is_recomputed(layer):
            passes.append(forward[pattern_index])
        total += sum(a * rows + b * pairs[patterns[pattern_index]] for a, b in passes)
    return total


def _bilinear(points: tuple[StepPoint, ...], layers: float, rows: float, of: Callable[[StepPoint], float]) -> float:
    """``a + b layers + (c + d layers) rows`` through four points, none of a, b, c and d below 0."""
    counts = [[1.0, point.layers, point.rows, point.layers * point.rows] for point in points]
    a, b, c, d = fit_seconds(counts, [max(of(point), 1e-9) for point in points])
    return a + b * layers + (c + d * layers) * rows


def rows_of(settings: TrainSettings) -> float:
    """Rows of a process."""
    return settings.batch_size * settings.context_length / processes_of_a_batch(settings)


def shape_of_steps(settings: TrainSettings, num_processes: int) -> str:
    """A name for what counts of a step beside layers and lengths."""
    same = {**settings.model.to_dict(), "num_layers": 0}
    told: list[Any] = [same, settings.precision, settings.optimizer]
    if num_processes > 1:
        names = ("data_parallel", "context_parallel", "heads_parallel", "tensor_parallel", "strategy", "layout")
        told += [num_processes, *(getattr(settings, name) for name in names)]
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=6).hexdigest()
