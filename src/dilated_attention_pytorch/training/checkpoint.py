"""Folders with a model or a half-finished run in them: finding, checking, loading."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import package_version
from dilated_attention_pytorch.output import sync

from .manifest import MANIFEST_NAME, read_json, verify_manifest, write_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dilated_attention_pytorch.models import LongNetForCausalLM

SETTINGS_NAME = "training.json"
WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
STAGING_NAME = ".unfinished"
"""Where a checkpoint is written before it gets its name: whatever lies in it is not complete."""

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})", re.ASCII)
_STATE_NAME = "trainer_state.json"
_ALSO_WRITTEN = ("generation_config.json",)
"""What models of transformers may add to a checkpoint."""
_VERSIONS = ("dilated-attention-pytorch", "torch", "transformers", "accelerate")
_NAME_A_RUN = "name a folder that `dilated-attention train` wrote"
_RESTORE = "restore the folder from a copy, or begin anew into another --output"
_UNFIT = (pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What is raised for values that are not of the kind that a state holds."""


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of the run folder, the one that is furthest on first. Nothing of them is looked at."""
    found = [path for path in run.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=checkpoint_step, reverse=True)


def latest_checkpoint(run: Path) -> Path | None:
    """The checkpoint of the run folder that is furthest on; None if there is none."""
    return next(iter(checkpoints(run)), None)


def checkpoint_step(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a run goes on."""

    checkpoint: Path | None
    """The newest checkpoint that is whole; None if the run has none yet."""
    left: Mapping[str, str]
    """Newer ones by name, and why each is left."""
    digest: str = ""
    """SHA-256 of the checkpoint's manifest, by which other processes know that they see the same one."""

    def verify_here(self, run_id: str, processes: int, rank: int) -> None:
        """Raise :class:`RunError` unless this process reads what the first one has found to be whole."""
        if self.checkpoint is None or rank == 0:
            return
        verify_checkpoint(self.checkpoint, run_id, file_names(processes, rank))
        if manifest_digest(self.checkpoint) != self.digest:
            raise RunError(
                f"{self.checkpoint} is another one here than where the first process looks; the run folder must lie on "
                "a file system that all hosts of the run share"
            )

    def in_words(self) -> Iterator[str]:
        """A line for each checkpoint that is left."""
        assert self.checkpoint is not None or not self.left
        for name, reason in self.left.items():
            assert self.checkpoint is not None
            yield f"{name} is left, and {self.checkpoint.name} before it is taken: {reason}"


def choose_start(run: Path, run_id: str, processes: int, check: Callable[[Path], None]) -> Start:
    """The newest checkpoint of ``run`` that is whole, and that ``check`` does not refuse.

    Args:
        run: the run folder.
        run_id: the run's name for itself.
        processes: how many processes it has.
        check: raises :class:`RunError` for a checkpoint that is whole and not the run's.

    Raises:
        RunError: there are checkpoints, and none is.
    """
    left: dict[str, str] = {}
    for checkpoint in checkpoints(run):
        try:
            verify_checkpoint(checkpoint, run_id, file_names(processes))
            check(checkpoint)
        except RunError as error:
            left[checkpoint.name] = str(error)
            continue
        return Start(checkpoint=checkpoint, left=left, digest=manifest_digest(checkpoint))
    if left:
        newest, *older = left.values()
        raise RunError(". ".join([newest, *(f"Nor can the one before be taken: {reason}" for reason in older)]))
    return Start(checkpoint=None, left=left)


def file_names(processes: int, rank: int | None = None) -> list[str]:
    """What is read of a checkpoint: by the process ``rank``, or by all."""
    ranks = range(processes) if rank is None else [rank]
    random = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in ranks]
    return [CONFIG_NAME, WEIGHTS_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, _STATE_NAME, *random]


def manifest_digest(checkpoint: Path) -> str:
    """SHA-256 of the manifest."""
    return hashlib.sha256((checkpoint / MANIFEST_NAME).read_bytes()).hexdigest()


def verify_checkpoint(checkpoint: Path, run_id: str, reading: Collection[str]) -> None:
    """Raise :class:`RunError` unless ``checkpoint`` is as this run wrote it, and holds nothing that would be executed.

    Args:
        checkpoint: the folder.
        run_id: the run's name for itself.
        reading: the files that are about to be read.
    """
    from transformers import TrainerState

    what = "broken checkpoint"
    manifest = verify_manifest(checkpoint, what=what, remedy=_RESTORE, reading=reading)
    if manifest.get("run") != run_id:
        raise RunError(
            f"foreign checkpoint: {checkpoint} was written by another run ({manifest.get('run')!r}, and this is "
            f"{run_id!r}), though perhaps with the same settings; {_RESTORE}"
        )
    if manifest.get("step") != checkpoint_step(checkpoint):
        raise RunError(
            f"{what}: {checkpoint} was written after step {manifest.get('step')!r}, which is not what its name says; "
            f"{_RESTORE}"
        )
    listed = manifest["files"].keys()
    # What is loaded is found by names, and more names than ours mean something to transformers. Hidden ones do not.
    known = {*listed, MANIFEST_NAME}
    strangers = sorted(path.name for path in checkpoint.iterdir() if path.name not in known and path.name[0] != ".")
    strangers += sorted(name for name in listed if not _is_written(name))
    if strangers:
        raise RunError(f"{what}: {checkpoint / strangers[0]} is nothing that a run writes there; remove it")
    state = read_json(checkpoint / _STATE_NAME, what=what, remedy=_RESTORE)
    if state.get("global_step") != checkpoint_step(checkpoint):
        raise RunError(f"{what}: {checkpoint / _STATE_NAME} is of step {state.get('global_step')!r}; {_RESTORE}")
    with fitting(checkpoint):
        TrainerState.load_from_json(str(checkpoint / _STATE_NAME))
    for name in reading:
        if Path(name).suffix in (".pt", ".pth"):
            _check_state(checkpoint / name)


def _is_written(name: str) -> bool:
    known = {*file_names(1), *_ALSO_WRITTEN}
    return name in known or re.fullmatch(r"rng_state_(0|[1-9][0-9]*)\.pth", name, re.ASCII) is not None


def _check_state(path: Path) -> None:
    """Raise :class:`RunError` unless the file holds tensors and plain values, and nothing that is called to be read."""
    import torch
    from transformers.trainer_pt_utils import safe_globals

    try:
        with safe_globals():  # NumPy's arrays, of which the state of its random numbers is one
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (*_UNFIT, RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(
            f"broken checkpoint: {path} is no state of a training run, and was not unpickled ({type(error).__name__}: "
            f"{reason}); {_RESTORE}"
        ) from error


@contextmanager
def fitting(checkpoint: str | Path) -> Iterator[None]:
    """What is read from ``checkpoint`` fits this run.

    Raises:
        RunError: it does not.
    """
    try:
        yield
    except _UNFIT as error:
        raise RunError(
            f"foreign checkpoint: the states in {checkpoint} do not fit this run ({type(error).__name__}: {error}); "
            f"{_RESTORE}"
        ) from error


def publish(staged: Path, run: Path, *, run_id: str, processes: int, keep: int, left: Collection[str]) -> None:
    """Give a checkpoint that was written aside its name, and remove those that it replaces.

    Args:
        staged: its folder, below the one for what is not complete.
        run: the run folder.
        run_id: the run's name for itself.
        processes: how many processes wrote into it.
        keep: checkpoints to keep, this one included.
        left: names of those that were damaged when the run went on; this one may have got the name of one.

    Raises:
        RunError: what a process wrote is not there.
    """
    names = [*file_names(processes), *(name for name in _ALSO_WRITTEN if (staged / name).exists())]
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
    target = run / staged.name
    if os.path.lexists(target):
        os.rename(target, staged.with_name("replaced"))
    os.rename(staged, target)
    sync(run)
    # A run that went on from an older checkpoint writes those after it anew: what is left of them is of no use.
    whole = [path for path in checkpoints(run) if path == target or path.name not in left]
    before = [path for path in whole if checkpoint_step(path) <= step]
    for path in checkpoints(run):
        if path not in before[:keep]:
            clear(path)
    clear(run / STAGING_NAME)


def clear(path: Path) -> None:
    """Remove what lies there, as far as the system lets it: a folder, a file, or a link, but not what that leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def model_folder(run: Path) -> tuple[Path, Mapping[str, str]]:
    """The folder with the weights of a run: its own once it is finished, before that its newest whole checkpoint.

    Returns:
        the folder; and newer checkpoints by name, with why each is left.

    Raises:
        RunError: there are none, or none is whole.
    """
    if not run.is_dir():
        reason = "it is a file" if run.exists() else "there is no such folder"
        raise RunError(f"{run} is no run folder: {reason}; name the --output of a `train` command")
    if (run / WEIGHTS_NAME).exists():
        return run, {}
    left: dict[str, str] = {}
    for checkpoint in checkpoints(run):
        try:
            verify_manifest(checkpoint, what="broken checkpoint", remedy=_RESTORE, reading=(CONFIG_NAME, WEIGHTS_NAME))
            check_weights(checkpoint)
        except RunError as error:
            left[checkpoint.name] = str(error)
            continue
        return checkpoint, left
    if left:
        raise RunError(next(iter(left.values())))
    raise RunError(
        f"{run} holds no trained model: neither {WEIGHTS_NAME} nor a checkpoint is in it; "
        "name the --output of a `train` command that has saved one"
    )


def load_model(folder: Path) -> LongNetForCausalLM:
    """The model of a folder with ``config.json`` and ``model.safetensors``, after both were checked.

    Raises:
        RunError: a file is missing or damaged, or belongs to another model.
    """
    from transformers.utils import logging

    from dilated_attention_pytorch.models import LongNetForCausalLM

    remedy = f"copy it again, or, if it was changed on purpose, remove {folder / MANIFEST_NAME}"
    if os.path.lexists(folder / MANIFEST_NAME):
        verify_manifest(folder, what="broken model", remedy=remedy, reading=(CONFIG_NAME, WEIGHTS_NAME))
    check_weights(folder)
    logging.disable_progress_bar()
    with _described_by(folder / CONFIG_NAME):
        return LongNetForCausalLM.from_pretrained(folder)


@contextmanager
def _described_by(path: Path) -> Iterator[None]:
    """What transformers makes of a configuration; a value that it cannot use is a :class:`RunError`."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        raise RunError(f"broken checkpoint: {path} describes no model ({error}); {_NAME_A_RUN}") from error


def check_weights(folder: Path) -> None:
    """Raise :class:`RunError` unless configuration and weights are whole and fit each other."""
    import torch
    from safetensors import SafetensorError, safe_open

    from dilated_attention_pytorch.models import LongNetCausalLMConfig, LongNetForCausalLM

    remedy = _NAME_A_RUN
    values = read_json(folder / CONFIG_NAME, what="broken checkpoint", remedy=remedy)
    kind = values.get("model_type")
    if kind != LongNetCausalLMConfig.model_type:
        raise RunError(
            f"foreign checkpoint: {folder / CONFIG_NAME} describes a model of type {kind!r}, "
            f"not {LongNetCausalLMConfig.model_type!r}; {remedy}"
        )
    with _described_by(folder / CONFIG_NAME):
        config = LongNetCausalLMConfig.from_pretrained(folder)
    if config.vocab_size != 256:
        raise RunError(
            f"foreign checkpoint: {folder / CONFIG_NAME} describes a model of {config.vocab_size} tokens, "
            f"not of the 256 bytes; {remedy}"
        )
    weights = folder / WEIGHTS_NAME
    if not weights.exists():
        raise RunError(f"broken checkpoint: {weights} does not exist; {remedy}")
    try:
        with safe_open(weights, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise RunError(
            f"broken checkpoint: {weights} is damaged or was not written to its end ({error}); "
            "copy it again from where it came from, or begin anew"
        ) from error
    # Every layer has weights: a number of layers that none could have is not built to be compared.
    if config.num_layers > len(found):
        raise RunError(
            f"foreign checkpoint: {folder / CONFIG_NAME} describes a model of {config.num_layers} layers, and "
            f"{weights} holds {len(found)} tensors; bring the two files of one model together again"
        )
    with _described_by(folder / CONFIG_NAME), torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in LongNetForCausalLM(config).state_dict().items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise RunError(
                f"foreign checkpoint: the weights in {weights} do not fit {folder / CONFIG_NAME}: {name} is "
                f"{_shape(found.get(name))} in the weights and {_shape(expected.get(name))} in the model; "
                "bring the two files of one model together again"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def save_finished(model: PreTrainedModel, run: Path, *, run_id: str, step: int) -> None:
    """Save the trained model into its run folder. The weights come last: where they are, the run is finished."""
    staging = run / STAGING_NAME
    clear(staging)
    model.save_pretrained(staging, max_shard_size="100TB")  # one file, whose presence means that all is there
    names = [path.name for path in staging.iterdir()]
    versions = {name: package_version(name) for name in _VERSIONS}
    write_manifest(staging, names, run=run_id, step=step, versions=versions)
    for path in sorted(staging.iterdir(), key=lambda path: path.name == WEIGHTS_NAME):
        os.replace(path, run / path.name)
    sync(run)
    clear(staging)
