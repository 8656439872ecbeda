"""Measure steps of one kind on this machine: a few small steps, products, attention, copies, communication."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import in_bytes
from dilated_attention_pytorch.selection.hardware import Hardware
from dilated_attention_pytorch.selection.tuning import call_of, fit_seconds
from dilated_attention_pytorch.selection.workload import Workload
from dilated_attention_pytorch.training.autocast import computing_dtype
from dilated_attention_pytorch.training.batch_rows import with_length
from dilated_attention_pytorch.training.footprint import footprint
from dilated_attention_pytorch.training.measures import matrix_product_rate
from dilated_attention_pytorch.training.profiled_step import measure_step
from dilated_attention_pytorch.training.settings import TrainSettings
from dilated_attention_pytorch.training.zero import zero_stage

from .here import Here, StepPoint, attention_seconds, processes_of_a_batch, rows_of, shape_of_steps
from .measurements import MOST_SECONDS, Measurements, copied_bytes, least_seconds, measuring, sheet_here
from .processes_here import exchange_rates, shared_step_seconds
from .work import pairs_of, shapes_of, step_work

_SECONDS_OF_A_STEP = 1.5
"""Time limit of the largest measured step, estimated from its operations."""
_MOST_ROWS, _LONG, _LEAST_ROWS = 16384, 4096, 64
_CALLS = 3
_PROCESSES_OF_A_CORE = 4
_MEASUREMENTS = 7


def measure_here(
    settings: TrainSettings,
    num_processes: int,
    device: str,
    *,
    is_quiet: bool = False,
    folder: Path | None = None,
    seconds: float = MOST_SECONDS,
) -> Here:
    """Measure steps with a model of this shape on this machine, in two minutes at most; known measurements are reused.

    Measured are matrix products of the model's own shapes, attention under its patterns at a few lengths, four small
    steps with two of its layer counts and lengths, and copies. For a run of several processes, as many processes take
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
    cores = _cores_for(num_processes, device)
    with measuring(device, _MEASUREMENTS, is_quiet=is_quiet, folder=folder, seconds=seconds) as known:
        return _Probe(settings, num_processes, torch.device(device), cores, *known).all()


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
    done: Callable[[], None]

    def all(self) -> Here:
        cores, done = self.cores, self.done
        dtype = computing_dtype(self.settings.precision)
        rate = self.measured.get(f"product rate {dtype}", lambda: [matrix_product_rate(self.device, dtype)])[0]
        done()
        threads = torch.get_num_threads() if self.device.type == "cpu" else 0
        shared = max(1.0, self.num_processes * threads / cores)
        layers, texts, lengths = self._sizes(rate / shared)
        self._check_size(layers[1], lengths[1], texts)
        copied = self.measured.get("bytes copied a second", lambda: [copied_bytes(self.device)])[0]
        done()
        rows = texts * lengths[1] // processes_of_a_batch(self.settings)
        own = self.measured.get(self._name(f"products {rows}"), lambda: [self._products(rows)])[0]
        done()
        longest = min(self.settings.context_length, 4 * min(lengths[1], _LONG))
        attention = self._attention(sorted({*lengths, longest}), is_training=True)
        done()
        forward = self._attention(sorted({*lengths, longest}), is_training=False)
        done()
        points = []
        of_attention = shared / processes_of_a_batch(self.settings)
        for told, gradients, optimizer in self._steps(layers, texts, lengths, threads):
            others = attention_seconds(told, attention, forward) * of_attention
            points.append(StepPoint(told.model.num_layers, rows_of(told), max(0.0, gradients - others), optimizer))
        done()
        exchange = [0.0, 0.0]
        if self.num_processes > 1:
            exchange = self.measured.get("exchange", lambda: exchange_rates(self.device.type, self._left()))
        done()
        return Here(
            sheet=sheet_here(self.measured, self.hardware, self.settings.precision, rate, copied),
            kind=self.device.type,
            steps=shape_of_steps(self.settings, self.num_processes),
            cores=cores,
            threads=threads,
            points=tuple(points),
            product_rate=own,
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
            for told in steps:
                words = f"step of {told.model.num_layers} layers, {texts} x {told.context_length} rows"
                gradients, optimizer = self.measured.get(self._name(words), lambda told=told: self._step(told))  # type: ignore[misc]
                yield told, gradients, optimizer
            return
        shared, count, device = [self._shared(one) for one in steps], self.num_processes, self.device.type
        found = self.measured.get(
            self._name(f"steps of {layers} layers, {texts} x {lengths} rows"),
            lambda: shared_step_seconds(shared, count, device, threads, self._left()),
        )
        yield from zip(shared, found[::2], found[1::2], strict=True)

    def _step(self, told: TrainSettings) -> list[float]:
        tokens = torch.randint(told.model.vocab_size, (told.batch_size, told.context_length))
        cost = measure_step(told, {"input_ids": tokens, "labels": tokens}, self.device.type)
        return [cost.forward + cost.backward, cost.optimizer]

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

    def _shared(self, told: TrainSettings) -> TrainSettings:
        """The step with the parallel settings of the run."""
        given = self.settings
        return dataclasses.replace(
            told,
            data_parallel="ddp" if zero_stage(given) else given.data_parallel,
            context_parallel=given.context_parallel,
            heads_parallel=given.heads_parallel,
            tensor_parallel=given.tensor_parallel,
            strategy=given.strategy,
            layout=given.layout,
        )

    def _check_size(self, layers: int, length: int, texts: int) -> None:
        needed = self._bytes(layers, length, texts)
        if needed > self.hardware.free_bytes // 2:
            raise RunError(
                f"--hardware here takes steps of {layers} layers of the model, for which {in_bytes(needed)} of memory "
                f"are needed, and {in_bytes(self.hardware.free_bytes)} are free; name a device with --hardware"
            )

    def _products(self, rows: int) -> float:
        """Operations per second of the products of a block and of the output matrix, in the forward pass."""
        dtype = computing_dtype(self.settings.precision)
        operations = seconds = 0.0
        for width, out in shapes_of(self.settings.model):
            left = torch.randn(rows, width, device=self.device).to(dtype)
            right = torch.randn(out, width, device=self.device).to(dtype)
            seconds += least_seconds(lambda left=left, right=right: left @ right.T, self.device)  # type: ignore[misc]
            operations += 2.0 * rows * width * out
        return operations / seconds

    def _attention(self, lengths: list[int], *, is_training: bool) -> tuple[tuple[float, float], ...]:
        """Seconds per row and per pair, for each pattern."""
        found = []
        for index in range(len(self.settings.model.different_patterns)):
            counts, seconds = [], []
            for length in lengths:
                seconds.append(self._attended(index, length, is_training=is_training))
                told = self._small(self.settings.model.num_layers, length)
                counts.append([float(length), float(pairs_of(told)[self.settings.model.different_patterns[index]])])
            of_row, of_pair = fit_seconds(counts, seconds)
            found.append((of_row, of_pair))
        return tuple(found)

    def _attended(self, index: int, length: int, *, is_training: bool) -> float:
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
            pattern = model.different_patterns[index]
            call(pattern)
            return [statistics.median(call(pattern) for _ in range(_CALLS))]

        return self.measured.get(self._name(f"attention {index} {kind}, {length} rows"), measure)[0]
