"""Measurements of this machine for steps of one process, and the seconds of a step that follow from them.

A few small steps are measured, and products and attention; other steps follow by layers, rows and pairs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from dilated_attention_pytorch.data_sheets import DataSheet
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.memory import in_bytes
from dilated_attention_pytorch.progress import Show, progress_bar
from dilated_attention_pytorch.selection.hardware import Hardware, read_hardware
from dilated_attention_pytorch.selection.profile import identity, read_record, write_record
from dilated_attention_pytorch.selection.tuning import call_of, fit_seconds, now
from dilated_attention_pytorch.training.autocast import computing_dtype
from dilated_attention_pytorch.training.measures import matrix_product_rate
from dilated_attention_pytorch.training.profiled_step import new_step
from dilated_attention_pytorch.training.settings import TrainSettings

from .batch import attention_of, of_mesh, period_of_positions, recomputed_layers, rows_of_batch, with_length
from .flops import pairs_of, step_work
from .memory import footprint
from .seconds import StepSeconds

_FORMAT = "dilated-attention-pytorch measurements 1"
_MOST_SECONDS = 120.0
"""Default time after which no further measurement is begun."""
_SECONDS_OF_A_STEP = 1.5
"""Time limit of the largest measured step, estimated from its operations."""
_MOST_ROWS, _LONG, _LEAST_ROWS = 16384, 4096, 64
_CALLS = _STEPS = 3


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
    """Name, free memory, and the highest rate of matrix products that was measured, alone or in a step."""
    kind: str
    """ "cpu" or "cuda"."""
    steps: str
    """Digest of what the measurements are for: model shape except layers and patterns, precision and optimizer."""
    points: tuple[StepPoint, ...]
    """Steps with two numbers of layers, each with two numbers of rows."""
    attention: tuple[tuple[float, float], ...]
    """Seconds per row and per pair in a training step, for each pattern in the order of ``different_patterns``."""
    attention_forward: tuple[tuple[float, float], ...]
    """The same for the forward pass alone."""

    def seconds(self, settings: TrainSettings) -> StepSeconds:
        """Predicted seconds of a step of one process.

        All but attention is fitted to four measured steps of one batch, by layers, rows and their product, and scaled
        such that the nearest of those steps is met; attention follows from its own rows and pairs, under a pattern that
        was not measured at the rates of the one in its place. Every batch takes as long, and no less than its
        operations at the highest rate that was measured.

        Raises:
            RunError: the measurements are for other steps.
        """
        if shape_of_steps(settings) != self.steps:
            raise RunError(
                "this machine was measured for steps of another shape, precision or optimizer; measure it for these"
            )
        batches, layers, rows = settings.gradient_accumulation, settings.model.num_layers, rows_of_batch(settings)
        gradients = _bilinear(self.points, layers, rows, lambda point: point.gradients)
        gradients *= self._nearest(layers, rows)
        attention = attention_seconds(settings, self.attention, self.attention_forward)
        work, rate = step_work(settings), self.sheet.flops[settings.precision]
        gradients = max(gradients, work.total / batches / rate - attention)
        host = min(gradients, _bilinear(self.points, layers, 0, lambda point: point.gradients))
        products = min(work.products / batches / rate, gradients - host)
        return StepSeconds(
            products=batches * products,
            attention=batches * attention,
            rest=batches * (gradients - host - products),
            optimizer=_bilinear(self.points, layers, 0, lambda point: point.optimizer),
            host=batches * host,
            exchange=0.0,
            overlapped=0.0,
            is_bound=False,
        )

    def _nearest(self, layers: float, rows: float) -> float:
        """Measured time of the nearest measured step, relative to its fitted time."""
        point = min(self.points, key=lambda one: abs(math.log(one.layers / layers)) + abs(math.log(one.rows / rows)))
        expected = _bilinear(self.points, point.layers, point.rows, lambda one: one.gradients)
        return max(point.gradients, 1e-9) / expected


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
    pairs, patterns, again = pairs_of(settings), model.different_patterns, recomputed_layers(model)
    total = 0.0
    for layer in range(model.num_layers):
        pattern_index = patterns.index(model.pattern(layer))
        passes = [step[pattern_index]]
        if layer in again:
            passes.append(forward[pattern_index])
        total += sum(a * rows + b * pairs[patterns[pattern_index]] for a, b in passes)
    return total


def _bilinear(points: tuple[StepPoint, ...], layers: float, rows: float, of: Callable[[StepPoint], float]) -> float:
    """``a + b layers + (c + d layers) rows``, fitted to four points, with non-negative a, b, c and d."""
    counts = [[1.0, point.layers, point.rows, point.layers * point.rows] for point in points]
    a, b, c, d = fit_seconds(counts, [max(of(point), 1e-9) for point in points])
    return a + b * layers + (c + d * layers) * rows


def shape_of_steps(settings: TrainSettings) -> str:
    """Digest of all that determines the time of a step, except its layers, lengths and patterns."""
    model = settings.model
    others = dataclasses.replace(
        model, num_layers=1, segment_lengths=(1,), dilation_rates=(1,), layer_segment_shifts=(0,), layer_patterns=()
    )
    return _digest([others.to_dict(), len(model.different_patterns), settings.precision, settings.optimizer])


def _digest(values: list[object]) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=6).hexdigest()


@dataclass(slots=True)
class Measurements:
    """Measured numbers by name, for one device, number of threads, and version of torch and of this package."""

    file: Path
    hardware: Hardware
    ends_at: float
    """Time on the monotonic clock after which no further measurement is begun."""
    values: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, hardware: Hardware, folder: Path | None = None, *, seconds: float = math.inf) -> Measurements:
        """Load the stored measurements of a device.

        Args:
            hardware: the device.
            folder: folder of the file; None is the cache folder.
            seconds: time from now after which no further measurement is begun.

        Raises:
            RunError: the file is damaged.
        """
        digest = hashlib.blake2b(json.dumps(identity(hardware)).encode(), digest_size=6).hexdigest()
        file = (cache_folder() if folder is None else folder) / f"measurements-{digest}.json"
        return cls(file, hardware, time.monotonic() + seconds, _read(file, hardware))

    def get(self, name: str, measure: Callable[[], list[float]]) -> list[float]:
        """Return the numbers stored under ``name``; measure and store them if there are none.

        Raises:
            RunError: there is no time left to measure them.
        """
        if name not in self.values:
            if time.monotonic() > self.ends_at:
                raise RunError(
                    "this machine could not be measured in time, as other programs compute on it or the model is "
                    "large; what was measured is kept, and the same command goes on with the rest; or name a device "
                    "(--hardware)"
                )
            self._store(name, measure())
        return self.values[name]

    def highest(self, name: str, rate: float) -> float:
        """Return the highest of ``rate`` and the rates passed before, in other processes too, and store it.

        Other programs that compute at the same time lower a measured rate, and nothing raises one.
        """
        if rate > self.values.get(name, [0.0])[0]:
            self._store(name, [rate])
        return self.values[name][0]

    def _store(self, name: str, numbers: list[float]) -> None:
        self.values[name] = numbers
        write_record(self.file, _FORMAT, self.hardware, values=self.values)


def _read(file: Path, hardware: Hardware) -> dict[str, list[float]]:
    try:
        record = read_record(file, _FORMAT, hardware) or {"values": {}}
        values = {str(name): [float(number) for number in numbers] for name, numbers in record["values"].items()}
        if not all(math.isfinite(number) and number >= 0 for numbers in values.values() for number in numbers):
            raise ValueError("a number is not finite, or below 0")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{file} holds no measurements ({error}); delete it, and this machine is measured again"
        ) from error
    return values


def measure_here(
    settings: TrainSettings,
    device: str,
    *,
    is_quiet: bool = False,
    folder: Path | None = None,
    seconds: float = _MOST_SECONDS,
) -> Here:
    """Measure steps with a model of this shape on this machine, in two minutes at most; known measurements are reused.

    Measured are matrix products, attention under the model's patterns at a few lengths, and four small steps of one
    process with two of its layer counts and lengths.

    Args:
        settings: settings of the run.
        device: "cpu" or "cuda".
        is_quiet: show no progress bar.
        folder: folder of stored measurements; None is the cache folder.
        seconds: time after which no further measurement is begun.

    Raises:
        RunError: the model is too large to measure a few layers of it here, or the time is over.
    """
    hardware = read_hardware(device)
    measured = Measurements.of(hardware, folder, seconds=seconds)
    with progress_bar(Console(quiet=is_quiet), "measurements") as show:
        return _Probe(settings, torch.device(device), hardware, measured, show).all()


def sheet_here(device: str, precision: str) -> DataSheet:
    """This machine with its free memory and its rate of matrix products, which is measured in tenths of a second."""
    hardware = read_hardware(device)
    rate = _product_rate(Measurements.of(hardware), torch.device(device), precision)
    return _sheet_of(hardware, {precision: rate})


def _product_rate(measured: Measurements, device: torch.device, precision: str, *, of_steps: float = 0.0) -> float:
    """The highest rate so far: of products that are measured now, of steps, and of earlier measurements."""
    rate = matrix_product_rate(device, computing_dtype(precision))
    return measured.highest(f"rate of products in {precision}", max(rate, of_steps))


def _sheet_of(hardware: Hardware, flops: dict[str, float]) -> DataSheet:
    return DataSheet(
        name="this machine",
        family=hardware.architecture,
        memory_bytes=hardware.free_bytes,
        bytes_per_second=hardware.bytes_per_second,
        flops=flops,
        processors=hardware.processors,
        watts=0.0,
        link="",
    )


def step_seconds(settings: TrainSettings, device: str) -> list[float]:
    """Median seconds of a few steps of a new model after a warm-up step: of its gradients, and of its optimizer.

    torch.compile and float8 are ignored.
    """
    tokens = torch.zeros(settings.batch_size, settings.context_length, dtype=torch.int64)
    halves = new_step(settings, {"input_ids": tokens, "labels": tokens}, device)

    def seconds(half: Callable[[], None]) -> float:
        start = now(torch.device(device))
        half()
        return now(torch.device(device)) - start

    both = [list(map(seconds, halves)) for _ in range(1 + _STEPS)]
    return [statistics.median(column) for column in zip(*both[1:], strict=True)]


@dataclass(slots=True)
class _Probe:
    settings: TrainSettings
    device: torch.device
    hardware: Hardware
    measured: Measurements
    show: Show
    done: int = 0
    total: int = 0

    def all(self) -> Here:
        rate = _product_rate(self.measured, self.device, self.settings.precision)
        layers, texts, lengths = self._sizes(rate)
        self._check_size(layers[1], lengths[1], texts)
        longest = min(self.settings.context_length, 4 * min(lengths[1], _LONG))
        attended = sorted({*lengths, longest})
        of_attention = 2 * len(attended) * len(self.settings.model.different_patterns)
        self.total = of_attention + len(layers) * len(lengths)
        attention, forward = (self._attention(attended, is_training=is_training) for is_training in (True, False))
        points, of_steps = [], 0.0
        for step in (self._small(number, length, texts) for number in layers for length in lengths):
            gradients, optimizer = self._stepped(step)
            of_steps = max(of_steps, step_work(step).total / gradients)
            others = attention_seconds(step, attention, forward)
            points.append(
                StepPoint(step.model.num_layers, rows_of_batch(step), max(0.0, gradients - others), optimizer)
            )
        rate = _product_rate(self.measured, self.device, self.settings.precision, of_steps=of_steps)
        return Here(
            sheet=_sheet_of(self.hardware, {self.settings.precision: rate}),
            kind=self.device.type,
            steps=shape_of_steps(self.settings),
            points=tuple(points),
            attention=attention,
            attention_forward=forward,
        )

    def _stepped(self, step: TrainSettings) -> list[float]:
        """Seconds of the gradients and of the optimizer of a small step."""
        words = f"step of {step.model.num_layers} layers, {step.batch_size} x {step.context_length} rows"
        self._show(words)
        return self.measured.get(self._name(words), lambda: step_seconds(step, self.device.type))

    def _show(self, words: str) -> None:
        self.show(f"measuring this machine: {words}", self.done, self.total)
        self.done += 1

    def _name(self, words: str) -> str:
        """Name of a measurement, with a digest of the model without its number of layers."""
        patterns = list(map(repr, self.settings.model.different_patterns))
        return f"{words} of {_digest([shape_of_steps(self.settings), patterns])}"

    def _sizes(self, rate: float) -> tuple[tuple[int, int], int, tuple[int, int]]:
        """Two numbers of layers, a number of texts, and two lengths.

        Texts and lengths are those of the run, reduced until a step of two periods of the layers meets the time limit.
        The larger number of layers is as large as time and memory allow, up to the model's: small differences could not
        be measured.
        """
        model = self.settings.model
        recomputation = model.checkpoint_every if model.gradient_checkpointing else 1
        period = math.lcm(len(model.different_patterns), period_of_positions(model), recomputation)
        period = min(period, model.num_layers)
        texts, length = self.settings.batch_size, min(_MOST_ROWS, max(_LEAST_ROWS, self.settings.context_length))

        def is_short(layers: int) -> bool:
            return step_work(self._small(layers, length, texts)).total <= rate * _SECONDS_OF_A_STEP

        while not is_short(2 * period):
            if texts > 1:
                texts //= 2
            elif length > _LEAST_ROWS:
                length //= 2
            else:
                break
        most = 2 * period
        while most + period <= model.num_layers and is_short(most + period):
            most += period
        while most > 2 * period and self._bytes(most, length, texts) > self.hardware.free_bytes // 2:
            most = max(2 * period, most // (2 * period) * period)
        return (period, most), texts, (max(8, length // 2), length)

    def _bytes(self, layers: int, length: int, texts: int) -> int:
        """Memory of such steps."""
        return footprint(self._small(layers, length, texts), 1).total

    def _small(self, layers: int, length: int, texts: int = 1) -> TrainSettings:
        model = dataclasses.replace(self.settings.model, num_layers=layers)
        return with_length(
            self.settings,
            length,
            model=model,
            batch_size=texts,
            gradient_accumulation=1,
            packing="windows",
            random_local_windows=(),
            **of_mesh(),
        )

    def _check_size(self, layers: int, length: int, texts: int) -> None:
        needed = self._bytes(layers, length, texts)
        if needed > self.hardware.free_bytes // 2:
            raise RunError(
                f"this machine is measured by steps of {layers} layers of the model, which need {in_bytes(needed)} of "
                f"memory, and {in_bytes(self.hardware.free_bytes)} are free, of which they may take half; name a "
                "device (--hardware)"
            )

    def _attention(self, lengths: list[int], *, is_training: bool) -> tuple[tuple[float, float], ...]:
        """Seconds per row and per pair, for each pattern."""
        rates = []
        for index in range(len(self.settings.model.different_patterns)):
            counts, seconds = [], []
            for length in lengths:
                seconds.append(self._attended(index, length, is_training=is_training))
                step = self._small(self.settings.model.num_layers, length)
                counts.append([float(length), float(pairs_of(step)[self.settings.model.different_patterns[index]])])
            of_row, of_pair = fit_seconds(counts, seconds)
            rates.append((of_row, of_pair))
        return tuple(rates)

    def _attended(self, index: int, length: int, *, is_training: bool) -> float:
        def measure() -> list[float]:
            call = call_of(attention_of(self.settings, length, 1, is_training=is_training), self.device)
            pattern = self.settings.model.different_patterns[index]
            call(pattern)
            return [statistics.median(call(pattern) for _ in range(_CALLS))]

        words = f"attention {index} {'of a step' if is_training else 'forward'}, {length} rows"
        self._show(words)
        return self.measured.get(self._name(words), measure)[0]
