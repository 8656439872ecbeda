"""What went wrong in a run, and what it cost: a line for each in the run folder."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .checkpoint import checkpoints
from .lease import LEASE_NAME
from .manifest import MANIFEST_NAME, opened, sealed_line, unsealed

FAULTS_NAME = "faults.jsonl"

Kind = Literal["failed", "stopped", "resumed", "broken", "skipped", "out of memory", "overflow", "slow rank"]
"""``failed``: an error ended the run; ``stopped``: a signal did. ``resumed``: it goes on after one of them, after a
kill or after going back. ``broken``: a weight or a state of the optimizer was NaN or infinite after ``step``, and the
run went back. ``skipped``: it went back to leave out the batch of ``step``. ``out of memory``: batches are taken in
parts of ``rows`` windows. ``overflow``: the batches of ``step`` are taken again with the loss scaled by ``scale``.
``slow rank``: the others wait for ``rank`` (:mod:`.stragglers`)."""
_ON_THE_WAY: tuple[Kind, ...] = ("resumed", "out of memory", "overflow", "slow rank")
"""After these a run goes on."""


def note_fault(run: Path, kind: Kind, **values: Any) -> None:
    """Append a line to the faults of ``run``: its kind, the time in seconds since 1970, ``values``, and its SHA-256.

    Every rank may. A line is on the disk when this returns, and where a line before was cut off it begins anew.
    """
    path = run / FAULTS_NAME
    if path.is_symlink():
        path.unlink()  # what it leads to is somebody else's
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
    """The faults of ``run`` in their order, or those of some ``kinds``. A damaged line is no fault.

    Raises:
        RunError: they cannot be read.
    """
    path = run / FAULTS_NAME
    if not os.path.lexists(path):
        return []
    with opened(path, str(path), "remove it: batches that were left out are found anew") as file:
        lines = file.read().splitlines()
    found = [entry for entry in map(unsealed, lines) if entry is not None]
    return [entry for entry in found if not kinds or entry["kind"] in kinds]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What faults have cost a run."""

    restarts: int
    """How often it went on after a fault, and not after somebody stopped it."""
    skipped_steps: int
    """Steps whose batch was left out."""
    seconds_lost: float
    """From the checkpoint that it went on from until it computed again, all restarts together."""

    def in_words(self) -> str:
        """A line about it; empty where there was nothing."""
        if not self.restarts and not self.skipped_steps:
            return ""
        return (
            f"faults: {self.restarts} restarts, {self.skipped_steps} steps without their batch, "
            f"{self.seconds_lost:,.1f} s lost ({FAULTS_NAME})"
        )


def cost_of_faults(run: Path) -> Cost:
    """What the faults of ``run`` have cost."""
    resumed = [fault for fault in read_faults(run, "resumed") if fault["after"] != "stopped"]
    return Cost(
        restarts=len(resumed),
        skipped_steps=len(steps_of(run, "skipped")),
        seconds_lost=round(sum(fault["down_seconds"] + fault["redone_seconds"] for fault in resumed), 1),
    )


def steps_of(run: Path, kind: Kind) -> frozenset[int]:
    """The steps, from 1, that faults of a ``kind`` name."""
    return frozenset(fault["step"] for fault in read_faults(run, kind))


def most_rows(run: Path) -> int | None:
    """Windows that a process takes at once since memory ran out; None if it never did."""
    return min((fault["rows"] for fault in read_faults(run, "out of memory")), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """What the job before left of a run that goes on."""

    after: str
    """Its last fault: ``killed`` where it has left no word."""
    last_seen: float
    """When it last wrote something, in seconds since 1970: a lease is renewed every few seconds."""


def interrupted(run: Path) -> Interrupted:
    """What the job before left. It must be asked before anything is written to the folder."""
    last = next(reversed(read_faults(run)), None)
    after = "killed" if last is None or last["kind"] in _ON_THE_WAY else last["kind"]
    newest = [path / MANIFEST_NAME for path in checkpoints(run)[:1]]
    seen = [_modified(path) for path in (run / LEASE_NAME, run / FAULTS_NAME, *newest)]
    return Interrupted(after=after, last_seen=max(seen))


def note_resumed(run: Path, before: Interrupted, checkpoint: Path | None, *, step: int, processes: int) -> None:
    """Append that the run goes on from ``checkpoint``, how long it stood, and how long it had computed in vain."""
    since = before.last_seen if checkpoint is None else _modified(checkpoint / MANIFEST_NAME)
    note_fault(
        run, "resumed", after=before.after, step=step, processes=processes,
        down_seconds=round(max(0.0, time.time() - before.last_seen), 2),
        redone_seconds=round(max(0.0, before.last_seen - since), 2),
    )  # fmt: skip


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return 0.0
