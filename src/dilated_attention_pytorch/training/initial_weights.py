"""The weights of another run, or of a saved model, with which a new run begins."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models.config import LongNetConfig

from .checkpoint import WEIGHTS_NAME
from .data.run_data import tokenizer_of
from .data.tokenizer import Tokenizer
from .settings import TrainSettings
from .trained_model import check_weights, load_model, model_folder, verify_files

if TYPE_CHECKING:
    from dilated_attention_pytorch.models import LongNetForCausalLM

_MAY_DIFFER = (
    *("segment_lengths", "dilation_rates", "offset_rule", "layer_segment_shifts", "layer_patterns", "rope_theta"),
    *("layer_rope_thetas", "layer_scale_lengths"),
    *("dropout", "attention_dropout", "gradient_checkpointing", "checkpoint_every"),
)
"""Fields of a model's configuration that say how its weights are used, and not which weights it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialWeights:
    """A folder with weights for a new run."""

    folder: Path
    """The run folder or saved model; of an unfinished run its newest intact checkpoint."""
    digest: str
    """SHA-256 of its weights."""

    def load_into(self, model: LongNetForCausalLM) -> None:
        """Set the weights of ``model``, which has the same ones."""
        model.load_state_dict(load_model(self.folder).state_dict())

    def record(self) -> dict[str, str]:
        """What the record of the run says about them."""
        return {"path": str(self.folder.absolute()), "sha256": self.digest}


def model_of(folder: Path) -> LongNetConfig:
    """The configuration of the model in a run folder or of a saved LongNet.

    Raises:
        RunError: it holds no LongNet; the message starts with ``--init-from``.
    """
    return _found(folder)[1]


def find_initial_weights(settings: TrainSettings, tokenizer: Tokenizer) -> InitialWeights:
    """The weights of ``settings.init_from``.

    Raises:
        RunError: they are missing or damaged, or of a model of other sizes or another vocabulary.
    """
    assert settings.init_from is not None
    folder, theirs = _found(settings.init_from)
    what, ours = f"--init-from {settings.init_from}", settings.model
    names = [entry.name for entry in dataclasses.fields(ours) if entry.name not in _MAY_DIFFER]
    differing = [name for name in names if getattr(theirs, name) != getattr(ours, name)]
    if differing:
        words = ", ".join(
            f"--model.{name.replace('_', '-')} {getattr(theirs, name)} there and {getattr(ours, name)} here"
            for name in differing
        )
        raise RunError(
            f"{what}: its weights do not fit the model of this run: {words}; leave these "
            "flags out, as train then takes them from that folder, or leave --init-from out"
        )
    if tokenizer_of(settings.init_from, theirs.vocab_size).digest != tokenizer.digest:
        raise RunError(
            f"{what}: its tokens are not those of this run's tokenizer, so its weights say nothing about them; leave "
            "--tokenizer out, as train then takes that of the folder, or leave --init-from out"
        )
    with open(folder / WEIGHTS_NAME, "rb") as file:
        return InitialWeights(folder=folder, digest=hashlib.file_digest(file, "sha256").hexdigest())


def _found(source: Path) -> tuple[Path, LongNetConfig]:
    from dilated_attention_pytorch.models import LongNetCausalLMConfig

    try:
        folder, _ = model_folder(source)
        verify_files(folder)
        check_weights(folder)
    except RunError as error:
        raise RunError(f"--init-from {source}: {error}") from error
    return folder, LongNetCausalLMConfig.from_pretrained(folder).to_longnet_config()
