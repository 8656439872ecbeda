"""How long other processes have been silent, counted by how often this one looked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LEFT = b"left"
"""The beat of a process that came to its end: it is not missed."""


class Pulse:
    """Since when each of the processes that this one watches gives no sign of life.

    Every process leaves a beat for the others twice a second, another one each time. A process whose beat does not
    change is silent, if it was heard before: the first beat that is found may be one of an earlier process.

    This process's own looks are the clock: however much time went by between two of them, they count as
    ``most_seconds`` at most. One that was itself stopped, or got no time on a busy machine, or waited long for the
    store, takes nobody for silent whom it could not have heard.

    Args:
        most_seconds: what one look can add to a silence.
    """

    def __init__(self, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        self._last: dict[int, bytes] = {}
        self._silence: dict[int, float] = {}

    def watch(self, ranks: Iterable[int]) -> None:
        """Look at these too from now on."""
        for rank in ranks:
            self._last.setdefault(rank, b"")

    def meet(self, ranks: Iterable[int]) -> None:
        """These have been heard of otherwise: what stands there as their beat is theirs, and no earlier process's."""
        for rank in ranks:
            if rank in self._last:
                self._silence.setdefault(rank, 0.0)

    @property
    def watched(self) -> list[int]:
        """Whose beats :meth:`look` is to be given."""
        return list(self._last)

    def look(self, beats: Mapping[int, bytes], seconds: float) -> None:
        """Take in the present ``beats`` of those watched that have one, ``seconds`` after the last look."""
        for rank, last in self._last.items():
            beat = beats.get(rank, last)
            if beat == LEFT:
                self._silence.pop(rank, None)
            elif beat != last and last:
                self._silence[rank] = 0.0
            elif rank in self._silence:
                self._silence[rank] += min(seconds, self._most_seconds)
            self._last[rank] = beat

    def silent(self, seconds: float) -> list[int]:
        """The ranks that have been silent for so long, of those that were heard once."""
        return sorted(rank for rank, silence in self._silence.items() if silence >= seconds)
