"""Verification of the weights of a folder: intact, and of the model that its configuration describes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models.config import LongNetConfig

from .checkpoint import CONFIG_NAME, SETTINGS_NAME, WEIGHTS_NAME
from .manifest import read_json

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
            "copy it again from its source, or start a new run"
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
