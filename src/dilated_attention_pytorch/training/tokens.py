"""Tokenization with a pretrained model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError

from .corpus import Text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


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
            f"({_TOKENIZER_FILES[0]}) lies beside it; copy the tokenizer's files into the folder"
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # of a damaged file the library tokenizers raises the class itself: nothing is narrower
        if not (isinstance(error, (OSError, *configuration_errors())) or type(error) is Exception):
            raise  # tokenizers raises plain Exception for damaged files; subclasses are other errors
        raise RunError(f"{what}: the tokenizer of {model} cannot be loaded ({error}); copy its files again") from error
    if _separator(tokenizer) is None:
        raise RunError(
            f"{what}: its tokenizer has neither a bos_token nor an eos_token to put between texts; set one of "
            "them in tokenizer_config.json"
        )
    return tokenizer


def _separator(tokenizer: PreTrainedTokenizerBase) -> int | None:
    first: int | None = tokenizer.bos_token_id
    return tokenizer.eos_token_id if first is None else first


def num_bytes(tokens: Tensor, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Number of bytes of text in ``tokens``; a separator counts as one."""
    if tokenizer is None:
        return len(tokens)
    text = str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return len(text.encode()) + tokens.tolist().count(_separator(tokenizer))


def tokenized(text: Text, tokenizer: PreTrainedTokenizerBase | None) -> Text:
    """The files of ``text`` as tokens, each preceded by the tokenizer's separator; bytes unchanged without one."""
    if tokenizer is None:
        return text
    separator = _separator(tokenizer)
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
