"""Detection of slow ranks from the time that each rank computes by itself in a step.

All ranks take equally long per step, as each waits for the slowest. So only the time before a rank has to
wait counts: loading batches, and computing up to the first communication. With pure gradient averaging
(``ddp``) that is the whole step; where layers communicate (context and tensor parallelism, FSDP, ZeRO) it is
the part before the first layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

FACTOR = 1.5
"""A rank that works this many times as long as the median of the others is slow, ..."""
LEAST_PART = 0.1
"""... if the excess is at least this fraction of a step."""


class OwnTime:
    """A stopwatch for this process's own work; on a GPU with stream events, as calls are asynchronous.

    Args:
        device: device of the run.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._last: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Start the watch."""
        self._last = self._now()

    def mark(self) -> None:
        """Count the time until now and continue; no-op if stopped."""
        if self._last is not None:
            now = self._now()
            self._spans.append((self._last, now))
            self._last = now

    def stop(self) -> None:
        """Stop the watch: time since the last mark is not counted."""
        self._last = None

    def take(self) -> float:
        """Counted seconds since the last call."""
        spans, self._spans = self._spans, []
        if not self._is_cuda:
            return sum(after - before for before, after in spans)
        if spans:
            spans[-1][1].synchronize()
        return sum(before.elapsed_time(after) for before, after in spans) / 1e3

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that works longer than the others."""

    rank: int
    seconds: float
    """Its own work per step in seconds: the median over the steps between two log entries."""
    others: float
    """The median over the other ranks, in seconds."""

    def in_words(self) -> str:
        """One sentence of text."""
        return (
            f"rank {self.rank} is slow: it works {self.seconds:.3g} s by itself in a step, the others "
            f"{self.others:.3g} s (median), and they wait for it"
        )


def slowest(seconds: Sequence[float]) -> Straggler:
    """The rank with the most seconds, with the median of the others."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    others = statistics.median([*seconds[:rank], *seconds[rank + 1 :]])
    return Straggler(rank, seconds[rank], others)


def is_straggler(slowest: Straggler, step_seconds: float) -> bool:
    """Whether the others' waiting time for the slowest rank is significant."""
    waited = slowest.seconds - slowest.others
    return slowest.seconds > FACTOR * slowest.others and waited > LEAST_PART * step_seconds


class StragglerWatch(TrainerCallback):
    """Compares the ranks between log entries; one number per rank is gathered asynchronously with the next step.

    Args:
        own_time: this process's stopwatch.
        device: device of the run.
        name: called by the first process with a rank that was slow in two consecutive intervals.
    """

    def __init__(self, own_time: OwnTime, device: torch.device, name: Callable[[int, Straggler], None]) -> None:
        self.own_time = own_time
        self.device = device
        self.name = name
        self.slowest: Straggler | None = None
        """The slowest rank of the last completed interval."""
        self._steps: list[tuple[float, float]] = []
        self._ended = time.perf_counter()
        self._step_seconds = 0.0
        self._gathered: tuple[list[Tensor], Any] | None = None
        self._slow: int | None = None
        self._named: int | None = None

    def figures(self) -> dict[str, float]:
        """Figures for the log."""
        if self.slowest is None:
            return {}
        return {
            "slowest_rank": self.slowest.rank,
            "slowest_rank_seconds": round(self.slowest.seconds, 4),
            "other_ranks_seconds": round(self.slowest.others, 4),
        }

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the time of this step, read the last gather, and start the next one."""
        now = time.perf_counter()
        self._steps.append((self.own_time.take(), now - self._ended))
        self._ended = now
        self._read(state)
        if state.global_step % args.logging_steps == 0:
            own, self._step_seconds = map(statistics.median, zip(*self._steps, strict=True))
            self._steps = []
            mine = torch.tensor([own], device=self.device)
            everyones = [torch.empty_like(mine) for _ in range(args.world_size)]
            self._gathered = everyones, dist.all_gather(everyones, mine, async_op=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Read the last gather."""
        self._read(state)

    def _read(self, state: TrainerState) -> None:
        if self._gathered is None:
            return
        everyones, work = self._gathered
        self._gathered = None
        work.wait()
        found = self.slowest = slowest([float(seconds) for seconds in everyones])
        is_slow = is_straggler(found, self._step_seconds)
        if is_slow and found.rank == self._slow and found.rank != self._named and state.is_world_process_zero:
            self._named = found.rank
            self.name(state.global_step, found)
        self._slow = found.rank if is_slow else None
        if not is_slow:
            self._named = None
