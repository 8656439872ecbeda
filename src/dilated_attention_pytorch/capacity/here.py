"""Predicted time of steps on this machine: a few small ones are measured, others follow by layers, rows and pairs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dilated_attention_pytorch.data_sheets import DataSheet
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.selection.tuning import fit_seconds
from dilated_attention_pytorch.training.batch_rows import rows_of_batch
from dilated_attention_pytorch.training.settings import TrainSettings

from .exchanged import Exchange, exchanges
from .seconds import StepSeconds
from .work import pairs_of, step_work


class StepPoint(NamedTuple):
    """Measured time of a small step (few layers, few rows, one batch)."""

    layers: int
    rows: float
    gradients: float
    """Seconds of forward and backward pass, without attention."""
    optimizer: float


@dataclass(frozen=True, slots=True)
class Here:
    """Measurements of this machine for steps of one kind of model."""

    sheet: DataSheet
    """Name, free memory, and measured rates of matrix products and memory."""
    kind: str
    """ "cpu" or "cuda"."""
    steps: str
    """Digest of what the measurements are for: model shape except layers, precision, optimizer, and how processes share
    a step."""
    cores: int
    threads: int
    points: tuple[StepPoint, ...]
    """Steps with two numbers of layers, each with two numbers of rows."""
    product_rate: float
    """Operations per second of matrix products with the model's own shapes."""
    attention: tuple[tuple[float, float], ...]
    """Seconds per row and per pair in a training step, for each pattern in the order of ``different_patterns``."""
    attention_forward: tuple[tuple[float, float], ...]
    """The same for the forward pass alone."""
    exchange: tuple[float, float]
    """Bytes per second and seconds per message; zeros if nothing is sent."""

    def seconds(self, settings: TrainSettings, num_processes: int, sent: tuple[Exchange, ...]) -> StepSeconds:
        """Predicted seconds of a step.

        All but attention is fitted to four measured steps of one batch, by layers, rows and their product, and scaled
        such that the nearest of those steps is met; attention follows from its own rows and pairs. Every batch takes as
        long. Steps of several processes were measured including communication and waiting: communication is computed
        from bytes and messages, and limited to the remaining time of the step. What is sent once a step is left out of
        all batches but one.

        Raises:
            RunError: the measurements are for other steps.
        """
        if shape_of_steps(settings, num_processes) != self.steps:
            raise RunError(
                "this machine was measured for steps of another shape, precision or optimizer, or of other processes; "
                "measure it"
            )
        sharing, batches = processes_of_a_batch(settings), settings.gradient_accumulation
        of_batch = dataclasses.replace(settings, gradient_accumulation=1)
        layers, rows = settings.model.num_layers, rows_of(settings)
        gradients = _bilinear(self.points, layers, rows, lambda point: point.gradients)
        gradients *= self._nearest(layers, rows)
        host = min(gradients, _bilinear(self.points, layers, 0, lambda point: point.gradients))
        shared = max(1.0, num_processes * self.threads / self.cores)
        work = step_work(of_batch).products / sharing
        products = min(work / self.product_rate * shared, gradients - host)
        sending = self._sending(sent if batches == 1 else exchanges(of_batch, num_processes))
        exchange = min(sending, gradients - host - products)
        attention = attention_seconds(settings, self.attention, self.attention_forward) * shared / sharing
        return StepSeconds(
            products=batches * products,
            attention=batches * attention,
            rest=batches * (gradients - host - products - exchange),
            optimizer=_bilinear(self.points, layers, 0, lambda point: point.optimizer),
            host=batches * host,
            exchange=self._sending(sent) * exchange / sending if sending else 0.0,
            overlapped=0.0,
            is_bound=False,
        )

    def _sending(self, sent: tuple[Exchange, ...]) -> float:
        """Seconds of communication by bytes and messages."""
        rate, message = self.exchange
        return sum(one.bytes / rate + one.messages * message for one in sent)

    def _nearest(self, layers: float, rows: float) -> float:
        """Measured time of the nearest measured step, relative to its fitted time."""
        point = min(self.points, key=lambda one: abs(math.log(one.layers / layers)) + abs(math.log(one.rows / rows)))
        expected = _bilinear(self.points, point.layers, point.rows, lambda one: one.gradients)
        return max(point.gradients, 1e-9) / expected


def processes_of_a_batch(settings: TrainSettings) -> int:
    """Number of processes that share the rows or the products of one batch."""
    return settings.context_parallel * settings.tensor_parallel


def attention_seconds(
    settings: TrainSettings, step: tuple[tuple[float, float], ...], forward: tuple[tuple[float, float], ...]
) -> float:
    """Seconds of attention with a batch of one process.

    Args:
        settings: the run.
        step: seconds per row and per pair in a training step, for each pattern.
        forward: the same for the forward pass alone, which recomputed layers repeat.
    """
    model, rows = settings.model, rows_of_batch(settings)
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
    """``a + b layers + (c + d layers) rows``, fitted to four points, with non-negative a, b, c and d."""
    counts = [[1.0, point.layers, point.rows, point.layers * point.rows] for point in points]
    a, b, c, d = fit_seconds(counts, [max(of(point), 1e-9) for point in points])
    return a + b * layers + (c + d * layers) * rows


def rows_of(settings: TrainSettings) -> float:
    """Mean rows of a batch per process."""
    return rows_of_batch(settings) / processes_of_a_batch(settings)


def shape_of_steps(settings: TrainSettings, num_processes: int) -> str:
    """Digest of all that determines the time of a step, except its layers and lengths."""
    same = {**settings.model.to_dict(), "num_layers": 0}
    told: list[Any] = [same, settings.precision, settings.optimizer]
    if num_processes > 1:
        names = ("data_parallel", "context_parallel", "heads_parallel", "tensor_parallel", "strategy", "layout")
        told += [num_processes, *(getattr(settings, name) for name in names)]
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=6).hexdigest()
