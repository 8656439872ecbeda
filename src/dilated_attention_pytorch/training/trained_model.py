"""The model of a run folder: found, verified, loaded, and sampled from."""

from __future__ import annotations

import codecs
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models.config import LongNetConfig

from .checkpoint import CONFIG_NAME, RESTORE, SETTINGS_NAME, WEIGHTS_NAME, newest_intact
from .data.tokenizer import BYTES, Tokenizer
from .manifest import MANIFEST_NAME, read_json, verify_manifest
from .settings import SampleSettings

if TYPE_CHECKING:
    from dilated_attention_pytorch.models import LongNetForCausalLM, LongNetLM


_NAME_A_RUN = "name a folder that `dilated-attention train` wrote"


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
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise RunError(
            f"broken checkpoint: {weights} is damaged or was not written to its end ({error}); "
            "copy it again from its source, or start a new run"
        ) from error
    # Every layer has weights: do not build a model with more layers than the file can hold.
    if config.num_layers > len(shapes):
        raise RunError(
            f"foreign checkpoint: {folder / CONFIG_NAME} describes a model of {config.num_layers} layers, and "
            f"{weights} holds {len(shapes)} tensors; bring the two files of one model together again"
        )
    with described_by(folder / CONFIG_NAME), torch.device("meta"):
        expected = {name: tuple(weight.shape) for name, weight in LongNetForCausalLM(config).named_parameters()}
    if any(name.endswith("in_proj_weight") for name in shapes):
        expected = fused_shapes(expected)
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise RunError(
                f"foreign checkpoint: the weights in {weights} do not fit {folder / CONFIG_NAME}: {name} is "
                f"{_shape(shapes.get(name))} in the weights and {_shape(expected.get(name))} in the model; "
                "bring the two files of one model together again"
            )


def check_same_model(checkpoint: Path, model: LongNetConfig) -> None:
    """Raise :class:`RunError` unless a checkpoint is intact and holds ``model``; recomputation settings may differ."""
    from dilated_attention_pytorch.models import LongNetCausalLMConfig

    check_weights(checkpoint)
    saved = LongNetCausalLMConfig.from_pretrained(checkpoint).to_longnet_config()
    expected = dataclasses.replace(
        model, gradient_checkpointing=saved.gradient_checkpointing, checkpoint_every=saved.checkpoint_every
    )
    if saved != expected:
        names = [
            entry.name
            for entry in dataclasses.fields(saved)
            if getattr(saved, entry.name) != getattr(expected, entry.name)
        ]
        raise RunError(
            f"foreign checkpoint: {checkpoint} is of another model than {checkpoint.parent / SETTINGS_NAME} describes "
            f"({', '.join(names)} differ); bring the two of one run together again"
        )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


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
        raise RunError(f"{run} is not a run folder: {reason}; name the --output of a `train` command")
    if (run / WEIGHTS_NAME).exists():
        return run, {}

    def verify(checkpoint: Path) -> None:
        verify_manifest(checkpoint, what="broken checkpoint", remedy=RESTORE, reading=(CONFIG_NAME, WEIGHTS_NAME))
        check(checkpoint)

    checkpoint, rejected = newest_intact(run, verify)
    if checkpoint is not None:
        return checkpoint, rejected
    if rejected:
        raise RunError(next(iter(rejected.values())))
    raise RunError(
        f"{run} holds no trained model: neither {WEIGHTS_NAME} nor a checkpoint is in it; "
        "go on with that run until it has saved one, or name the --output of another"
    )


def verify_files(folder: Path) -> None:
    """Raise :class:`RunError` unless configuration and weights match the manifest of the folder, if it has one."""
    if os.path.lexists(folder / MANIFEST_NAME):
        remedy = f"copy it again, or, if it was changed on purpose, remove {folder / MANIFEST_NAME}"
        verify_manifest(folder, what="broken model", remedy=remedy, reading=(CONFIG_NAME, WEIGHTS_NAME))


def load_model(folder: Path) -> LongNetForCausalLM:
    """Load the model of a folder with ``config.json`` and ``model.safetensors``, after verifying both.

    Raises:
        RunError: a file is missing, damaged, or belongs to another model.
    """
    from transformers.utils import logging

    from dilated_attention_pytorch.models import LongNetForCausalLM

    verify_files(folder)
    check_weights(folder)
    logging.disable_progress_bar()
    with described_by(folder / CONFIG_NAME):
        return LongNetForCausalLM.from_pretrained(folder)


def sample_text(model: LongNetLM, prompt: str, settings: SampleSettings, tokenizer: Tokenizer = BYTES) -> Iterator[str]:
    """Continue ``prompt``, taken as the beginning of a file, until the file ends or the length is reached.

    Args:
        model: the model; put into eval mode.
        prompt: the beginning of the text.
        settings: sampling settings and length.
        tokenizer: the model's tokenizer.

    Yields:
        the text in pieces, one for every token that completes a character; invalid UTF-8 becomes U+FFFD.

    Raises:
        RunError: the tokenizer cannot encode the prompt.
    """
    from dilated_attention_pytorch.models import generate

    model.eval()
    device = model.embedding.weight.device
    generator = torch.Generator(device)
    if settings.seed is None:
        generator.seed()
    else:
        generator.manual_seed(settings.seed)
    (prompt_ids,) = tokenizer.encode([prompt.encode(errors="surrogateescape")])
    tokens = torch.tensor([[tokenizer.separator, *prompt_ids.tolist()]], device=device)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in generate(
        model,
        tokens,
        settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        generator=generator,
    ):
        if int(token) == tokenizer.separator:
            break
        text = decoder.decode(tokenizer.token_bytes[int(token)])
        if text:
            yield text
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest
