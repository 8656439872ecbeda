"""Liveness of other processes, measured in this process's own polls."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping


class Heartbeats:
    """How long each watched process has been silent.

    Every process writes a state that changes twice a second. A process is silent while its state does not change,
    provided that it changed before: the first state that is read may come from an earlier process.

    Time is measured by this process's polls: however long the gap between two polls, it counts as at most
    ``most_seconds``. A process that was itself stopped, starved or waiting for the store therefore does not declare
    others silent that it could not have heard.

    Args:
        most_seconds: largest contribution of one poll to a silence.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._last: dict[int, Hashable] = {}
        self._silence: dict[int, float] = {}

    def watch(self, ranks: Iterable[int]) -> None:
        """Also watch these ranks from now on."""
        for rank in ranks:
            self._last.setdefault(rank, None)

    def expect(self, ranks: Iterable[int]) -> None:
        """Record that these ranks are alive, so their current states are not an earlier process's."""
        for rank in ranks:
            if rank in self._last:
                self._silence.setdefault(rank, 0.0)

    @property
    def watched(self) -> list[int]:
        """The ranks whose states :meth:`look` expects."""
        return list(self._last)

    def look(self, states: Mapping[int, Hashable], left: Collection[int], seconds: float) -> None:
        """Process the current states of the watched ranks, ``seconds`` after the previous poll.

        The silence of ranks that ``left``, as processes that exit normally do, is no failure.
        """
        for rank, last in self._last.items():
            state = states.get(rank, last)
            if rank in left:
                self._silence.pop(rank, None)
            elif state != last and last is not None:
                self._silence[rank] = 0.0
            elif rank in self._silence:
                self._silence[rank] += min(seconds, self._most_seconds)
            self._last[rank] = state

    def silent(self, seconds: float) -> list[int]:
        """Ranks that have been silent for ``seconds``, among those heard at least once."""
        return sorted(rank for rank, silence in self._silence.items() if silence >= seconds)
