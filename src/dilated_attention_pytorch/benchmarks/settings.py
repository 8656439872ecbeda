"""What a benchmark run is told: every option of it, each with its meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from .shapes import SHAPES, DtypeName, Mode

PresetName = Literal["auto", "cpu", "gpu", "claims"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(kw_only=True, slots=True)
class BenchSettings:
    """Time attention against what else computes it, each call checked against the definition first.

    Raises:
        ValueError: a value out of range, or a name that is none.
    """

    preset: PresetName = "auto"
    """Which sweeps to begin with: cpu (under 5 minutes on two cores), gpu (bfloat16, 32,768 to 1,048,576 rows, under 8
    minutes on an H200), claims (the earlier package's figures beside this machine's). "auto": gpu if there is a
    CUDA device, else cpu."""
    output: Path | None = None
    """Folder to make for bench.json, time.png and limit.png. It must not exist, or be empty. Without it:
    runs/bench-PRESET."""
    shapes: tuple[str, ...] = ()
    """Sweep these shapes instead of the preset's: paper, slide, three, hybrid-ring, head-parallel, blocks, decode."""
    rows: tuple[int, ...] = ()
    """Numbers of rows N, instead of those of every sweep."""
    modes: tuple[Mode, ...] = ()
    """What to time, instead of what the sweeps say: forward, forward_backward, or decode (one query against N rows)."""
    dtypes: tuple[DtypeName, ...] = ()
    """Dtypes, instead of those of the sweeps."""
    causal: tuple[bool, ...] = ()
    """Without the causal mask (False), with it (True), or both, instead of what the sweeps say."""
    head_dims: tuple[int, ...] = ()
    """Widths D of a head, instead of those of the sweeps."""
    num_groups: tuple[int, ...] = ()
    """Keep this many of a shape's dilation groups, shortest segments first; several numbers sweep it."""
    batch: int = 1
    """Sequences in the batch."""
    contestants: tuple[str, ...] = ()
    """Parts of the names of those who take part, for example: ours published dense. Without it: all."""
    device: Device = "auto"
    """Where to compute; "auto" takes a CUDA device if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves the number to PyTorch."""
    seconds_each: float | None = None
    """Seconds of repeated calls for one contestant in one case (at least 5 calls, 3 where one takes over a second)."""
    call_limit: float | None = None
    """Leave out a contestant whose single call takes more seconds than this at the machine's matrix-product rate."""
    time_limit: float | None = None
    """Seconds after which no further call is begun; what is left out is said in the table."""
    resume: bool = False
    """Go on with the run in the output folder: what it measured is kept, what the time limit cut off is measured."""
    compare: Path | None = None
    """bench.json of an earlier run on this machine: say what moved beyond noise."""
    compare_any_machine: bool = False
    """Compare although the earlier run is of another machine. The difference is then the machines' too."""
    dry_run: bool = False
    """A few rows instead of thousands: sees in seconds that everything works, and measures nothing."""

    def __post_init__(self) -> None:
        _check_names("preset", (self.preset,), get_args(PresetName))
        _check_names("shapes", self.shapes, tuple(SHAPES))
        _check_names("modes", self.modes, get_args(Mode))
        _check_names("dtypes", self.dtypes, get_args(DtypeName))
        _check_names("device", (self.device,), get_args(Device))
        for name, least in (("rows", 1), ("head_dims", 1), ("num_groups", 1)):
            for value in getattr(self, name):
                _check_number(name, value, least=least)
        _check_number("batch", self.batch, least=1)
        _check_number("threads", self.threads, least=0)
        for name in ("seconds_each", "call_limit", "time_limit"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), least=0)
        self._check_contestants()
        if self.compare is None and self.compare_any_machine:
            raise ValueError("compare_any_machine says how to compare, and there is no --compare; name a file with it")

    def _check_contestants(self) -> None:
        # Who takes part imports the engine; the help of the command does not wait for that.
        if self.contestants:
            from .contestants import CONTESTANTS

            for part in self.contestants:
                if not any(part in entry.name for entry in CONTESTANTS):
                    names = ", ".join(repr(entry.name) for entry in CONTESTANTS)
                    raise ValueError(f"contestants must be parts of names, got {part!r}; the names are {names}")

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as values that JSON holds."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _check_names(what: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{what}: there is no {name!r}; choose from {', '.join(known)}")


def _check_number(what: str, value: float, *, least: float) -> None:
    if not math.isfinite(value) or value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}")


@dataclass(kw_only=True, slots=True)
class ProfileSettings:
    """One call to look into.

    Raises:
        ValueError: a value out of range, or a name that is none.
    """

    shape: str = "three"
    """Which sizes and pattern: paper, slide, three, hybrid-ring, head-parallel, blocks, decode."""
    rows: int | None = None
    """Number of rows N; without it the shape's largest."""
    backward: bool = False
    """Whether to compute gradients too."""
    dtype: DtypeName | None = None
    """Dtype; without it the shape's."""
    causal: bool = False
    """With the causal mask. (The shape decode always has it.)"""
    head_dim: int | None = None
    """Width D of a head; without it the shape's."""
    num_groups: int | None = None
    """Keep this many dilation groups, shortest segments first."""
    batch: int = 1
    """Sequences in the batch."""
    contestant: str | None = None
    """Part of the name of who computes it, as in the benchmark: aten, triton, published, dense, ... Without it: what
    impl="auto" takes."""
    device: Device = "auto"
    """Where to compute; "auto" takes a CUDA device if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves the number to PyTorch."""
    output: Path = Path("runs/profile")
    """Folder to make for trace.json, memory.png and profile.json. It must not exist, or be empty."""

    def __post_init__(self) -> None:
        _check_names("shape", (self.shape,), tuple(SHAPES))
        _check_names("dtype", () if self.dtype is None else (self.dtype,), get_args(DtypeName))
        _check_names("device", (self.device,), get_args(Device))
        for name in ("rows", "head_dim", "num_groups"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), least=1)
        _check_number("batch", self.batch, least=1)
        _check_number("threads", self.threads, least=0)
        if self.backward and SHAPES[self.shape].mode == "decode":
            raise ValueError("backward: a decoding step has none; leave it out, or name another --shape")
