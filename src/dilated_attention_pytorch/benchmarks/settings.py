"""Settings of benchmark runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from .shapes import SHAPES, DtypeName, Mode

PresetName = Literal["auto", "cpu", "gpu"]
DeviceChoice = Literal["auto", "cpu", "cuda"]


@dataclass(kw_only=True, slots=True)
class BenchSettings:
    """Time attention against other implementations, each checked against the definition first.

    Raises:
        ValueError: a value is out of range, or a name is unknown.
    """

    preset: PresetName = "auto"
    """Sweeps to run: cpu (under 5 minutes on two cores) or gpu. gpu: bfloat16, 32,768 to 1,048,576 rows, under 8
    minutes on an H200. "auto": gpu if there is a CUDA device, else cpu."""
    output: Path | None = None
    """Folder to create for bench.json and page.md. It must not exist, or be empty. Default: runs/bench-PRESET."""
    shapes: tuple[str, ...] = ()
    """Shapes to time instead of the preset's: paper, slide, three, blocks, decode."""
    rows: tuple[int, ...] = ()
    """Sequence lengths N. Default: those of every sweep."""
    modes: tuple[Mode, ...] = ()
    """Modes: forward, forward_backward, or decode (one query against N rows). Default: those of the sweeps."""
    dtypes: tuple[DtypeName, ...] = ()
    """Number formats. Default: those of the sweeps."""
    causal: tuple[bool, ...] = ()
    """Causal mask: False, True, or both. Default: as in the sweeps."""
    head_dims: tuple[int, ...] = ()
    """Head dimensions D. Default: those of the sweeps."""
    num_groups: tuple[int, ...] = ()
    """Dilation groups of a shape to keep, shortest segments first. Several numbers sweep it. Default: all."""
    batch: int = 1
    """Batch size."""
    contestants: tuple[str, ...] = ()
    """Implementations to time, by parts of their names. For example: ours published dense. Default: all."""
    device: DeviceChoice = "auto"
    """"auto" takes a CUDA device if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves the number to PyTorch."""
    seconds_each: float | None = None
    """Seconds of repeated calls per implementation and case. At least 5 calls are made, 3 if one takes over a second.
    Default: the preset's."""
    call_limit: float | None = None
    """Longest call in seconds; slower implementations are skipped. A call is predicted at the machine's matrix-product
    rate. Default: the preset's."""
    time_limit: float | None = None
    """Seconds after which no further call starts. The table lists what was left out. Default: the preset's."""
    resume: bool = False
    """Continue the run in the output folder. Results are kept, and what the time limit cut off is measured."""
    dry_run: bool = False
    """A few rows instead of thousands: a smoke test that measures nothing."""

    def __post_init__(self) -> None:
        _check_names("preset", (self.preset,), get_args(PresetName))
        _check_names("shapes", self.shapes, tuple(SHAPES))
        _check_names("modes", self.modes, get_args(Mode))
        _check_names("dtypes", self.dtypes, get_args(DtypeName))
        _check_names("device", (self.device,), get_args(DeviceChoice))
        for name, values in (
            ("sequence_lengths", self.rows),
            ("head_dims", self.head_dims),
            ("num_groups", self.num_groups),
        ):
            for value in values:
                _check_number(name, value, least=1)
        _check_number("batch", self.batch, least=1)
        _check_number("threads", self.threads, least=0)
        for name in ("seconds_each", "call_limit", "time_limit"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), least=0)
        self._check_contestants()

    def _check_contestants(self) -> None:
        # Contestants import the engine, which --help does not need.
        if self.contestants:
            from dilated_attention_pytorch.kernels.select import removal

            from .contestants import CONTESTANTS

            for part in self.contestants:
                sentence = removal(part.removeprefix("ours, "))
                if sentence is not None:
                    raise ValueError(f"implementations: {part!r}: {sentence}")
                if not any(part in entry.name for entry in CONTESTANTS):
                    names = ", ".join(repr(entry.name) for entry in CONTESTANTS)
                    raise ValueError(f"implementations must be parts of names, got {part!r}; the names are {names}")

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON-serialisable values."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _check_names(what: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{what}: there is no {name!r}; choose from {', '.join(known)}")


def _check_number(what: str, value: float, *, least: float) -> None:
    if not math.isfinite(value) or value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}")
