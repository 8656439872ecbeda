"""The protocol by which a cache is shared between ranks; models access other ranks only through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dilated_attention_pytorch.ops import AttentionOutput
from dilated_attention_pytorch.patterns import Pattern


class CacheShare(Protocol):
    """A rank's share of a cache: rank, number of ranks, and the collectives.

    All ranks call every method except :meth:`positions` and :meth:`rows`, in the same order.
    """

    @property
    def rank(self) -> int:
        """This rank, counted from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks that hold the cache."""
        ...

    def positions(self, sequence_length: int, device: torch.device) -> Tensor:
        """int64 ``[rows]``: positions of this rank's rows of a prompt of ``sequence_length`` tokens."""
        ...

    def rows(self, input_ids: Tensor) -> Tensor:
        """This rank's columns of the tokens ``[B, N]``, at :meth:`positions`."""
        ...

    def check_same(self, input_ids: Tensor) -> None:
        """Raise an error that names the rank whose tokens differ from the others'."""
        ...

    def row_at(self, rows: Tensor, position: int, sequence_length: int) -> Tensor:
        """The row at ``position``, on every rank, of a tensor sharded as ``[B, rows, ...]``."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, sequence_length: int) -> Tensor:
        """Causal attention of this rank's rows to all ranks' rows, ``[B, rows, H, D]`` in and out."""
        ...

    def deal(self, rows: Tensor, places: Sequence[Tensor], sequence_length: int) -> Tensor:
        """Send every rank the rows that it stores.

        Args:
            rows: this rank's rows ``[B, rows, G, D]``.
            places: per rank, the flat indices ``position * G + head`` that it stores, on the CPU.
            sequence_length: number of rows on all ranks.

        Returns:
            ``[B, len(places[rank]), D]``: the rows that this rank stores, in the order of its indices.
        """
        ...

    def merge(self, partial: AttentionOutput) -> AttentionOutput:
        """The merge of all ranks' partials over the same queries, bitwise equal on every rank."""
        ...

    def agreed(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, broadcast to every rank."""
        ...
