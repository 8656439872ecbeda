"""The gather strategy: all-gather of keys among the ranks of a segment, reduce-scatter of their gradients (LongNet).

Messages are fewer and larger than the ring's and do not overlap with computation. Every rank of a segment gets the rows
of all others, also under a causal mask (arXiv 2307.02486, section 3.2, here with the merge differentiated).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dilated_attention_pytorch.plan.layout import Shards
from dilated_attention_pytorch.plan.seen_rows import SeenRows
from dilated_attention_pytorch.plan.shards import Block, GatherGroup, gather_groups

from .communicator import Communicator
from .shipment import add_gradients, message_length, pack, unpack
from .slab import SeenKeys, Slab


class Gather:
    """The other ranks' rows for one pass of one call, with the interface of :class:`Ring`."""

    def __init__(self, communicator: Communicator, shards: Shards, slab: Slab, number: int) -> None:
        self._communicator = communicator
        self._shards = shards
        self._slab = slab
        self._tag = 2 * number
        self._gather_groups = gather_groups(slab.options.call, shards, communicator.rank)

    def begin(self) -> None:
        """No-op: gathering starts in :meth:`forward`."""

    def forward(self, consume: Callable[[SeenKeys], None]) -> None:
        """Pass every rank's rows to ``consume``."""
        for gather_group in self._gather_groups:
            for member, seen_keys in enumerate(self._gathered(gather_group)):
                if gather_group.members[member] != self._communicator.rank:
                    consume(seen_keys)

    def backward(self, gradients_of: Callable[[SeenKeys], Tensor], grad_key: Tensor, grad_value: Tensor) -> None:
        """Pass every rank's rows to ``gradients_of``, and add all ranks' gradients for this rank's rows."""
        for gather_group in self._gather_groups:
            size = self._size(gather_group, is_padded=False)
            # Reduced in transit, so gradients travel in the accumulation dtype.
            sums = torch.zeros(len(gather_group.members), size, dtype=self._slab.dtype, device=self._slab.key.device)
            for member, seen_keys in enumerate(self._gathered(gather_group)):
                if gather_group.members[member] != self._communicator.rank and seen_keys.seen.blocks:
                    part = gradients_of(seen_keys)
                    sums[member, : part.shape[0]] = part
            own = self._own(gather_group)
            mine = self._communicator.reduce_scatter(sums, gather_group.members, tag=self._tag + 1)
            add_gradients(mine[: message_length(own, grad_key, grad_value, is_padded=False)], own, grad_key, grad_value)

    def _gathered(self, gather_group: GatherGroup) -> list[SeenKeys]:
        """The gathered rows of every member of a group of ranks."""
        slab = self._slab
        is_padded = slab.is_ignored is not None
        rows = pack(self._own(gather_group), slab.key, slab.value, slab.is_ignored)
        message = rows.new_zeros(self._size(gather_group, is_padded=is_padded))
        message[: rows.shape[0]] = rows
        gathered = self._communicator.all_gather(message, gather_group.members, tag=self._tag)
        return [
            SeenKeys(
                self._shards[member],
                SeenRows(blocks, rectangles, ()),
                unpack(gathered[index], blocks, slab.key, slab.value, is_padded=is_padded),
            )
            for index, (member, blocks, rectangles) in enumerate(
                zip(gather_group.members, gather_group.blocks, gather_group.rectangles, strict=True)
            )
        ]

    def _own(self, gather_group: GatherGroup) -> tuple[Block, ...]:
        return gather_group.blocks[gather_group.members.index(self._communicator.rank)]

    def _size(self, gather_group: GatherGroup, *, is_padded: bool) -> int:
        """Number of elements that every member sends: the largest member's."""
        key, value = self._slab.key, self._slab.value
        return max(message_length(blocks, key, value, is_padded=is_padded) for blocks in gather_group.blocks)
