"""A partial whose keys are chosen at run time, and the kinds of partial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .gathered import Gathered
from .geometry import Partial


@dataclass(frozen=True, slots=True, eq=False)
class BlockLists:
    """All query rows of every sequence and head, and for every query block the key blocks that it sees.

    A block that is listed twice counts twice.
    """

    blocks: Tensor
    """int64 ``[B, G, query blocks, k]``: numbers of key blocks, -1 for none."""
    log_gates: Tensor | None
    """Added to the scores of a block, like ``blocks``."""
    block_size: int
    query_block_size: int
    is_causal: bool
    query_offset: int
    is_first: bool = True
    """No other partial writes to the same query rows."""
    zero_pad_keys: ClassVar[int] = 0

    @property
    def num_pairs(self) -> int:
        """Query-key pairs of all sequences, per query head of a key/value head; those of -1 and of later keys too."""
        return self.blocks.numel() * self.block_size * self.query_block_size


AnyPartial = Partial | Gathered | BlockLists
