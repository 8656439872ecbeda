"""The record of a run in its folder, and the outcome of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.output import check_writable

from .checkpoint import SETTINGS_NAME, WEIGHTS_NAME
from .data.corpus import CORPUS_KEYS
from .manifest import opened, read_sealed
from .run_settings import renamed
from .settings import TrainSettings

if TYPE_CHECKING:
    from .run_settings import RunSettings

SAMPLE_NAME = "sample.txt"
STATES = {"before": "before", "replaced": "after replacement", "trained": "after further training"}
"""States of a model whose context is extended, with their names in words: unchanged; with scaled positions and the
pattern; after training."""
_FINISHED = "--resume auto", "restore it from a copy"
"""Subject and advice of messages about the folder of a finished run."""


@contextmanager
def recorded(folder: Path, what: str, remedy: str) -> Iterator[dict[str, Any]]:
    """Context with the record of a run, finished or not; errors while its values are read become messages.

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
        record["settings"] = renamed(record["settings"])
        yield record
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{what}: {folder / SETTINGS_NAME} describes no run ({error}); {remedy}") from error


def train_settings(record: dict[str, Any]) -> TrainSettings | None:
    """The settings in the record of a run of `train`; None for a run of `extend`."""
    return None if "kind" in record else TrainSettings.from_dict(record["settings"])


@contextmanager
def read_record(folder: Path, command: str, *, finished: str, steps: int | None = None) -> Iterator[dict[str, Any]]:
    """Context with the record of a run; errors while reading it become messages.

    Args:
        folder: run folder.
        command: command that starts such runs.
        finished: advice for a run that is already finished.
        steps: a new number of steps, with which a finished run goes on; None if it keeps its own.

    Raises:
        RunError: the run does not exist, its record is damaged or of another command, or it is finished.
    """
    what = f"--resume {folder}"
    if not folder.is_dir():
        raise RunError(f"{what}: there is no such folder; name the --output of the run that was stopped")
    with _of_command(folder, command) as record:
        yield record
    taken = record["settings"]["steps"]
    if (folder / WEIGHTS_NAME).exists() and steps in (None, taken):
        raise RunError(
            f"{what}: that run is finished after {taken:,} steps; {finished}, train it longer with a larger --steps, "
            "or start a new run with another --output"
        )
    check_writable(folder, what)


@contextmanager
def _of_command(folder: Path, command: str) -> Iterator[dict[str, Any]]:
    article = "an" if command[0] in "aeiou" else "a"
    with recorded(folder, f"--resume {folder}", f"name the --output of {article} `{command}` command") as record:
        _ = {name: int(record["corpus"][name]) for name in CORPUS_KEYS}
        if not isinstance(record["run"], str):
            raise TypeError(f"run {record['run']!r}")
        yield record


RunState = Literal["nothing", "stopped", "finished"]
"""State of a folder that may hold a run."""


def find_run(output: Path, settings: RunSettings, command: str) -> RunState:
    """State of the run in ``output``, provided that the same command line started it.

    Args:
        output: run folder.
        settings: settings of this command line. Where it leaves choices to the run, any choice matches.
        command: command that starts such runs.

    Raises:
        RunError: it holds a run with other settings.
    """
    if not os.path.lexists(output / SETTINGS_NAME):
        return "nothing"
    with _of_command(output, command) as record:
        begun = record["settings"]
        left_open = settings.left_open()
        given = {name: value for name, value in settings.to_dict().items() if left_open.get(name) != value}
        differing = sorted(name for name, value in given.items() if begun.get(name) != value)
    if differing == ["steps"]:
        raise RunError(
            f"--resume auto: the run in {output} has {begun['steps']} steps, got --steps {settings.steps}; go on with "
            f"--resume {output} --steps {settings.steps}, which changes their number, or name another --output"
        )
    if differing:
        words = ", ".join(f"{name} {begun.get(name)!r} there, {given[name]!r} here" for name in differing[:3])
        raise RunError(
            f"--resume auto: the run in {output} was begun with other settings ({words}"
            f"{', ...' if len(differing) > 3 else ''}); name another --output, or go on with --resume {output}"
        )
    return "finished" if (output / WEIGHTS_NAME).exists() else "stopped"


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
    prompt: str | None = None
    """The beginning of a text like those of the run."""

    @classmethod
    def of_finished(cls, run: Path) -> Outcome:
        """Read the result of a finished run from its folder."""
        with recorded(run, *_FINISHED) as record:
            result = record["result"]
            return cls(
                run=run,
                step=record["settings"]["steps"],
                bits_per_byte=result["bits_per_byte"],
                xz_bits_per_byte=result["xz_bits_per_byte"],
                quarters=result["bits_per_byte_by_quarter"],
                last_quarter_alone=result["last_quarter_alone"],
                sample=_read_sample(run),
                prompt=result.get("prompt"),
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
            length=record["settings"]["context_length"],
            stopped_by=stopped_by,
            bits_per_byte={
                state: {int(context): bits for context, bits in entry["bits_per_byte"].items()}
                for state, entry in record["measured"].items()
            },
        )

    @classmethod
    def of_finished(cls, run: Path) -> ExtensionOutcome:
        """Read the result of a finished run from its folder."""
        with recorded(run, *_FINISHED) as record:
            return cls.of_record(run, record, record["settings"]["steps"], None)


def _read_sample(run: Path) -> str:
    what, remedy = _FINISHED
    with opened(run / SAMPLE_NAME, f"{what}: {run / SAMPLE_NAME}", remedy) as file:
        return file.read().decode("utf-8", errors="replace").removesuffix("\n")
