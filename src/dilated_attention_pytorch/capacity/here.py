"""What steps take on this machine: a few small ones measured, others from them by layers, rows and pairs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import Progress

from dilated_attention_pytorch.data_sheets import DataSheet
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import in_bytes
from dilated_attention_pytorch.selection.fit import fit_seconds
from dilated_attention_pytorch.selection.hardware import Hardware, read_hardware
from dilated_attention_pytorch.selection.tuning import call_of
from dilated_attention_pytorch.selection.workload import Workload
from dilated_attention_pytorch.training.autocast import computing_dtype
from dilated_attention_pytorch.training.footprint import footprint
from dilated_attention_pytorch.training.measures import matrix_product_rate
from dilated_attention_pytorch.training.profiled_step import measure_step
from dilated_attention_pytorch.training.settings import TrainSettings

from .company import Company
from .exchanged import Exchange
from .link_probe import exchange_rates
from .measurements import Measurements, copied_bytes, least_seconds, sheet_here
from .seconds import StepSeconds, scaled
from .work import pairs_of, shapes_of, step_work

_SECONDS_OF_A_STEP = 1.5
"""That the largest step which is measured takes at most, by its operations."""
_MOST_ROWS, _LONG, _LEAST_ROWS = 16384, 4096, 64
_CALLS = 3
_MOST_SECONDS = 120.0


class StepPoint(NamedTuple):
    """A step of few layers and rows, in seconds."""

    layers: int
    rows: int
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
    """Of which steps the measurements are: the shape of the model but for its layers, precision and optimizer."""
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

        Layers, rows and their product count, by the four steps that were measured; attention by its own rows and
        pairs; what is sent by bytes and messages, none of it hidden, as the cores that send are those that compute.
        Processes with more threads than there are cores share them; where each layer waits for all, for the slowest.

        Raises:
            RunError: these are no such steps.
        """
        if _shape(settings) != self.steps:
            raise RunError("this machine was measured for steps of another shape, precision or optimizer; measure it")
        if sent and not self.exchange[0]:
            raise RunError("this machine was measured for one process, and several exchange something; measure it")
        sharing = settings.context_parallel * settings.tensor_parallel
        rows = settings.batch_size * settings.context_length / sharing
        gradients = _bilinear(self.points, settings.model.num_layers, rows, lambda point: point.gradients)
        optimizer = _bilinear(self.points, settings.model.num_layers, 0, lambda point: point.optimizer)
        host = _bilinear(self.points, settings.model.num_layers, 0, lambda point: point.gradients)
        attention = self._attention(settings) / sharing
        products = min(step_work(settings).products / sharing / self.product_rate, gradients - host)
        rate, message = self.exchange
        exchange = sum(one.bytes / rate + one.messages * message for one in sent)
        shared = max(1.0, num_processes * self.threads / self.cores)
        if settings.data_parallel == "fsdp" or settings.context_parallel > 1:
            # Who has a core for itself waits in every layer for those who share one.
            shared = math.ceil(shared)
        found = StepSeconds(
            products=products,
            attention=attention,
            rest=max(0.0, gradients - host - products),
            optimizer=optimizer,
            host=host,
            exchange=exchange,
            overlapped=0.0,
            is_bound=False,
        )
        return scaled(found, shared)

    def _attention(self, settings: TrainSettings) -> float:
        return _attention_seconds(settings, self.attention, self.attention_forward)


def _attention_seconds(
    settings: TrainSettings, step: tuple[tuple[float, float], ...], forward: tuple[tuple[float, float], ...]
) -> float:
    model, rows = settings.model, settings.batch_size * settings.context_length
    pairs, patterns = pairs_of(settings), model.different_patterns
    total = 0.0
    for layer in range(model.num_layers):
        place = patterns.index(model.pattern(layer))
        passes = [step[place]]
        if model.gradient_checkpointing and model.is_recomputed(layer):
            passes.append(forward[place])
        total += sum(a * rows + b * pairs[patterns[place]] for a, b in passes)
    return total


def _bilinear(points: tuple[StepPoint, ...], layers: float, rows: float, of: Callable[[StepPoint], float]) -> float:
    """``a + b layers + (c + d layers) rows`` through four points, none of a, b, c and d below 0."""
    counts = [[1.0, point.layers, point.rows, point.layers * point.rows] for point in points]
    a, b, c, d = fit_seconds(counts, [max(of(point), 1e-9) for point in points])
    return a + b * layers + (c + d * layers) * rows


def measure_here(
    settings: TrainSettings,
    num_processes: int,
    device: str,
    *,
    is_quiet: bool = False,
    folder: Path | None = None,
    seconds: float = _MOST_SECONDS,
) -> Here:
    """Measure what is not known yet of steps with a model like this on this machine, in two minutes at most.

    Matrix products at the model's own shapes, attention under its patterns at a few lengths, four small steps with two
    numbers of its layers, copies, and with several processes sums over two of them. On a CPU whose cores several
    processes have, as many others take steps meanwhile, as far as there are cores for them.

    Args:
        settings: of the run.
        num_processes: of the run.
        device: "cpu" or "cuda".
        is_quiet: show no bar of progress.
        folder: where measurements are kept, the cache folder without it.
        seconds: after which no further measurement is begun.

    Raises:
        RunError: the model is too large to measure a few layers of it here, or the time is over.
    """
    hardware = read_hardware(device)
    measured = Measurements.of(hardware, folder, seconds=seconds)
    probe = _Probe(settings, torch.device(device), hardware, measured)
    with Progress(disable=is_quiet, transient=True) as progress:
        task = progress.add_task("measuring this machine", total=10)

        def done() -> None:
            progress.advance(task)

        return probe.all(num_processes, done)


@dataclass(slots=True)
class _Probe:
    settings: TrainSettings
    device: torch.device
    hardware: Hardware
    measured: Measurements
    company: Company | None = None

    def all(self, num_processes: int, done: Callable[[], None]) -> Here:
        try:
            return self._all(num_processes, done)
        finally:
            if self.company is not None:
                self.company.end()

    def _get(self, name: str, measure: Callable[[], list[float]]) -> list[float]:
        """A measurement beside the other processes, which are started for the first."""
        company = self.company
        if company is None or not company.count:
            return self.measured.get(name, measure)

        def among_others() -> list[float]:
            company.begin()
            return measure()

        return self.measured.get(f"{name}, beside {company.count} more", among_others)

    def _all(self, num_processes: int, done: Callable[[], None]) -> Here:
        dtype = computing_dtype(self.settings.precision)
        rate = self.measured.get(f"product rate {dtype}", lambda: [matrix_product_rate(self.device, dtype)])[0]
        done()
        threads, cores = torch.get_num_threads() if self.device.type == "cpu" else 0, os.cpu_count() or 1
        others = max(0, min(num_processes, cores // threads) - 1) if threads else 0
        layers, texts, lengths = self._sizes(rate, 1 + others)
        largest = self._small(layers[1], lengths[1], texts)
        self._check_size(largest, 1 + others)
        self.company = Company(largest, others, threads)
        copied = self._get("bytes copied a second", lambda: [copied_bytes(self.device)])[0]
        done()
        rows = texts * lengths[1]
        own = self._get(self._name(f"products {rows}"), lambda: [self._products(rows)])[0]
        done()
        longest = min(self.settings.context_length, 4 * min(lengths[1], _LONG))
        attention = self._attention(sorted({*lengths, longest}), is_training=True)
        done()
        forward = self._attention(sorted({*lengths, longest}), is_training=False)
        done()
        points = []
        for number in layers:
            for length in lengths:
                points.append(self._point(self._small(number, length, texts), attention, forward))
                done()
        exchange = [0.0, 0.0]
        self.company.end()
        if num_processes > 1:
            left = self.measured.ends_at - time.monotonic()
            exchange = self.measured.get("exchange", lambda: exchange_rates(left))
        done()
        sheet = sheet_here(self.measured, self.hardware, self.settings.precision, rate, copied)
        return Here(
            sheet=sheet,
            kind=self.device.type,
            steps=_shape(self.settings),
            cores=cores,
            threads=threads,
            points=tuple(points),
            product_rate=own,
            attention=attention,
            attention_forward=forward,
            exchange=(exchange[0], exchange[1]),
        )

    def _name(self, words: str) -> str:
        """A name that holds the shape of the model, of whatever number of layers."""
        return f"{words} of {_shape(self.settings)}"

    def _sizes(self, rate: float, processes: int) -> tuple[tuple[int, int], int, tuple[int, int]]:
        """Two numbers of layers, a number of texts, and two lengths of them.

        Texts and lengths are those of the run as far as two layers take no longer than they may; layers are then as
        many as there is time and memory for, up to those of the model: what differs little cannot be told apart.
        """
        model = self.settings.model
        period = max(len(model.different_patterns), model.checkpoint_every if model.gradient_checkpointing else 1)
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
        while most > 2 * period and self._bytes(most, length, texts, processes) > self.hardware.free_bytes // 2:
            most = max(2 * period, most // (2 * period) * period)
        return (period, most), texts, (max(8, length // 2), length)

    def _bytes(self, layers: int, length: int, texts: int, processes: int) -> int:
        """Of as many processes as take such steps beside each other."""
        return processes * footprint(self._small(layers, length, texts), 1).total

    def _small(self, layers: int, length: int, texts: int = 1) -> TrainSettings:
        model = dataclasses.replace(self.settings.model, num_layers=layers)
        return dataclasses.replace(
            self.settings,
            model=model,
            context_length=length,
            batch_size=texts,
            max_tokens=0,
            max_batch_size=0,
            stages=type(self.settings.stages)(),
            data_parallel="ddp",
            context_parallel=1,
            heads_parallel=1,
            tensor_parallel=1,
            offload="none",
            offload_folder=None,
            strategy="auto",
            layout="auto",
            packing="windows",
            parallel="told",
        )

    def _check_size(self, largest: TrainSettings, processes: int) -> None:
        model = largest.model
        needed = self._bytes(model.num_layers, largest.context_length, largest.batch_size, processes)
        if needed > self.hardware.free_bytes // 2:
            raise RunError(
                f"--hardware here takes steps of {model.num_layers} layers of the model, for which {in_bytes(needed)} "
                f"of memory are needed, and {in_bytes(self.hardware.free_bytes)} are free; name a device with "
                "--hardware"
            )

    def _products(self, rows: int) -> float:
        """Operations a second of the products of a block and of the output matrix, forward."""
        dtype = computing_dtype(self.settings.precision)
        operations = seconds = 0.0
        for width, out in shapes_of(self.settings.model):
            left = torch.randn(rows, width, device=self.device).to(dtype)
            right = torch.randn(out, width, device=self.device).to(dtype)
            seconds += least_seconds(lambda left=left, right=right: left @ right.T, self.device)  # type: ignore[misc]
            operations += 2.0 * rows * width * out
        return operations / seconds

    def _attention(self, lengths: list[int], *, is_training: bool) -> tuple[tuple[float, float], ...]:
        """Seconds a row and a pair, by pattern."""
        found = []
        for place in range(len(self.settings.model.different_patterns)):
            counts, seconds = [], []
            for length in lengths:
                seconds.append(self._attended(place, length, is_training=is_training))
                told = self._small(self.settings.model.num_layers, length)
                counts.append([float(length), float(pairs_of(told)[self.settings.model.different_patterns[place]])])
            of_row, of_pair = fit_seconds(counts, seconds)
            found.append((of_row, of_pair))
        return tuple(found)

    def _attended(self, place: int, length: int, *, is_training: bool) -> float:
        model = self.settings.model
        assert model.num_kv_heads is not None
        kind = "of a step" if is_training else "forward"

        def measure() -> list[float]:
            assert model.num_kv_heads is not None
            workload = Workload(
                sequence_length=length,
                batch_size=1,
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.embed_dim // model.num_heads,
                dtype=computing_dtype(self.settings.precision),
                is_causal=True,
                is_training=is_training,
            )
            call = call_of(workload, self.device)
            pattern = model.different_patterns[place]
            call(pattern)
            return [statistics.median(call(pattern) for _ in range(_CALLS))]

        return self._get(self._name(f"attention {place} {kind}, {length} rows"), measure)[0]

    def _point(
        self,
        told: TrainSettings,
        attention: tuple[tuple[float, float], ...],
        forward: tuple[tuple[float, float], ...],
    ) -> StepPoint:
        layers, texts, length = told.model.num_layers, told.batch_size, told.context_length

        def measure() -> list[float]:
            tokens = torch.randint(told.model.vocab_size, (texts, length))
            cost = measure_step(told, {"input_ids": tokens, "labels": tokens}, self.device.type)
            return [cost.forward + cost.backward, cost.optimizer]

        words = f"step of {layers} layers, {texts} x {length} rows"
        gradients, optimizer = self._get(self._name(words), measure)
        return StepPoint(layers, texts * length, gradients - _attention_seconds(told, attention, forward), optimizer)


def _shape(settings: TrainSettings) -> str:
    """A name for what counts of a step beside layers and lengths."""
    same = {**settings.model.to_dict(), "num_layers": 0}
    told = json.dumps([same, settings.precision, settings.optimizer], sort_keys=True)
    return hashlib.blake2b(told.encode(), digest_size=6).hexdigest()
