"""Atomic publication of checkpoints and finished models."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import package_version
from dilated_attention_pytorch.output import sync

from .checkpoint import ALSO_WRITTEN, STAGING, WEIGHTS_NAME, checkpoint_step, checkpoints, file_names
from .manifest import write_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VERSIONS = ("dilated-attention-pytorch", "torch", "transformers", "accelerate")


def publish(
    staged: Path,
    run: Path,
    *,
    run_id: str,
    processes: int,
    keep: int,
    left: Collection[str],
    check: Callable[[], None],
) -> None:
    """Rename a staged checkpoint into place, and remove the checkpoints that it replaces.

    Args:
        staged: its folder in this job's staging folder.
        run: run folder.
        run_id: unique id of the run.
        processes: number of processes that wrote it.
        keep: number of checkpoints to keep, including this one.
        left: names of checkpoints found damaged on resumption; this one may have the same name.
        check: raises :class:`RunError` if another job has taken the folder; called before each change of it.

    Raises:
        RunError: a file that a process wrote is missing, or another job has taken the folder.
    """
    names = [*file_names(processes), *(name for name in ALSO_WRITTEN if (staged / name).exists())]
    missing = [name for name in names if not (staged / name).exists()]
    if missing:
        raise RunError(
            f"{missing[0]} is not in {staged}, though its process has written it: the run folder must lie on a file "
            "system that all hosts of the run share"
        )
    for path in staged.iterdir():
        if path.name not in names:
            clear(path)
    versions = {name: package_version(name) for name in _VERSIONS}
    step = checkpoint_step(staged)
    write_manifest(staged, names, run=run_id, step=step, processes=processes, versions=versions)
    target, staging = run / staged.name, staged.parent
    is_replaced = os.path.lexists(target)
    check()
    if is_replaced:
        os.rename(target, staged.with_name("replaced"))
        try:
            check()  # this process may have been stopped before the rename, and have moved another job's checkpoint
        except RunError:
            with contextlib.suppress(OSError):  # it has published another one, or removed this job's folder
                os.rename(staged.with_name("replaced"), target)
            raise
    os.rename(staged, target)  # fails if another job has published this step since
    sync(run)
    # A run resumed from an older checkpoint rewrites the later ones; their remains are obsolete.
    whole = [path for path in checkpoints(run) if path == target or path.name not in left]
    before = [path for path in whole if checkpoint_step(path) <= step]
    _remove([path for path in checkpoints(run) if path not in before[:keep]], check)
    clear(staging)


def remove_leftovers(
    run: Path, *, start: Path | None, keep: int, left: Collection[str], check: Callable[[], None]
) -> None:
    """Remove what killed jobs left of a resumed run: their staging folders, and checkpoints beyond ``keep``.

    Args:
        run: run folder.
        start: checkpoint that the run resumes from; it counts among those kept.
        keep, left: see :func:`publish`. Damaged checkpoints stay until the next one is published.
        check: raises :class:`RunError` if another job has taken the folder; called before each removal.
    """
    whole = [path for path in checkpoints(run) if path.name not in left]
    before = [path for path in whole if start is not None and checkpoint_step(path) <= checkpoint_step(start)]
    _remove([*run.glob(f"{STAGING}*"), *before[keep:]], check)


def _remove(paths: Iterable[Path], check: Callable[[], None]) -> None:
    # This process may be stopped at any time and wake up after another job has taken the folder.
    for path in paths:
        check()
        clear(path)


def clear(path: Path) -> None:
    """Remove a folder, file or link (not its target), as far as the system allows."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def save_finished(
    model: PreTrainedModel, run: Path, *, run_id: str, step: int, staging: Path, check: Callable[[], None]
) -> None:
    """Save the trained model to its run folder. Weights are written last: their presence marks a finished run.

    Args:
        model, run, run_id, step: model and run.
        staging: this job's staging folder.
        check: raises :class:`RunError` if another job has taken the folder; called before each change of it.
    """
    clear(staging)
    model.save_pretrained(staging, max_shard_size="100TB")  # a single file, whose presence marks completeness
    names = [path.name for path in staging.iterdir()]
    versions = {name: package_version(name) for name in _VERSIONS}
    write_manifest(staging, names, run=run_id, step=step, versions=versions)
    for path in sorted(staging.iterdir(), key=lambda path: path.name == WEIGHTS_NAME):
        check()
        os.replace(path, run / path.name)
    sync(run)
    clear(staging)
