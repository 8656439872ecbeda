"""Selection of the fastest configuration: timed once per kind of call, remembered for the life of the process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .configurations import BlockSizes, Candidates
from .tiles import INTERPRETED


@dataclass(slots=True, eq=False)
class TimedChoice:
    """The candidates for one kind of call, and the fastest once it is timed."""

    candidates: Candidates
    timed: BlockSizes | None = None


_CHOICES: dict[tuple[object, ...], TimedChoice] = {}


def choice_of(kernel: str, candidates: Candidates, *key: object) -> TimedChoice:
    """The choice shared by calls with this key."""
    return _CHOICES.setdefault((kernel, candidates, *key), TimedChoice(candidates))


def fastest(choice: TimedChoice, launch: Callable[[BlockSizes], None]) -> BlockSizes:
    """The fastest candidate of a choice.

    The first call compiles every candidate and times each for some milliseconds (Triton's ``do_bench``, which
    allocates some memory to flush the device's cache). Nothing is timed, and the first candidate is taken, under
    deterministic algorithms (timings vary from run to run), in Triton's interpreter, and if a CUDA graph is captured
    before this kind of call was timed.
    """
    first = choice.candidates[0]
    if len(choice.candidates) == 1 or torch.are_deterministic_algorithms_enabled():
        return first
    if choice.timed is None:
        if INTERPRETED.value or torch.cuda.is_current_stream_capturing():
            return first
        choice.timed = min(choice.candidates, key=lambda candidate: _milliseconds(launch, candidate))
    return choice.timed


def _milliseconds(launch: Callable[[BlockSizes], None], candidate: BlockSizes) -> float:
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        return do_bench(lambda: launch(candidate), warmup=5, rep=20)
    except OutOfResources:  # a device with less shared memory than others of its capability
        return float("inf")
