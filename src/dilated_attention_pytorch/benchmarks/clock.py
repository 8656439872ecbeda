"""Time and additional memory of a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.memory import peak_memory

_L2_BYTES = 256 << 20
"""More than the L2 cache of any GPU: writing this much evicts everything."""


_FIRST_SLEEP = 0.5e-3
"""Initial device sleep in seconds before an unknown call: about the host time of a backward pass."""
_LONGEST_SLEEP = 0.1
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """Timing of one call."""

    seconds: float
    """On a GPU between CUDA events; else wall-clock time."""
    host_seconds: float | None = None
    """Host time of the launch on a GPU."""
    is_hidden: bool = True
    """Whether everything was launched before the device started: otherwise the device may have waited for the host."""


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flushed = torch.empty(_L2_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None
        self._cycles_of_second: float | None = None

    def timer(self, call: Callable[[], object]) -> Timer:
        """A timer for repeated samples of one call."""
        return Timer(self, call)

    def seconds(self, call: Callable[[], object]) -> float:
        """Time of one call, with a new timer."""
        return self.timer(call).sample().seconds

    def sample(self, call: Callable[[], object], sleep: float) -> Sample:
        """Time one call; on a GPU with cold caches, launched while the device sleeps for ``sleep`` seconds."""
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
        """Device cycles of a duration; the clock rate is measured once."""
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

    def product_rate(self, dtype: torch.dtype, *, is_dry: bool = False) -> float:
        """Operations per second of a large square matrix product, the fastest of three; a dry run's is tiny."""
        size = 128 if is_dry else 8192 if self.device.type == "cuda" else 2048
        # Random numbers: a GPU that multiplies zeros draws less power and runs faster than on real data.
        a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        return max(2 * size**3 / self.seconds(lambda: torch.mm(a, b)) for _ in range(3))

    def memory(self, call: Callable[[], tuple[Tensor, ...]]) -> tuple[int, int] | None:
        """Peak bytes of one call above the level before it: in total, and without results.

        None where they cannot be measured, see :func:`peak_memory`.
        """
        found = peak_memory(call, self.device)
        if found is None:
            return None
        peak, results = found
        return peak, max(0, peak - sum(x.numel() * x.element_size() for x in results))


class Timer:
    """Times one call, and learns the device sleep that covers its launch."""

    def __init__(self, clock: Clock, call: Callable[[], object]) -> None:
        self.call = call
        self._clock = clock
        self._sleep = _FIRST_SLEEP

    def sample(self) -> Sample:
        """Time one call; on a GPU, repeat with a longer sleep if the device woke up before the launch was complete.

        A call that synchronises can never be launched completely in advance: ``is_hidden`` is then False.
        """
        for _ in range(_TRIES):
            sample = self._clock.sample(self.call, self._sleep)
            if sample.is_hidden or sample.host_seconds is None or self._sleep >= _LONGEST_SLEEP:
                break
            self._sleep = min(_LONGEST_SLEEP, max(2 * self._sleep, 2 * sample.host_seconds))
        return sample
