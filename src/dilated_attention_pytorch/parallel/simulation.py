"""When every rank of a ring computes, sends and waits: its messages and partials as events, at given rates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.planning import Layout, Shards
from dilated_attention_pytorch.planning.pairs import num_pairs
from dilated_attention_pytorch.planning.traffic import Links, ring_links, ring_pairs

from .plan import Machine, Shape, shape_of
from .sharding import check_layout

_BACKWARD = 2.5
"""Operations of the backward pass over those of the forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What a simulated ring did, by rank."""

    seconds: tuple[float, ...]
    """From the beginning until the rank has done everything."""
    compute_seconds: tuple[float, ...]
    """Of them those in which the rank computes."""
    link_seconds: tuple[float, ...]
    """Those that the messages take which the rank sends, or those that it is sent: whichever take longer."""
    messages: tuple[int, ...]
    """Messages that every rank sends."""
    bytes: tuple[int, ...]
    """Bytes that every rank sends."""
    distances: tuple[tuple[int, int, int], ...]
    """For every distance d, messages from any rank to the one d places after it (keys) or before it (their gradients):
    ``(d, messages, bytes)``."""

    @property
    def step_seconds(self) -> float:
        """Seconds of the slowest rank."""
        return max(self.seconds)

    @property
    def imbalance(self) -> float:
        """Most seconds of computation of a rank over the mean."""
        mean = sum(self.compute_seconds) / len(self.compute_seconds)
        return max(self.compute_seconds) / mean if mean else 1.0

    @property
    def overlap(self) -> float:
        """Of the slowest rank the share of its link's seconds in which it did not wait; 1 where it has no messages."""
        slowest = self.seconds.index(max(self.seconds))
        waiting, sending = self.seconds[slowest] - self.compute_seconds[slowest], self.link_seconds[slowest]
        return max(0.0, 1.0 - waiting / sending) if sending else 1.0


def simulate_ring(
    pattern: Pattern,
    shape: Sequence[int],
    ranks: int,
    *,
    num_kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    is_causal: bool = False,
    query_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    layout: Layout = "contiguous",
    machine: Machine | None = None,
    is_backward: bool = False,
    noise: float = 0.0,
    seed: int = 0,
) -> Simulation:
    """Run the ring of :func:`attend` event by event, with the exact bytes and pairs of every step; compute nothing.

    A rank computes its own rows while the rows of its first step are under way, waits for them, has those of the next
    step under way, computes with what came, and so on: what :class:`ring.Ring` does. A message begins when both ranks
    have asked for it and neither's link is taken in that direction; it takes ``message_seconds`` and its bytes over
    ``bytes_per_second``. A partial takes its operations over ``flops_per_second``: 4 D for a pair forward, 2.5 times
    as many backward. Links of different ranks do not slow each other down, and starting a partial is free.

    Args:
        pattern: dilation groups; rules are not simulated.
        shape, num_kv_heads, dtype, is_causal, query_offset, cu_seqlens: see :func:`plan_parallel`.
        ranks: number of ranks on the ring.
        layout: how rows are spread.
        machine: rates of every rank.
        is_backward: the backward pass instead of the forward pass.
        noise: every duration is multiplied by ``exp(noise x)``, x normal.
        seed: of the noise.

    Returns:
        seconds, messages and bytes of every rank. Memory grows with the ranks times the distances between ranks that
        exchange anything.

    Raises:
        TypeError, ValueError: see :func:`plan_parallel`; or noise below 0.
        NotImplementedError: rules, ragged segments or zero-padded tails.

    >>> from dilated_attention_pytorch import parallel
    >>> run = parallel.simulate_ring(DilatedPattern([2048, 32768], [1, 12]), (1, 32768, 12, 64), 4)
    >>> run.messages, run.bytes[0]
    ((3, 3, 3, 3), 6291456)
    """
    size = shape_of(
        pattern, shape, ranks, num_kv_heads=num_kv_heads, dtype=dtype, is_causal=is_causal, query_offset=query_offset,
        cu_seqlens=cu_seqlens, is_padded=False,
    )  # fmt: skip
    check_layout(layout)
    if not (isinstance(noise, int | float) and math.isfinite(noise) and noise >= 0):
        raise ValueError(f"noise must be a finite number, at least 0, got {noise!r}")
    if pattern.rules or any(group.boundaries is not None or group.tail != "ragged" for group in pattern.groups):
        raise NotImplementedError(
            "the ring is simulated for dilation groups of segments of one length with ragged tails: got "
            f"{type(pattern).__name__} with rules, other segments or padded tails; plan_parallel counts what rules send"
        )
    return _Run(size, layout, machine or Machine(), is_backward, noise, seed).simulation()


class _Run:
    """One pass. Times are float64 ``[ranks]``, one distance after the other, as every rank takes its steps."""

    def __init__(
        self, size: Shape, layout: Layout, machine: Machine, is_backward: bool, noise: float, seed: int
    ) -> None:
        self._machine, self._noise = machine, noise
        self._generator = torch.Generator().manual_seed(seed)
        self._is_backward = is_backward
        shards = Shards(size.num_rows, size.ranks[0], layout)
        num_ranks = len(shards)
        self._row_bytes = 2 * size.row_bytes
        self._flops_of_pair = 4 * size.head_dim * size.batch_size * size.ratio * (_BACKWARD if is_backward else 1)
        self._rows = _ByDistance(ring_links(size.call, shards), num_ranks, torch.int32)
        self._pairs = _ByDistance(ring_pairs(size.call, shards), num_ranks, torch.float32)
        self._own_pairs = torch.tensor(num_pairs(size.call, shards)) - self._pairs.taken
        zeros = torch.zeros(num_ranks, dtype=torch.float64)
        self._ready, self._computed = zeros.clone(), zeros.clone()
        self._seconds_sent, self._seconds_received = zeros.clone(), zeros.clone()
        self._posted = zeros.clone()
        """When a rank asked for the messages of its next step."""
        self._sending, self._receiving = zeros.clone(), zeros.clone()
        """Until when a rank's link is taken."""
        self._messages, self._bytes = zeros.clone(), zeros.clone()
        self._of_distance: dict[int, tuple[int, int]] = {}

    def simulation(self) -> Simulation:
        """Work off all steps."""
        self._compute(self._own_pairs.double())
        steps = self._rows.distances
        arrived = self._send_keys(steps[0]) if steps else self._ready
        returned = torch.zeros_like(self._ready)
        for distance, following in itertools.zip_longest(steps, steps[1:]):
            rows = self._rows.of(distance)
            takes_part = (rows > 0) | (rows.roll(distance) > 0)
            here = torch.maximum(self._ready, arrived)
            self._ready = torch.where(takes_part, here, self._ready)
            self._posted = torch.where(takes_part, here, self._posted)
            if following is not None:
                arrived = self._send_keys(following)
            self._compute(self._pairs.of(distance).roll(distance))
            if self._is_backward:
                self._ready = torch.where(takes_part, torch.maximum(self._ready, returned), self._ready)
                back = self._send(-distance, rows.roll(distance) * self._row_bytes, self._ready)
                returned = torch.where(takes_part, back, returned)
        self._ready = torch.maximum(self._ready, returned)
        return Simulation(
            seconds=tuple(self._ready.tolist()), compute_seconds=tuple(self._computed.tolist()),
            link_seconds=tuple(torch.maximum(self._seconds_sent, self._seconds_received).tolist()),
            messages=tuple(int(x) for x in self._messages.tolist()),
            bytes=tuple(int(x) for x in self._bytes.tolist()),
            distances=tuple((distance, *of_distance) for distance, of_distance in self._of_distance.items()),
        )  # fmt: skip

    def _compute(self, pairs: Tensor) -> None:
        taken = self._noisy(pairs * self._flops_of_pair / self._machine.flops_per_second)
        self._ready = self._ready + taken
        self._computed += taken

    def _send_keys(self, distance: int) -> Tensor:
        return self._send(distance, self._rows.of(distance) * self._row_bytes, self._posted)

    def _send(self, distance: int, num_bytes: Tensor, posted: Tensor) -> Tensor:
        """Every rank sends to the one ``distance`` places after it; when all that a rank takes part in is through."""
        is_sent = num_bytes > 0
        taken = self._noisy(num_bytes / self._machine.bytes_per_second + self._machine.message_seconds) * is_sent
        asked = torch.maximum(posted, posted.roll(-distance))
        free = torch.maximum(self._sending, self._receiving.roll(-distance))
        through = torch.where(is_sent, torch.maximum(asked, free) + taken, 0.0)
        self._sending = torch.maximum(self._sending, through)
        self._receiving = torch.maximum(self._receiving, through.roll(distance))
        self._seconds_sent += taken
        self._seconds_received += taken.roll(distance)
        self._messages += is_sent
        self._bytes += num_bytes
        messages, total = self._of_distance.get(abs(distance), (0, 0))
        self._of_distance[abs(distance)] = (messages + int(is_sent.sum()), total + int(num_bytes.sum()))
        return torch.maximum(through, through.roll(distance))

    def _noisy(self, seconds: Tensor) -> Tensor:
        if not self._noise:
            return seconds
        draws = torch.randn(len(seconds), dtype=torch.float64, generator=self._generator)
        return seconds * (self._noise * draws).exp()


class _ByDistance:
    """What every rank sends to the one some places after it, for every distance at which any sends anything."""

    def __init__(self, links: Iterator[Links], num_ranks: int, dtype: torch.dtype) -> None:
        # Of fresh zeros only what is written to takes memory.
        self._table = torch.zeros(num_ranks, num_ranks, dtype=dtype)
        has_any = torch.zeros(num_ranks, dtype=torch.bool)
        self.taken = torch.zeros(num_ranks, dtype=torch.int64)
        """What every rank gets from all others."""
        for sources, targets, numbers in links:
            source, target = numbers.nonzero().unbind(1)
            distance = (target + targets.start - source - sources.start) % num_ranks
            self._table[distance, source + sources.start] = numbers[source, target].to(dtype)
            has_any[distance] = True
            self.taken[targets.start : targets.stop] += numbers.sum(0)
        self.distances: list[int] = has_any.nonzero().squeeze(1).tolist()

    def of(self, distance: int) -> Tensor:
        """What every rank sends that many places on, float64 ``[ranks]``."""
        return self._table[distance].double()
