"""Communication between processes through the store, by a thread that answers while the main thread is blocked."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from .note import (
    Answer,
    Failure,
    UnreadableNoteError,
    call_to_note,
    read_answer,
    read_call,
    read_failure,
    read_number,
)
from .pulse import LEFT, Pulse

if TYPE_CHECKING:
    from torch.distributed import Store

_Result = TypeVar("_Result")

LOOK_SECONDS = 0.5
"""Interval in seconds at which a process polls for questions and failures and writes its heartbeat."""
LISTENING_SECONDS = 3.0
"""Six polls: a process that is silent for this long is stopped or dead, however busy the machine is."""
KNOWN_SECONDS = 2.5 * LOOK_SECONDS
"""Seconds after which all live processes know of a failure."""
WATCHERS = 8
"""Number of group members that watch each member's heartbeat."""
_MOST_FAILURES = 64
_MOST_COMPLAINTS = 16

_PREFIX = "dilated_attention_pytorch"
_QUESTIONS = f"{_PREFIX}/questions"


@dataclass(frozen=True, slots=True)
class Heard:
    """A failure and the time at which this process learned of it."""

    failure: Failure
    at: float


class RollCall:
    """This process's membership among the processes of a store, over its own connection.

    Args:
        store: the store.
        rank: this process's global rank.
        timeout: seconds without a sign of life after which a process counts as failed.
        is_over: whether the process group of ``store`` has been destroyed.
    """

    def __init__(self, store: Store, rank: int, timeout: float, is_over: Callable[[], bool]) -> None:
        self.rank = rank
        self.wait_at_most(timeout)
        self.words = ""
        """Why this process makes no further calls, while that is so."""
        self.failures: list[Heard] = []
        """Published failures, in the same order on all processes."""
        self.unreadable: dict[str, str] = {}
        """Values in the store that are not valid notes, by key."""
        self._store = store.clone()  # type: ignore[attr-defined]
        # A get of a key that was just deleted would block.
        self._store.set_timeout(timedelta(seconds=LISTENING_SECONDS))
        self._is_over = is_over
        self._is_silent = False
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[str, Callable[[], tuple[Answer, Mapping[str, str]]]] = {}
        self._before: dict[str, set[str]] = {}
        self._pulse = Pulse(2 * LOOK_SECONDS)
        self._life = uuid.uuid4().hex
        self._num_notes = 0
        self._num_failures = 0  # failure notes read, including unreadable ones
        self._seen = 0  # number of the latest question in the store
        self._seen = self._heard = self._number()  # _heard: the largest number seen
        self._last = self._began = time.monotonic()
        self._look()
        self._thread = threading.Thread(target=self._run, name="dilated-attention-roll-call", daemon=True)
        self._thread.start()
        # A thread that returns from the store's C++ code during interpreter shutdown would abort the process.
        atexit.register(self.stop)

    def wait_at_most(self, seconds: float) -> None:
        """Declare a process failed after this many seconds of silence."""
        self.timeout = max(seconds, LISTENING_SECONDS)

    def answer(self, group: str, ranks: Sequence[int], about: Callable[[], tuple[Answer, Mapping[str, str]]]) -> None:
        """Answer questions about ``group`` from now on with the result of ``about``: the answer and the last call.

        Watches the members of ``ranks`` that come after this one.
        """
        own_index = ranks.index(self.rank)
        others = [*ranks[own_index + 1 :], *ranks[:own_index]]

        def register() -> int:
            if group not in self._answers and self._store.check([_answer_key(group, self.rank)]):
                # After re-initialisation on the same store: ranks that left the old group have not left this one.
                said = self._answers_that_stand(group, others).values()
                self._before[group] = {answer.life for answer in said if answer.has_left}
            self._answers[group] = about
            self._pulse.watch(others[:WATCHERS])
            self._say(group)
            return 1

        self._ask(register)

    def meet(self, ranks: Sequence[int]) -> None:
        """Record that these processes took part in a call; their silence counts from now on."""
        self._requests.put(lambda: self._pulse.meet(ranks))

    def question(self) -> int | None:
        """Ask all processes for their state; the number of the question, or None if the store does not respond."""

        def write() -> int:
            self._seen = self._heard = max(self._heard, self._number()) + 1
            self._store.set(_QUESTIONS, str(self._seen))
            for group in self._answers:
                self._say(group)
            return self._heard

        return self._ask(write)

    def answers(self, group: str, ranks: Sequence[int]) -> dict[int, Answer] | None:
        """The latest answers of those ``ranks`` that ever answered; None if the store does not respond.

        Answers to questions that were never asked are ignored.
        """

        def read() -> dict[int, Answer]:
            found, before = self._answers_that_stand(group, ranks), self._before.get(group, set())
            self._heard = max(self._heard, self._number())
            return {rank: a for rank, a in found.items() if a.question <= self._heard and a.life not in before}

        return self._ask(read)

    def calls(self, group: str, ranks: Sequence[int]) -> dict[int, dict[str, str]] | None:
        """The last calls of ``ranks``; None if the store does not respond or lacks one of them."""

        def read() -> dict[int, dict[str, str]]:
            notes = self._read({_call_key(group, rank): rank for rank in ranks})
            found = {rank: self._understood(_call_key(group, rank), read_call, note) for rank, note in notes}
            return {rank: call for rank, call in found.items() if call is not None}

        found = self._ask(read)
        return found if found is not None and len(found) == len(ranks) else None

    def publish(self, failure: Failure) -> None:
        """Add to the :attr:`failures` of all processes."""

        def write() -> int:
            self._publish(failure)
            return 1

        self._ask(write)

    def look(self) -> None:
        """Poll for failures now."""

        def look() -> int:
            self._look_for_failures()
            return 1

        self._ask(look)

    @property
    def can_answer(self) -> bool:
        """Whether the thread runs and is not blocked in the store."""
        return self._thread.is_alive() and not self._is_silent

    def stop(self) -> None:
        """Announce the exit and end the thread, publishing failures that only this process knows while it can."""
        if self.words and not self.failures and self.can_answer:
            self.publish(Failure(self.words))
            time.sleep(KNOWN_SECONDS)
        self._requests.put(None)
        self._thread.join(timeout=LISTENING_SECONDS if self.can_answer else 0.0)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            request: Callable[[], None] | None = self._look
            with contextlib.suppress(queue.Empty):
                request = self._requests.get(timeout=max(0.0, last + LOOK_SECONDS - time.monotonic()))
            if request is None or self._is_over():
                request = self._leave
            if request == self._look:
                last = time.monotonic()
            self._began = time.monotonic()
            try:
                request()
            except RuntimeError as error:
                # Without the store there is no communication: pending requests get None and report that.
                if not _is_slow(error) or request == self._leave:
                    return
                self._is_silent = True
            else:
                self._is_silent = False
                if request == self._leave:
                    return

    def _leave(self) -> None:
        for group in self._answers:
            self._say(group, has_left=True)
        self._store.set(_beat_key(self.rank), LEFT)

    def _look(self) -> None:
        self._num_notes += 1
        self._store.set(_beat_key(self.rank), f"{self._life} {self._num_notes}")
        self._look_for_failures()
        number = self._number()
        if number != self._seen:
            self._seen, self._heard = number, max(self._heard, number)
            for group in self._answers:
                self._say(group)
        beats = dict(self._read({_beat_key(rank): rank for rank in self._pulse.watched}))
        now = time.monotonic()
        self._pulse.look(beats, now - self._last)
        self._last = now
        named = {rank for heard in self.failures for rank in heard.failure.silent}
        if any(rank not in named for rank in self._pulse.silent(self.timeout)):
            # Together with ranks that fell silent at the same time, such as the others on its host.
            silent = self._pulse.silent(self.timeout - 2 * LOOK_SECONDS)
            self._publish(Failure(f"{no_answer(silent)} (no sign of life for {self.timeout:g} s)", tuple(silent)))

    def _look_for_failures(self) -> None:
        for _ in range(_MOST_FAILURES):
            key = _failure_key(self._num_failures + 1)
            if not self._store.check([key]):
                return
            self._num_failures += 1
            failure = self._understood(key, read_failure, self._store.get(key))
            if failure is not None:
                self.failures.append(Heard(failure, time.monotonic()))

    def _publish(self, failure: Failure) -> None:
        note = failure.to_note()
        for _ in range(_MOST_FAILURES):
            self._look_for_failures()
            # The first process to write wins.
            if self._store.compare_set(_failure_key(self._num_failures + 1), "", note) == note.encode():
                break
        self._look_for_failures()

    def _number(self) -> int:
        """Number of the latest question in the store."""
        if not self._store.check([_QUESTIONS]):
            return 0
        number = self._understood(_QUESTIONS, read_number, self._store.get(_QUESTIONS))
        return self._seen if number is None else number

    def _read(self, ranks: Mapping[str, int]) -> list[tuple[int, bytes]]:
        """The values of the keys that exist, by rank."""
        keys = list(ranks)
        if keys and not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        return [(ranks[key], note) for key, note in zip(keys, self._store.multi_get(keys), strict=True)] if keys else []

    def _answers_that_stand(self, group: str, ranks: Sequence[int]) -> dict[int, Answer]:
        notes = self._read({_answer_key(group, rank): rank for rank in ranks})
        found = {rank: self._understood(_answer_key(group, rank), read_answer, note) for rank, note in notes}
        return {rank: answer for rank, answer in found.items() if answer is not None}

    def _understood(self, key: str, read: Callable[[bytes], _Result], note: bytes) -> _Result | None:
        """Parse ``note``. An unreadable value is reported once and skipped."""
        try:
            found = read(note)
        except UnreadableNoteError as error:
            if key not in self.unreadable and len(self.unreadable) < _MOST_COMPLAINTS:
                print(
                    f"rank {self.rank}: passing over {key!r} in the store, which this package did not write: {error}",
                    file=sys.stderr,
                    flush=True,
                )
            self.unreadable[key] = str(error)
            return None
        self.unreadable.pop(key, None)
        return found

    def _say(self, group: str, *, has_left: bool = False) -> None:
        answer, call = self._answers[group]()
        # The call first, so that a reader of the answer finds it.
        self._store.set(_call_key(group, self.rank), call_to_note(call))
        said = dataclasses.replace(answer, question=self._heard, words=self.words, has_left=has_left, life=self._life)
        self._store.set(_answer_key(group, self.rank), said.to_note())

    def _ask(self, request: Callable[[], _Result]) -> _Result | None:
        """The result of ``request``, run on the thread; None if the store is gone or does not respond."""
        results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._requests.put(lambda: results.put(request()))
        # A request that has already waited long shows that the store does not respond.
        deadline = max(time.monotonic() + 2 * LOOK_SECONDS, self._began + LISTENING_SECONDS)
        while self.can_answer:
            with contextlib.suppress(queue.Empty):
                return results.get(timeout=0.1)
            self._is_silent = time.monotonic() > deadline
        with contextlib.suppress(queue.Empty):
            return results.get_nowait()
        return None


def no_answer(silent: Sequence[int]) -> str:
    """The message for ranks without a sign of life."""
    return (
        f"{names(silent)} does not answer: the process was killed or stopped, or its host cannot be reached. Look at "
        "what it printed last, and start the run again from its last checkpoint"
    )


def names(ranks: Sequence[int]) -> str:
    """Ranks as the subject of a sentence."""
    listed = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"each of the ranks {listed}"


def _is_slow(error: RuntimeError) -> bool:
    """Whether a store request timed out while the connection still stands."""
    from torch.distributed import DistNetworkError

    return "imeout" in str(error) and not isinstance(error, DistNetworkError)


def _beat_key(rank: int) -> str:
    return f"{_PREFIX}/beat/{rank}"


def _failure_key(number: int) -> str:
    return f"{_PREFIX}/failures/{number}"


def _answer_key(group: str, rank: int) -> str:
    return f"{_PREFIX}/answer/{group}/{rank}"


def _call_key(group: str, rank: int) -> str:
    return f"{_PREFIX}/call/{group}/{rank}"
