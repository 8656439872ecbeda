"""``--parallel auto``: choice of the parallelism from the processes and their memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import free_memory, in_bytes
from dilated_attention_pytorch.training.preflight import check_processes
from dilated_attention_pytorch.training.settings import TrainSettings

from .memory import device_of_process, footprint

_REAL_PEAK = 1.25
"""Safety factor over the estimate, for allocator overhead and libraries."""


def choose_parallel(settings: TrainSettings, device: str, processes: int) -> tuple[TrainSettings, str]:
    """``settings`` with the first parallelism that fits into memory, and the reason as text.

    Tried in order: replicated weights (DDP), sharded weights (FSDP), then two, four, ... processes per
    sequence. Throughput grows with the number of processes with separate windows, so as few as possible share a
    sequence. If nothing fits, the last option is taken and left to the memory check.

    Args:
        settings: settings of the run; their ``data_parallel`` and ``context_parallel`` are ignored.
        device: "cpu" or "cuda".
        processes: number of processes.

    Raises:
        RunError: no option is valid for that number of processes.
    """
    where, sharing = device_of_process(device)
    free = free_memory(where) // sharing
    left: list[str] = []
    last: TrainSettings | None = None
    for chosen in _ways(settings, processes):
        name = _name(chosen)
        try:
            check_processes(chosen, processes)
        except RunError as error:
            left.append(f"{name} does not go: {error}")
            continue
        last, needed = chosen, int(_REAL_PEAK * footprint(chosen, processes).total)
        if needed <= free:
            before = f"; {', '.join(left)}" if left else ""
            return chosen, f"--parallel auto takes {name}: about {in_bytes(needed)} of {in_bytes(free)} free{before}"
        left.append(f"{name} would take {in_bytes(needed)}")
    if last is None:
        raise RunError(f"--parallel auto finds no way for {processes} processes: {', '.join(left)}")
    return last, f"--parallel auto takes {_name(last)}, though nothing is sure to fit: {', '.join(left)}"


def _ways(settings: TrainSettings, processes: int) -> Iterator[TrainSettings]:
    manual = dataclasses.replace(settings, parallel="manual", context_parallel=1, data_parallel="ddp")
    yield manual
    if processes == 1:
        return
    context = 1
    while context <= (1 if settings.max_tokens else processes):
        if processes % context == 0:
            yield dataclasses.replace(manual, context_parallel=context, data_parallel="fsdp")
        context *= 2


def _name(settings: TrainSettings) -> str:
    context = f" with {settings.context_parallel} processes at a sequence" if settings.context_parallel > 1 else ""
    return settings.data_parallel + context
