"""Free memory of a device, peak memory of a call, and the check that a call fits."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from .errors import RunError

_Result = TypeVar("_Result")
_M_MMAP_THRESHOLD = -3
"""Of malloc.h: blocks from this size on are mapped one by one, and unmapped when freed."""


def free_memory(device: torch.device | str) -> int:
    """Bytes that this process can still allocate on a device.

    On Linux: the kernel's "available" memory, or less under a control group limit or an address space limit
    (``ulimit -v``). On a GPU: the memory that the driver reports free plus what PyTorch's allocator holds unused.

    Raises:
        NotImplementedError: the free memory of this kind of device or system cannot be read.
    """
    device = torch.device(device)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    table = Path("/proc/meminfo")
    if device.type != "cpu" or not table.exists():
        raise NotImplementedError(unknown_memory(device))
    lines = [line.split() for line in table.read_text().splitlines()]
    available = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    return min([available, *_left_in_groups(), *_left_of_addresses()])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device or the CPU ran out of memory; PyTorch has no class of its own for all."""
    if isinstance(error, RuntimeError):
        words = str(error)
        is_plain = "can't allocate memory" in words or "out of memory" in words
        return is_plain or isinstance(error, torch.OutOfMemoryError)
    return isinstance(error, MemoryError)


def unknown_memory(device: torch.device) -> str:
    """The error message for a device whose free memory cannot be read."""
    return (
        f"free memory is read for CUDA devices and on Linux for the CPU, not for {device.type!r} on this system; "
        "pass hardware=Hardware.of_architecture(..., free_bytes=...) with what may be used"
    )


def _left_in_groups() -> Iterator[int]:
    """Bytes left below the limit of each enclosing control group (cgroup v1 and v2)."""
    own = Path("/proc/self/cgroup")
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            limit, usage, reclaimable = folder / names[0], folder / names[1], folder / "memory.stat"
            if limit.is_file() and usage.is_file() and limit.read_text().strip().isdecimal():
                used = int(usage.read_text())
                # The page cache counts as used but is reclaimed on demand.
                for entry in reclaimable.read_text().splitlines() if reclaimable.is_file() else ():
                    key, _, value = entry.partition(" ")
                    used -= int(value) if key == names[2] else 0
                yield max(0, int(limit.read_text()) - used)
            if folder == root:
                break


def _left_of_addresses() -> Iterator[int]:
    import resource  # Linux only

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        yield max(0, limit - pages * resource.getpagesize())


def check_memory(needed: int, device: torch.device | str, *, what: str, remedy: str, sharing: int = 1) -> None:
    """Raise :class:`RunError` if ``needed`` exceeds the free memory of the device.

    No check where free memory cannot be read (CPUs on systems other than Linux).

    Args:
        needed: lower bound of the bytes needed per process.
        device: device to allocate on.
        what: subject of the error message.
        remedy: last clause of the error message: what to do.
        sharing: number of processes that each allocate ``needed``.
    """
    device = torch.device(device)
    if device.type == "cpu" and sys.platform != "linux":
        return
    free = free_memory(device)
    if needed * sharing > free:
        each = f" in each of {sharing} processes" if sharing > 1 else ""
        raise RunError(
            f"{what} needs at least {in_bytes(needed)} of memory{each}, and {in_bytes(free)} are free; {remedy}"
        )


def peak_memory(call: Callable[[], _Result], device: torch.device) -> tuple[int, _Result] | None:
    """Peak memory of one call, in bytes above the level before it, and the call's result.

    On a GPU, memory allocated by PyTorch; on Linux, resident memory of the process. None where neither can be read.
    Freed pages that glibc keeps count, since other processes cannot use them.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        if not begin_peak():
            return None
        before = resident("VmRSS")
        result = call()
        peak = resident("VmHWM") - before
    return max(0, peak), result


def return_freed_blocks() -> bool:
    """Have glibc's malloc return freed blocks of 1 MiB and more to the system at once, until the process ends.

    By default it keeps freed blocks of up to 32 MiB, and blocks of changing sizes leave gaps between them: resident
    memory can reach four times the memory in use. Returning them takes time, as the pages of every new block are
    cleared again; with transparent huge pages, where the system has them, it takes less (PyTorch reads
    THP_MEM_ALLOC_ENABLE at its first allocation).

    Returns:
        False where malloc is not glibc's.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20))


def begin_peak() -> bool:
    """Return freed pages to the system and reset the peak of resident memory; False where that is not supported."""
    file = Path("/proc/self/clear_refs")
    if not sys.platform.startswith("linux") or not file.exists():
        return False
    # Pages that the allocator kept from earlier calls would hide what this call allocates.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    file.write_text("5")
    return True


def resident(field: str) -> int:
    """A field of /proc/self/status in bytes: ``VmRSS`` is the current resident size, ``VmHWM`` the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def in_bytes(number: int) -> str:
    """Format a number of bytes with its unit and three digits, rounded down.

    >>> in_bytes(1_549_000_000), in_bytes(98_760_000_000), in_bytes(123_900_000), in_bytes(10**30)
    ('1.54 GB', '98.7 GB', '123 MB', '1,000,000,000,000,000,000 TB')
    """
    size, unit = next(((size, unit) for size, unit in ((10**12, "TB"), (10**9, "GB")) if number >= size), (10**6, "MB"))
    digits = 0 if number >= 100 * size or number == 0 else 1 if number >= 10 * size else 2
    return f"{number // (size // 10**digits) / 10**digits:,.{digits}f} {unit}"
