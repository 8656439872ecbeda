"""The fault log of a run folder, one line per fault, and its cost."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .checkpoint import WEIGHTS_NAME, checkpoints
from .lease import LEASE_NAME
from .manifest import MANIFEST_NAME, opened, sealed_line, unsealed

FAULTS_NAME = "faults.jsonl"

Kind = Literal["failed", "stopped", "resumed", "broken", "skipped", "overflow"]
"""``failed``: an error ended the run; ``stopped``: a signal ended it. ``resumed``: it goes on after these, after
a kill or after a rewind. ``broken``: a weight or optimizer state was NaN or infinite after ``step``, and the
run rewound. ``skipped``: it rewound to skip the batch of ``step``. ``overflow``: the batches of ``step`` are
repeated with the loss scaled by ``scale``."""
_LAST: tuple[Kind, ...] = ("failed", "stopped", "broken", "skipped")
"""Faults after which the job does not train on."""


def note_fault(run: Path, kind: Kind, **values: Any) -> None:
    """Append a line to the fault log of ``run``: kind, time in seconds since 1970, ``values``, and its SHA-256.

    Any rank may call this. The line is on disk on return, and starts on a new line if the previous one was truncated.
    """
    path = run / FAULTS_NAME
    if path.is_symlink():
        path.unlink()  # do not follow a link out of the run folder
    line = sealed_line({"kind": kind, "time": round(time.time(), 2), **values})
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        size = os.fstat(file).st_size
        is_cut = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, ("\n" * is_cut + line + "\n").encode())
        os.fsync(file)
    finally:
        os.close(file)


def read_faults(run: Path, *kinds: Kind) -> list[dict[str, Any]]:
    """The faults of ``run`` in order, optionally of some ``kinds`` only. Damaged lines are skipped.

    Raises:
        RunError: the log cannot be read.
    """
    path = run / FAULTS_NAME
    if not os.path.lexists(path):
        return []
    with opened(path, str(path), "remove it: batches that were left out are detected again") as file:
        lines = file.read().splitlines()
    entries = [entry for entry in map(unsealed, lines) if entry is not None]
    return [entry for entry in entries if not kinds or entry["kind"] in kinds]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Total cost of a run's faults."""

    restarts: int
    """Number of restarts after a fault (not after a deliberate stop or the end)."""
    skipped_steps: int
    """Steps whose batch was skipped."""
    seconds_lost: float
    """Seconds from the checkpoint that each restart resumed from until it computed again, summed."""

    def describe(self) -> str:
        """One line of text; empty without faults."""
        if not self.restarts and not self.skipped_steps:
            return ""
        return (
            f"faults: {self.restarts} restarts, {self.skipped_steps} steps without their batch, "
            f"{self.seconds_lost:,.1f} s lost ({FAULTS_NAME})"
        )


def cost_of_faults(run: Path) -> Cost:
    """Total cost of the faults of ``run``."""
    resumed = [fault for fault in read_faults(run, "resumed") if fault["after"] not in ("stopped", "finished")]
    return Cost(
        restarts=len(resumed),
        skipped_steps=len(steps_of(run, "skipped")),
        seconds_lost=round(sum(fault["down_seconds"] + fault["redone_seconds"] for fault in resumed), 1),
    )


def steps_of(run: Path, kind: Kind) -> frozenset[int]:
    """The steps (from 1) of the faults of one ``kind``."""
    return frozenset(fault["step"] for fault in read_faults(run, kind))


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """State in which the previous job left a run that is resumed."""

    after: str
    """Its last fault; ``killed`` if it logged none, ``finished`` if the run is to have more steps than it has taken."""
    last_seen: float
    """Time of its last write, in seconds since 1970; a lease is renewed every few seconds."""


def interrupted(run: Path) -> Interrupted:
    """The previous job's state. Call this before anything is written to the folder."""
    last = next(reversed(read_faults(run)), None)
    after = last["kind"] if last is not None and last["kind"] in _LAST else "killed"
    if (run / WEIGHTS_NAME).exists():
        after = "finished"
    newest = [path / MANIFEST_NAME for path in checkpoints(run)[:1]]
    seen = [_modified(path) for path in (run / LEASE_NAME, run / FAULTS_NAME, *newest)]
    return Interrupted(after=after, last_seen=max(seen))


def note_resumed(run: Path, before: Interrupted, checkpoint: Path | None, *, step: int, processes: int) -> None:
    """Log that the run resumes from ``checkpoint``, its down time, and the computation time that was lost."""
    since = before.last_seen if checkpoint is None else _modified(checkpoint / MANIFEST_NAME)
    note_fault(
        run,
        "resumed",
        after=before.after,
        step=step,
        processes=processes,
        down_seconds=round(max(0.0, time.time() - before.last_seen), 2),
        redone_seconds=round(max(0.0, before.last_seen - since), 2),
    )


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return 0.0
