"""Memory: what a device has left, and a sentence where a call would need more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from .errors import RunError


def free_memory(device: torch.device | str) -> int:
    """Bytes that this process could still take on a device.

    On Linux what the kernel calls available, or less where a control group of this process or its limit of addresses
    (``ulimit -v``) leaves less. On a GPU what the driver has free, and what PyTorch's allocator holds without using it.

    Raises:
        NotImplementedError: a kind of device, or a system, whose free memory this package cannot read.
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


def unknown_memory(device: torch.device) -> str:
    """What is said of a device whose free memory this package cannot read."""
    return (
        f"free memory is read for CUDA devices and on Linux for the CPU, not for {device.type!r} on this system; "
        "pass hardware=Hardware.of_architecture(..., free_bytes=...) with what may be used"
    )


def _left_in_groups() -> Iterator[int]:
    """What every control group that this process is in, or within, leaves of its limit (both versions of them)."""
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
                # Pages of files that nobody reads any more count as used, and go when they are needed.
                for entry in reclaimable.read_text().splitlines() if reclaimable.is_file() else ():
                    key, _, value = entry.partition(" ")
                    used -= int(value) if key == names[2] else 0
                yield max(0, int(limit.read_text()) - used)
            if folder == root:
                break


def _left_of_addresses() -> Iterator[int]:
    import resource  # Linux alone asks

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        yield max(0, limit - pages * resource.getpagesize())


def check_memory(needed: int, device: torch.device | str, *, what: str, remedy: str, sharing: int = 1) -> None:
    """Raise :class:`RunError` if ``needed`` bytes are more than a device has left.

    On a system that does not tell how much that is (a CPU beside Linux) nothing is refused.

    Args:
        needed: bytes that are taken at least.
        device: where.
        what: takes them, the beginning of the sentence.
        remedy: what to do, its end.
        sharing: processes that take as much each.
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


def in_bytes(number: int) -> str:
    """A number of bytes for a person.

    >>> in_bytes(1_540_000_000), in_bytes(10**30)
    ('1.5 GB', '1,000,000,000,000,000,000.0 TB')
    """
    for unit, size in (("TB", 10**12), ("GB", 10**9)):
        if number >= size:
            return f"{number // (size // 10) / 10:,.1f} {unit}"
    return f"{number / 10**6:,.1f} MB"
