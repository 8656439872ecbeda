"""Locating and loading the model of a run folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention_pytorch.errors import RunError

from .checkpoint import CONFIG_NAME, RESTORE, WEIGHTS_NAME, newest_intact
from .manifest import MANIFEST_NAME, verify_manifest
from .verification import check_weights, described_by

if TYPE_CHECKING:
    from dilated_attention_pytorch.models import LongNetForCausalLM


def model_folder(run: Path, check: Callable[[Path], None] = check_weights) -> tuple[Path, Mapping[str, str]]:
    """The folder with the weights of a run: its own once finished, before that its newest intact checkpoint.

    Args:
        run: run folder.
        check: raises :class:`RunError` for a checkpoint whose configuration and weights are not a model of the run.

    Returns:
        the folder; and newer checkpoints by name, with the reasons for skipping them.

    Raises:
        RunError: there are no weights, or none are intact.
    """
    if not run.is_dir():
        reason = "it is a file" if run.exists() else "there is no such folder"
        raise RunError(f"{run} is no run folder: {reason}; name the --output of a `train` command")
    if (run / WEIGHTS_NAME).exists():
        return run, {}

    def verify(checkpoint: Path) -> None:
        verify_manifest(checkpoint, what="broken checkpoint", remedy=RESTORE, reading=(CONFIG_NAME, WEIGHTS_NAME))
        check(checkpoint)

    checkpoint, left = newest_intact(run, verify)
    if checkpoint is not None:
        return checkpoint, left
    if left:
        raise RunError(next(iter(left.values())))
    raise RunError(
        f"{run} holds no trained model: neither {WEIGHTS_NAME} nor a checkpoint is in it; "
        "go on with that run until it has saved one, or name the --output of another"
    )


def load_model(folder: Path) -> LongNetForCausalLM:
    """Load the model of a folder with ``config.json`` and ``model.safetensors``, after verifying both.

    Raises:
        RunError: a file is missing, damaged, or belongs to another model.
    """
    from transformers.utils import logging

    from dilated_attention_pytorch.models import LongNetForCausalLM

    remedy = f"copy it again, or, if it was changed on purpose, remove {folder / MANIFEST_NAME}"
    if os.path.lexists(folder / MANIFEST_NAME):
        verify_manifest(folder, what="broken model", remedy=remedy, reading=(CONFIG_NAME, WEIGHTS_NAME))
    check_weights(folder)
    logging.disable_progress_bar()
    with described_by(folder / CONFIG_NAME):
        return LongNetForCausalLM.from_pretrained(folder)
