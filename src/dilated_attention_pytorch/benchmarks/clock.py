"""How long one call takes, and how much memory it needs beyond what it is given."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

_L2_BYTES = 256 << 20
"""More than the second-level cache of any GPU: what lies in it is from no earlier call once so much was written."""


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flushed = torch.empty(_L2_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def seconds(self, call: Callable[[], object]) -> float:
        """One call. On a GPU by its own events, with cold caches, and with launches hidden behind the flush."""
        if self._flushed is None:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        self._flushed.zero_()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(begin.elapsed_time(end)) / 1e3

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
