"""The messages of an all-gather: direct from each rank to each, or, for small tensors, forwarded in a few rounds.

In reverse, with sums instead of copies, the same rounds are a reduce-scatter.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

PASSED_ON_BYTES = 1 << 20
"""Largest tensor that is forwarded, in bytes. At 5e10 bytes per second its transfer takes as long as the latency of a
message, 20 us (:class:`Machine`). For larger tensors, fewer messages save less than concurrent ones."""
FEWEST_MEMBERS = 16
"""Smallest number of members for which tensors are forwarded. Rounds are sequential, and each costs about as much as
three concurrent messages (measured with gloo): four rounds take as long as fifteen concurrent messages."""


class Hop(NamedTuple):
    """A message of each member to the one ``distance`` places before it; it receives one from as far after it."""

    distance: int
    num_tensors: int
    """Number of tensors in the message: the sender's own, and those of the next ``num_tensors - 1`` members."""


def is_passed_on(num_members: Any, num_bytes: Any) -> Any:
    """Whether ``num_members`` ranks forward tensors of ``num_bytes`` each. Arguments are numbers or tensors of them."""
    return (num_members >= FEWEST_MEMBERS) & (num_bytes <= PASSED_ON_BYTES)


def gather_rounds(num_members: int, num_bytes: int) -> tuple[tuple[Hop, ...], ...]:
    """The rounds of an all-gather of tensors of ``num_bytes`` each; a round begins when the previous one has ended.

    With forwarding, every member sends all that it holds to the member 1, 2, 4, ... places before it, so that what it
    holds doubles in every round: ``ceil(log2 m)`` messages per member, with the same number of bytes as the ``m - 1``
    messages of a single round (Bruck et al., IEEE Transactions on Parallel and Distributed Systems 8(11), 1997).

    >>> [(hop.distance, hop.num_tensors) for (hop,) in gather_rounds(20, 100)]
    [(1, 1), (2, 2), (4, 4), (8, 8), (16, 4)]
    """
    if num_bytes == 0:
        return ()
    return _doubling(num_members) if is_passed_on(num_members, num_bytes) else _at_once(num_members)


def num_messages(num_members: int, num_bytes: int) -> int:
    """Number of messages that each member sends in all rounds."""
    return sum(map(len, gather_rounds(num_members, num_bytes)))


@functools.lru_cache(maxsize=256)
def _doubling(num_members: int) -> tuple[tuple[Hop, ...], ...]:
    distances = [1 << index for index in range((num_members - 1).bit_length())]
    return tuple((Hop(distance, min(distance, num_members - distance)),) for distance in distances)


@functools.lru_cache(maxsize=16)
def _at_once(num_members: int) -> tuple[tuple[Hop, ...], ...]:
    return (tuple(Hop(distance, 1) for distance in range(1, num_members)),) if num_members > 1 else ()


def around(first: int, count: int, size: int) -> list[tuple[slice, slice]]:
    """Slices of ``count`` consecutive members from ``first`` on, modulo ``size``, and their slices in a message.

    >>> around(3, 2, 4)
    [(slice(3, 4, None), slice(0, 1, None)), (slice(0, 1, None), slice(1, 2, None))]
    """
    first %= size
    until = min(count, size - first)
    parts = [(slice(first, first + until), slice(0, until))]
    if until < count:
        parts.append((slice(0, count - until), slice(until, count)))
    return parts
