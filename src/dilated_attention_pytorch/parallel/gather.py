"""Rows of keys by all-gather among the ranks of a segment, and their gradients by reduce-scatter: LongNet's own way.

Fewer and larger messages than the ring's, which do not overlap with the computation; every rank of a segment gets the
rows of all others, under a causal mask too (arXiv 2307.02486, section 3.2, with the merge differentiated).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dilated_attention_pytorch.planning import Block, Exchange, Shards, Team, teams

from .shipment import add_gradients, message_length, pack, unpack
from .slab import Parcel, Slab
from .wire import Wire


class Gather:
    """The other ranks' rows for one pass over one call, with the interface of :class:`Ring`."""

    def __init__(self, wire: Wire, shards: Shards, slab: Slab, number: int) -> None:
        self._wire = wire
        self._shards = shards
        self._slab = slab
        self._tag = 2 * number
        self._teams = teams(slab.options.call, shards, wire.rank)

    def begin(self) -> None:
        """Nothing is under way before it is asked for."""

    def forward(self, consume: Callable[[Parcel], None]) -> None:
        """Hand every rank's rows to ``consume``."""
        for team in self._teams:
            for member, parcel in enumerate(self._gathered(team)):
                if team.members[member] != self._wire.rank:
                    consume(parcel)

    def backward(self, gradients_of: Callable[[Parcel], Tensor], grad_key: Tensor, grad_value: Tensor) -> None:
        """Hand every rank's rows to ``gradients_of``, and add the gradients that all ranks have for this one's rows."""
        batch, _, _, head_dim = self._slab.key.shape
        for team in self._teams:
            size = self._size(team, is_padded=False)
            # Sums of several ranks are taken on the way, so they travel in the accumulation dtype.
            sums = torch.zeros(len(team.members), size, dtype=self._slab.dtype, device=self._slab.key.device)
            for member, parcel in enumerate(self._gathered(team)):
                if team.members[member] != self._wire.rank and parcel.seen.blocks:
                    part = gradients_of(parcel)
                    sums[member, : part.shape[0]] = part
            own = self._own(team)
            mine = self._wire.reduce_scatter(sums, team.members, tag=self._tag + 1)
            add_gradients(mine[: message_length(own, batch, head_dim, is_padded=False)], own, grad_key, grad_value)

    def _gathered(self, team: Team) -> list[Parcel]:
        """The rows that every member of a team shows."""
        slab = self._slab
        is_padded = slab.is_ignored is not None
        batch, _, _, head_dim = slab.key.shape
        rows = pack(self._own(team), slab.key, slab.value, slab.is_ignored)
        message = rows.new_zeros(self._size(team, is_padded=is_padded))
        message[: rows.shape[0]] = rows
        gathered = self._wire.all_gather(message, team.members, tag=self._tag)
        return [
            Parcel(
                self._shards[member], Exchange(blocks, rectangles, ()),
                unpack(gathered[index], blocks, batch, head_dim, is_padded=is_padded),
            )
            for index, (member, blocks, rectangles) in enumerate(
                zip(team.members, team.blocks, team.rectangles, strict=True)
            )
        ]  # fmt: skip

    def _own(self, team: Team) -> tuple[Block, ...]:
        return team.blocks[team.members.index(self._wire.rank)]

    def _size(self, team: Team, *, is_padded: bool) -> int:
        """Elements that every member sends: those of the member with most."""
        batch, _, _, head_dim = self._slab.key.shape
        return max(message_length(blocks, batch, head_dim, is_padded=is_padded) for blocks in team.blocks)
