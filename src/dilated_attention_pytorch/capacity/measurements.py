"""Named measurements of this machine, taken once and stored in the cache folder."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.progress import Progress

from dilated_attention_pytorch.data_sheets import DataSheet
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.selection.hardware import Hardware, read_hardware
from dilated_attention_pytorch.selection.profile import identity, read_record, write_record

FORMAT = "dilated-attention-pytorch measurements 1"
MOST_SECONDS = 120.0
"""Default time after which no further measurement is begun."""
_CALLS = 3
_COPIED = 1 << 26


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
            write_record(self.file, FORMAT, self.hardware, values=self.values)
        return self.values[name]


@contextmanager
def measuring(
    device: str, number: int, *, is_quiet: bool, folder: Path | None, seconds: float
) -> Iterator[tuple[Hardware, Measurements, Callable[[], None]]]:
    """Yield the device, its measurements, and a function to call after each new measurement; show a progress bar.

    Args:
        device: "cpu" or "cuda".
        number: number of measurements.
        is_quiet: show no progress bar.
        folder, seconds: see :meth:`Measurements.of`.

    Raises:
        RunError: the file is damaged.
    """
    hardware = read_hardware(device)
    measured = Measurements.of(hardware, folder, seconds=seconds)
    with Progress(disable=is_quiet, transient=True) as progress:
        task = progress.add_task("measuring this machine", total=number)
        yield hardware, measured, lambda: progress.advance(task)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of a call, including all that it starts on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def least_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Minimum time of a few calls after a warm-up call."""
    call()
    return min(seconds_of(call, device) for _ in range(_CALLS))


def copied_bytes(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.ones(_COPIED // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / least_seconds(lambda: target.copy_(source), device)


def sheet_here(measured: Measurements, hardware: Hardware, precision: str, rate: float, copied: float) -> DataSheet:
    """A data sheet of this machine.

    Args:
        measured: the measurements, whose file is named as the source.
        hardware: the device.
        precision, rate: a precision, and operations per second of matrix products in it.
        copied: bytes per second of a copy.
    """
    return DataSheet(
        name="this machine",
        family=hardware.architecture,
        memory_bytes=hardware.free_bytes,
        bytes_per_second=copied,
        flops={precision: rate},
        processors=hardware.processors,
        watts=0.0,
        link="",
        sources={"flops": f"measured: {measured.file.name}"},
        compared={},
    )


def _read(file: Path, hardware: Hardware) -> dict[str, list[float]]:
    try:
        record = read_record(file, FORMAT, hardware) or {"values": {}}
        values = {str(name): [float(one) for one in some] for name, some in record["values"].items()}
        if not all(math.isfinite(one) and one >= 0 for some in values.values() for one in some):
            raise ValueError("a number is not finite, or below 0")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{file} holds no measurements ({error}); delete it, and they are taken anew") from error
    return values
