"""Results of finished and stopped runs, and how they are read from run folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.errors import RunError

from .checkpoint import SETTINGS_NAME
from .manifest import opened, read_sealed
from .settings import TrainSettings

SAMPLE_NAME = "sample.txt"
STATES = ("before", "replaced", "trained")
"""States of a model whose context is extended: unchanged; with scaled positions and the pattern; after training."""
_REMEDY = "restore it from a copy"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ended:
    """A run that finished or was stopped."""

    run: Path
    """The run folder."""
    step: int
    """Optimizer steps done."""
    stopped_by: int | None = None
    """The signal that stopped the run; None if it finished, and then the other fields are set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(_Ended):
    """Result of a training run."""

    bits_per_byte: float | None = None
    """Held-out bits per byte."""
    xz_bits_per_byte: float | None = None
    """Bits per byte of xz -9e on the same bytes."""
    quarters: list[float] | None = None
    """Held-out bits per byte by quarter of the context; None without held-out files as long as the context."""
    last_quarter_alone: float | None = None
    """Bits per byte of the last quarter if the model sees nothing before it."""
    sample: str | None = None
    """A sampled text."""

    @classmethod
    def of_finished(cls, run: Path) -> Outcome:
        """Read the result of a finished run from its folder."""
        record = _record(run)
        result = record["result"]
        return cls(
            run=run,
            step=record["settings"]["steps"],
            bits_per_byte=result["bits_per_byte"],
            xz_bits_per_byte=result["xz_bits_per_byte"],
            quarters=result["bits_per_byte_by_quarter"],
            last_quarter_alone=result["last_quarter_alone"],
            sample=_read_sample(run),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtensionOutcome(_Ended):
    """Result of a run that extended the context of a model."""

    own_length: int
    """Context length of the model before, in tokens."""
    length: int
    """Context length of the model now, in tokens."""
    bits_per_byte: dict[str, dict[int, float]]
    """Held-out bits per byte by state (:data:`STATES`) and by the largest number of tokens that the model reads; the
    same bytes are predicted in every case."""

    @classmethod
    def of_record(cls, run: Path, record: dict[str, Any], step: int, stopped_by: int | None) -> ExtensionOutcome:
        """Build the result from the run's ``record``."""
        return cls(
            run=run,
            step=step,
            own_length=record["own_length"],
            length=record["settings"]["length"],
            stopped_by=stopped_by,
            bits_per_byte={
                state: {int(context): bits for context, bits in entry["bits_per_byte"].items()}
                for state, entry in record["measured"].items()
            },
        )

    @classmethod
    def of_finished(cls, run: Path) -> ExtensionOutcome:
        """Read the result of a finished run from its folder."""
        record = _record(run)
        return cls.of_record(run, record, record["settings"]["steps"], None)


def recorded_run(folder: Path, what: str, remedy: str) -> tuple[dict[str, Any], TrainSettings | None]:
    """The record of a run, finished or not, and its settings; None for a run of `extend`.

    Args:
        folder: run folder.
        what: the command that reads it, for messages.
        remedy: what to do if it is not a run folder.

    Raises:
        RunError: it is not a run folder, or the record is damaged.
    """
    if not folder.is_dir():
        raise RunError(f"{what}: {folder} is not a run folder; {remedy}")
    record = read_sealed(folder / SETTINGS_NAME, what=what, remedy=remedy)
    try:
        return record, None if "kind" in record else TrainSettings.from_dict(record["settings"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{what}: {folder / SETTINGS_NAME} describes no run ({error}); {remedy}") from error


def _record(run: Path) -> dict[str, Any]:
    return read_sealed(run / SETTINGS_NAME, what="--resume auto", remedy=_REMEDY)


def _read_sample(run: Path) -> str:
    with opened(run / SAMPLE_NAME, f"--resume auto: {run / SAMPLE_NAME}", _REMEDY) as file:
        return file.read().decode("utf-8", errors="replace").removesuffix("\n")
