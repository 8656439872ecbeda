"""Each rank's own work per step, in the log, and the slow ranks that a log shows.

All ranks take equally long per step, as each waits for the slowest. So only the time before a rank has to
wait counts: loading batches, and computing up to the first communication. With pure gradient averaging
(``ddp``) that is the whole step; where layers communicate (context and tensor parallelism, FSDP, ZeRO) it is
the part before the first layer.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

OWN_SECONDS, STEP_SECONDS = "own_seconds_of_rank_", "step_seconds"
"""Names in the log: the first is followed by the rank."""
FACTOR = 1.5
"""A rank that works this many times as long as the median of the others is slow, ..."""
LEAST_PART = 0.1
"""... if the excess is at least this fraction of a step."""


class OwnTime(TrainerCallback):
    """Times the steps and this rank's own work in them; on a GPU with stream events, as calls are asynchronous."""

    def __init__(self, args: TrainingArguments) -> None:
        self._is_cuda, self._is_alone = args.device.type == "cuda", args.world_size == 1
        self._since: Any = None
        self._spans: list[tuple[Any, Any]] = []
        self._began, self._seconds, self._num_steps = 0.0, 0.0, 0
        self._entries: list[dict[str, float]] = []
        self._slow_ranks: set[int] = set()

    def start(self) -> None:
        """Own work begins. A single rank waits for nobody, and is not timed."""
        self._since = None if self._is_alone else self._now()

    def mark(self) -> None:
        """Count the time since the last call as own work, and continue."""
        if self._since is not None:
            before, self._since = self._since, self._now()
            self._spans.append((before, self._since))

    def stop(self) -> None:
        """Waiting begins; the time since the last call is not counted."""
        self._since = None

    def begin_step(self) -> None:
        """A step begins, with the loading of its batches."""
        self._began = time.perf_counter()
        self.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The optimizer has stepped."""
        self._seconds += time.perf_counter() - self._began
        self._num_steps += 1

    def take(self) -> tuple[float, float]:
        """Mean seconds of own work, and of a step, over the steps since the last call."""
        spans, self._spans = self._spans, []
        if self._is_cuda and spans:
            spans[-1][1].synchronize()
            own = sum(before.elapsed_time(after) for before, after in spans) / 1e3
        else:
            own = sum(after - before for before, after in spans)
        means = own / max(1, self._num_steps), self._seconds / max(1, self._num_steps)
        self._seconds, self._num_steps = 0.0, 0
        return means

    def entry(self, accelerator: Accelerator, say: Callable[[str], None]) -> dict[str, float]:
        """Each rank's own work per step since the last entry, for the log. A collective.

        The first process says which rank is slow for the second time, once per rank.
        """
        own, step = self.take()
        everyones = accelerator.gather(torch.tensor([own], device=accelerator.device)).tolist()
        figures = {f"{OWN_SECONDS}{rank}": round(seconds, 4) for rank, seconds in enumerate(everyones)}
        self._entries = [*self._entries[-1:], {**figures, STEP_SECONDS: round(step, 4)}]
        for straggler in stragglers(self._entries):
            if straggler.rank not in self._slow_ranks and accelerator.is_main_process:
                self._slow_ranks.add(straggler.rank)
                say(f"slow rank: {straggler.describe()}")
        return self._entries[-1]

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
    """Its own work per step."""
    others: float
    """The median over the other ranks, in seconds."""
    part: float
    """Fraction of a step that the others wait for it."""

    def describe(self) -> str:
        """One sentence of text."""
        return (
            f"rank {self.rank} works {self.seconds:.3g} s by itself in a step, the others {self.others:.3g} s "
            f"(median), and they wait for it, {self.part:.0%} of a step"
        )


def stragglers(entries: Sequence[Mapping[str, float]]) -> list[Straggler]:
    """The ranks that are slow in two consecutive entries of the log, each once."""
    slow = [_straggler(entry) for entry in entries if STEP_SECONDS in entry]
    by_rank: dict[int, Straggler] = {}
    for before, after in itertools.pairwise(slow):
        if before is not None and after is not None and before.rank == after.rank:
            by_rank.setdefault(after.rank, after)
    return list(by_rank.values())


def _straggler(entry: Mapping[str, float]) -> Straggler | None:
    own = [seconds for name, seconds in entry.items() if name.startswith(OWN_SECONDS)]
    if len(own) < 2:
        return None
    rank = max(range(len(own)), key=own.__getitem__)
    others = statistics.median([*own[:rank], *own[rank + 1 :]])
    part = (own[rank] - others) / max(entry[STEP_SECONDS], 1e-9)
    is_slow = own[rank] > FACTOR * others and part > LEAST_PART
    return Straggler(rank, own[rank], others, part) if is_slow else None
