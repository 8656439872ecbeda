"""Benchmark presets: for two CPU cores and for a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from dilated_attention_pytorch.errors import RunError

from .contestants import FLEX
from .settings import BenchSettings, PresetName
from .shapes import ROWS, SHAPES, Case, DtypeName, Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Cases of one shape: all combinations of the listed values; empty lists mean the shape's own."""

    shape: str
    rows: tuple[int, ...] = ()
    modes: tuple[Mode, ...] = ()
    dtypes: tuple[DtypeName, ...] = ()
    causal: tuple[bool, ...] = ()
    head_dims: tuple[int, ...] = ()
    num_groups: tuple[int, ...] = ()
    without: tuple[str, ...] = ()
    """Contestants left out of these cases, unless the settings name contestants."""

    def cases(self, batch: int) -> list[Case]:
        """The combinations, with rows varying fastest."""
        shape = SHAPES[self.shape]
        combinations = itertools.product(
            self.head_dims or (shape.head_dim,),
            self.num_groups or (len(shape.segment_lengths),),
            self.dtypes or (shape.dtype,),
            self.causal or (shape.causal,),
            self.modes or (shape.mode,),
            self.rows or ROWS[self.shape],
        )
        return [
            replace(
                shape,
                rows=rows,
                mode=mode,
                dtype=dtype,
                causal=causal,
                head_dim=head_dim,
                segment_lengths=shape.segment_lengths[:groups],
                dilation_rates=shape.dilation_rates[:groups],
                batch=batch,
            )
            for head_dim, groups, dtype, causal, mode, rows in combinations
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Sweeps and time limits. The settings can override each of them."""

    sweeps: tuple[Sweep, ...]
    seconds_each: float
    call_limit: float
    time_limit: float


_BOTH: tuple[Mode, ...] = ("forward", "forward_backward")


def _gpu(*, dtypes: tuple[DtypeName, ...] = ("bfloat16",), **cases: Any) -> Sweep:
    return Sweep(dtypes=dtypes, without=(FLEX,), **cases)


PRESETS: dict[str, Preset] = {
    "cpu": Preset(
        sweeps=(
            Sweep(shape="three", rows=(1024, 4096, 8192)),
            Sweep(shape="three", rows=(1024, 4096), modes=("forward_backward",)),
            Sweep(shape="decode"),
            Sweep(shape="slide", rows=(1000, 3000, 10000)),
            Sweep(shape="paper", rows=(4096,), modes=("forward_backward",)),
            Sweep(shape="three", rows=(4096,), causal=(True,)),
            Sweep(shape="three", rows=(4096,), dtypes=("bfloat16",)),
            Sweep(shape="three", rows=(4096,), head_dims=(32, 128)),
            Sweep(shape="three", rows=(4096,), num_groups=(1, 2)),
            Sweep(shape="paper", rows=(4096, 32768)),
            Sweep(shape="slide", rows=(30000,)),
        ),
        seconds_each=1.0,
        call_limit=6.0,
        time_limit=240.0,
    ),
    "gpu": Preset(
        # Most important first: the time limit truncates the list, and a resumed run continues there.
        sweeps=(
            # FlexAttention compiles anew for every case: two shapes suffice.
            Sweep(shape="paper", rows=(32768,), modes=_BOTH, dtypes=("bfloat16",)),
            Sweep(shape="blocks", rows=(32768,), modes=_BOTH, dtypes=("bfloat16",)),
            _gpu(shape="paper", rows=(1048576,), modes=_BOTH),
            _gpu(shape="paper", rows=(32768,), modes=_BOTH, causal=(True,)),
            _gpu(shape="three", rows=(32768,), modes=_BOTH, head_dims=(128,)),
            _gpu(shape="decode", rows=(8128, 130944)),
            _gpu(shape="paper", rows=(131072,), modes=_BOTH),
            _gpu(shape="paper", rows=(32768, 131072, 1048576), modes=_BOTH, head_dims=(128,)),
            _gpu(shape="three", rows=(131072, 1048576), modes=_BOTH, head_dims=(128,)),
            _gpu(shape="three", rows=(32768, 131072), modes=_BOTH, causal=(True,)),
            _gpu(shape="three", rows=(32768, 131072, 1048576), modes=_BOTH),
            _gpu(shape="slide", modes=("forward_backward",), dtypes=("float16",)),
            _gpu(shape="three", rows=(131072,), num_groups=(1, 2)),
            _gpu(shape="three", rows=(32768,), dtypes=("float32",), modes=_BOTH),
        ),
        seconds_each=0.4,
        call_limit=1.5,
        time_limit=420.0,
    ),
}
"""Presets by name."""

assert set(PRESETS) | {"auto"} == set(get_args(PresetName))


def planned_cases(settings: BenchSettings, preset: Preset) -> dict[Case, tuple[str, ...]]:
    """The cases of a run, each with the contestants left out of it.

    They are the preset's sweeps, or one per named shape, with the overrides of the settings.

    Raises:
        RunError: more groups than a shape has.
    """
    sweeps: Sequence[Sweep] = preset.sweeps
    if settings.shapes:
        sweeps = [Sweep(shape=shape) for shape in settings.shapes]
    cases: dict[Case, tuple[str, ...]] = {}
    for sweep in sweeps:
        most = len(SHAPES[sweep.shape].segment_lengths)
        for number in settings.num_groups:
            if number > most:
                raise RunError(
                    f"--num-groups {number}: the shape {sweep.shape} has {most} dilation groups; name at most {most}, "
                    "or another one of --shapes"
                )
        replaced = {
            name: values
            for name in ("rows", "modes", "dtypes", "causal", "head_dims", "num_groups")
            if (values := getattr(settings, name))
        }
        for case in replace(sweep, **replaced).cases(settings.batch):
            cases.setdefault(case, () if settings.contestants else sweep.without)
    if settings.dry_run:
        return {_tiny(case, index): without for index, (case, without) in enumerate(cases.items())}
    return cases


def _tiny(case: Case, index: int) -> Case:
    """The case with a few rows, distinct for every case so that none is merged; segments shrink in proportion."""
    lengths = tuple(max(4, length // 256) for length in case.segment_lengths)
    return replace(case, rows=40 + index, segment_lengths=lengths, block_size=8)
