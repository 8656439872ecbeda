"""Where a pretrained model is: a folder here, or a name on the hub that can be reached."""

from __future__ import annotations

import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dilated_attention_pytorch.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, RuntimeError) as error:
        raise RunError(f"{what}: its config.json describes no causal language model ({error}); {_REMEDY}") from error
    return sum(parameter.numel() for parameter in model.parameters())
