"""Timings of this machine, and the rates fitted to them. What was timed is kept, so that a stopped run goes on."""

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
from dilated_attention_pytorch.patterns import DilatedPattern

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
"""Into how many parts shapes are dealt to judge a fit."""
_OF_A_SHAPE = 8
"""Candidates of one shape that are timed."""
_MORE_ON_A_GPU = 8
"""How many times longer sequences are on a GPU, where short ones are over before they fill it."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One pattern for one workload, and the seconds of its calls."""

    workload: Workload
    pattern: DilatedPattern
    samples: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The least: whatever else ran made calls longer, never shorter."""
        return min(self.samples)

    @property
    def name(self) -> str:
        """Says which case it is, the same in every run."""
        return f"{self.workload}; {list(self.pattern.segment_lengths)} {list(self.pattern.dilation_rates)}"


@dataclass(frozen=True, slots=True)
class Fit:
    """The rates of one dtype and mode, and how well predictions rank candidates of shapes that they were not fitted to.

    Correlations are Spearman's between predicted and measured times of the candidates of one shape, the mean over all
    shapes, each predicted by rates of the others.
    """

    rates: Rates
    model_correlation: float
    model_error: float
    """Median of ``abs(predicted / measured - 1)``."""
    formula_correlation: float
    formula_error: float
    num_shapes: int


def cases(dtypes: Sequence[torch.dtype], hardware: Hardware, *, is_dry: bool = False) -> list[Timing]:
    """What is timed: for every dtype and mode shapes of several lengths, widths, batches, and candidates of each.

    The candidates of one shape are drawn, the same in every run, from those that take at most four times as long as
    the fastest by the formula: choices are made between such. Dealt into three parts, shapes of every kind are in each.
    """
    # length, batch, heads, key/value heads, width, causal
    shapes: list[tuple[int, int, int, int, int, bool]] = [
        (4096, 1, 4, 4, 64, False), (2000, 2, 4, 2, 64, True), (6000, 1, 2, 2, 64, False), (8192, 1, 2, 2, 64, True),
        (1500, 1, 8, 8, 64, False), (3000, 1, 4, 4, 128, True), (4096, 1, 4, 4, 64, True), (5000, 1, 4, 2, 32, False),
        (12000, 1, 2, 2, 64, True), (2048, 1, 8, 8, 64, False), (3500, 2, 2, 2, 64, True), (16384, 1, 1, 1, 64, False),
    ]  # fmt: skip
    shortest: tuple[int, ...] = (128, 512, 256, 1024)
    config = SegmentSelectionConfig(max_num_segments=6)
    scale, of_shape = 1 if hardware.kind == "cpu" else _MORE_ON_A_GPU, _OF_A_SHAPE
    if is_dry:
        shapes, of_shape = [(length // 16, *others) for length, *others in shapes[:6]], 3  # type: ignore[misc]
        shortest = (32,)
    found = []
    for dtype, is_training in itertools.product(dtypes, (False, True)):
        for place, (length, batch, heads, kv_heads, width, causal) in enumerate(shapes):
            workload = Workload(
                sequence_length=length * scale, batch_size=batch, num_heads=heads, num_kv_heads=kv_heads,
                head_dim=width, dtype=dtype, is_causal=causal, is_training=is_training,
            )  # fmt: skip
            least = shortest[place % len(shortest)]  # kernels compute short problems and long ones in other ways
            patterns = candidates(replace(config, min_segment_size=least), workload, hardware.tile_rows)
            seconds = [nominal_seconds(pattern, workload, hardware) for pattern in patterns]
            near = [pattern for pattern, one in zip(patterns, seconds, strict=True) if one <= 4 * min(seconds)]
            drawn = random.Random(place).sample(near, min(of_shape, len(near)))
            found += [Timing(workload, pattern) for pattern in drawn]
    return found


def measure(
    timings: Sequence[Timing], device: torch.device, *, seconds: float, finished: Callable[[Timing], None]
) -> None:
    """Time every case twice, then all of them again and again until ``seconds`` are over.

    Rounds far apart see the machine at several paces; the least time of a case is what it takes. Before it is timed a
    case is called once: what it plans is kept only until many others were planned, and programs call one pattern often.

    Args:
        timings: get samples; those with fewer go first.
        device: where.
        seconds: after which no further round begins.
        finished: is called after every round of a case.
    """
    ends_at = time.monotonic() + seconds
    while True:
        done = min(len(timing.samples) for timing in timings)
        for workload, group in itertools.groupby(timings, key=lambda timing: timing.workload):
            if done and time.monotonic() >= ends_at:
                return
            waiting = [timing for timing in group if len(timing.samples) == done]
            if not waiting:
                continue
            call = call_of(workload, device)
            for timing in waiting:
                call(timing.pattern)
                timing.samples.extend(call(timing.pattern) for _ in range(_CALLS_IN_A_ROUND))
                finished(timing)


def call_of(workload: Workload, device: torch.device) -> Callable[[DilatedPattern], float]:
    """A function that attends under a pattern once and gives its seconds."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        shape = (workload.batch_size, workload.sequence_length, heads, workload.head_dim)
        x = torch.randn(shape, generator=generator, device=device).to(workload.dtype)
        return x.requires_grad_(workload.is_training)

    query, key, value = draw(workload.num_heads), draw(workload.num_kv_heads), draw(workload.num_kv_heads)
    grad = torch.randn(query.shape, generator=generator, device=device).to(workload.dtype)

    def call(pattern: DilatedPattern) -> float:
        _synchronize(device)
        start = time.perf_counter()
        out = attend(query, key, value, pattern, is_causal=workload.is_causal)
        if workload.is_training:
            torch.autograd.grad(out, (query, key, value), grad)
        _synchronize(device)
        return time.perf_counter() - start

    return call


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fit(timings: Sequence[Timing], hardware: Hardware) -> list[Fit]:
    """The rates of every dtype and mode that was timed, and how good their predictions are for shapes that are new.

    The judged rates are not the ones returned: the shapes are dealt into three parts, and each is predicted by rates
    fitted to the other two.
    """
    fits = []
    for (dtype, is_training), group in itertools.groupby(
        timings, key=lambda timing: (timing.workload.dtype_name, timing.workload.is_training)
    ):
        shapes = [list(shape) for _, shape in itertools.groupby(group, key=lambda timing: timing.workload)]
        by_model: list[list[float]] = [[] for _ in shapes]
        for part in range(_PARTS):
            seen = [timing for place, shape in enumerate(shapes) if place % _PARTS != part for timing in shape]
            rates = _fit(seen, hardware)
            for place in range(part, len(shapes), _PARTS):
                by_model[place] = [
                    weighted(rates, features(one.pattern, one.workload, hardware)) for one in shapes[place]
                ]
        by_formula = [[nominal_seconds(one.pattern, one.workload, hardware) for one in shape] for shape in shapes]
        fits.append(
            Fit(
                Rates(dtype, is_training, _fit([timing for shape in shapes for timing in shape], hardware)),
                *_judged(shapes, by_model), *_judged(shapes, by_formula), len(shapes),
            )
        )  # fmt: skip
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
    """The fitted rates, and those of ``before`` for what was not measured now."""
    new = {(entry.rates.dtype, entry.rates.is_training): entry.rates for entry in fits}
    old = {(entry.dtype, entry.is_training): entry for entry in before.rates} if before is not None else {}
    return Profile(tuple((old | new).values()))


def keep_timings(file: Path, timings: Sequence[Timing], hardware: Hardware, **values: Any) -> None:
    """Write what was timed so far, whole or not at all."""
    record = {
        "format": FORMAT, "machine": identity(hardware), **values,
        "samples": {timing.name: timing.samples for timing in timings},
    }  # fmt: skip
    write_whole(file, json.dumps(record, indent=1) + "\n")


def kept_timings(file: Path, timings: Sequence[Timing], hardware: Hardware) -> list[Timing]:
    """The cases with the samples that an earlier run left in ``file``.

    Raises:
        RunError: the file is no record of a tuning, or of another machine or version.
    """
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is no regular file")
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return list(timings)
    except (OSError, ValueError) as error:
        raise RunError(f"{file} is no record of a tuning ({error}); delete it, or name another --output") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT or not isinstance(record.get("samples"), dict):
        raise RunError(f"{file} is no record of a tuning; delete it, or name another --output")
    if record.get("machine") != identity(hardware):
        raise RunError(
            f"{file} is of another machine or version: expected {identity(hardware)}, got {record.get('machine')}; "
            "name another --output"
        )
    samples = record["samples"]
    return [
        replace(timing, samples=[float(value) for value in samples.get(timing.name, [])]) for timing in timings
    ]  # fmt: skip
