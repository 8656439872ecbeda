"""Which configuration is fastest here: timed once for every kind of call, remembered while the process lives."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch

from .tiles import INTERPRETED

Backward = Literal["pair", "single"]
"""One kernel for the gradient of the queries and one for those of keys and values, or one for all."""
BACKWARDS: tuple[Backward, ...] = ("pair", "single")
Candidate = TypeVar("Candidate")


@dataclass(slots=True, eq=False)
class Choice(Generic[Candidate]):
    """What one kind of call may be computed by, and which was the fastest."""

    candidates: tuple[Candidate, ...]
    timed: Candidate | None = None


_CHOICES: dict[tuple[object, ...], Choice] = {}


def choice_of(kernel: str, candidates: tuple[Candidate, ...], *key: object) -> Choice[Candidate]:
    """The one choice for calls of this key."""
    return _CHOICES.setdefault((kernel, candidates, *key), Choice(candidates))


def are_backwards_timed() -> bool:
    """Whether the backward by one kernel is timed beside the pair: it waits for a device to show what it gains."""
    return os.environ.get("DILATED_ATTENTION_TIME_BACKWARDS", "0") == "1"


def fastest(choice: Choice[Candidate], launch: Callable[[Candidate], None]) -> Candidate:
    """The fastest candidate of a choice.

    The first call compiles every candidate and times each for some milliseconds (Triton's ``do_bench``, which takes
    some memory to flush the device's cache with). Nothing is timed, and the first candidate taken, under deterministic
    algorithms (timings vary from run to run), in Triton's interpreter, and where a CUDA graph is captured before the
    kind of call was timed.
    """
    first = choice.candidates[0]
    if len(choice.candidates) == 1 or torch.are_deterministic_algorithms_enabled():
        return first
    if choice.timed is None:
        if INTERPRETED.value or torch.cuda.is_current_stream_capturing():
            return first
        choice.timed = min(choice.candidates, key=lambda candidate: _milliseconds(launch, candidate))
    return choice.timed


def _milliseconds(launch: Callable[[Candidate], None], candidate: Candidate) -> float:
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        return do_bench(lambda: launch(candidate), warmup=5, rep=20)
    except OutOfResources:  # a device with less shared memory than others of its capability
        return float("inf")
