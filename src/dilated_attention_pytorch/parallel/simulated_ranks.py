"""Simulated ranks: computation and communication at given rates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .plan import Machine


class SimulatedRanks:
    """The clocks of all ranks during a pass, float64 ``[ranks]`` each, in seconds from its start.

    Args:
        num_ranks: number of ranks.
        machine: rates of every rank.
        noise: every duration is multiplied by ``exp(noise x)``, x standard normal.
        seed: seed of the noise.
    """

    def __init__(self, num_ranks: int, machine: Machine, noise: float, seed: int) -> None:
        self._machine, self._noise = machine, noise
        self._generator = torch.Generator().manual_seed(seed)
        zeros = torch.zeros(num_ranks, dtype=torch.float64)
        self.ready, self.computed = zeros.clone(), zeros.clone()
        """Time at which a rank is free, and its total time of computation."""
        self.seconds_sent, self.seconds_received = zeros.clone(), zeros.clone()
        self.messages, self.bytes = zeros.clone(), zeros.clone()
        self.messages_of, self.bytes_of = zeros.clone(), zeros.clone()
        """Messages and bytes by distance in ranks, modulo the number of ranks."""
        self._sending, self._receiving = zeros.clone(), zeros.clone()
        """Time until which a rank's link is busy in each direction."""

    def compute(self, flops: Tensor, ranks: Tensor | slice = slice(None)) -> None:
        """Some ranks compute, each starting when it is free."""
        taken = self._noisy(flops / self._machine.flops_per_second)
        self.ready[ranks] += taken
        self.computed[ranks] += taken

    def send(self, sources: Tensor, targets: Tensor, num_bytes: Tensor, posted: Tensor) -> Tensor:
        """One message from each of ``sources`` to the corresponding rank of ``targets``; neither repeats a rank.

        A message starts when both ranks have posted it (``posted``, for all ranks) and neither's link is busy.

        Returns:
            the arrival time of each message.
        """
        num_bytes = num_bytes.double()
        taken = self._noisy(num_bytes / self._machine.bytes_per_second + self._machine.message_seconds)
        asked = torch.maximum(posted[sources], posted[targets])
        through = torch.maximum(asked, torch.maximum(self._sending[sources], self._receiving[targets])) + taken
        self._sending[sources], self._receiving[targets] = through, through
        self.seconds_sent.index_add_(0, sources, taken)
        self.seconds_received.index_add_(0, targets, taken)
        one = torch.ones_like(taken)
        self.messages.index_add_(0, sources, one)
        self.bytes.index_add_(0, sources, num_bytes)
        distances = (targets - sources) % len(posted)
        self.messages_of.index_add_(0, distances, one)
        self.bytes_of.index_add_(0, distances, num_bytes)
        return through

    def exchange(self, members: Tensor, num_bytes: Tensor) -> None:
        """All-to-all among ``members``; each continues when all of its messages are done.

        Messages go to one member after another, so that no link carries two at a time; ``num_bytes`` is
        ``[members, members]``. Messages of 0 bytes are not sent.
        """
        index = torch.arange(len(members))
        self.shift(
            members,
            [(step, num_bytes[index, (index + step) % len(members)]) for step in range(1, len(members))],
        )

    def shift(self, members: Tensor, messages: Sequence[tuple[int, int | Tensor]]) -> None:
        """Every member sends messages to members some ranks after it, and continues when all of them have arrived.

        Args:
            members: the ranks.
            messages: distance from the sender, and number of bytes, for all or ``[members]``; 0 bytes are not sent.
        """
        posted = self.ready.clone()
        through = posted.clone()
        index = torch.arange(len(members))
        for distances, num_bytes in messages:
            targets = members[(index + distances) % len(members)]
            sizes = torch.as_tensor(num_bytes).expand(len(members))
            is_sent = sizes > 0
            ends = (members[is_sent], targets[is_sent])
            done = self.send(*ends, sizes[is_sent], posted)
            for ranks in ends:
                through[ranks] = torch.maximum(through[ranks], done)
        self.ready = through

    def _noisy(self, seconds: Tensor) -> Tensor:
        if not self._noise:
            return seconds
        draws = torch.randn(len(seconds), dtype=torch.float64, generator=self._generator)
        return seconds * (self._noise * draws).exp()
