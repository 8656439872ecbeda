"""The choice between routines that compute the same: measured once per machine, kept beside the compiled kernels."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compilation import processor_features
from .once_per_machine import file_of, once_per_machine

Routine = Callable[[], tuple[Tensor, ...]]

_SECONDS = 0.5
"""Seconds of a measurement, unless the fewest rounds take longer."""
_FEWEST_ROUNDS = 5
_ADVANTAGE = 1.25
"""A routine replaces the usual one if it is faster by this factor: measurements on a shared machine vary."""
_WAITING_SECONDS = 60.0
"""How long to wait for another process that is measuring."""


class MeasuredChoice(NamedTuple):
    """The routine to use, and what was measured."""

    name: str
    rates: dict[str, float]
    """Operations per second of each routine; 0 for one that failed or gave other numbers. Empty: not measured."""

    def describe(self) -> str:
        """The routine and the measured rates, in GFLOP/s."""
        if not self.rates:
            return f"{self.name}, as the environment says"
        return f"{self.name} ({', '.join(f'{name} {rate / 1e9:,.0f}' for name, rate in self.rates.items())} GFLOP/s)"


def measured_choice(
    subject: str, routines: Mapping[str, Routine], *, operations: float, tolerance: float, threads: int
) -> MeasuredChoice:
    """The fastest of ``routines`` on this machine.

    A choice is kept in the cache folder for each subject, processor, PyTorch version and number of threads. Processes
    that start at once wait for the one that measures. Where the folder cannot be used, every process measures.

    Args:
        subject: what the routines compute, a part of the file's name.
        routines: by name, the usual one first. Each returns its results; those of the others must agree with the first.
        operations: arithmetic operations of a call, for the rates.
        tolerance: largest difference that counts as agreement, relative to the largest number of a result.
        threads: number of threads of this process.
    """
    return once_per_machine(
        file_of(f"choice-{subject}", torch.__version__, processor_features(), str(threads)),
        lambda: _measure(routines, operations, tolerance),
        decode=lambda kept: _decode(kept, routines),
        encode=MeasuredChoice._asdict,
        waiting_seconds=_WAITING_SECONDS,
    )


def _decode(kept: Any, routines: Mapping[str, Routine]) -> MeasuredChoice | None:
    choice = MeasuredChoice(kept["name"], {name: float(kept["rates"][name]) for name in routines})
    return choice if choice.name in routines and all(map(math.isfinite, choice.rates.values())) else None


def _measure(routines: Mapping[str, Routine], operations: float, tolerance: float) -> MeasuredChoice:
    usual = next(iter(routines))
    expected = routines[usual]()
    # The first call of a routine is not timed: libraries prepare their kernels in it.
    rounds: list[dict[str, float]] = []
    timed = [name for name, call in routines.items() if name == usual or _agrees(call, expected, tolerance)]
    end = time.perf_counter() + (_SECONDS if len(timed) > 1 else 0.0)
    while len(rounds) < _FEWEST_ROUNDS or time.perf_counter() < end:
        rounds.append({name: _seconds(routines[name]) for name in timed})
    shortest, median = (
        {name: summary(one[name] for one in rounds) for name in timed} for summary in (min, statistics.median)
    )
    fastest = min(timed, key=shortest.__getitem__)
    # Other programs lengthen calls at random, so both must say so.
    is_faster = all(_ADVANTAGE * seconds[fastest] < seconds[usual] for seconds in (shortest, median))
    rates = {name: operations / shortest.get(name, math.inf) for name in routines}
    return MeasuredChoice(fastest if is_faster else usual, rates)


def _seconds(call: Routine) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _agrees(call: Routine, expected: tuple[Tensor, ...], tolerance: float) -> bool:
    try:
        results = call()
    except RuntimeError:  # PyTorch's for what it cannot compute
        return False
    return [x.shape for x in results] == [x.shape for x in expected] and all(
        float((result - exact).abs().max()) <= tolerance * float(exact.abs().max())
        for result, exact in zip(results, expected, strict=True)
    )
