"""Pretrained models of transformers: where they are, what describes them, and loading them."""

from __future__ import annotations

import pickle
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dilated_attention_pytorch.errors import RunError

from .checkpoint import SETTINGS_NAME
from .finite import what_is_not_finite

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SECONDS = 5.0
_REMEDY = "name a folder with config.json and weights, or a model of the hub"


def check_source(what: str, model: str) -> None:
    """Raise :class:`RunError` unless ``model`` is a folder with a configuration, or may be had from the hub.

    The hub's client tries again and again where there is no network; here one connection is opened first, so that a
    mistyped folder is said at once.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise RunError(f"{what}: there is no config.json in that folder; {_REMEDY}")
        return
    if folder.exists():
        raise RunError(f"{what}: it is a file, not a folder; {_REMEDY}")
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise RunError(f"{what}: there is no such folder (looked for from {Path.cwd()}); {_REMEDY}") from error
    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    refused = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _why_unreachable(constants.ENDPOINT)
    if refused is not None:
        raise RunError(
            f"{what}: there is no such folder (looked for from {Path.cwd()}), and no hub to ask for a model of that "
            f"name ({refused}); check the path, or the network"
        )


def _why_unreachable(endpoint: str) -> str | None:
    address = urllib.parse.urlsplit(endpoint)
    if address.scheme in urllib.request.getproxies() or address.hostname is None:
        return None  # a proxy knows names that this machine does not
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=_SECONDS).close()
    except OSError as error:
        return f"{address.hostname}: {error.strerror or error}"
    return None


def num_parameters(what: str, config: PreTrainedConfig) -> int:
    """Weights of the model that a configuration describes, without making any.

    Raises:
        RunError: it describes no causal language model.
    """
    from transformers import AutoModelForCausalLM

    from dilated_attention_pytorch.integrations.transformers.config import configuration_errors

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except configuration_errors() as error:
        raise RunError(f"{what}: its config.json describes no causal language model ({error}); {_REMEDY}") from error
    return sum(parameter.numel() for parameter in model.parameters())


def load_config(what: str, model: str | Path) -> PreTrainedConfig:
    """What describes a model of transformers.

    Raises:
        RunError: nothing there does; the sentence begins with ``what``.
    """
    from transformers import AutoConfig

    from dilated_attention_pytorch.integrations.transformers.config import configuration_errors

    refusals: tuple[type[Exception], ...] = (OSError, *configuration_errors())
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except refusals as error:
        raise RunError(
            f"{what}: {model} describes no model of transformers ({error}); it takes a folder with config.json, or a "
            "model of the hub"
        ) from error
    return config


def length_of(what: str, config: PreTrainedConfig) -> int:
    """Tokens that a model was made for.

    Raises:
        RunError: that is not known, or a pattern reads more of them already.
    """
    length: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if length is None:
        raise RunError(
            f"{what}: {config.model_type} has no max_position_embeddings, so its length is not known; set it "
            "in config.json to the length that the model was trained on"
        )
    if hasattr(config.get_text_config(), "dilated_attention"):
        raise RunError(
            f"{what}: the model has a pattern already (dilated_attention in config.json), so what it computes with "
            "dense attention says nothing: begin with the model from before, or call set_pattern or extend_context and "
            "train with your own trainer"
        )
    return length


def num_kv_heads(config: PreTrainedConfig) -> int:
    """Key/value heads of a layer."""
    text = config.get_text_config()
    heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return heads


def load_model(what: str, model: str, device: str, **options: Any) -> PreTrainedModel:
    """A causal language model with its weights in float32, on ``device``.

    Args:
        what: the beginning of what is said if it cannot be loaded.
        model: a folder, or a name on the hub.
        device: "cpu" or "cuda".
        **options: of ``from_pretrained``.

    Raises:
        RunError: weights are missing, damaged, executable or not finite.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from dilated_attention_pytorch.integrations.transformers.config import configuration_errors

    logging.disable_progress_bar()
    refusals: tuple[type[Exception], ...] = (OSError, SafetensorError, *configuration_errors())
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, output_loading_info=True, trust_remote_code=False, **options
        )
    except pickle.UnpicklingError as error:
        raise RunError(
            f"{what}: the weights of {model} are a pickle that holds more than tensors, and were not unpickled, as "
            "what is in it would run; take a copy with model.safetensors, or convert it with the program that wrote it"
        ) from error
    except refusals as error:
        raise RunError(f"{what}: the weights of {model} cannot be loaded ({error}); copy them again") from error
    loaded: PreTrainedModel = found[0]
    missing = sorted(found[1]["missing_keys"])
    if missing:
        raise RunError(
            f"{what}: {len(missing)} weights are missing in it ({missing[0]} the first), so it is no trained "
            "causal language model; name another one"
        )
    broken = what_is_not_finite({"weights": loaded.named_parameters()})
    if broken is not None:
        raise RunError(f"{what}: NaN or infinity is in {broken} of {model}, so nothing can be trained from it")
    moved: PreTrainedModel = nn.Module.to(loaded, device)
    return moved


def figures_of(config: PreTrainedConfig) -> dict[str, Any]:
    """What an extension changes of a model, by which its checkpoints are known again."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "rope_parameters", "dilated_attention")
    return {**{name: getattr(text, name, None) for name in names}, "use_cache": getattr(text, "use_cache", None)}


def check_same_model(what: str, figures: dict[str, Any], checkpoint: Path) -> None:
    """Raise :class:`RunError` unless ``checkpoint`` is of the model of which :func:`figures_of` gave ``figures``."""
    of_checkpoint = figures_of(load_config(what, checkpoint))
    # The trainer turns the cache of the model off.
    names = [name for name in figures if name != "use_cache" and of_checkpoint.get(name) != figures[name]]
    if names:
        raise RunError(
            f"foreign checkpoint: {checkpoint} is of another model than {checkpoint.parent / SETTINGS_NAME} describes "
            f"({', '.join(names)} differ); bring the two of one run together again"
        )
