"""Measurements of this machine for steps of one kind, and the seconds of a step that follow from them.

A few small steps are measured, and products, attention and communication; other steps follow by layers, rows
and pairs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from dilated_attention_pytorch.data_sheets import DataSheet
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.memory import in_bytes
from dilated_attention_pytorch.selection.hardware import Hardware, read_hardware
from dilated_attention_pytorch.selection.profile import identity, read_record, write_record
from dilated_attention_pytorch.selection.tuning import call_of, fit_seconds
from dilated_attention_pytorch.training.autocast import computing_dtype
from dilated_attention_pytorch.training.measures import matrix_product_rate
from dilated_attention_pytorch.training.settings import TrainSettings

from .batch import (
    attention_of,
    of_mesh,
    processes_of_a_batch,
    recomputed_layers,
    rows_of_batch,
    with_length,
)
from .exchange import SentBytes, exchanges
from .flops import pairs_of, step_work
from .memory import footprint
from .processes import exchange_rates, shared_step_seconds, step_seconds
from .seconds import StepSeconds

_FORMAT = "dilated-attention-pytorch measurements 1"
_MOST_SECONDS = 120.0
"""Default time after which no further measurement is begun."""
_SECONDS_OF_A_STEP = 1.5
"""Time limit of the largest measured step, estimated from its operations."""
_MOST_ROWS, _LONG, _LEAST_ROWS = 16384, 4096, 64
_CALLS = 3
_PROCESSES_OF_A_CORE = 4


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
    """Name, free memory, and the measured rate of matrix products."""
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
    """Operations per second of matrix products."""
    attention: tuple[tuple[float, float], ...]
    """Seconds per row and per pair in a training step, for each pattern in the order of ``different_patterns``."""
    attention_forward: tuple[tuple[float, float], ...]
    """The same for the forward pass alone."""
    exchange: tuple[float, float]
    """Bytes per second and seconds per message; zeros if nothing is sent."""

    def seconds(self, settings: TrainSettings, num_processes: int, sent: tuple[SentBytes, ...]) -> StepSeconds:
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

    def _sending(self, sent: tuple[SentBytes, ...]) -> float:
        """Seconds of communication by bytes and messages."""
        rate, message = self.exchange
        return sum(one.bytes / rate + one.messages * message for one in sent)

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


def rows_of(settings: TrainSettings) -> float:
    """Mean rows of a batch per process."""
    return rows_of_batch(settings) / processes_of_a_batch(settings)


def shape_of_steps(settings: TrainSettings, num_processes: int) -> str:
    """Digest of all that determines the time of a step, except its layers and lengths."""
    same = {**settings.model.to_dict(), "num_layers": 0}
    values: list[Any] = [same, settings.precision, settings.optimizer]
    if num_processes > 1:
        names = ("data_parallel", "context_parallel", "heads_parallel", "tensor_parallel", "strategy", "layout")
        values += [num_processes, *(getattr(settings, name) for name in names)]
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
                    "large; what was measured is kept, and the same command goes on with the rest"
                )
            self.values[name] = measure()
            write_record(self.file, _FORMAT, self.hardware, values=self.values)
        return self.values[name]


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
    num_processes: int,
    device: str,
    *,
    is_quiet: bool = False,
    folder: Path | None = None,
    seconds: float = _MOST_SECONDS,
) -> Here:
    """Measure steps with a model of this shape on this machine, in two minutes at most; known measurements are reused.

    Measured are matrix products, attention under the model's patterns at a few lengths, and four small steps with two
    of its layer counts and lengths. For a run of several processes, as many processes take
    the small steps, shared as the settings say (with DDP instead of DeepSpeed), and all-reduces over two processes are
    measured, too.

    Args:
        settings: settings of the run.
        num_processes: number of processes of the run.
        device: "cpu" or "cuda".
        is_quiet: show no progress bar.
        folder: folder of stored measurements; None is the cache folder.
        seconds: time after which no further measurement is begun.

    Raises:
        RunError: the model is too large to measure a few layers of it here, there are many more processes than cores,
            or the time is over.
    """
    cores, hardware = _cores_for(num_processes, device), read_hardware(device)
    measured = Measurements.of(hardware, folder, seconds=seconds)
    with Console(quiet=is_quiet).status("measuring this machine"):
        return _Probe(settings, num_processes, torch.device(device), cores, hardware, measured).all()


def _cores_for(num_processes: int, device: str) -> int:
    """Number of cores or GPUs of this machine; raises RunError if it takes fewer processes."""
    cores = os.cpu_count() or 1 if device == "cpu" else torch.cuda.device_count()
    most = cores * (_PROCESSES_OF_A_CORE if device == "cpu" else 1)
    if num_processes > most:
        raise RunError(
            f"--hardware here starts as many processes as are planned, got {num_processes}, and this machine takes at "
            f"most {most}; name a device with --hardware"
        )
    return cores


@dataclass(slots=True)
class _Probe:
    settings: TrainSettings
    num_processes: int
    device: torch.device
    cores: int
    hardware: Hardware
    measured: Measurements

    def all(self) -> Here:
        cores, dtype = self.cores, computing_dtype(self.settings.precision)
        rate = self.measured.get(f"product rate {dtype}", lambda: [matrix_product_rate(self.device, dtype)])[0]
        threads = torch.get_num_threads() if self.device.type == "cpu" else 0
        shared = max(1.0, self.num_processes * threads / cores)
        layers, texts, lengths = self._sizes(rate / shared)
        self._check_size(layers[1], lengths[1], texts)
        longest = min(self.settings.context_length, 4 * min(lengths[1], _LONG))
        attention, forward = (
            self._attention(sorted({*lengths, longest}), is_training=is_training) for is_training in (True, False)
        )
        points = []
        for step, gradients, optimizer in self._steps(layers, texts, lengths, threads):
            others = attention_seconds(step, attention, forward) * shared / processes_of_a_batch(self.settings)
            points.append(StepPoint(step.model.num_layers, rows_of(step), max(0.0, gradients - others), optimizer))
        exchange = [0.0, 0.0]
        if self.num_processes > 1:
            exchange = self.measured.get("exchange", lambda: exchange_rates(self.device.type, self._left()))
        sheet = DataSheet(
            name="this machine",
            family=self.hardware.architecture,
            memory_bytes=self.hardware.free_bytes,
            bytes_per_second=self.hardware.bytes_per_second,
            flops={self.settings.precision: rate},
            processors=self.hardware.processors,
            watts=0.0,
            link="",
            sources={"flops": f"measured: {self.measured.file.name}"},
            compared={},
        )
        return Here(
            sheet=sheet,
            kind=self.device.type,
            steps=shape_of_steps(self.settings, self.num_processes),
            cores=cores,
            threads=threads,
            points=tuple(points),
            product_rate=rate,
            attention=attention,
            attention_forward=forward,
            exchange=(exchange[0], exchange[1]),
        )

    def _left(self) -> float:
        return self.measured.ends_at - time.monotonic()

    def _steps(
        self, layers: tuple[int, int], texts: int, lengths: tuple[int, int], threads: int
    ) -> Iterator[tuple[TrainSettings, float, float]]:
        """Small steps, with the seconds of their gradients and of their optimizer."""
        steps = [self._small(number, length, texts) for number in layers for length in lengths]
        if self.num_processes == 1:
            for step in steps:
                words = f"step of {step.model.num_layers} layers, {texts} x {step.context_length} rows"
                kind = self.device.type
                seconds = self.measured.get(self._name(words), lambda step=step, kind=kind: step_seconds(step, kind))  # type: ignore[misc]
                yield step, seconds[0], seconds[1]
            return
        shared, count, device = [self._shared(one) for one in steps], self.num_processes, self.device.type
        seconds = self.measured.get(
            self._name(f"steps of {layers} layers, {texts} x {lengths} rows"),
            lambda: shared_step_seconds(shared, count, device, threads, self._left()),
        )
        yield from zip(shared, seconds[::2], seconds[1::2], strict=True)

    def _name(self, words: str) -> str:
        """Name of a measurement, with a digest of the model's shape without its number of layers."""
        return f"{words} of {shape_of_steps(self.settings, self.num_processes)}"

    def _sizes(self, rate: float) -> tuple[tuple[int, int], int, tuple[int, int]]:
        """Two numbers of layers, a number of texts, and two lengths.

        Texts and lengths are those of the run, reduced until a step of two pattern periods meets the time limit. The
        larger number of layers is as large as time and memory allow, up to the model's: small differences could not be
        measured.
        """
        model = self.settings.model
        period = max(len(model.different_patterns), model.checkpoint_every if model.gradient_checkpointing else 1)
        texts, length = self.settings.batch_size, min(_MOST_ROWS, max(_LEAST_ROWS, self.settings.context_length))

        def is_short(layers: int) -> bool:
            work = step_work(self._small(layers, length, texts)).over(processes_of_a_batch(self.settings))
            return work.total <= rate * _SECONDS_OF_A_STEP

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
        """Upper bound of the memory of such steps, over all processes."""
        return self.num_processes * footprint(self._small(layers, length, texts), 1).total

    def _small(self, layers: int, length: int, texts: int = 1) -> TrainSettings:
        model = dataclasses.replace(self.settings.model, num_layers=layers)
        return with_length(
            self.settings,
            length,
            model=model,
            batch_size=texts,
            gradient_accumulation=1,
            packing="windows",
            **of_mesh(),
        )

    def _shared(self, step: TrainSettings) -> TrainSettings:
        """The step with the parallel settings of the run."""
        names = ("context_parallel", "heads_parallel", "tensor_parallel", "strategy", "layout", "data_parallel")
        given = {name: getattr(self.settings, name) for name in names}
        if given["data_parallel"].startswith("zero"):
            given["data_parallel"] = "ddp"
        return dataclasses.replace(step, **given)

    def _check_size(self, layers: int, length: int, texts: int) -> None:
        needed = self._bytes(layers, length, texts)
        if needed > self.hardware.free_bytes // 2:
            raise RunError(
                f"--hardware here takes steps of {layers} layers of the model, for which {in_bytes(needed)} of memory "
                f"are needed, and {in_bytes(self.hardware.free_bytes)} are free; name a device with --hardware"
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

        kind = "of a step" if is_training else "forward"
        return self.measured.get(self._name(f"attention {index} {kind}, {length} rows"), measure)[0]
