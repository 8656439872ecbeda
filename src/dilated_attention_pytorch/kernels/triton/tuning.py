"""Which configuration is fastest here: timed once for every kind of call, remembered while the process lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dilated_attention_pytorch.kernels.select import is_interpreted

from .configurations import Configuration


@dataclass(slots=True, eq=False)
class Choice:
    """The configurations that a kernel may be launched with for one kind of call, and which was the fastest."""

    candidates: tuple[Configuration, ...]
    timed: Configuration | None = None


_CHOICES: dict[tuple[object, ...], Choice] = {}


def choice_of(kernel: str, candidates: tuple[Configuration, ...], *key: object) -> Choice:
    """The one choice for calls of this key."""
    return _CHOICES.setdefault((kernel, candidates, *key), Choice(candidates))


def fastest(choice: Choice, launch: Callable[[Configuration], None]) -> Configuration:
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
        if is_interpreted() or torch.cuda.is_current_stream_capturing():
            return first
        choice.timed = min(choice.candidates, key=lambda candidate: _milliseconds(launch, candidate))
    return choice.timed


def _milliseconds(launch: Callable[[Configuration], None], candidate: Configuration) -> float:
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        return do_bench(lambda: launch(candidate), warmup=5, rep=20)
    except OutOfResources:  # a device with less shared memory than others of its capability
        return float("inf")
