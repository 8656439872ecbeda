"""Texts of random tokens with repeated passages, for which the bits of a perfect copier are known."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import torch
from torch import Tensor

LONG = 1024
"""Number of tokens of a text."""
VOCAB, FEW, PASSAGE = 1024, 256, 16
"""Two vocabulary sizes, and the tokens of a passage. Within 1,024 tokens, a token seldom repeats by chance with VOCAB,
and often with FEW."""
OCTAVES = (32, 64, 128, 256, 512)
"""Smallest distance of each octave; the last octave ends with the text."""
RATE = 4
"""The largest rate of the patterns; distances are classified by their remainder modulo it."""
GAPS = 4
"""Random tokens before a passage: 0 to 3, so that every remainder occurs."""
AGAIN = 0.6


class Kind(NamedTuple):
    """A kind of text: the distances at which passages repeat."""

    nearest: int
    farthest: int
    remainder: int | None = None
    """Remainder of all distances modulo RATE; None for any."""
    vocab_size: int = VOCAB


NEAR, ANY, ALIGNED = Kind(18, 96), Kind(32, LONG), Kind(32, LONG, 1)


class Texts(NamedTuple):
    """Tokens ``[B, N]``, and the distance from which each can be copied, 0 for a new token, ``[B, N]``."""

    tokens: Tensor
    distances: Tensor


def draw_text(draws: random.Random, kind: Kind) -> tuple[list[int], list[int]]:
    """Draw random tokens, some passages of which repeat at log-uniform distances.

    The first token of a repeated passage marks the repetition and cannot be predicted. A passage repeats at most once,
    so that its distance is unique.
    """
    tokens: list[int] = []
    distances: list[int] = []
    unused: list[int] = []

    def new(number: int) -> None:
        tokens.extend(draws.randrange(kind.vocab_size) for _ in range(number))
        distances.extend([0] * number)

    while len(tokens) < LONG:
        gap = draws.randrange(GAPS)
        wanted = math.exp(draws.uniform(math.log(kind.nearest), math.log(kind.farthest)))
        here = len(tokens) + gap
        if unused and wanted < here and draws.random() < AGAIN:
            start = min(unused, key=lambda one: abs(math.log((here - one) / wanted)))
            unused.remove(start)
            if kind.remainder is not None:
                gap = (kind.remainder + start - len(tokens)) % RATE
            new(gap)
            distance = len(tokens) - start
            tokens.extend(tokens[start : start + PASSAGE])
            distances.extend([0] + [distance] * (PASSAGE - 1))
        else:
            new(gap)
            unused.append(len(tokens))
            new(PASSAGE)
    return tokens[:LONG], distances[:LONG]


def draw_texts(number: int, seed: int, kind: Kind) -> Texts:
    """Draw ``number`` texts of 1,024 tokens each."""
    draws = random.Random(seed)
    drawn = [draw_text(draws, kind) for _ in range(number)]
    return Texts(torch.tensor([tokens for tokens, _ in drawn]), torch.tensor([found for _, found in drawn]))


def in_pieces(texts: Texts, length: int) -> tuple[Texts, Tensor]:
    """The texts cut into pieces, and a mask of the tokens that can be copied from within their piece."""
    pieces = Texts(*(part.view(-1, length) for part in texts))
    # The token before it is the cue, so its earlier occurrence must be in the piece too.
    inside = (pieces.distances > 0) & (torch.arange(length) - pieces.distances >= 1)
    inside[:, 0] = False
    return pieces, inside


def ideal_bits(texts: Texts, length: int, vocab_size: int = VOCAB) -> float:
    """Bits per token of a perfect copier that reads one piece at a time; the first token of a piece does not count."""
    inside = in_pieces(texts, length)[1]
    return math.log2(vocab_size) * float((~inside[:, 1:]).double().mean())


def octaves(distances: Tensor) -> dict[str, Tensor]:
    """Mask of the distances in each octave, by the octave's smallest distance."""
    return {str(least): (distances >= least) & (distances < 2 * least) for least in OCTAVES}


def by_distance(bits: Tensor, distances: Tensor, remainder: int | None = None) -> dict[str, float]:
    """Mean bits of tokens that can be copied, by octave of distance; NaN for an empty octave."""
    after = distances[:, 1:]
    right = torch.ones_like(after, dtype=torch.bool) if remainder is None else after % RATE == remainder
    return {name: float(bits[chosen & right].mean()) for name, chosen in octaves(after).items()}


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.far_text --help")
