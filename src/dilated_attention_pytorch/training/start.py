"""Selection of the newest intact checkpoint to resume from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.errors import RunError

from .checkpoint import OF_ALL, RESTORE, SCALER_NAME, checkpoints, file_names
from .manifest import MANIFEST_NAME, read_sealed
from .verification import verify_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The checkpoint that a run resumes from."""

    checkpoint: Path | None
    """The newest intact checkpoint; None if the run has none yet."""
    left: Mapping[str, str]
    """Newer checkpoints that were skipped, with reasons."""
    digest: str = ""
    """SHA-256 of the checkpoint's manifest, by which other processes verify that they see the same one."""
    has_random_states: bool = True
    """Whether it was written by the same number of processes, so that each finds its random state."""

    def verify_here(self, run_id: str, processes: int, rank: int) -> None:
        """Raise :class:`RunError` unless this process reads the same checkpoint as the first one."""
        if self.checkpoint is None or rank == 0:
            return
        verify_checkpoint(self.checkpoint, run_id, files_to_read(self.checkpoint, processes, rank))
        if manifest_digest(self.checkpoint) != self.digest:
            raise RunError(
                f"{self.checkpoint} is another one here than where the first process looks; the run folder must lie on "
                "a file system that all hosts of the run share"
            )

    def in_words(self) -> Iterator[str]:
        """One line per skipped checkpoint."""
        assert self.checkpoint is not None or not self.left
        for name, reason in self.left.items():
            assert self.checkpoint is not None
            yield f"{name} is skipped, {self.checkpoint.name} is used instead: {reason}"


def choose_start(run: Path, run_id: str, processes: int, check: Callable[[Path], None]) -> Start:
    """The newest checkpoint of ``run`` that is intact and passes ``check``.

    Args:
        run: run folder.
        run_id: unique id of the run.
        processes: number of processes.
        check: raises :class:`RunError` for an intact checkpoint of another run.

    Raises:
        RunError: there are checkpoints, but none is valid.
    """
    left: dict[str, str] = {}
    for checkpoint in checkpoints(run):
        try:
            verify_checkpoint(checkpoint, run_id, files_to_read(checkpoint, processes))
            check(checkpoint)
        except RunError as error:
            left[checkpoint.name] = str(error)
            continue
        has_states, digest = _manifest(checkpoint).get("processes") == processes, manifest_digest(checkpoint)
        return Start(checkpoint=checkpoint, left=left, digest=digest, has_random_states=has_states)
    if left:
        newest, *older = left.values()
        raise RunError(". ".join([newest, *(f"Nor can the one before be taken: {reason}" for reason in older)]))
    return Start(checkpoint=None, left=left)


def files_to_read(checkpoint: Path, processes: int, rank: int | None = None) -> list[str]:
    """Files that all ``processes``, or process ``rank``, read of a checkpoint, whoever wrote it.

    Raises:
        RunError: its manifest was changed.
    """
    manifest = _manifest(checkpoint)
    names = file_names(processes, rank) if manifest.get("processes") == processes else [*OF_ALL]
    files = manifest.get("files")
    return [*names, *([SCALER_NAME] if isinstance(files, dict) and SCALER_NAME in files else [])]


def _manifest(checkpoint: Path) -> dict[str, Any]:
    return read_sealed(checkpoint / MANIFEST_NAME, what="broken checkpoint", remedy=RESTORE)


def manifest_digest(checkpoint: Path) -> str:
    """SHA-256 of the manifest."""
    return hashlib.sha256((checkpoint / MANIFEST_NAME).read_bytes()).hexdigest()
