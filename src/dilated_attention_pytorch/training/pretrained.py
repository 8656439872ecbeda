"""Pretrained models of transformers: their configurations, weights and tokenizers."""

from __future__ import annotations

import pickle
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.errors import RunError

from .checkpoint import SETTINGS_NAME
from .data.corpus import Text
from .finite import what_is_not_finite

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_SECONDS = 5.0
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_REMEDY = "name a folder with config.json and weights, or a model of the hub"


def check_source(what: str, model: str) -> None:
    """Raise :class:`RunError` unless ``model`` is a folder with a configuration, or the hub can be reached.

    The hub's client retries for a long time without a network; opening one connection first reports a
    mistyped folder at once.
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
        return None  # names may be resolved by a proxy
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname, port), timeout=_SECONDS).close()
    except OSError as error:
        return f"{address.hostname}: {error.strerror or error}"
    return None


def num_parameters(what: str, config: PreTrainedConfig) -> int:
    """Number of weights of the model that a configuration describes, without allocating them.

    Raises:
        RunError: it does not describe a causal language model.
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
    """The configuration of a transformers model.

    Raises:
        RunError: there is none; the message starts with ``what``.
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
    """Context length of a model, in tokens.

    Raises:
        RunError: it is unknown, or the model already has a pattern.
    """
    from dilated_attention_pytorch.models import LongNetCausalLMConfig

    if isinstance(config, LongNetCausalLMConfig):
        raise RunError(
            f"{what}: it is a LongNet, which is trained on longer text by `dilated-attention train --init-from` and "
            "the folder, with a larger --context-length"
        )
    length: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if length is None:
        raise RunError(
            f"{what}: {config.model_type} has no max_position_embeddings, so its length is not known; set it "
            "in config.json to the length that the model was trained on"
        )
    if getattr(config.get_text_config(), "dilated_attention", None) is not None:
        raise RunError(
            f"{what}: the model has a pattern already (dilated_attention in config.json), so what it computes with "
            "dense attention says nothing: begin with the model from before, or call set_pattern or extend_context and "
            "train with your own trainer"
        )
    return length


def num_kv_heads(config: PreTrainedConfig) -> int:
    """Number of key/value heads per layer."""
    text = config.get_text_config()
    heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return heads


def load_model(what: str, model: str, device: str, *, attention: str | None = None) -> PreTrainedModel:
    """A causal language model with float32 weights, on ``device``.

    Args:
        what: start of error messages.
        model: folder, or a name on the hub.
        device: "cpu" or "cuda".
        attention: what the model attends with, a name of transformers; its own choice without it.

    Raises:
        RunError: weights are missing, damaged, in an unsafe pickle, or not finite.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from dilated_attention_pytorch.integrations.transformers.config import configuration_errors

    logging.disable_progress_bar()
    chosen = {} if attention is None else {"attn_implementation": attention}
    refusals: tuple[type[Exception], ...] = (OSError, SafetensorError, *configuration_errors())
    try:
        result: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, output_loading_info=True, trust_remote_code=False, **chosen
        )
    except pickle.UnpicklingError as error:
        raise RunError(
            f"{what}: the weights of {model} are a pickle that holds more than tensors, and were not unpickled, as "
            "what is in it would run; take a copy with model.safetensors, or convert it with the program that wrote it"
        ) from error
    except refusals as error:
        raise RunError(f"{what}: the weights of {model} cannot be loaded ({error}); copy them again") from error
    loaded: PreTrainedModel = result[0]
    missing = sorted(result[1]["missing_keys"])
    if missing:
        raise RunError(
            f"{what}: {len(missing)} weights are missing in it ({missing[0]} the first), so it is not a trained "
            "causal language model; name another one"
        )
    broken = what_is_not_finite({"weights": loaded.named_parameters()})
    if broken is not None:
        raise RunError(f"{what}: NaN or infinity is in {broken} of {model}, so nothing can be trained from it")
    moved: PreTrainedModel = nn.Module.to(loaded, device)
    return moved


def figures_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Configuration values that an extension changes, which identify its checkpoints."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "rope_parameters", "dilated_attention")
    return {**{name: getattr(text, name, None) for name in names}, "use_cache": getattr(text, "use_cache", None)}


def check_same_model(what: str, figures: dict[str, Any], checkpoint: Path) -> None:
    """Raise :class:`RunError` unless ``checkpoint`` matches the model with these :func:`figures_of`."""
    from dilated_attention_pytorch.integrations.transformers.config import same_entry

    of_checkpoint = figures_of(load_config(what, checkpoint))
    # The trainer disables the model's cache.
    names = [name for name in figures if name != "use_cache" and not same_entry(of_checkpoint.get(name), figures[name])]
    if names:
        raise RunError(
            f"foreign checkpoint: {checkpoint} is of another model than {checkpoint.parent / SETTINGS_NAME} describes "
            f"({', '.join(names)} differ); bring the two of one run together again"
        )


def load_tokenizer(what: str, model: str, config: PreTrainedConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model; None for a model with a vocabulary of the 256 bytes and no tokenizer.

    Raises:
        RunError: it has no tokenizer, and its tokens are not bytes.
    """
    from transformers import AutoTokenizer

    from dilated_attention_pytorch.integrations.transformers.config import configuration_errors

    if Path(model).is_dir() and not any((Path(model) / name).exists() for name in _TOKENIZER_FILES):
        if config.get_text_config().vocab_size == 256:
            return None
        raise RunError(
            f"{what}: it has {config.get_text_config().vocab_size} tokens and no tokenizer "
            f"({_TOKENIZER_FILES[0]}) in its folder; copy the tokenizer's files there"
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # of a damaged file the library tokenizers raises the class itself: nothing is narrower
        if not (isinstance(error, (OSError, *configuration_errors())) or type(error) is Exception):
            raise  # tokenizers raises plain Exception for damaged files; subclasses are other errors
        raise RunError(f"{what}: the tokenizer of {model} cannot be loaded ({error}); copy its files again") from error
    if separator_of(tokenizer) is None:
        raise RunError(
            f"{what}: its tokenizer has neither a bos_token nor an eos_token to put between texts; set one of "
            "them in tokenizer_config.json"
        )
    return tokenizer


def separator_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token between texts: the tokenizer's bos_token, else its eos_token; None without both."""
    first: int | None = tokenizer.bos_token_id
    return tokenizer.eos_token_id if first is None else first


def num_bytes(tokens: Tensor, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Number of bytes of text in ``tokens``; a separator counts as one."""
    if tokenizer is None:
        return len(tokens)
    text = str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return len(text.encode()) + tokens.tolist().count(separator_of(tokenizer))


def tokenized(text: Text, tokenizer: PreTrainedTokenizerBase | None) -> Text:
    """The files of ``text`` as tokens, each preceded by the tokenizer's separator; bytes unchanged without one."""
    if tokenizer is None:
        return text
    separator = separator_of(tokenizer)
    assert separator is not None
    files = [text.file(index)[1:].numpy().tobytes().decode() for index in range(len(text.file_starts))]
    # Some tokenizers warn beyond the model's maximum length, which this run changes.
    tokens: list[int] = []
    starts = []
    for ids in tokenizer(files, add_special_tokens=False, verbose=False)["input_ids"]:
        starts.append(len(tokens))
        tokens.append(separator)
        tokens.extend(ids)
    return Text(torch.tensor(tokens, dtype=torch.int32), torch.tensor(starts, dtype=torch.int64))
