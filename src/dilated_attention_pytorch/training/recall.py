"""What a model still knows of what it read: a string that comes again, and values by the keys that they came with.

The tasks are the same for a model that was trained for them (``benchmarks.recall``) and for a language model that was
not. The latter shows whether it copies: the bits that it takes for a string of random letters where it comes again, and
for a value where its key does.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

KEYS, VALUES, NOISE = 64, 32, 32  # kinds of tokens
QUESTIONS = 64

NEEDLE_LETTERS, CUE_LETTERS = 32, 8
"""Letters of the string that comes again, and the first of them, by which the model may know that it does."""
_BEFORE = 64
"""Tokens of text before the string comes first."""
_WORD_LETTERS = 4
_MOST_PAIRS = 16


class Texts(NamedTuple):
    """Tokens ``[texts, length]``; of every question the value and where it came, ``[texts, questions]``."""

    tokens: Tensor
    answers: Tensor
    positions: Tensor


def draw(texts: int, length: int, pairs: int, generator: torch.Generator, questions: int = QUESTIONS) -> Texts:
    """Pairs of different keys at any even places before the questions, which ask for any of them."""
    context = length - questions
    tokens = torch.randint(NOISE, (texts, context), generator=generator) + KEYS + VALUES
    places = 2 * torch.rand(texts, context // 2, generator=generator).argsort(1)[:, :pairs]
    keys = torch.rand(texts, KEYS, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(VALUES, (texts, pairs), generator=generator)
    tokens.scatter_(1, places, keys).scatter_(1, places + 1, values + KEYS)
    asked = torch.randint(pairs, (texts, questions), generator=generator)
    return Texts(torch.cat([tokens, keys.gather(1, asked)], 1), values.gather(1, asked), places.gather(1, asked) + 1)


@dataclass(frozen=True, slots=True)
class Asked:
    """Tokens of a text that came before in it."""

    distance: int
    """Tokens from there to here."""
    rows: tuple[int, int]
    """The first of them, and one past the last."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Task:
    """A text, and what is looked at in it."""

    tokens: Tensor
    """int64 ``[N]``."""
    again: tuple[Asked, ...]
    """What came before."""
    first: tuple[int, int]
    """Rows of what came for the first time and is as hard to guess; empty if there is none."""


Tokens = Callable[[str], Sequence[int]]
"""Text to the tokens of a model."""


def needle(text: Tensor, distance: int, seed: int, tokens_of: Tokens) -> Task:
    """Random letters in a text, and once more at its end, ``distance`` tokens later; the first of them are the cue.

    Args:
        text: int64, at least ``distance + 64`` tokens of the kind that the model was trained on.
        distance: more than the tokens of the letters.
        seed: of the letters.
        tokens_of: the model's tokens.
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
    """Pairs of words scattered over others, then the first words of some of them, each with the second that it had.

    The task of :func:`draw`, in words of four letters; a key is asked for once.

    Args:
        length: tokens of the text at most.
        seed: of the words and places.
        tokens_of: the model's tokens.
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
    """A different word for every kind of token."""
    draws = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < KEYS + VALUES + NOISE:
        words["".join(draws.choices(string.ascii_lowercase, k=_WORD_LETTERS))] = None
    return list(words)
