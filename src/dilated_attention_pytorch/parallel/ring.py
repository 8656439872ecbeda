"""The ring strategy: point-to-point exchange of key rows; in step s every rank sends to the rank s places after it.

The next step's rows are in transit while those of the current step are used; gradients return the same way. Ranks
exchange only rows that the receiver's queries attend to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from dilated_attention_pytorch.plan.layout import Shards
from dilated_attention_pytorch.plan.seen_rows import SeenRows, neighbours, seen_rows
from dilated_attention_pytorch.plan.shards import Block, ShardedCall

from .communicator import Communicator, Pending
from .shipment import add_gradients, message_length, pack, unpack
from .slab import SeenKeys, Slab


@dataclass(frozen=True, slots=True)
class _RingStep:
    """What a rank receives from the rank some places before it and sends to the rank as many places after it."""

    distance: int
    """Distance in ranks, modulo the number of ranks."""
    source: int
    wanted: SeenRows
    target: int
    served: tuple[Block, ...]


_NOTHING = SeenRows((), (), ())


@functools.lru_cache(maxsize=64)
def steps(call: ShardedCall, shards: Shards, rank: int) -> tuple[_RingStep, ...]:
    """The steps with communication for a rank, nearest ranks first.

    Computed from the rows of the rank and its neighbours. The order can be processed batch by batch, as NCCL
    does: a rank that waits in a step waits only for ranks in an earlier or the same step.
    """
    size = len(shards)
    sources, targets = neighbours(call, shards, rank)
    ring_steps = []
    for distance in sorted({(rank - peer) % size for peer in sources} | {(peer - rank) % size for peer in targets}):
        source, target = (rank - distance) % size, (rank + distance) % size
        wanted = seen_rows(call, shards[source], shards[rank]) if source in sources else _NOTHING
        served = seen_rows(call, shards[rank], shards[target]).blocks if target in targets else ()
        if wanted.blocks or served:
            ring_steps.append(_RingStep(distance, source, wanted, target, served))
    return tuple(ring_steps)


class Ring:
    """The other ranks' rows for one pass of one call. Call :meth:`begin`, then one of the other two methods.

    Args:
        communicator: the ranks.
        shards: the runs of every rank.
        slab: this rank's rows.
        number: tag of this call's messages.
    """

    def __init__(self, communicator: Communicator, shards: Shards, slab: Slab, number: int) -> None:
        self._communicator = communicator
        self._shards = shards
        self._slab = slab
        self._number = number
        self._steps = steps(slab.options.call, shards, communicator.rank)
        self._under_way: tuple[Tensor | None, Pending] | None = None

    def begin(self) -> None:
        """Start the transfer of the first step's rows."""
        self._post(0)

    def forward(self, consume: Callable[[SeenKeys], None]) -> None:
        """Pass every rank's rows to ``consume``."""
        for index in range(len(self._steps)):
            seen_keys = self._arrived(index)
            if seen_keys is not None:
                consume(seen_keys)
            # Free before the next rows arrive, to limit peak memory.
            del seen_keys

    def backward(self, gradients_of: Callable[[SeenKeys], Tensor], grad_key: Tensor, grad_value: Tensor) -> None:
        """Pass every rank's rows to ``gradients_of``, return their gradients, and add those returned to this rank."""
        returning: tuple[_RingStep, Tensor | None, Pending] | None = None
        for index, step in enumerate(self._steps):
            is_next_early = self._may_overtake(index)
            seen_keys = self._arrived(index, is_next_early=is_next_early)
            sends, receives, message = {}, {}, None
            if seen_keys is not None:
                sends[step.source] = gradients_of(seen_keys).to(self._slab.key.dtype)
            del seen_keys
            self._add_returned(returning, grad_key, grad_value)
            returning = None
            if step.served:
                message = self._empty(step.served, is_padded=False)
                receives[step.target] = message
            pending = self._communicator.exchange(
                sends, receives, 2 * self._number + 1, "sending gradients around the ring"
            )
            returning = (step, message, pending)
            if not is_next_early:
                self._post(index + 1)
        self._add_returned(returning, grad_key, grad_value)

    def _post(self, index: int) -> None:
        """Start the transfer of a step's rows, if there is one."""
        if index >= len(self._steps):
            return
        slab, step = self._slab, self._steps[index]
        sends, receives, message = {}, {}, None
        if step.served:
            sends[step.target] = pack(step.served, slab.key, slab.value, slab.is_ignored)
        if step.wanted.blocks:
            message = self._empty(step.wanted.blocks, is_padded=slab.is_ignored is not None)
            receives[step.source] = message
        pending = self._communicator.exchange(sends, receives, 2 * self._number, "sending keys around the ring")
        self._under_way = (message, pending)

    def _may_overtake(self, index: int) -> bool:
        """Whether the next step's rows may be sent before this step's gradients.

        Tagged messages may. Batches without tags need the same order on all ranks, whichever steps each rank
        takes: rows of the distance d + 1, gradients of d, rows of d + 2.
        """
        steps = self._steps
        return (
            self._communicator.has_tags
            or index + 1 == len(steps)
            or steps[index + 1].distance == steps[index].distance + 1
        )

    def _arrived(self, index: int, *, is_next_early: bool = True) -> SeenKeys | None:
        """Wait for the rows of a step and start the transfer of the next step's rows, unless they have to wait."""
        assert self._under_way is not None
        message, pending = self._under_way
        pending.wait()
        if is_next_early:
            self._post(index + 1)
        if message is None:
            return None
        slab, step = self._slab, self._steps[index]
        keys = unpack(message, step.wanted.blocks, slab.key, slab.value, is_padded=slab.is_ignored is not None)
        return SeenKeys(self._shards[step.source], step.wanted, keys)

    @staticmethod
    def _add_returned(
        returning: tuple[_RingStep, Tensor | None, Pending] | None, grad_key: Tensor, grad_value: Tensor
    ) -> None:
        if returning is None:
            return
        step, message, pending = returning
        pending.wait()
        if message is not None:
            add_gradients(message, step.served, grad_key, grad_value)

    def _empty(self, blocks: Sequence[Block], *, is_padded: bool) -> Tensor:
        key, value = self._slab.key, self._slab.value
        return key.new_empty(message_length(blocks, key, value, is_padded=is_padded))
