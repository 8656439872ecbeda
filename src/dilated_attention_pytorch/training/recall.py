"""Recall tasks: a string that is repeated, and values for keys.

The tasks are the same for a model trained on them (``benchmarks.recall``) and for a general language
model. The latter shows whether it copies: by the bits for a repeated string of random letters
and for a value after its key.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

KEYS, VALUES, NOISE = 64, 32, 32  # number of tokens of each kind
QUESTIONS = 64

NEEDLE_LETTERS, CUE_LETTERS = 32, 8
"""Letters of the repeated string, and of its beginning, which serves as the cue."""
_BEFORE = 64
"""Tokens of text before the string's first occurrence."""
_WORD_LETTERS = 4
_MOST_PAIRS = 16


class Texts(NamedTuple):
    """Tokens ``[texts, length]``; per question, the value and the position of its pair, ``[texts, questions]``."""

    tokens: Tensor
    answers: Tensor
    positions: Tensor


def draw(texts: int, length: int, pairs: int, generator: torch.Generator, questions: int = QUESTIONS) -> Texts:
    """Pairs with distinct keys at random even positions before the questions, each of which asks for one of them."""
    context = length - questions
    tokens = torch.randint(NOISE, (texts, context), generator=generator) + KEYS + VALUES
    key_positions = 2 * torch.rand(texts, context // 2, generator=generator).argsort(1)[:, :pairs]
    keys = torch.rand(texts, KEYS, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(VALUES, (texts, pairs), generator=generator)
    tokens.scatter_(1, key_positions, keys).scatter_(1, key_positions + 1, values + KEYS)
    asked = torch.randint(pairs, (texts, questions), generator=generator)
    return Texts(
        torch.cat([tokens, keys.gather(1, asked)], 1), values.gather(1, asked), key_positions.gather(1, asked) + 1
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """Tokens that occurred earlier in the text."""

    distance: int
    """Distance in tokens to the earlier occurrence."""
    rows: tuple[int, int]
    """Start and stop row."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Task:
    """A text and the items to evaluate in it."""

    tokens: Tensor
    """int64 ``[N]``."""
    again: tuple[Asked, ...]
    """Repeated items."""
    first: tuple[int, int]
    """Rows of a first occurrence of equal difficulty; empty if there is none."""


Tokens = Callable[[str], Sequence[int]]
"""Tokenizer function of a model."""


def needle(text: Tensor, distance: int, seed: int, tokens_of: Tokens) -> Task:
    """Random letters in a text, repeated at its end ``distance`` tokens later; the first letters are the cue.

    Args:
        text: int64, at least ``distance + 64`` tokens of in-domain text.
        distance: more than the number of tokens of the letters.
        seed: seed of the letters.
        tokens_of: the model's tokenizer.
    """
    letters = "".join(random.Random(seed).choices(string.ascii_lowercase, k=NEEDLE_LETTERS))
    cue = torch.tensor(tokens_of(letters[:CUE_LETTERS]))
    rest = torch.tensor(tokens_of(letters[CUE_LETTERS:]))
    between = distance - len(cue) - len(rest)
    pieces = [text[:_BEFORE], cue, rest, text[_BEFORE : _BEFORE + between], cue, rest]
    first = _BEFORE + len(cue)
    rows = (first + distance, first + distance + len(rest))
    asked = Asked(distance, rows, NEEDLE_LETTERS - CUE_LETTERS)
    return Task(torch.cat(pieces), (asked,), (first, first + len(rest)))


def associations(length: int, seed: int, tokens_of: Tokens) -> Task:
    """Word pairs scattered among other words, then some of their first words, each followed by its second word.

    The task of :func:`draw` with four-letter words; each key is asked for once.

    Args:
        length: maximum number of tokens of the text.
        seed: seed of words and positions.
        tokens_of: the model's tokenizer.
    """
    words = _words(seed)
    spelled = [list(tokens_of(f" {word}")) for word in words]
    most = max(len(ids) for ids in spelled)
    tokens, starts = list(tokens_of("\n")), []
    room = (length - len(tokens)) // most
    pairs = min(_MOST_PAIRS, room // 8)
    context = room - 2 * pairs
    drawn = draw(1, context + pairs, pairs, torch.Generator().manual_seed(seed), pairs)
    for token in drawn.tokens[0, :context].tolist():
        starts.append(len(tokens))
        tokens += spelled[token]
    again, asked_for = [], set()
    for key, value, place in zip(
        drawn.tokens[0, context:].tolist(), drawn.answers[0].tolist(), drawn.positions[0].tolist(), strict=True
    ):
        if key in asked_for:
            continue
        asked_for.add(key)
        tokens += spelled[key]
        first, ids = len(tokens), spelled[KEYS + value]
        again.append(Asked(first - starts[place], (first, first + len(ids)), 1 + _WORD_LETTERS))
        tokens += ids
    return Task(torch.tensor(tokens), tuple(again), (0, 0))


def _words(seed: int) -> list[str]:
    """A distinct word per token of the synthetic vocabulary."""
    draws = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < KEYS + VALUES + NOISE:
        words["".join(draws.choices(string.ascii_lowercase, k=_WORD_LETTERS))] = None
    return list(words)
