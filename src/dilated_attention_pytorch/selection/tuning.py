"""Timing of this machine and fitting of rates; stored timings let a stopped run continue."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate.workload import Workload
from dilated_attention_pytorch.ops import attend
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern

from .config import SegmentSelectionConfig
from .cost import features, nominal_rates, weighted
from .hardware import Hardware
from .profile import Accuracy, Profile, Rates, read_record, write_record
from .selector import candidates

_FORMAT = "dilated-attention-pytorch tuning 1"
_SHAPES: tuple[tuple[int, int, int, int, int, bool], ...] = (
    # length, batch, heads, key/value heads, width, causal
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
)
_SHORTEST = (128, 512, 256, 1024)
"""Shortest segment lengths of the shapes, in turn: kernels treat short and long segments differently."""
_PATTERNS = 8
"""Patterns timed per shape."""
_SHAPES_FIRST, _PATTERNS_FIRST = 6, 4
"""Of each dtype and mode, the shapes and the patterns of a shape that are timed before the others."""
_LEAST_SHAPES, _LEAST_PATTERNS = 6, 3
"""The fewest shapes, and timed patterns of a shape, that rates are fitted to and judged by."""
_HELD_OUT = 3
"""Every third shape is held out: rates are fitted to the others and judged by it."""
_LONGER_ON_A_GPU = 8
"""Factor of the sequence lengths on a GPU, where short calls do not fill the device."""
_CALLS_IN_A_ROUND = 2
_REWEIGHTINGS, _QUADRATIC_UP_TO = 5, 0.1


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


def cases(dtypes: Sequence[torch.dtype], hardware: Hardware, *, is_dry: bool = False) -> list[Timing]:
    """The cases to time: for every dtype and mode, shapes of several lengths, widths and batch sizes with candidates.

    A shape's candidates are sampled, identically in every run, from those within four times the fastest estimate,
    since choices are made among these. Half of the patterns of half of the shapes come first, for all dtypes and modes:
    that is enough to fit and judge rates when the time ends before a round.
    """
    shapes, num_patterns, shortest = (_SHAPES[:6], 3, (32,)) if is_dry else (_SHAPES, _PATTERNS, _SHORTEST)
    scale = 1 / 16 if is_dry else 1 if hardware.kind == "cpu" else _LONGER_ON_A_GPU
    ordered = []
    for dtype, is_training in itertools.product(dtypes, (False, True)):
        for index, (length, batch, heads, kv_heads, width, causal) in enumerate(shapes):
            workload = Workload(
                sequence_length=int(length * scale),
                batch_size=batch,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=width,
                dtype=dtype,
                is_causal=causal,
                is_training=is_training,
            )
            config = SegmentSelectionConfig(max_num_segments=6, min_segment_size=shortest[index % len(shortest)])
            patterns = candidates(config, workload, hardware.tile_rows)
            rates = nominal_rates(workload, hardware)
            seconds = [weighted(rates, features(pattern, workload)) for pattern in patterns]
            near = [pattern for pattern, one in zip(patterns, seconds, strict=True) if one <= 4 * min(seconds)]
            drawn = random.Random(index).sample(near, min(num_patterns, len(near)))
            for number, pattern in enumerate(drawn):
                is_later = (index >= _SHAPES_FIRST) + (number >= _PATTERNS_FIRST)
                ordered.append(((is_later, index), Timing(workload, pattern)))
    return [timing for _, timing in sorted(ordered, key=lambda entry: entry[0])]


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

    Args:
        timings: cases to extend with samples; those with fewer samples go first.
        device: device to measure.
        seconds: time after which no further case starts.
        finished: called after every round of a case.
        is_once: stop when every case has samples.
        clock: the time in seconds.
    """
    ends_at = clock() + seconds
    while not (is_once and all(timing.samples for timing in timings)):
        done = min(len(timing.samples) for timing in timings)
        for workload, group in itertools.groupby(timings, key=lambda timing: timing.workload):
            call = None
            for timing in [timing for timing in group if len(timing.samples) == done]:
                if clock() >= ends_at:
                    return
                call = call_of(workload, device) if call is None else call
                call(timing.pattern)
                timing.samples.extend(call(timing.pattern) for _ in range(_CALLS_IN_A_ROUND))
                finished(timing)


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
        start = now(device)
        out = attend(query, key, value, pattern, is_causal=workload.is_causal, heads_first=False)
        if workload.is_training:
            torch.autograd.grad(out, (query, key, value), grad)
        return now(device) - start

    return call


def now(device: torch.device) -> float:
    """Seconds on the host's clock when the device has done its work so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def fit_rates(timings: Iterable[Timing], hardware: Hardware) -> list[Rates]:
    """Rates of every dtype and mode with times of enough shapes and patterns.

    They are fitted to two thirds of the shapes. Their accuracy, and the formula's, is that on the third that is held
    out.
    """
    by_mode: dict[tuple[str, bool], dict[Workload, list[Timing]]] = {}
    for timing in timings:
        if timing.samples:
            shapes = by_mode.setdefault((timing.workload.dtype_name, timing.workload.is_training), {})
            shapes.setdefault(timing.workload, []).append(timing)
    fits = []
    for (dtype, is_training), shapes in by_mode.items():
        enough = [shape for shape in shapes.values() if len(shape) >= _LEAST_PATTERNS]
        if len(enough) < _LEAST_SHAPES:
            continue
        held_out = enough[_HELD_OUT - 1 :: _HELD_OUT]
        seen = [timing for index, shape in enumerate(enough, 1) if index % _HELD_OUT for timing in shape]
        seconds = fit_seconds(
            [features(timing.pattern, timing.workload) for timing in seen], [timing.seconds for timing in seen]
        )
        fitted = _accuracy(held_out, lambda workload, seconds=seconds: seconds)  # type: ignore[misc]
        formula = _accuracy(held_out, lambda workload: nominal_rates(workload, hardware))
        samples = sum(len(timing.samples) for shape in enough for timing in shape)
        fits.append(Rates(dtype, is_training, seconds, samples, fitted, formula))
    return fits


def _accuracy(shapes: Sequence[Sequence[Timing]], rates_of: Callable[[Workload], Sequence[float]]) -> Accuracy:
    correlations, errors = [], []
    for shape in shapes:
        rates, measured = rates_of(shape[0].workload), [timing.seconds for timing in shape]
        predicted = [weighted(rates, features(timing.pattern, timing.workload)) for timing in shape]
        correlations.append(rank_correlation(predicted, measured))
        errors += [abs(one / seconds - 1) for one, seconds in zip(predicted, measured, strict=True)]
    return Accuracy(statistics.mean(correlations), statistics.median(errors))


def profile_of(fits: Iterable[Rates], before: Profile | None) -> Profile:
    """The fitted rates, plus those of ``before`` for the other dtypes and modes, or that have more times."""
    rates = {entry.mode: entry for entry in (() if before is None else before.rates)}
    for entry in fits:
        if entry.mode not in rates or rates[entry.mode].samples <= entry.samples:
            rates[entry.mode] = entry
    return Profile(tuple(rates.values()))


def fit_seconds(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative seconds per unit of every feature that minimise the sum of ``huber(predicted / measured - 1)``.

    Errors are relative, since candidates are compared within a shape: a call of a millisecond counts as much as
    one of a second. Huber's loss is quadratic up to 0.1 and linear beyond, which limits the influence of disturbed
    timings. Rates are non-negative, so that predictions stay positive outside the measured range. Solved by
    iteratively reweighted least squares.

    Args:
        counts: features of every timing, ``[timings][features]``, at most a few features.
        seconds: measured times, each above 0.

    >>> [round(x, 9) for x in fit_seconds([[1.0, 10.0], [1.0, 20.0], [1.0, 40.0]], [12.0, 22.0, 42.0])]
    [2.0, 1.0]
    """
    rows = torch.tensor(counts, dtype=torch.float64) / torch.tensor(seconds, dtype=torch.float64)[:, None]
    norms = rows.norm(dim=0)
    rows = rows / norms.where(norms > 0, 1.0)
    weights = torch.ones(len(rows), dtype=torch.float64)
    for _ in range(_REWEIGHTINGS):
        solution = least_squares(rows, weights)
        weights = (_QUADRATIC_UP_TO / (rows @ solution - 1).abs()).clamp(max=1.0)
    return tuple((solution / norms.where(norms > 0, 1.0)).tolist())


def least_squares(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Non-negative x that minimises ``sum weight (row . x - 1)^2``: the best of all unconstrained solutions on a
    subset of the features that have no negative component."""
    root = weights.sqrt()
    matrix, target = rows * root[:, None], root[:, None]
    best, least = torch.zeros_like(rows[0]), target.square().sum()
    for number in range(1, rows.shape[1] + 1):
        for subset in map(list, itertools.combinations(range(rows.shape[1]), number)):
            solution = torch.linalg.lstsq(matrix[:, subset], target, driver="gelsd").solution
            loss = (matrix[:, subset] @ solution - target).square().sum()
            if loss < least and bool((solution >= 0).all()):
                best, least = torch.zeros_like(best).index_copy(0, torch.tensor(subset), solution[:, 0]), loss
    return best


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation: 1 for the same order, -1 for the opposite. Ties share a rank.

    >>> round(rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]), 9)
    0.5
    """
    values = torch.tensor([one, other], dtype=torch.float64)
    before, equal = (compare(values[:, None], values[:, :, None]).sum(dim=-1) for compare in (torch.lt, torch.eq))
    return float(torch.corrcoef((before + equal / 2).double())[0, 1].nan_to_num(0.0))


def keep_timings(file: Path, timings: Sequence[Timing], hardware: Hardware, **values: Any) -> None:
    """Write the timings so far, atomically."""
    write_record(file, _FORMAT, hardware, **values, samples={timing.name: timing.samples for timing in timings})


def kept_timings(file: Path, timings: Sequence[Timing], hardware: Hardware) -> list[Timing]:
    """The cases with the samples stored in ``file`` by an earlier run.

    Raises:
        RunError: the file is not a tuning record of this machine and version.
    """
    try:
        record = read_record(file, _FORMAT, hardware) or {"samples": {}}
        if not isinstance(record.get("samples"), dict):
            raise ValueError("is damaged: it has no samples")
    except ValueError as error:
        raise RunError(f"{file} {error}; delete it, or name another --output") from error
    samples = record["samples"]
    return [replace(timing, samples=[float(value) for value in samples.get(timing.name, [])]) for timing in timings]
