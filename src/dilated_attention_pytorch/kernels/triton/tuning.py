"""Selection of the fastest configuration: timed once per kind of call, remembered for the life of the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch

from .tiles import INTERPRETED

Backward = Literal["pair", "single"]
"""One kernel for the gradient of the queries and one for those of keys and values, or one kernel for all."""
BACKWARDS: tuple[Backward, ...] = ("pair", "single")
Candidate = TypeVar("Candidate")


@dataclass(slots=True, eq=False)
class Choice(Generic[Candidate]):
    """The candidates for one kind of call, and the fastest once it is timed."""

    candidates: tuple[Candidate, ...]
    timed: Candidate | None = None


_CHOICES: dict[tuple[object, ...], Choice] = {}


def choice_of(kernel: str, candidates: tuple[Candidate, ...], *key: object) -> Choice[Candidate]:
    """The choice shared by calls with this key."""
    return _CHOICES.setdefault((kernel, candidates, *key), Choice(candidates))


def are_backwards_timed() -> bool:
    """Whether the single-kernel backward is timed against the pair; off by default until its gain is measured."""
    return os.environ.get("DILATED_ATTENTION_TIME_BACKWARDS", "0") == "1"


def fastest(choice: Choice[Candidate], launch: Callable[[Candidate], None]) -> Candidate:
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


def _milliseconds(launch: Callable[[Candidate], None], candidate: Candidate) -> float:
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        return do_bench(lambda: launch(candidate), warmup=5, rep=20)
    except OutOfResources:  # a device with less shared memory than others of its capability
        return float("inf")
