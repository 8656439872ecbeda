"""How long one call takes, and how much memory it needs beyond what it is given."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_L2_BYTES = 256 << 20
"""More than the second-level cache of any GPU: what lies in it is from no earlier call once so much was written."""


_FIRST_SLEEP = 0.5e-3
"""Seconds that a device sleeps before a call of which nothing is known: about what Python takes for a backward."""
_LONGEST_SLEEP = 0.1
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """One call."""

    seconds: float
    """On a GPU between its own events; else by the wall clock."""
    host_seconds: float | None = None
    """What the host took to launch it on a GPU."""
    is_hidden: bool = True
    """Whether all of it was launched before the device began with it: else the device may have waited for the host."""


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flushed = torch.empty(_L2_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None
        self._cycles_of_second: float | None = None

    def timer(self, call: Callable[[], object]) -> Timer:
        """What times one call again and again."""
        return Timer(self, call)

    def seconds(self, call: Callable[[], object]) -> float:
        """One call, by a timer of its own."""
        return self.timer(call).sample().seconds

    def sample(self, call: Callable[[], object], sleep: float) -> Sample:
        """One call. On a GPU with cold caches, launched while the device sleeps for so many seconds."""
        if self._flushed is None:
            start = time.perf_counter()
            call()
            return Sample(time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cycles = self._cycles(sleep)
        torch.cuda.synchronize(self.device)
        self._flushed.zero_()
        torch.cuda._sleep(cycles)
        begin.record()
        start = time.perf_counter()
        call()
        host_seconds = time.perf_counter() - start
        end.record()
        is_hidden = not begin.query()
        torch.cuda.synchronize(self.device)
        return Sample(float(begin.elapsed_time(end)) / 1e3, host_seconds, is_hidden)

    def _cycles(self, seconds: float) -> int:
        """Cycles of the device that take so long; their rate is measured once."""
        if self._cycles_of_second is None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cycles = 1 << 24
            torch.cuda._sleep(cycles)
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            torch.cuda.synchronize(self.device)
            self._cycles_of_second = cycles / (float(begin.elapsed_time(end)) / 1e3)
        return int(seconds * self._cycles_of_second)

    def memory(self, call: Callable[[], tuple[Tensor, ...]]) -> tuple[int, int] | None:
        """Bytes beyond what was there before, at the peak of one call: all of them, and those that are no results.

        On a GPU what was allocated, on Linux the resident memory of the process; None where neither can be read. The
        pages that glibc keeps after they were freed count, as they do for whoever shares the machine.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            results = call()
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device) - before
        else:
            if not begin_peak():
                return None
            before = resident("VmRSS")
            results = call()
            peak = resident("VmHWM") - before
        return max(0, peak), max(0, peak - sum(x.numel() * x.element_size() for x in results))


class Timer:
    """Times one call, and learns how long the device has to sleep until the host has launched it."""

    def __init__(self, clock: Clock, call: Callable[[], object]) -> None:
        self.call = call
        self._clock = clock
        self._sleep = _FIRST_SLEEP

    def sample(self) -> Sample:
        """One call; on a GPU again with a longer sleep if the device was done sleeping before the host was launching.

        A call that waits for the device itself can never be launched before it begins: its sample says so.
        """
        for _ in range(_TRIES):
            sample = self._clock.sample(self.call, self._sleep)
            if sample.is_hidden or sample.host_seconds is None or self._sleep >= _LONGEST_SLEEP:
                break
            self._sleep = min(_LONGEST_SLEEP, max(2 * self._sleep, 2 * sample.host_seconds))
        return sample


def begin_peak() -> bool:
    """Give freed pages back and let the peak of resident memory begin anew; False where the system cannot."""
    file = Path("/proc/self/clear_refs")
    if not sys.platform.startswith("linux") or not file.exists():
        return False
    # Pages that earlier calls left with the allocator would hide what this one takes.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    file.write_text("5")
    return True


def resident(field: str) -> int:
    """A field of /proc/self/status in bytes: ``VmRSS`` is resident now, ``VmHWM`` was at the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
