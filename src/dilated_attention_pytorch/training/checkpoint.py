"""Checkpoints of a run: written to a staging folder, published by renaming, verified before they are read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.installation import NAME
from dilated_attention_pytorch.machine import package_version
from dilated_attention_pytorch.models.card import write_card
from dilated_attention_pytorch.output import sync

from .manifest import MANIFEST_NAME, read_json, read_sealed, verify_manifest, write_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SETTINGS_NAME = "training.json"
WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
STATE_NAME = "trainer_state.json"
SCALER_NAME = "scaler.pt"
STAGING = ".unfinished"
"""Beginning of the name of a folder for checkpoints that are being written; the token of the job's lease follows."""
COMMON_FILES = (CONFIG_NAME, WEIGHTS_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, STATE_NAME)
"""Files of a checkpoint that every process reads, independent of the number of processes."""
OPTIONAL_FILES = ("generation_config.json", SCALER_NAME)
"""Optional files of a checkpoint: of transformers models, and of float16 runs."""
RESTORE = "restore the folder from a copy, or start a new run with another --output"
"""Remedy for a damaged checkpoint."""

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})", re.ASCII)
_RANDOM_STATE = re.compile(r"rng_state_(0|[1-9][0-9]*)\.pth", re.ASCII)
_VERSIONS = (NAME, "torch", "transformers", "accelerate")
_WHAT = "broken checkpoint"
_UNFIT = (pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Exceptions raised for values of the wrong kind in a state."""


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of the run folder, latest step first; not verified."""
    paths = [path for path in run.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(paths, key=checkpoint_step, reverse=True)


def staging_folder(run: Path, token: str) -> Path:
    """The folder in which the job with this lease token writes checkpoints; no other job writes to it."""
    return run / f"{STAGING}-{token}"


def latest_checkpoint(run: Path) -> Path | None:
    """The checkpoint of the run folder with the latest step; None if there is none."""
    return next(iter(checkpoints(run)), None)


def checkpoint_step(checkpoint: Path) -> int:
    """The step of a checkpoint, from its name."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def file_names(processes: int, rank: int | None = None) -> list[str]:
    """Files of a checkpoint that process ``rank`` reads; None = all processes."""
    ranks = range(processes) if rank is None else [rank]
    random = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in ranks]
    return [*COMMON_FILES, *random]


def publish(
    staged: Path,
    run: Path,
    *,
    run_id: str,
    processes: int,
    keep: int,
    rejected: Collection[str],
    check: Callable[[], None],
) -> None:
    """Rename a staged checkpoint into place, and remove the checkpoints that it replaces.

    Args:
        staged: its folder in this job's staging folder.
        run: run folder.
        run_id: unique id of the run.
        processes: number of processes that wrote it.
        keep: number of checkpoints to keep, including this one.
        rejected: names of checkpoints found damaged on resumption; this one may have the same name.
        check: raises :class:`RunError` if another job has taken the folder; called before each change of it.

    Raises:
        RunError: a file that a process wrote is missing, or another job has taken the folder.
    """
    names = [*file_names(processes), *(name for name in OPTIONAL_FILES if (staged / name).exists())]
    missing = [name for name in names if not (staged / name).exists()]
    if missing:
        raise RunError(
            f"{missing[0]} is not in {staged}, though its process has written it: the run folder must lie on a file "
            "system that all hosts of the run share"
        )
    for path in staged.iterdir():
        if path.name not in names:
            clear(path)
    step = checkpoint_step(staged)
    write_manifest(staged, names, run=run_id, step=step, processes=processes, versions=_versions())
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
    intact = [path for path in checkpoints(run) if path == target or path.name not in rejected]
    before = [path for path in intact if checkpoint_step(path) <= step]
    _remove([path for path in checkpoints(run) if path not in before[:keep]], check)
    clear(staging)


def remove_leftovers(
    run: Path, *, start: Path | None, keep: int, rejected: Collection[str], check: Callable[[], None]
) -> None:
    """Remove what killed jobs left of a resumed run: their staging folders, and checkpoints beyond ``keep``.

    Args:
        run: run folder.
        start: checkpoint that the run resumes from; it counts among those kept.
        keep, rejected: see :func:`publish`. Damaged checkpoints stay until the next one is published.
        check: raises :class:`RunError` if another job has taken the folder; called before each removal.
    """
    intact = [path for path in checkpoints(run) if path.name not in rejected]
    before = [path for path in intact if start is not None and checkpoint_step(path) <= checkpoint_step(start)]
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
    write_card(model, staging)
    names = [path.name for path in staging.iterdir()]
    write_manifest(staging, names, run=run_id, step=step, versions=_versions())
    for path in sorted(staging.iterdir(), key=lambda path: path.name == WEIGHTS_NAME):
        check()
        os.replace(path, run / path.name)
    sync(run)
    clear(staging)


def _versions() -> dict[str, str | None]:
    return {name: package_version(name) for name in _VERSIONS}


def verify_checkpoint(checkpoint: Path, run_id: str, processes: int, rank: int | None = None) -> None:
    """Raise :class:`RunError` unless ``checkpoint`` is as this run wrote it, without executable contents.

    Args:
        checkpoint: the folder.
        run_id: unique id of the run.
        processes: number of processes that read it.
        rank: the process that reads it; None = all of them.
    """
    from transformers import TrainerState

    written = _manifest(checkpoint)
    reading = file_names(processes, rank) if written.get("processes") == processes else [*COMMON_FILES]
    files = written.get("files")
    if isinstance(files, dict) and SCALER_NAME in files:
        reading.append(SCALER_NAME)
    manifest = verify_manifest(checkpoint, what=_WHAT, remedy=RESTORE, reading=reading)
    if manifest.get("run") != run_id:
        raise RunError(
            f"foreign checkpoint: {checkpoint} was written by another run ({manifest.get('run')!r}, and this is "
            f"{run_id!r}), though perhaps with the same settings; {RESTORE}"
        )
    if manifest.get("step") != checkpoint_step(checkpoint):
        raise RunError(
            f"{_WHAT}: {checkpoint} was written after step {manifest.get('step')!r}, which is not what its name says; "
            f"{RESTORE}"
        )
    listed = manifest["files"].keys()
    # transformers looks files up by name and knows more names than are written here. Hidden files are not loaded.
    known = {*listed, MANIFEST_NAME}
    unknown = sorted(path.name for path in checkpoint.iterdir() if path.name not in known and path.name[0] != ".")
    unknown += sorted(name for name in listed if not _is_written(name))
    if unknown:
        raise RunError(f"{_WHAT}: {checkpoint / unknown[0]} is not a file that a run writes there; remove it")
    state = read_json(checkpoint / STATE_NAME, what=_WHAT, remedy=RESTORE)
    if state.get("global_step") != checkpoint_step(checkpoint):
        raise RunError(f"{_WHAT}: {checkpoint / STATE_NAME} is of step {state.get('global_step')!r}; {RESTORE}")
    with fitting(checkpoint):
        TrainerState.load_from_json(str(checkpoint / STATE_NAME))
    for name in reading:
        if Path(name).suffix in (".pt", ".pth"):
            _check_state(checkpoint / name)


def _is_written(name: str) -> bool:
    return name in {*file_names(1), *OPTIONAL_FILES} or _RANDOM_STATE.fullmatch(name) is not None


def _check_state(path: Path) -> None:
    """Raise :class:`RunError` unless the file holds only tensors and plain values, and nothing executable."""
    import torch
    from transformers.trainer_pt_utils import safe_globals

    try:
        with safe_globals():  # NumPy arrays, which hold NumPy's random state
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (*_UNFIT, RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(
            f"broken checkpoint: {path} is not a state of a training run, and was not unpickled "
            f"({type(error).__name__}: {reason}); {RESTORE}"
        ) from error


@contextlib.contextmanager
def fitting(checkpoint: str | Path) -> Iterator[None]:
    """Context that reads states from ``checkpoint``.

    Raises:
        RunError: they do not fit this run.
    """
    try:
        yield
    except _UNFIT as error:
        raise RunError(
            f"foreign checkpoint: the states in {checkpoint} do not fit this run ({type(error).__name__}: {error}); "
            f"{RESTORE}"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The checkpoint that a run resumes from."""

    checkpoint: Path | None
    """The newest intact checkpoint; None if the run has none yet."""
    rejected: Mapping[str, str]
    """Newer checkpoints that were skipped, with reasons."""
    digest: str = ""
    """SHA-256 of the checkpoint's manifest, by which other processes verify that they see the same one."""
    has_random_states: bool = True
    """Whether it was written by the same number of processes, so that each finds its random state."""

    def verify_here(self, run_id: str, processes: int, rank: int) -> None:
        """Raise :class:`RunError` unless this process reads the same checkpoint as the first one."""
        if self.checkpoint is None or rank == 0:
            return
        verify_checkpoint(self.checkpoint, run_id, processes, rank)
        if _manifest_digest(self.checkpoint) != self.digest:
            raise RunError(
                f"{self.checkpoint} differs here from what the first process reads; the run folder must lie on "
                "a file system that all hosts of the run share"
            )

    def describe(self) -> Iterator[str]:
        """One line per skipped checkpoint."""
        for name, reason in self.rejected.items():
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

    def verify(checkpoint: Path) -> None:
        verify_checkpoint(checkpoint, run_id, processes)
        check(checkpoint)

    checkpoint, rejected = newest_intact(run, verify)
    if checkpoint is not None:
        has_random_states, digest = _manifest(checkpoint).get("processes") == processes, _manifest_digest(checkpoint)
        return Start(checkpoint=checkpoint, rejected=rejected, digest=digest, has_random_states=has_random_states)
    if rejected:
        newest, *older = rejected.values()
        raise RunError(". ".join([newest, *(f"Nor can the one before be used: {reason}" for reason in older)]))
    return Start(checkpoint=None, rejected=rejected)


def newest_intact(run: Path, verify: Callable[[Path], None]) -> tuple[Path | None, dict[str, str]]:
    """The newest checkpoint for which ``verify`` raises no :class:`RunError`, and the reasons against newer ones."""
    rejected: dict[str, str] = {}
    for checkpoint in checkpoints(run):
        try:
            verify(checkpoint)
        except RunError as error:
            rejected[checkpoint.name] = str(error)
            continue
        return checkpoint, rejected
    return None, rejected


def _manifest(checkpoint: Path) -> dict[str, Any]:
    return read_sealed(checkpoint / MANIFEST_NAME, what=_WHAT, remedy=RESTORE)


def _manifest_digest(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / MANIFEST_NAME).read_bytes()).hexdigest()
