"""Failure diagnosis: after a transport error, the ranks of a group agree on which rank failed and why."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence

from .note import Answer, Failure, call_to_note
from .roll_call import KNOWN_SECONDS, LISTENING_SECONDS, Heard, RollCall, names, no_answer
from .watch import Watch

_POLL_SECONDS = 0.1
_ASKING_SECONDS = 1.0
"""Seconds after which a question is repeated; another rank may have overwritten it."""
_TRANSPORT_LENGTH = 120
"""Characters of the transport's error message to quote; the full error is chained as the cause."""


class RankFailure(RuntimeError):
    """A rank died, does not respond, or makes a different call. The message names it."""


class Board:
    """State that the ranks of one group share to diagnose a failure.

    Args:
        roll: this process's index among all processes.
        watch: thread that interrupts waits of this process.
        group: a unique name of the group.
        ranks: global ranks of the group.
    """

    def __init__(self, roll: RollCall, watch: Watch, group: str, ranks: Sequence[int]) -> None:
        self._roll = roll
        self._watch = watch
        self._group = group
        self._ranks = ranks
        self._call: Mapping[str, str] = {}
        self._number = 0
        self._said = ""
        self.waits = ""
        """Description of the exchange that this rank waits in; empty outside of exchanges."""
        watch.ask(lambda: self.waits)
        roll.look()
        self._born = len(roll.failures)
        roll.answer(group, ranks, self._answer)

    def enter(self, call: Mapping[str, str], number: int) -> None:
        """Start the ``number``-th call on this group; clears an earlier refusal."""
        self._call, self._number = call, number
        self._roll.words = ""

    def meet(self) -> None:
        """Record that all ranks of the group took part in a call."""
        self._roll.meet(self._ranks)

    def refuse(self, error: Exception) -> None:
        """Publish that this rank raises an error of its own, so that the others do not wait until their timeout."""
        self._roll.words = f"rank {self._roll.rank} refused the call: {type(error).__name__}: {error}"

    @contextlib.contextmanager
    def waiting(self, doing: str, *, is_in_reach: bool) -> Iterator[None]:
        """Context of a wait for other ranks: a transport error becomes one that names the failed rank and the cause.

        Args:
            doing: description of the exchange.
            is_in_reach: whether the watch can interrupt the wait; on SIGTERM the process then reports its wait first.
        """

        def say() -> None:
            if not self._said:
                self.diagnose(None, doing)
            print(self._said, file=sys.stderr, flush=True)

        self.waits, self._said = doing, ""
        try:
            with self._watch.heeding(say) if is_in_reach else contextlib.nullcontext():
                try:
                    yield
                except RankFailure:
                    raise
                except RuntimeError as error:
                    raise RankFailure(f"{doing}: {self.diagnose(error, doing)}") from error
        finally:
            self.waits = ""

    def diagnose(self, error: Exception | None, doing: str) -> str:
        """Find the rank that caused a transport error, or a termination signal without one.

        All ranks that ask get the same answer. Returns only after the other processes had time to receive it, as this
        process may host the store and exit afterwards.
        """
        transport = ""
        if error is not None and not self._watch.is_told:
            text = re.sub(r"^\[/\S*\] ", "", str(error))  # source location in gloo
            transport = f"; the transport said: {textwrap.shorten(text, _TRANSPORT_LENGTH, placeholder=' ...')}"
        with _held_back(signal.SIGTERM, self._watch) as words:
            self._roll.look()
            cause, found = "", None
            if self._known() is None:
                cause, found = self._cause(transport, doing)
            if found is not None and self._known() is None:
                self._roll.publish(found)
            known = self._known()
            if known is not None:
                cause = known.failure.cause
                time.sleep(max(0.0, known.at + KNOWN_SECONDS - time.monotonic()))
            self._roll.words = cause
            if cause.startswith(f"rank {self._roll.rank} ") and not self._watch.is_told:
                cause = f"the other ranks gave this one up: {cause}"
            is_told = "told to end (SIGTERM) while " if self._watch.is_told else ""
            self._said = f"rank {self._roll.rank}: {is_told}{doing}: {cause}"
            words.append(self._said)
        return cause

    def _answer(self) -> tuple[Answer, Mapping[str, str]]:
        call, number = self._call, self._number
        digest = f"{zlib.crc32(call_to_note(call).encode()):08x}"
        elsewhere = "" if self.waits else self._watch.waits()
        answer = Answer(number=number, call=digest, waits=self.waits, elsewhere=elsewhere, is_told=self._watch.is_told)
        return answer, call

    def _known(self) -> Heard | None:
        """The first failure published during the lifetime of this group."""
        return self._roll.failures[self._born] if len(self._roll.failures) > self._born else None

    def _cause(self, transport: str, doing: str) -> tuple[str, Failure | None]:
        """The cause, and the failure to publish if one was found. Asks all ranks of the group for their state."""
        start = asked = time.monotonic()
        question = self._roll.question()
        others = [rank for rank in self._ranks if rank != self._roll.rank]
        while question is not None:
            answers = self._roll.answers(self._group, others)
            if self._known() is not None:
                return "", None
            if answers is None:
                break
            seconds = time.monotonic() - start
            heard = {rank: answer for rank, answer in answers.items() if answer.question >= question or answer.has_left}
            told = self._told(heard, doing)
            cause = self._answered(heard, transport) or self._unanswered(heard, answers, seconds, transport)
            if cause is None and len(heard) == len(others):
                if told is not None:
                    cause = told if seconds > LISTENING_SECONDS + KNOWN_SECONDS else None
                else:
                    cause = self._differing(heard) or self._outside(heard)
                # Ranks that wait in another group need this long to report the rank they wait for.
                if cause is None and seconds > 3 * LISTENING_SECONDS:
                    return f"{self._all_wait(heard)}{transport}", None
            if cause is not None:
                return cause, Failure(cause)
            if time.monotonic() - asked > _ASKING_SECONDS:
                asked = time.monotonic()
                self._roll.question()
            time.sleep(_POLL_SECONDS)
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holder = "torchrun's agent on the first host" if is_agents else "rank 0 (or a launcher)"
        return (
            f"{holder}, which holds the store at which the ranks met, does not answer: the process has ended or was "
            f"stopped, or its host cannot be reached{transport}"
        ), None

    def _answered(self, heard: Mapping[int, Answer], transport: str) -> str | None:
        """The cause, if a rank reports one or has exited."""
        for answer in heard.values():
            if answer.words:
                return answer.words
        left = [rank for rank, answer in heard.items() if answer.has_left]
        if not left:
            return None
        return (
            f"{names(left)} came to an end while others waited: the program ended there, or an error that it "
            f"printed{transport}"
        )

    def _unanswered(
        self, heard: Mapping[int, Answer], answers: Mapping[int, Answer], seconds: float, transport: str
    ) -> str | None:
        """The cause, if ranks have not answered for long."""
        silent = [rank for rank in self._ranks if rank != self._roll.rank and rank not in heard]
        if not silent or seconds <= LISTENING_SECONDS:
            return None
        text = no_answer(silent)
        never = [rank for rank in silent if rank not in answers]
        if never:
            text += f" ({names(never)} had not made a call on this group yet, or ended before this rank made its first)"
        return text + transport

    def _told(self, heard: Mapping[int, Answer], doing: str) -> str | None:
        """That a rank received SIGTERM, if one did; what the others wait for is then irrelevant."""
        told = [rank for rank, answer in heard.items() if answer.is_told]
        if self._watch.is_told:
            return f"rank {self._roll.rank} was told to end (SIGTERM) while {doing}; no rank is known to have failed"
        return f"{names(told)} was told to end (SIGTERM)" if told else None

    def _differing(self, heard: Mapping[int, Answer]) -> str | None:
        """Ranks that wait in a different call from the others."""
        own, _ = self._answer()
        waiting = {self._roll.rank: own} | {rank: answer for rank, answer in heard.items() if answer.waits}
        if len({(answer.number, answer.call) for answer in waiting.values()}) == 1:
            return None
        ranks = sorted(waiting)
        # One rank per distinct call suffices.
        kinds = {(answer.number, answer.call): rank for rank, answer in waiting.items() if rank != self._roll.rank}
        texts = self._roll.calls(self._group, list(kinds.values()))
        if texts is None:
            return None
        call_of = {kind: texts[rank] for kind, rank in kinds.items()} | {(own.number, own.call): dict(self._call)}
        calls = [call_of[waiting[rank].number, waiting[rank].call] for rank in ranks]
        numbers = [waiting[rank].number for rank in ranks]
        return disagreement(numbers, calls, ranks)

    def _outside(self, heard: Mapping[int, Answer]) -> str | None:
        """Ranks that do not wait for anyone."""
        outside = [rank for rank, answer in heard.items() if not answer.waits and not answer.elsewhere]
        if not outside:
            return None
        numbers = ", ".join(str(heard[rank].number) for rank in outside)
        return (
            f"{names(outside)} is alive, but takes no part: it computes for longer than the group's timeout, or left "
            f"out a call or a backward pass that the others make (calls made there: {numbers}; here: {self._number})"
        )

    def _all_wait(self, heard: Mapping[int, Answer]) -> str:
        """The message if no rank is at fault."""
        elsewhere = "; ".join(
            f"rank {rank} waits for others: {a.elsewhere}" for rank, a in heard.items() if a.elsewhere
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


@contextlib.contextmanager
def _held_back(number: signal.Signals, watch: Watch) -> Iterator[list[str]]:
    """Defer SIGTERM until the failed rank has been reported: launchers terminate all processes when one has died.

    Yields a list for the message, which is printed if the signal came.
    """
    words: list[str] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(number) is None or watch.is_heeding:
        yield words
        return
    has_come = threading.Event()
    before = signal.signal(number, lambda *_: has_come.set())
    try:
        yield words
    finally:
        signal.signal(number, before)
        if has_come.is_set():
            print(*words, file=sys.stderr, flush=True)
            signal.raise_signal(number)
