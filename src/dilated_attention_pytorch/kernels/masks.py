"""Per-call masks, padding keys and dropout, and terms of the scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Masks:
    """Padding keys, dropout, and the positions that index dropout."""

    hidden: Tensor | None = None
    """bool ``[B, M]`` or ``[B, M, G]``: keys to ignore."""
    seed: Tensor | None = None
    """Dropout seed, int64; None without dropout."""
    dropout_p: float = 0.0
    query_offset: int = 0
    """Position of the first query row."""
    key_offset: int = 0
    """Position of the first key row."""
    key_positions: Tensor | None = None
    """Position of every key, int64 ``[M, G]`` or ``[B, M, G]``, if key rows are not consecutive."""
    query_step: int = 1
    """Positions from one query row to the next."""


@dataclass(frozen=True, slots=True)
class ScoreTerms:
    """Terms of a call's scores besides the scale and gates; see :class:`.call.Call`."""

    softcap: float
    """0 = none."""
    distance_bias: Tensor | None = None
    """``[H, distances]`` in the accumulation dtype."""
    first_distance: int = 0
    """Key at position t and query at position p have the bias ``[h, t - p - first_distance]``."""
    key_bias: Tensor | None = None
    """``[B, M, G]`` in the accumulation dtype."""
    coordinates: Tensor | None = None
    """``[B, 2, M]``; ``distance_bias`` is then ``[H, 1]`` and counts distances between them."""
    bias_at: Callable[[Tensor, Tensor], Tensor] | None = None
    """The bias by distance as a function of query heads and distances t - p, in place of ``distance_bias``: for the few
    rows of a cache, without gradients."""

    @property
    def is_by_distance(self) -> bool:
        """Whether there is a bias by distance."""
        return self.distance_bias is not None or self.bias_at is not None
