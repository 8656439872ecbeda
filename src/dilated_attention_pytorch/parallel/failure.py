"""Failure diagnosis: after a transport error, the ranks of a group agree on which rank failed and why."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import textwrap
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence

from .monitor import KNOWN_SECONDS, SILENT_SECONDS, Failure, InGroup, Monitor, State, names, no_answer

_POLL_SECONDS = 0.1
_TRANSPORT_LENGTH = 120
"""Characters of the transport's error message to quote; the full error is chained as the cause."""


class RankFailure(RuntimeError):
    """A rank died, does not respond, or makes a different call. The message names it."""


class RankGroup:
    """A group of ranks that diagnose a failure together.

    Args:
        monitor: this process among all processes.
        group: a unique name of the group.
        ranks: global ranks of the group.
    """

    def __init__(self, monitor: Monitor, group: str, ranks: Sequence[int]) -> None:
        self._monitor = monitor
        self._group = group
        self._ranks = ranks
        self._call: Mapping[str, str] = {}
        self._number = 0
        self._report = ""
        self.waits = ""
        """Description of the exchange that this rank waits in; empty outside of exchanges."""
        monitor.look()
        self._born = len(monitor.failures)
        monitor.show(group, ranks, lambda: (self._own(), self._call))

    def enter(self, call: Mapping[str, str], number: int) -> None:
        """Start the ``number``-th call on this group; clears an earlier refusal."""
        self._call, self._number = call, number
        self._monitor.reason = ""

    def expect(self) -> None:
        """Record that all ranks of the group took part in a call."""
        self._monitor.expect(self._ranks)

    def refuse(self, error: Exception) -> None:
        """Publish that this rank raises an error of its own, so that the others do not wait until their timeout."""
        self._monitor.reason = f"rank {self._monitor.rank} refused the call: {type(error).__name__}: {error}"

    @contextlib.contextmanager
    def waiting(self, doing: str, *, can_interrupt: bool) -> Iterator[None]:
        """Context of a wait for other ranks: a transport error becomes one that names the failed rank and the cause.

        Args:
            doing: description of the exchange.
            can_interrupt: whether the monitor can interrupt the wait; on SIGTERM the process then reports it first.
        """

        self.waits, self._report = doing, ""
        try:
            with self._reported(doing) if can_interrupt else contextlib.nullcontext():
                try:
                    yield
                except RankFailure:
                    raise
                except RuntimeError as error:
                    raise RankFailure(f"{doing}: {self.diagnose(error, doing)}") from error
        finally:
            self.waits = ""

    def _reported(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Context in which SIGTERM ends the process only after it printed what it waited for, and why in vain.

        Launchers terminate all processes when one has died.
        """

        def report() -> None:
            if not self._report:
                self.diagnose(None, doing)
            print(self._report, file=sys.stderr, flush=True)

        return self._monitor.watching(report)

    def diagnose(self, error: Exception | None, doing: str) -> str:
        """Find the rank that caused a transport error, or a termination signal without one.

        All ranks that ask get the same answer. Returns only after the other processes had time to receive it, as this
        process may host the store and exit afterwards.
        """
        monitor, transport = self._monitor, ""
        if error is not None and not monitor.got_sigterm:
            text = re.sub(r"^\[/\S*\] ", "", str(error))  # source location in gloo
            transport = f"; the transport said: {textwrap.shorten(text, _TRANSPORT_LENGTH, placeholder=' ...')}"
        with self._reported(doing):
            monitor.look()
            cause = self._cause(transport, doing) if self._known() is None else ""
            failure = self._known()
            if failure is not None:
                cause = failure.cause
                time.sleep(max(0.0, failure.at + KNOWN_SECONDS - time.monotonic()))
            monitor.reason = cause
            if cause.startswith(f"rank {monitor.rank} ") and not monitor.got_sigterm:
                cause = f"the other ranks declared this one failed: {cause}"
            ending = "received SIGTERM while " if monitor.got_sigterm else ""
            self._report = f"rank {monitor.rank}: {ending}{doing}: {cause}"
        return cause

    def _own(self) -> InGroup:
        digest = f"{zlib.crc32(json.dumps(dict(self._call)).encode()):08x}"
        return InGroup(self._number, digest, self.waits)

    def _known(self) -> Failure | None:
        """The first failure published during the lifetime of this group."""
        failures = self._monitor.failures
        return failures[self._born] if len(failures) > self._born else None

    def _cause(self, transport: str, doing: str) -> str:
        """The cause, from states that the ranks write from now on; published if it lies with a rank."""
        start = time.monotonic()
        others = [rank for rank in self._ranks if rank != self._monitor.rank]
        before = self._monitor.states(others)
        states = before
        while before is not None and states is not None:
            seconds = time.monotonic() - start
            # States may be written over each other; one that is older than the failure says nothing about it.
            fresh = {
                rank: state
                for rank, state in states.items()
                if state.has_left or rank not in before or state.heartbeat != before[rank].heartbeat
            }
            ending = self._ending(fresh, doing)
            cause = self._stated(fresh, transport) or self._silent(fresh, states, seconds, transport)
            if cause is None and len(fresh) == len(others):
                if ending is not None:
                    # The rank itself knows best what it waited for: the others leave it time to say so.
                    patience = KNOWN_SECONDS if self._monitor.got_sigterm else 2 * KNOWN_SECONDS
                    cause = ending if seconds > SILENT_SECONDS + patience else None
                else:
                    cause = self._differing(fresh) or self._outside(fresh)
                # Ranks that wait in another group need this long to report the rank they wait for.
                if cause is None and seconds > 3 * SILENT_SECONDS:
                    return f"{self._all_wait(fresh)}{transport}"
            time.sleep(_POLL_SECONDS if cause is None else 0.0)
            self._monitor.look()
            if self._known() is not None:
                return ""
            if cause is not None:
                self._monitor.publish(Failure(cause))
                return cause
            states = self._monitor.states(others)
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holder = "torchrun's agent on the first host" if is_agents else "rank 0 (or a launcher)"
        return (
            f"{holder}, which holds the store at which the ranks met, does not answer: the process has ended or was "
            f"stopped, or its host cannot be reached{transport}"
        )

    def _in_group(self, state: State) -> InGroup:
        return state.groups.get(self._group, InGroup())

    def _stated(self, fresh: Mapping[int, State], transport: str) -> str | None:
        """The cause, if a rank states one or has exited."""
        for state in fresh.values():
            if state.reason:
                return state.reason
        left = [rank for rank, state in fresh.items() if state.has_left]
        if not left:
            return None
        return (
            f"{names(left)} ended while others waited: the program ended there, or with an error that it "
            f"printed{transport}"
        )

    def _silent(
        self, fresh: Mapping[int, State], states: Mapping[int, State], seconds: float, transport: str
    ) -> str | None:
        """The cause, if ranks have written no state for long."""
        silent = [rank for rank in self._ranks if rank != self._monitor.rank and rank not in fresh]
        if not silent or seconds <= SILENT_SECONDS:
            return None
        text = no_answer(silent)
        never = [rank for rank in silent if rank not in states or self._group not in states[rank].groups]
        if never:
            text += f" ({names(never)} had not made a call on this group yet, or ended before this rank made its first)"
        return text + transport

    def _ending(self, fresh: Mapping[int, State], doing: str) -> str | None:
        """That a rank received SIGTERM, if one did; what the others wait for is then irrelevant."""
        ending = [rank for rank, state in fresh.items() if state.got_sigterm]
        if self._monitor.got_sigterm:
            return f"rank {self._monitor.rank} received SIGTERM while {doing}; no rank is known to have failed"
        return f"{names(ending)} received SIGTERM" if ending else None

    def _differing(self, fresh: Mapping[int, State]) -> str | None:
        """Ranks that wait in a different call from the others."""
        own = self._own()
        waiting = {self._monitor.rank: own}
        waiting |= {rank: in_group for rank, state in fresh.items() if (in_group := self._in_group(state)).waits}
        if len({(in_group.number, in_group.call) for in_group in waiting.values()}) == 1:
            return None
        ranks = sorted(waiting)
        # One rank per distinct call suffices.
        kinds = {
            (in_group.number, in_group.call): rank for rank, in_group in waiting.items() if rank != self._monitor.rank
        }
        texts = self._monitor.calls(self._group, list(kinds.values()))
        if texts is None:
            return None
        call_of = {kind: texts[rank] for kind, rank in kinds.items()} | {(own.number, own.call): dict(self._call)}
        calls = [call_of[waiting[rank].number, waiting[rank].call] for rank in ranks]
        return disagreement([waiting[rank].number for rank in ranks], calls, ranks)

    def _outside(self, fresh: Mapping[int, State]) -> str | None:
        """Ranks that do not wait for anyone."""
        outside = [
            rank
            for rank, state in fresh.items()
            if not self._in_group(state).waits and not state.waits_outside(self._group)
        ]
        if not outside:
            return None
        numbers = ", ".join(str(self._in_group(fresh[rank]).number) for rank in outside)
        return (
            f"{names(outside)} is alive, but takes no part: it computes for longer than the group's timeout, or left "
            f"out a call or a backward pass that the others make (calls made there: {numbers}; here: {self._number})"
        )

    def _all_wait(self, fresh: Mapping[int, State]) -> str:
        """The message if no rank is at fault."""
        elsewhere = "; ".join(
            f"rank {rank} waits for others: {waits}"
            for rank, state in fresh.items()
            if not self._in_group(state).waits and (waits := state.waits_outside(self._group))
        )
        if elsewhere:
            return f"{names(self._ranks)} is alive, and {elsewhere}"
        return (
            f"{names(self._ranks)} is alive and waits in the same call: the network lost a message, or a rank that "
            "they all wait for came too late"
        )


def disagreement(numbers: Sequence[int], calls: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str:
    """How the ranks' calls differ: the minority is compared with the majority."""
    names = dict.fromkeys(name for call in calls for name in call)
    compared = [
        [("call number", str(number)), *((name, call.get(name, "nothing")) for name in names)]
        for number, call in zip(numbers, calls, strict=True)
    ]
    lines = []
    for column in zip(*compared, strict=True):
        values = [value for _, value in column]
        common = max(dict.fromkeys(values), key=values.count)
        others = [index for index, value in enumerate(values) if value != common]
        lines += [
            f"rank {ranks[index]} has {column[0][0]} {values[index]}, rank {ranks[values.index(common)]} has {common}"
            for index in others[:8]
        ]
        if len(others) > 8:
            lines.append(f"and {len(others) - 8} more ranks have another {column[0][0]}")
    text = f"the ranks disagree about the call: {'; '.join(lines)}. "
    if len(set(numbers)) > 1:
        text += "A rank left out a call or a backward pass, or made one more. "
    return text + "Every rank must make the same calls in the same order, with the same arguments and its own rows"
