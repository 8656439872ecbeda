"""Byte-level tokenizers: single bytes, or a tokenizer that was loaded or trained here.

Only lossless tokenizers whose tokens are byte strings are accepted, so that losses convert exactly to bits per byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.output import write_text

from .sources import SEPARATOR

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

    Tokens = np.ndarray[Any, np.dtype[np.integer[Any]]]

TOKENIZER_NAME, TOKENIZER_CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
"""Separator token of the tokenizers trained here."""
_SMALLEST, _LARGEST = 257, 1 << 24
_REMEDY = "name the tokenizer.json of a byte-level tokenizer, or train one with `dilated-attention tokenizer`"


class ByteTokenizer:
    """One token per byte."""

    vocab_size = 256
    separator = SEPARATOR
    """Token before every document; it counts as one byte."""
    digest = "bytes"
    """Digest that identifies the tokenizer in a token cache."""
    token_bytes: Sequence[bytes] = tuple(bytes([value]) for value in range(256))
    """The byte string of every token."""

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """The bytes as tokens."""
        import numpy as np

        return [np.frombuffer(text, np.uint8) for text in texts]


class BytePairs:
    """A byte-level tokenizer of the ``tokenizers`` library.

    Args:
        what: name in error messages.
        tokenizer: the library's object.
        separator: token between documents.

    Raises:
        RunError: its tokens are not byte strings, or it has no token ``separator``.
    """

    def __init__(self, what: str, tokenizer: tokenizers.Tokenizer, separator: str) -> None:
        self._what, self._tokenizer = what, tokenizer
        self.separator_text = separator
        separator_id = tokenizer.token_to_id(separator)
        if separator_id is None:
            raise RunError(f"{what}: the separator {separator!r} is not one of its tokens; {_REMEDY}")
        self.separator: int = separator_id
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        _check_lossless(what, tokenizer)
        # Special tokens in the text are treated as plain text.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.text = tokenizer.to_str()
        self.digest = hashlib.sha256(json.dumps([self.text, separator]).encode()).hexdigest()
        self.token_bytes: Sequence[bytes] = _token_bytes(what, tokenizer)
        self._lengths = torch.tensor([len(token) for token in self.token_bytes]).numpy()

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Tokens of each UTF-8 text, integers ``[tokens]``.

        Raises:
            RunError: the tokens do not reproduce the text.
        """
        import numpy as np

        # Invalid UTF-8, possible only in a prompt, becomes U+FFFD and is rejected below.
        words = [text.decode(errors="replace") for text in texts]
        encodings = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)
        tokens: list[Tokens] = [np.array(encoding.ids, np.int64) for encoding in encodings]
        for text, ids in zip(texts, tokens, strict=True):
            if self._lengths[ids].sum() != len(text):
                raise RunError(
                    f"{self._what}: its tokens of the text {text[:40].decode(errors='replace')!r}... do not stand for "
                    f"all of its bytes; {_REMEDY}"
                )
        return tokens

    def save(self, folder: Path) -> list[str]:
        """Write the files from which this package and transformers can load it; returns their names."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.separator_text}
        write_text(folder / TOKENIZER_NAME, self.text)
        write_text(folder / TOKENIZER_CONFIG_NAME, json.dumps(config, indent=2) + "\n")
        return [TOKENIZER_NAME, TOKENIZER_CONFIG_NAME]


Tokenizer = ByteTokenizer | BytePairs
BYTES: Tokenizer = ByteTokenizer()


def byte_lengths(tokenizer: Tokenizer) -> Tensor:
    """int64 ``[vocab_size]``: number of bytes per token; 1 for the separator."""
    lengths = torch.tensor([len(token) for token in tokenizer.token_bytes])
    lengths[tokenizer.separator] = 1
    return lengths


def bytes_of(tokenizer: Tokenizer, tokens: Tensor) -> bytes:
    """The bytes of ``tokens``; 0 for the separator."""
    if tokenizer is BYTES:
        return tokens.to(torch.uint8).numpy().tobytes()
    token_bytes = list(tokenizer.token_bytes)
    token_bytes[tokenizer.separator] = bytes([SEPARATOR])
    return b"".join(map(token_bytes.__getitem__, tokens.tolist()))


def load_tokenizer(path: Path, what: str = "") -> BytePairs:
    """The tokenizer of a ``tokenizer.json``, or of a folder that contains one.

    The separator is ``eos_token`` of the adjacent ``tokenizer_config.json``, else ``<|endoftext|>``, else the only
    special token.

    Args:
        path: file or folder.
        what: subject of error messages; default ``--tokenizer PATH``.

    Raises:
        RunError: it is missing or damaged, its tokens are not byte strings, or the separator is ambiguous.
    """
    from tokenizers import Tokenizer as Library

    what = what or f"--tokenizer {path}"
    file = path / TOKENIZER_NAME if path.is_dir() else path
    if not file.is_file():
        raise RunError(f"{what}: there is no file {file}; {_REMEDY}")
    text = _read(file, what)
    try:
        tokenizer = Library.from_str(text)
    except Exception as error:  # the library raises the class itself: nothing is narrower
        if type(error) is not Exception:
            raise  # the library raises plain Exception for bad files; subclasses are other errors
        raise RunError(f"{what}: {file} is damaged or not a tokenizer ({error}); {_REMEDY}") from error
    return BytePairs(what, tokenizer, _separator_of(file, tokenizer, what))


def _read(file: Path, what: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{what}: {file} cannot be read ({error}); {_REMEDY}") from error


def _separator_of(file: Path, tokenizer: tokenizers.Tokenizer, what: str) -> str:
    config = file.with_name(TOKENIZER_CONFIG_NAME)
    if config.is_file():
        try:
            separator = json.loads(_read(config, what)).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise RunError(f"{what}: {config} is not a JSON object ({error}); {_REMEDY}") from error
        if isinstance(separator, dict):  # format of older transformers versions
            separator = separator.get("content")
        if isinstance(separator, str):
            return separator
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    if END_OF_TEXT in special or len(special) == 1:
        return END_OF_TEXT if END_OF_TEXT in special else special[0]
    raise RunError(
        f"{what}: nothing says which of its special tokens ({', '.join(special) or 'none'}) stands between texts; put "
        f"it as eos_token into {config}"
    )


def _check_lossless(what: str, tokenizer: tokenizers.Tokenizer) -> None:
    """Raise :class:`RunError` for a tokenizer that normalizes texts before splitting them."""
    parts = json.loads(tokenizer.to_str())
    if parts["normalizer"] is not None:
        raise RunError(
            f"{what}: it changes texts before it cuts them (normalizer {parts['normalizer'].get('type')}), so its "
            f"tokens are not their bytes; {_REMEDY}"
        )
    if (parts["decoder"] or {}).get("type") != "ByteLevel":
        kind = (parts["decoder"] or {}).get("type", "none")
        raise RunError(f"{what}: its tokens do not stand for bytes (decoder {kind}, not ByteLevel); {_REMEDY}")


def _token_bytes(what: str, tokenizer: tokenizers.Tokenizer) -> list[bytes]:
    """The byte string of every token, by id."""
    added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
    of_character = _bytes_of_characters()
    token_bytes = [b""] * tokenizer.get_vocab_size(with_added_tokens=True)
    for word, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number >= len(token_bytes):
            raise RunError(f"{what}: its tokens are not numbered from 0 without a gap; {_REMEDY}")
        if number in added:
            token_bytes[number] = added[number].encode()
            continue
        if not all(character in of_character for character in word):
            raise RunError(f"{what}: its token {word!r} does not stand for bytes; {_REMEDY}")
        token_bytes[number] = bytes(of_character[character] for character in word)
    return token_bytes


def _bytes_of_characters() -> dict[str, int]:
    """Byte of each character of a byte-level token (GPT-2's mapping): printable characters map to themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + index): value for index, value in enumerate(others)}


def check_vocab_size(vocab_size: int) -> None:
    """Raise :class:`RunError` unless a tokenizer of this vocabulary size can be trained."""
    if not _SMALLEST <= vocab_size <= _LARGEST:
        raise RunError(
            f"--vocab-size must be at least {_SMALLEST}, the bytes and a separator, and at most {_LARGEST:,}, got "
            f"{vocab_size}"
        )


def train_tokenizer(texts: Iterable[bytes], vocab_size: int) -> BytePairs:
    """Train a byte-level BPE tokenizer of ``vocab_size`` tokens: 256 bytes, the separator, and merges.

    Args:
        texts: UTF-8, in token_bytes.
        vocab_size: at least 257.

    Raises:
        RunError: the texts contain too few pairs for that vocabulary size.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    check_vocab_size(vocab_size)
    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode() for text in texts), trainer)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != vocab_size:
        raise RunError(f"--vocab-size {vocab_size}: the text gives {size} tokens only; take {size}, or more text")
    return BytePairs("the tokenizer", tokenizer, END_OF_TEXT)
