"""Verification of run folders: files are intact, belong to the run, and contain nothing executable."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models.config import LongNetConfig

from .checkpoint import (
    ALSO_WRITTEN,
    CONFIG_NAME,
    RESTORE,
    SETTINGS_NAME,
    STATE_NAME,
    WEIGHTS_NAME,
    checkpoint_step,
    file_names,
)
from .manifest import MANIFEST_NAME, read_json, verify_manifest

_NAME_A_RUN = "name a folder that `dilated-attention train` wrote"
_UNFIT = (pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Exceptions raised for values of the wrong kind in a state."""


def verify_checkpoint(checkpoint: Path, run_id: str, reading: Collection[str]) -> None:
    """Raise :class:`RunError` unless ``checkpoint`` is as this run wrote it, without executable contents.

    Args:
        checkpoint: the folder.
        run_id: unique id of the run.
        reading: files about to be read.
    """
    from transformers import TrainerState

    what = "broken checkpoint"
    manifest = verify_manifest(checkpoint, what=what, remedy=RESTORE, reading=reading)
    if manifest.get("run") != run_id:
        raise RunError(
            f"foreign checkpoint: {checkpoint} was written by another run ({manifest.get('run')!r}, and this is "
            f"{run_id!r}), though perhaps with the same settings; {RESTORE}"
        )
    if manifest.get("step") != checkpoint_step(checkpoint):
        raise RunError(
            f"{what}: {checkpoint} was written after step {manifest.get('step')!r}, which is not what its name says; "
            f"{RESTORE}"
        )
    listed = manifest["files"].keys()
    # transformers looks files up by name and knows more names than are written here. Hidden files are not loaded.
    known = {*listed, MANIFEST_NAME}
    strangers = sorted(path.name for path in checkpoint.iterdir() if path.name not in known and path.name[0] != ".")
    strangers += sorted(name for name in listed if not _is_written(name))
    if strangers:
        raise RunError(f"{what}: {checkpoint / strangers[0]} is nothing that a run writes there; remove it")
    state = read_json(checkpoint / STATE_NAME, what=what, remedy=RESTORE)
    if state.get("global_step") != checkpoint_step(checkpoint):
        raise RunError(f"{what}: {checkpoint / STATE_NAME} is of step {state.get('global_step')!r}; {RESTORE}")
    with fitting(checkpoint):
        TrainerState.load_from_json(str(checkpoint / STATE_NAME))
    for name in reading:
        if Path(name).suffix in (".pt", ".pth"):
            _check_state(checkpoint / name)


def _is_written(name: str) -> bool:
    known = {*file_names(1), *ALSO_WRITTEN}
    return name in known or re.fullmatch(r"rng_state_(0|[1-9][0-9]*)\.pth", name, re.ASCII) is not None


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
            f"broken checkpoint: {path} is no state of a training run, and was not unpickled ({type(error).__name__}: "
            f"{reason}); {RESTORE}"
        ) from error


@contextmanager
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


@contextmanager
def described_by(path: Path) -> Iterator[None]:
    """Context that builds a transformers configuration; invalid values raise :class:`RunError`."""
    from dilated_attention_pytorch.integrations.transformers.config import configuration_errors

    try:
        yield
    except configuration_errors() as error:
        raise RunError(f"broken checkpoint: {path} describes no model ({error}); {_NAME_A_RUN}") from error


def check_weights(folder: Path) -> None:
    """Raise :class:`RunError` unless configuration and weights are intact and match."""
    import torch
    from safetensors import SafetensorError, safe_open

    from dilated_attention_pytorch.models import LongNetCausalLMConfig, LongNetForCausalLM
    from dilated_attention_pytorch.models.fused_weights import fused_shapes

    remedy = _NAME_A_RUN
    values = read_json(folder / CONFIG_NAME, what="broken checkpoint", remedy=remedy)
    kind = values.get("model_type")
    if kind != LongNetCausalLMConfig.model_type:
        raise RunError(
            f"foreign checkpoint: {folder / CONFIG_NAME} describes a model of type {kind!r}, "
            f"not {LongNetCausalLMConfig.model_type!r}; {remedy}"
        )
    with described_by(folder / CONFIG_NAME):
        config = LongNetCausalLMConfig.from_pretrained(folder)
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
    # Every layer has weights: do not build a model with more layers than the file can hold.
    if config.num_layers > len(found):
        raise RunError(
            f"foreign checkpoint: {folder / CONFIG_NAME} describes a model of {config.num_layers} layers, and "
            f"{weights} holds {len(found)} tensors; bring the two files of one model together again"
        )
    with described_by(folder / CONFIG_NAME), torch.device("meta"):
        expected = {name: tuple(weight.shape) for name, weight in LongNetForCausalLM(config).named_parameters()}
    if any(name.endswith("in_proj_weight") for name in found):
        expected = fused_shapes(expected)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise RunError(
                f"foreign checkpoint: the weights in {weights} do not fit {folder / CONFIG_NAME}: {name} is "
                f"{_shape(found.get(name))} in the weights and {_shape(expected.get(name))} in the model; "
                "bring the two files of one model together again"
            )


def check_same_model(checkpoint: Path, model: LongNetConfig) -> None:
    """Raise :class:`RunError` unless a checkpoint is intact and holds ``model``; recomputation settings may differ."""
    from dilated_attention_pytorch.models import LongNetCausalLMConfig

    check_weights(checkpoint)
    found = LongNetCausalLMConfig.from_pretrained(checkpoint).to_longnet_config()
    expected = dataclasses.replace(
        model, gradient_checkpointing=found.gradient_checkpointing, checkpoint_every=found.checkpoint_every
    )
    if found != expected:
        names = [
            entry.name
            for entry in dataclasses.fields(found)
            if getattr(found, entry.name) != getattr(expected, entry.name)
        ]
        raise RunError(
            f"foreign checkpoint: {checkpoint} is of another model than {checkpoint.parent / SETTINGS_NAME} describes "
            f"({', '.join(names)} differ); bring the two of one run together again"
        )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
