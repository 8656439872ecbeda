"""The gather strategy: all-gather of keys among the ranks of a segment, reduce-scatter of their gradients (LongNet).

Messages are fewer and larger than the ring's and do not overlap with computation. Every rank of a segment gets the rows
of all others, also under a causal mask (arXiv 2307.02486, section 3.2, here with the merge differentiated).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dilated_attention_pytorch.planning.exchange import Exchange
from dilated_attention_pytorch.planning.layout import Shards
from dilated_attention_pytorch.planning.shards import Block, Team, teams

from .shipment import add_gradients, message_length, pack, unpack
from .slab import Parcel, Slab
from .wire import Wire


class Gather:
    """The other ranks' rows for one pass of one call, with the interface of :class:`Ring`."""

    def __init__(self, wire: Wire, shards: Shards, slab: Slab, number: int) -> None:
        self._wire = wire
        self._shards = shards
        self._slab = slab
        self._tag = 2 * number
        self._teams = teams(slab.options.call, shards, wire.rank)

    def begin(self) -> None:
        """No-op: gathering starts in :meth:`forward`."""

    def forward(self, consume: Callable[[Parcel], None]) -> None:
        """Pass every rank's rows to ``consume``."""
        for team in self._teams:
            for member, parcel in enumerate(self._gathered(team)):
                if team.members[member] != self._wire.rank:
                    consume(parcel)

    def backward(self, gradients_of: Callable[[Parcel], Tensor], grad_key: Tensor, grad_value: Tensor) -> None:
        """Pass every rank's rows to ``gradients_of``, and add all ranks' gradients for this rank's rows."""
        batch, _, _, head_dim = self._slab.key.shape
        for team in self._teams:
            size = self._size(team, is_padded=False)
            # Reduced in transit, so gradients travel in the accumulation dtype.
            sums = torch.zeros(len(team.members), size, dtype=self._slab.dtype, device=self._slab.key.device)
            for member, parcel in enumerate(self._gathered(team)):
                if team.members[member] != self._wire.rank and parcel.seen.blocks:
                    part = gradients_of(parcel)
                    sums[member, : part.shape[0]] = part
            own = self._own(team)
            mine = self._wire.reduce_scatter(sums, team.members, tag=self._tag + 1)
            add_gradients(mine[: message_length(own, batch, head_dim, is_padded=False)], own, grad_key, grad_value)

    def _gathered(self, team: Team) -> list[Parcel]:
        """The gathered rows of every member of a group of ranks."""
        slab = self._slab
        is_padded = slab.is_ignored is not None
        batch, _, _, head_dim = slab.key.shape
        rows = pack(self._own(team), slab.key, slab.value, slab.is_ignored)
        message = rows.new_zeros(self._size(team, is_padded=is_padded))
        message[: rows.shape[0]] = rows
        gathered = self._wire.all_gather(message, team.members, tag=self._tag)
        return [
            Parcel(
                self._shards[member],
                Exchange(blocks, rectangles, ()),
                unpack(gathered[index], blocks, batch, head_dim, is_padded=is_padded),
            )
            for index, (member, blocks, rectangles) in enumerate(
                zip(team.members, team.blocks, team.rectangles, strict=True)
            )
        ]

    def _own(self, team: Team) -> tuple[Block, ...]:
        return team.blocks[team.members.index(self._wire.rank)]

    def _size(self, team: Team, *, is_padded: bool) -> int:
        """Number of elements that every member sends: the largest member's."""
        batch, _, _, head_dim = self._slab.key.shape
        return max(message_length(blocks, batch, head_dim, is_padded=is_padded) for blocks in team.blocks)
