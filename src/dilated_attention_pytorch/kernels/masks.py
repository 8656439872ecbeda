"""What a call leaves out: keys that are hidden, and pairs that dropout takes away."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Masks:
    """Hidden keys, dropout, and the positions that dropout counts by."""

    hidden: Tensor | None = None
    """bool ``[B, M]`` or ``[B, M, G]``: keys that are as if they were not there."""
    seed: Tensor | None = None
    """int64, of the dropout; None without dropout."""
    dropout_p: float = 0.0
    query_offset: int = 0
    """Position of the first query row."""
    key_offset: int = 0
    """Position of the first key row."""
    key_positions: Tensor | None = None
    """int64 ``[M, G]``: the position of every key, where rows of keys do not lie one after the other."""
