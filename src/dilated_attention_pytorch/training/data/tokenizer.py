"""Tokens that stand for bytes: the 256 themselves, or those of a byte-level tokenizer that was loaded or trained here.

Only tokenizers whose tokens stand for the very bytes of a text are taken, so that losses are bits per byte exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.output import write_text

from ..corpus import SEPARATOR

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

    Tokens = np.ndarray[Any, np.dtype[np.integer[Any]]]

TOKENIZER_NAME, TOKENIZER_CONFIG_NAME = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
"""The separator of the tokenizers that are trained here."""
_SMALLEST, _LARGEST = 257, 1 << 24
_REMEDY = "name the tokenizer.json of a byte-level tokenizer, or train one with `dilated-attention tokenizer`"


class Tokenizer(Protocol):
    """From texts to tokens, and from each token to the bytes that it stands for."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        ...

    @property
    def separator(self) -> int:
        """The token before every document; it counts as one byte, as in texts of bytes."""
        ...

    @property
    def digest(self) -> str:
        """By which a cache knows that its tokens are this one's."""
        ...

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes of every token."""
        ...

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """The tokens of each text of UTF-8, integers ``[tokens]``.

        Raises:
            RunError: they do not stand for its bytes.
        """
        ...


class ByteTokenizer:
    """One token a byte."""

    vocab_size = 256
    separator = SEPARATOR
    digest = "bytes"
    pieces: Sequence[bytes] = tuple(bytes([value]) for value in range(256))

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """The texts."""
        import numpy as np

        return [np.frombuffer(text, np.uint8) for text in texts]


BYTES: Tokenizer = ByteTokenizer()


def byte_lengths(tokenizer: Tokenizer) -> Tensor:
    """int64 ``[vocab_size]``: how many bytes each token stands for, a separator for one."""
    lengths = torch.tensor([len(piece) for piece in tokenizer.pieces])
    lengths[tokenizer.separator] = 1
    return lengths


def bytes_of(tokenizer: Tokenizer, tokens: Tensor) -> bytes:
    """The bytes that ``tokens`` stand for; of a separator the byte 0."""
    if tokenizer is BYTES:
        return tokens.to(torch.uint8).numpy().tobytes()
    pieces = list(tokenizer.pieces)
    pieces[tokenizer.separator] = bytes([SEPARATOR])
    return b"".join(map(pieces.__getitem__, tokens.tolist()))


class BytePairs:
    """A byte-level tokenizer of the library ``tokenizers``.

    Args:
        what: names it in messages.
        tokenizer: the library's.
        separator: the token that stands between texts.

    Raises:
        RunError: its tokens are not bytes of the text, or ``separator`` is none of them.
    """

    def __init__(self, what: str, tokenizer: tokenizers.Tokenizer, separator: str) -> None:
        self._what, self._tokenizer = what, tokenizer
        self.separator_text = separator
        found = tokenizer.token_to_id(separator)
        if found is None:
            raise RunError(f"{what}: {separator!r} is to stand between texts and is none of its tokens; {_REMEDY}")
        self.separator: int = found
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        _check_lossless(what, tokenizer)
        # What looks like a special token within a text is text.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.text = tokenizer.to_str()
        self.digest = hashlib.sha256(json.dumps([self.text, separator]).encode()).hexdigest()
        self.pieces: Sequence[bytes] = _pieces(what, tokenizer)
        self._lengths = torch.tensor([len(piece) for piece in self.pieces]).numpy()

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """See :class:`Tokenizer`."""
        import numpy as np

        # What no UTF-8 holds, which only a prompt may be, becomes U+FFFD and is refused below.
        words = [text.decode(errors="replace") for text in texts]
        found = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)
        tokens: list[Tokens] = [np.array(encoding.ids, np.int64) for encoding in found]
        for text, ids in zip(texts, tokens, strict=True):
            if self._lengths[ids].sum() != len(text):
                raise RunError(
                    f"{self._what}: its tokens of the text {text[:40].decode(errors='replace')!r}... do not stand for "
                    f"all of its bytes; {_REMEDY}"
                )
        return tokens

    def save(self, folder: Path) -> list[str]:
        """Write the files by which this package and transformers load it again; their names."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.separator_text}
        write_text(folder / TOKENIZER_NAME, self.text)
        write_text(folder / TOKENIZER_CONFIG_NAME, json.dumps(config, indent=2) + "\n")
        return [TOKENIZER_NAME, TOKENIZER_CONFIG_NAME]


def load_tokenizer(path: Path, what: str = "") -> BytePairs:
    """The tokenizer in a ``tokenizer.json``, or in a folder that holds one.

    The separator is the ``eos_token`` of the ``tokenizer_config.json`` beside it, else ``<|endoftext|>``, else the only
    special token.

    Args:
        path: the file or folder.
        what: begins the message; ``--tokenizer PATH`` without it.

    Raises:
        RunError: there is none, it is damaged, its tokens are not bytes, or nothing says what stands between texts.
    """
    from tokenizers import Tokenizer as Library

    what = what or f"--tokenizer {path}"
    file = path / TOKENIZER_NAME if path.is_dir() else path
    if not file.is_file():
        raise RunError(f"{what}: there is no file {file}; {_REMEDY}")
    text = _read(file, what)
    try:
        tokenizer = Library.from_str(text)
    except Exception as error:
        if type(error) is not Exception:
            raise  # the library raises the class itself; whatever is narrower is not about the file
        raise RunError(f"{what}: {file} is damaged or no tokenizer ({error}); {_REMEDY}") from error
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
            told = json.loads(_read(config, what)).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise RunError(f"{what}: {config} is no JSON object ({error}); {_REMEDY}") from error
        if isinstance(told, dict):  # as older versions of transformers wrote it
            told = told.get("content")
        if isinstance(told, str):
            return told
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    if END_OF_TEXT in special or len(special) == 1:
        return END_OF_TEXT if END_OF_TEXT in special else special[0]
    raise RunError(
        f"{what}: nothing says which of its special tokens ({', '.join(special) or 'none'}) stands between texts; put "
        f"it as eos_token into {config}"
    )


def _check_lossless(what: str, tokenizer: tokenizers.Tokenizer) -> None:
    """Raise :class:`RunError` for a tokenizer that changes texts before it cuts them."""
    parts = json.loads(tokenizer.to_str())
    if parts["normalizer"] is not None:
        raise RunError(
            f"{what}: it changes texts before it cuts them (normalizer {parts['normalizer'].get('type')}), so its "
            f"tokens are not their bytes; {_REMEDY}"
        )
    if (parts["decoder"] or {}).get("type") != "ByteLevel":
        kind = (parts["decoder"] or {}).get("type", "none")
        raise RunError(f"{what}: its tokens do not stand for bytes (decoder {kind}, not ByteLevel); {_REMEDY}")


def _pieces(what: str, tokenizer: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of every token, by its number."""
    added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
    of_character = _bytes_of_characters()
    pieces = [b""] * tokenizer.get_vocab_size(with_added_tokens=True)
    for word, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number >= len(pieces):
            raise RunError(f"{what}: its tokens are not numbered from 0 without a gap; {_REMEDY}")
        if number in added:
            pieces[number] = added[number].encode()
            continue
        if not all(character in of_character for character in word):
            raise RunError(f"{what}: its token {word!r} does not stand for bytes; {_REMEDY}")
        pieces[number] = bytes(of_character[character] for character in word)
    return pieces


def _bytes_of_characters() -> dict[str, int]:
    """Which byte each character of a byte-level token stands for (GPT-2): printable ones themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + index): value for index, value in enumerate(others)}


def check_vocab_size(vocab_size: int) -> None:
    """Raise :class:`RunError` unless a tokenizer of so many tokens can be trained."""
    if not _SMALLEST <= vocab_size <= _LARGEST:
        raise RunError(
            f"--vocab-size must be at least {_SMALLEST}, the bytes and a separator, and at most {_LARGEST:,}, got "
            f"{vocab_size}"
        )


def train_tokenizer(texts: Iterable[bytes], vocab_size: int) -> BytePairs:
    """A byte-level BPE tokenizer of ``vocab_size`` tokens: the 256 bytes, the separator, and the pairs merged.

    Args:
        texts: UTF-8, in pieces.
        vocab_size: at least 257.

    Raises:
        RunError: the texts hold too few pairs for so many tokens.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    check_vocab_size(vocab_size)
    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator((text.decode() for text in texts), trainer)
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found != vocab_size:
        raise RunError(f"--vocab-size {vocab_size}: the text gives {found} tokens only; take {found}, or more text")
    return BytePairs("the tokenizer", tokenizer, END_OF_TEXT)
