"""The rank that the others wait for: how long each works by itself in a step, and which one takes longer than the rest.

All ranks of a run take equally long for a step, as each waits for the slowest. So only the time before a rank has to
wait counts: reading its batches, and computing until it exchanges anything. Where gradients alone are exchanged
(``ddp``) that is all of a step; where layers exchange rows or weights (context and tensor parallel, FSDP, ZeRO) it is
what comes before the first layer.
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
"""A rank that works so many times as long as the median of the others is slow, ..."""
LEAST_PART = 0.1
"""... if what it works longer is so large a part of a step."""


class OwnTime:
    """A watch of what this process does by itself: on a GPU by events in its stream, as calls return before.

    Args:
        device: where the run computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._last: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """From now on this process works by itself."""
        self._last = self._now()

    def mark(self) -> None:
        """It has worked by itself until now, and goes on; nothing where it has stopped."""
        if self._last is not None:
            now = self._now()
            self._spans.append((self._last, now))
            self._last = now

    def stop(self) -> None:
        """From now on it may wait; what it did since the last mark does not count."""
        self._last = None

    def take(self) -> float:
        """Seconds of work since the last call."""
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
    """Of its own work in a step: the median of the steps between two entries of the log."""
    others: float
    """The median of the other ranks."""

    def in_words(self) -> str:
        """A sentence about it."""
        return (
            f"rank {self.rank} is slow: it works {self.seconds:.3g} s by itself in a step, the others "
            f"{self.others:.3g} s (median), and they wait for it"
        )


def slowest(seconds: Sequence[float]) -> Straggler:
    """The rank with the most seconds, beside the median of the others."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    others = statistics.median([*seconds[:rank], *seconds[rank + 1 :]])
    return Straggler(rank, seconds[rank], others)


def is_straggler(slowest: Straggler, step_seconds: float) -> bool:
    """Whether the others wait for the slowest rank for a time that counts."""
    waited = slowest.seconds - slowest.others
    return slowest.seconds > FACTOR * slowest.others and waited > LEAST_PART * step_seconds


class StragglerWatch(TrainerCallback):
    """Compares the ranks between two entries of the log: one number of each is gathered beside the next step.

    Args:
        own_time: this process's watch.
        device: where the run computes.
        name: what the first process calls with a rank that was slow in two intervals, one after the other.
    """

    def __init__(self, own_time: OwnTime, device: torch.device, name: Callable[[int, Straggler], None]) -> None:
        self.own_time = own_time
        self.device = device
        self.name = name
        self.slowest: Straggler | None = None
        """The slowest rank of the last interval that is known."""
        self._steps: list[tuple[float, float]] = []
        self._ended = time.perf_counter()
        self._step_seconds = 0.0
        self._gathered: tuple[list[Tensor], Any] | None = None
        self._slow: int | None = None
        self._named: int | None = None

    def figures(self) -> dict[str, float]:
        """For the log."""
        if self.slowest is None:
            return {}
        return {
            "slowest_rank": self.slowest.rank, "slowest_rank_seconds": round(self.slowest.seconds, 4),
            "other_ranks_seconds": round(self.slowest.others, 4),
        }  # fmt: skip

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the time of this step, read what was gathered, and have the next interval gathered."""
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
        """Read what the last interval gathered."""
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
