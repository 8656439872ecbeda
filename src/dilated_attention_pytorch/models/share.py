"""What a cache that ranks hold together needs from them; the models know of other ranks by this alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dilated_attention_pytorch.ops import AttentionOutput
from dilated_attention_pytorch.patterns import Pattern


class CacheShare(Protocol):
    """A rank's share of a cache: who it is among how many, and what the ranks do together.

    Every method but :meth:`positions` and :meth:`rows` is called by all ranks, in the same order.
    """

    @property
    def rank(self) -> int:
        """This rank, counted from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks hold the cache."""
        ...

    def positions(self, sequence_length: int, device: torch.device) -> Tensor:
        """int64 ``[rows]``: which of ``sequence_length`` tokens are this rank's rows where a prompt is dealt out."""
        ...

    def rows(self, input_ids: Tensor) -> Tensor:
        """This rank's columns of tokens ``[B, N]``, at :meth:`positions`."""
        ...

    def check_same(self, input_ids: Tensor) -> None:
        """Raise an error that names the rank whose tokens are not those of the others."""
        ...

    def row_at(self, rows: Tensor, position: int, sequence_length: int) -> Tensor:
        """Of a tensor of which each rank has its rows ``[B, rows, ...]`` the row at ``position``, on every rank."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, sequence_length: int) -> Tensor:
        """Causal attention of this rank's rows to all rows, ``[B, rows, H, D]`` in and out."""
        ...

    def deal(self, rows: Tensor, places: Sequence[Tensor], sequence_length: int) -> Tensor:
        """Send every rank the rows that it is to store.

        Args:
            rows: this rank's rows ``[B, rows, G, D]``.
            places: for every rank the flat places ``position * G + head`` that it stores, on the CPU.
            sequence_length: of all rows together.

        Returns:
            ``[B, len(places[rank]), D]``: what this rank stores, in the order of its places.
        """
        ...

    def merge(self, partial: AttentionOutput) -> AttentionOutput:
        """The merge of the partials of all ranks over the same queries, equal on every rank to the last bit."""
        ...

    def agreed(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, on every rank."""
        ...
