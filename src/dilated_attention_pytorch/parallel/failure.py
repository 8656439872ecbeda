"""Which rank failed, and how: after an error of the transport the ranks of a group find out, and agree about it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence

from .roll_call import KNOWN_SECONDS, LISTENING_SECONDS, Answer, RollCall

_POLL_SECONDS = 0.1
_TRANSPORT_LENGTH = 120
"""Letters of the transport's own message: the whole of it is the error's cause."""


class RankFailure(RuntimeError):
    """A rank died, does not answer, or makes another call than the rest. The message names it."""


class Board:
    """What the ranks of one group know about each other when something goes wrong.

    Args:
        roll: this process's place among all processes.
        group: a name of the group that no other has.
        ranks: the global ranks of the group.
    """

    def __init__(self, roll: RollCall, group: str, ranks: Sequence[int]) -> None:
        self._roll = roll
        self._group = group
        self._ranks = ranks
        self._call: Mapping[str, str] = {}
        self._number = 0
        self.waits = ""
        """What this rank waits for, in words; empty outside of every exchange."""
        roll.look()
        self._born = len(roll.failures)
        roll.answer(group, self._answer)

    def enter(self, call: Mapping[str, str], number: int) -> None:
        """This rank makes the ``number``-th call on this group: what it refused before is no longer of interest."""
        self._call, self._number = call, number
        self._roll.words = ""

    def refuse(self, error: Exception) -> None:
        """This rank raises an error of its own; the others would wait for it until their timeout."""
        self._roll.words = f"rank {self._roll.rank} refused the call: {type(error).__name__}: {error}"

    def diagnose(self, error: Exception, doing: str) -> str:
        """After an error of the transport: which rank is the cause. All ranks that ask get the same answer.

        Returns when the other processes can have heard of it, as this one may hold the store and end now.
        """
        text = re.sub(r"^\[/\S*\] ", "", str(error))  # the place in gloo's source
        transport = textwrap.shorten(text, _TRANSPORT_LENGTH, placeholder=" ...")
        with _held_back(signal.SIGTERM) as words:
            self._roll.look()
            cause, is_found = "", False
            if self._known() is None:
                cause, is_found = self._cause(transport)
            if is_found and self._known() is None:
                self._roll.publish(cause)
            known = self._known()
            if known is not None:
                cause, since = known
                time.sleep(max(0.0, since + KNOWN_SECONDS - time.monotonic()))
            self._roll.words = cause
            if cause.startswith(f"rank {self._roll.rank} "):
                cause = f"the other ranks gave this one up: {cause}"
            words.append(f"rank {self._roll.rank}: {doing}: {cause}")
        return cause

    def _answer(self) -> tuple[Answer, str]:
        call, number = self._call, self._number
        text = json.dumps(call)
        return Answer(number=number, call=f"{zlib.crc32(text.encode()):08x}", waits=self.waits), text

    def _known(self) -> tuple[str, float] | None:
        """The first failure that was published since this group exists, and since when this process knows it."""
        return self._roll.failures[self._born] if len(self._roll.failures) > self._born else None

    def _cause(self, transport: str) -> tuple[str, bool]:
        """The cause, and whether it was found. Asks all ranks of the group where they are."""
        start = time.monotonic()
        question = self._roll.question()
        answers: dict[int, Answer] | None = {}
        silent: list[int] = []
        others = [rank for rank in self._ranks if rank != self._roll.rank]
        while question is not None:
            answers = self._roll.answers(self._group, others)
            known = self._known()
            if known is not None:
                return known[0], True
            if answers is None:
                break
            heard = {rank: a for rank, a in answers.items() if a.question >= question or a.has_left}
            for answer in heard.values():
                if answer.words:
                    return answer.words, True
            silent = [rank for rank in others if rank not in heard]
            left = [rank for rank, answer in heard.items() if answer.has_left]
            if left:
                return (
                    f"{_names(left)} came to an end while others waited: the program ended there, or an error that it "
                    f"printed; the transport said: {transport}"
                ), True
            seconds = time.monotonic() - start
            if silent and seconds > LISTENING_SECONDS:
                return _no_answer(silent, [rank for rank in silent if rank not in answers], transport), True
            if not silent:
                cause = self._differing(heard) or self._outside(heard)
                if cause is not None:
                    return cause, True
                # They wait for ranks of other groups, and are about to say for which.
                if seconds > 2 * LISTENING_SECONDS:
                    return (
                        f"{_names(self._ranks)} is alive and waits in the same call: the network lost a message, or a "
                        f"rank that they all wait for came too late; the transport said: {transport}"
                    ), False
            time.sleep(_POLL_SECONDS)
        known = self._known()
        if known is not None:
            return known[0], True
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holder = "torchrun's agent on the first host" if is_agents else "rank 0 (or a launcher)"
        return (
            f"{holder}, which holds the store at which the ranks met, does not answer: the process has ended or was "
            f"stopped, or its host cannot be reached; the transport said: {transport}"
        ), False

    def _differing(self, heard: Mapping[int, Answer]) -> str | None:
        """The ranks that wait in another call than the others."""
        own, _ = self._answer()
        waiting = {self._roll.rank: own} | {rank: answer for rank, answer in heard.items() if answer.waits}
        if len({(answer.number, answer.call) for answer in waiting.values()}) == 1:
            return None
        ranks = sorted(waiting)
        # One rank of each kind is enough to tell the kinds apart.
        kinds = {(answer.number, answer.call): rank for rank, answer in waiting.items() if rank != self._roll.rank}
        texts = self._roll.calls(self._group, list(kinds.values()))
        if texts is None:
            return None
        call_of = {kind: texts[rank] for kind, rank in kinds.items()} | {(own.number, own.call): dict(self._call)}
        calls = [call_of[waiting[rank].number, waiting[rank].call] for rank in ranks]
        numbers = [waiting[rank].number for rank in ranks]
        return disagreement(numbers, calls, ranks)

    def _outside(self, heard: Mapping[int, Answer]) -> str | None:
        """The ranks that wait for nobody."""
        outside = [rank for rank, answer in heard.items() if not answer.waits]
        if not outside:
            return None
        numbers = ", ".join(str(heard[rank].number) for rank in outside)
        return (
            f"{_names(outside)} is alive, but takes no part: it computes for longer than the group's timeout, or left "
            f"out a call or a backward pass that the others make (calls made there: {numbers}; here: {self._number})"
        )


def disagreement(numbers: Sequence[int], calls: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str:
    """What differs between the ranks' calls: the minority is named against the majority."""
    names = dict.fromkeys(name for call in calls for name in call)
    compared = [[("call number", str(number)), *((name, call.get(name, "nothing")) for name in names)]
                for number, call in zip(numbers, calls, strict=True)]  # fmt: skip
    lines = []
    for column in zip(*compared, strict=True):
        values = [value for _, value in column]
        common = max(dict.fromkeys(values), key=values.count)
        others = [place for place, value in enumerate(values) if value != common]
        lines += [
            f"rank {ranks[place]} has {column[0][0]} {values[place]}, rank {ranks[values.index(common)]} has {common}"
            for place in others[:8]
        ]
        if len(others) > 8:
            lines.append(f"and {len(others) - 8} more ranks have another {column[0][0]}")
    text = f"the ranks disagree about the call: {'; '.join(lines)}. "
    if len(set(numbers)) > 1:
        text += "A rank left out a call or a backward pass, or made one more. "
    return text + "Every rank must make the same calls in the same order, with the same arguments and its own rows"


def _no_answer(silent: Sequence[int], never: Sequence[int], transport: str) -> str:
    text = (
        f"{_names(silent)} does not answer: the process was killed or stopped, or its host cannot be reached. Look at "
        "what it printed last, and start the run again from its last checkpoint"
    )
    if never:
        text += f" ({_names(never)} had not made a call on this group yet)"
    return f"{text}; the transport said: {transport}"


def _names(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"each of the ranks {listed}"


@contextlib.contextmanager
def _held_back(number: signal.Signals) -> Iterator[list[str]]:
    """A launcher ends the other processes when one has died: its signal waits until they have said which.

    Yields a list for the words, which are printed if the signal came.
    """
    words: list[str] = []
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) is None:
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
