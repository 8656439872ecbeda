"""Folders with a model or a half-finished run in them: finding, checking, loading."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.errors import RunError

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

_PREFIX = "checkpoint-"
_STATE_NAME = "trainer_state.json"


def latest_checkpoint(run: Path) -> Path | None:
    """The checkpoint of the run folder that is furthest on; None if there is none."""
    steps = [
        (int(path.name.removeprefix(_PREFIX)), path)
        for path in run.glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdigit()
    ]
    return max(steps)[1] if steps else None


def checkpoint_step(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def read_json(path: Path, *, what: str, remedy: str) -> dict[str, Any]:
    """An object from a JSON file.

    Raises:
        RunError: it is missing, or holds something else; ``what`` and ``remedy`` are parts of the sentence.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{what}: {path} does not exist; {remedy}") from error
    except NotADirectoryError as error:
        raise RunError(f"{what}: {path.parent} is a file, not a folder; {remedy}") from error
    except PermissionError as error:
        raise RunError(f"{what}: {path} may not be read by this user; change its permissions (chmod +r)") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{what}: {path} is damaged, it is no JSON ({error}); {remedy}") from error
    if not isinstance(values, dict):
        raise RunError(f"{what}: {path} is damaged, it holds no JSON object; {remedy}")
    return values


def model_folder(run: Path) -> Path:
    """The folder with the weights of a run: its own once it is finished, its last checkpoint before that.

    Raises:
        RunError: there are none.
    """
    if not run.is_dir():
        reason = "it is a file" if run.exists() else "there is no such folder"
        raise RunError(f"{run} is no run folder: {reason}; name the --output of a `train` command")
    if (run / WEIGHTS_NAME).exists():
        return run
    checkpoint = latest_checkpoint(run)
    if checkpoint is None:
        raise RunError(
            f"{run} holds no trained model: neither {WEIGHTS_NAME} nor a checkpoint is in it; "
            "name the --output of a `train` command that has saved one"
        )
    return checkpoint


def load_model(folder: Path) -> LongNetForCausalLM:
    """The model of a folder with ``config.json`` and ``model.safetensors``, after both were checked.

    Raises:
        RunError: a file is missing or damaged, or belongs to another model.
    """
    from transformers.utils import logging

    from dilated_attention_pytorch.models import LongNetForCausalLM

    check_weights(folder)
    logging.disable_progress_bar()
    return LongNetForCausalLM.from_pretrained(folder)


def check_weights(folder: Path) -> None:
    """Raise :class:`RunError` unless configuration and weights are whole and fit each other."""
    import torch
    from safetensors import SafetensorError, safe_open

    from dilated_attention_pytorch.models import LongNetCausalLMConfig, LongNetForCausalLM

    remedy = "name a folder that `dilated-attention train` wrote"
    values = read_json(folder / CONFIG_NAME, what="broken checkpoint", remedy=remedy)
    kind = values.get("model_type")
    if kind != LongNetCausalLMConfig.model_type:
        raise RunError(
            f"foreign checkpoint: {folder / CONFIG_NAME} describes a model of type {kind!r}, "
            f"not {LongNetCausalLMConfig.model_type!r}; {remedy}"
        )
    try:
        config = LongNetCausalLMConfig.from_pretrained(folder)
    except (TypeError, ValueError) as error:
        raise RunError(f"broken checkpoint: {folder / CONFIG_NAME} describes no model ({error}); {remedy}") from error
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
    with torch.device("meta"):
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


def check_checkpoint(checkpoint: Path) -> None:
    """Raise :class:`RunError` unless a run can be taken up from ``checkpoint``: every file there, whole and fitting."""
    check_weights(checkpoint)
    check_state(checkpoint)


def check_state(checkpoint: Path) -> None:
    """Raise :class:`RunError` unless what is beside the weights of ``checkpoint`` is there and whole."""
    remedy = "restore the folder from a copy, or begin anew into another --output"
    read_json(checkpoint / _STATE_NAME, what="broken checkpoint", remedy=remedy)
    random_states = [path.name for path in checkpoint.glob("rng_state*.pth")] or ["rng_state.pth"]
    for name in (OPTIMIZER_NAME, SCHEDULER_NAME, *random_states):
        path = checkpoint / name
        if not path.exists():
            raise RunError(f"broken checkpoint: {path} does not exist; {remedy}")
        # The directory of a zip archive is its end: a file that was cut off has none.
        if not zipfile.is_zipfile(path):
            raise RunError(f"broken checkpoint: {path} is damaged or was not written to its end; {remedy}")


def save_finished(model: PreTrainedModel, run: Path) -> None:
    """Save the trained model into its run folder. The weights come last: where they are, the run is finished."""
    staging = run / STAGING_NAME
    shutil.rmtree(staging, ignore_errors=True)
    model.save_pretrained(staging, max_shard_size="100TB")  # one file, whose presence means that all is there
    for path in sorted(staging.iterdir(), key=lambda path: path.name == WEIGHTS_NAME):
        os.replace(path, run / path.name)
    shutil.rmtree(staging)
