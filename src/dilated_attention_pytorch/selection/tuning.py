"""Timing of this machine and fitting of rates; stored timings let a stopped run continue."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.ops import attend
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern

from .candidates import candidates
from .config import SegmentSelectionConfig
from .cost import features, nominal_seconds, weighted
from .fit import fit_seconds, rank_correlation
from .hardware import Hardware
from .profile import Profile, Rates, identity, write_whole
from .workload import Workload

FORMAT = "dilated-attention-pytorch tuning 1"
_CALLS_IN_A_ROUND = 2
_PARTS = 3
"""Number of cross-validation folds over the shapes."""
_OF_A_SHAPE = 8
"""Candidates timed per shape."""
_SHAPES_FIRST, _PATTERNS_FIRST = 6, 4
"""Of each dtype and mode, the shapes and the patterns of a shape that are timed before the others."""
_LEAST_SHAPES, _LEAST_PATTERNS = 6, 3
"""The fewest shapes, and timed patterns of a shape, that rates are fitted to and judged by."""
_MORE_ON_A_GPU = 8
"""Factor of the sequence lengths on a GPU, where short calls do not fill the device."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One pattern for one workload, with the measured times of its calls."""

    workload: Workload
    pattern: DilatedPattern
    samples: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The minimum: interference only adds time."""
        return min(self.samples)

    @property
    def name(self) -> str:
        """An identifier of the case, stable between runs."""
        return f"{self.workload}; {list(self.pattern.segment_lengths)} {list(self.pattern.dilation_rates)}"


@dataclass(frozen=True, slots=True)
class Fit:
    """The rates of one dtype and mode, and the cross-validated rank correlation of their predictions.

    Spearman correlations between predicted and measured times of one shape's candidates, averaged over all shapes;
    each shape is predicted by rates fitted to other shapes.
    """

    rates: Rates
    model_correlation: float
    model_error: float
    """Median of ``abs(predicted / measured - 1)``."""
    formula_correlation: float
    formula_error: float
    num_shapes: int

    @property
    def is_better(self) -> bool:
        """Whether the rates rank patterns of shapes they were not fitted to at least as well as the formula does."""
        return self.model_correlation >= self.formula_correlation


def cases(dtypes: Sequence[torch.dtype], hardware: Hardware, *, is_dry: bool = False) -> list[Timing]:
    """The cases to time: for every dtype and mode, shapes of several lengths, widths and batch sizes with candidates.

    A shape's candidates are sampled, identically in every run, from those within four times the fastest estimate,
    since choices are made among these. Every cross-validation fold contains shapes of every kind.
    """
    # length, batch, heads, key/value heads, width, causal
    shapes: list[tuple[int, int, int, int, int, bool]] = [
        (4096, 1, 4, 4, 64, False),
        (2000, 2, 4, 2, 64, True),
        (6000, 1, 2, 2, 64, False),
        (8192, 1, 2, 2, 64, True),
        (1500, 1, 8, 8, 64, False),
        (3000, 1, 4, 4, 128, True),
        (4096, 1, 4, 4, 64, True),
        (5000, 1, 4, 2, 32, False),
        (12000, 1, 2, 2, 64, True),
        (2048, 1, 8, 8, 64, False),
        (3500, 2, 2, 2, 64, True),
        (16384, 1, 1, 1, 64, False),
    ]
    shortest: tuple[int, ...] = (128, 512, 256, 1024)
    config = SegmentSelectionConfig(max_num_segments=6)
    scale, of_shape = 1 if hardware.kind == "cpu" else _MORE_ON_A_GPU, _OF_A_SHAPE
    if is_dry:
        shapes, of_shape = [(length // 16, *others) for length, *others in shapes[:6]], 3  # type: ignore[misc]
        shortest = (32,)
    found = []
    for dtype, is_training in itertools.product(dtypes, (False, True)):
        for index, (length, batch, heads, kv_heads, width, causal) in enumerate(shapes):
            workload = Workload(
                sequence_length=length * scale,
                batch_size=batch,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=width,
                dtype=dtype,
                is_causal=causal,
                is_training=is_training,
            )
            least = shortest[index % len(shortest)]  # kernels treat short and long problems differently
            patterns = candidates(replace(config, min_segment_size=least), workload, hardware.tile_rows)
            seconds = [nominal_seconds(pattern, workload, hardware) for pattern in patterns]
            near = [pattern for pattern, one in zip(patterns, seconds, strict=True) if one <= 4 * min(seconds)]
            drawn = random.Random(index).sample(near, min(of_shape, len(near)))
            found += [Timing(workload, pattern) for pattern in drawn]
    return found


def measure(
    timings: Sequence[Timing],
    device: torch.device,
    *,
    seconds: float,
    finished: Callable[[Timing], None],
    is_once: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Time every case twice, then repeat all cases, until ``seconds`` have passed.

    Spreading the rounds averages over slow and fast phases of the machine; the minimum of a case is its time. Each case
    gets one warm-up call, since plans are cached for a limited number of patterns and programs use one pattern often.
    A round begins with half of the patterns of the smaller half of the shapes, for all dtypes and modes: that is enough
    to fit and judge rates when the time ends before the round.

    Args:
        timings: cases to extend with samples; those with fewer samples go first.
        device: device to measure.
        seconds: time after which no further case starts.
        finished: called after every round of a case.
        is_once: stop when every case has samples.
        clock: the time in seconds.
    """
    ends_at = clock() + seconds
    order = in_order(timings)
    while not (is_once and all(timing.samples for timing in timings)):
        done = min(len(timing.samples) for timing in timings)
        for workload, group in itertools.groupby(order, key=lambda timing: timing.workload):
            waiting = [timing for timing in group if len(timing.samples) == done]
            call = None
            for timing in waiting:
                if clock() >= ends_at:
                    return
                call = call_of(workload, device) if call is None else call
                call(timing.pattern)
                timing.samples.extend(call(timing.pattern) for _ in range(_CALLS_IN_A_ROUND))
                finished(timing)


def in_order(timings: Sequence[Timing]) -> list[Timing]:
    """The order of a round: what comes first, then shape by shape, with all dtypes and modes of a shape together."""
    ranked = []
    for group in _by_mode(timings):
        for index, shape in enumerate(_by_shape(group)):
            for number, timing in enumerate(shape):
                is_later = index >= _SHAPES_FIRST, number >= _PATTERNS_FIRST
                ranked.append((sum(is_later), index, timing))
    return [timing for *_, timing in sorted(ranked, key=lambda entry: entry[:2])]


def _by_mode(timings: Sequence[Timing]) -> list[list[Timing]]:
    """The cases of every dtype and mode."""
    groups = itertools.groupby(timings, key=lambda timing: (timing.workload.dtype_name, timing.workload.is_training))
    return [list(group) for _, group in groups]


def _by_shape(timings: Sequence[Timing]) -> list[list[Timing]]:
    return [list(shape) for _, shape in itertools.groupby(timings, key=lambda timing: timing.workload)]


def call_of(workload: Workload, device: torch.device) -> Callable[[Pattern], float]:
    """A function that runs attention under a pattern once and returns its seconds."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        shape = (workload.batch_size, workload.sequence_length, heads, workload.head_dim)
        x = torch.randn(shape, generator=generator, device=device).to(workload.dtype)
        return x.requires_grad_(workload.is_training)

    query, key, value = draw(workload.num_heads), draw(workload.num_kv_heads), draw(workload.num_kv_heads)
    grad = torch.randn(query.shape, generator=generator, device=device).to(workload.dtype)

    def call(pattern: Pattern) -> float:
        _synchronize(device)
        start = time.perf_counter()
        out = attend(query, key, value, pattern, is_causal=workload.is_causal, heads_first=False)
        if workload.is_training:
            torch.autograd.grad(out, (query, key, value), grad)
        _synchronize(device)
        return time.perf_counter() - start

    return call


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fit(timings: Sequence[Timing], hardware: Hardware) -> list[Fit]:
    """Rates of every dtype and mode with times of enough shapes and patterns, with cross-validated errors.

    Errors come from three-fold cross-validation over the shapes; the returned rates are fitted to all of them.
    """
    fits = []
    for group in _by_mode([timing for timing in timings if timing.samples]):
        shapes = [shape for shape in _by_shape(group) if len(shape) >= _LEAST_PATTERNS]
        if len(shapes) < _LEAST_SHAPES:
            continue
        by_model: list[list[float]] = [[] for _ in shapes]
        for part in range(_PARTS):
            seen = [timing for index, shape in enumerate(shapes) if index % _PARTS != part for timing in shape]
            rates = _fit(seen, hardware)
            for index in range(part, len(shapes), _PARTS):
                by_model[index] = [
                    weighted(rates, features(one.pattern, one.workload, hardware)) for one in shapes[index]
                ]
        by_formula = [[nominal_seconds(one.pattern, one.workload, hardware) for one in shape] for shape in shapes]
        workload = group[0].workload
        rates = _fit([timing for shape in shapes for timing in shape], hardware)
        fits.append(
            Fit(
                Rates(workload.dtype_name, workload.is_training, rates, sum(len(one.samples) for one in group)),
                *_judged(shapes, by_model),
                *_judged(shapes, by_formula),
                len(shapes),
            )
        )
    return fits


def _fit(timings: Sequence[Timing], hardware: Hardware) -> tuple[float, ...]:
    counts = [features(timing.pattern, timing.workload, hardware) for timing in timings]
    return fit_seconds(counts, [timing.seconds for timing in timings])


def _judged(shapes: Sequence[Sequence[Timing]], predicted: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean rank correlation within shapes, and median relative error over all timings."""
    correlations, errors = [], []
    for shape, of_shape in zip(shapes, predicted, strict=True):
        measured = [timing.seconds for timing in shape]
        correlations.append(rank_correlation(of_shape, measured))
        errors += [abs(one / seconds - 1) for one, seconds in zip(of_shape, measured, strict=True)]
    return statistics.mean(correlations), statistics.median(errors)


def profile_of(fits: Sequence[Fit], before: Profile | None) -> Profile:
    """The fitted rates that are better than the formula, plus those of ``before`` for the other dtypes and modes.

    Rates that were fitted to more samples are kept, whatever a shorter run finds. For what is not in the profile, the
    formula predicts.
    """
    rates = {entry.mode: entry for entry in (() if before is None else before.rates)}
    for entry in fits:
        mode = entry.rates.mode
        if mode in rates and rates[mode].samples > entry.rates.samples:
            continue
        rates.pop(mode, None)
        if entry.is_better:
            rates[mode] = entry.rates
    return Profile(tuple(rates.values()))


def keep_timings(file: Path, timings: Sequence[Timing], hardware: Hardware, **values: Any) -> None:
    """Write the timings so far, atomically."""
    record = {
        "format": FORMAT,
        "machine": identity(hardware),
        **values,
        "samples": {timing.name: timing.samples for timing in timings},
    }
    write_whole(file, json.dumps(record, indent=1) + "\n")


def kept_timings(file: Path, timings: Sequence[Timing], hardware: Hardware) -> list[Timing]:
    """The cases with the samples stored in ``file`` by an earlier run.

    Raises:
        RunError: the file is not a tuning record, or belongs to another machine or version.
    """
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is not a regular file")
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return list(timings)
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is not a tuning record ({error}); delete it, or name another --output") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT or not isinstance(record.get("samples"), dict):
        raise RunError(f"{file} is not a tuning record; delete it, or name another --output")
    if record.get("machine") != identity(hardware):
        raise RunError(
            f"{file} is of another machine or version: expected {identity(hardware)}, got {record.get('machine')}; "
            "name another --output"
        )
    samples = record["samples"]
    return [replace(timing, samples=[float(value) for value in samples.get(timing.name, [])]) for timing in timings]
