"""What processes tell each other through the store where they met: a thread answers, whatever the main thread does."""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

_Result = TypeVar("_Result")

LOOK_SECONDS = 0.5
"""How often a process looks for questions and failures."""
LISTENING_SECONDS = 3.0
"""Six looks: a process that is silent for so long is stopped or gone, however busy the machine is."""
KNOWN_SECONDS = 2.5 * LOOK_SECONDS
"""After so long all processes that are alive know of a failure."""

_PREFIX = "dilated_attention_pytorch"
_QUESTIONS = f"{_PREFIX}/questions"
_FAILURES = f"{_PREFIX}/failures"


@dataclass(frozen=True, slots=True)
class Answer:
    """Where a process is, in its own words."""

    question: int = 0
    """The latest question that it has heard."""
    number: int = 0
    """Calls that it has made on the group of the one who asks."""
    call: str = ""
    """A digest of the last one."""
    waits: str = ""
    """What it waits for; empty if it waits for no other rank."""
    words: str = ""
    """Why it makes no call any more."""
    has_left: bool = False
    """Its process or its process group came to an end."""


class RollCall:
    """This process's place among those that met at a store, over a connection of its own.

    Args:
        store: the store.
        rank: this process's global rank.
        is_over: whether the process group of ``store`` has been taken down.
    """

    def __init__(self, store: Store, rank: int, is_over: Callable[[], bool]) -> None:
        self.rank = rank
        self.words = ""
        """Why this process makes no call any more, while that is so."""
        self.failures: list[tuple[str, float]] = []
        """What was published, in the order that all processes see, and when this one heard of it."""
        self._store = store.clone()  # type: ignore[attr-defined]
        self._is_over = is_over
        self._is_silent = False
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[str, Callable[[], tuple[Answer, str]]] = {}
        self._heard = self._store.add(_QUESTIONS, 0)
        self._store.add(_FAILURES, 0)
        self._look()
        self._thread = threading.Thread(target=self._run, name="dilated-attention-roll-call", daemon=True)
        self._thread.start()
        # A thread that comes back from the store's C++ code while the interpreter goes away would abort the process.
        atexit.register(self.stop)

    def answer(self, group: str, about: Callable[[], tuple[Answer, str]]) -> None:
        """From now on answer questions about ``group`` with what ``about`` returns, that and the last call in words."""

        def register() -> int:
            self._answers[group] = about
            self._say(group)
            return 1

        self._ask(register)

    def question(self) -> int | None:
        """Ask all processes where they are; the number of the question, or None if the store does not answer."""
        return self._ask(lambda: self._store.add(_QUESTIONS, 1))

    def answers(self, group: str, ranks: Sequence[int]) -> dict[int, Answer] | None:
        """The latest answers of those ``ranks`` that ever gave one; None if the store does not answer."""

        def read() -> dict[int, Answer]:
            keys = {rank: _answer_key(group, rank) for rank in ranks}
            if keys and not self._store.check(list(keys.values())):
                keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
            texts = self._store.multi_get(list(keys.values())) if keys else []
            return {rank: Answer(**json.loads(text)) for rank, text in zip(keys, texts, strict=True)}

        return self._ask(read)

    def calls(self, group: str, ranks: Sequence[int]) -> dict[int, dict[str, str]] | None:
        """The last calls of ``ranks``, which have answered; None if the store does not answer."""
        return self._ask(lambda: {rank: json.loads(self._store.get(_call_key(group, rank))) for rank in ranks})

    def publish(self, failure: str) -> None:
        """Add to :attr:`failures` of all processes."""

        def write() -> int:
            number = self._store.add(_FAILURES, 1)
            self._store.set(f"{_FAILURES}/{number}", failure)
            return number

        if self._ask(write) is not None:
            self.look()

    def look(self) -> None:
        """Hear now of the latest failures."""

        def look() -> int:
            self._look()
            return 1

        self._ask(look)

    def stop(self) -> None:
        """Leave word, and end the thread. What this process alone knows is told while its store may still stand."""
        if self.words and not self.failures and self._can_answer():
            self.publish(self.words)
            time.sleep(KNOWN_SECONDS)
        self._requests.put(None)
        self._thread.join(timeout=LISTENING_SECONDS if self._can_answer() else 0.0)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        last = time.monotonic()
        # Without the store there is nobody to talk to: whoever asks then gets no answer, and says so.
        with contextlib.suppress(RuntimeError):
            while True:
                request: Callable[[], None] | None = self._look
                with contextlib.suppress(queue.Empty):
                    request = self._requests.get(timeout=max(0.0, last + LOOK_SECONDS - time.monotonic()))
                if request is None or self._is_over():
                    for group in self._answers:
                        self._say(group, has_left=True)
                    return
                if request == self._look:
                    last = time.monotonic()
                request()
                self._is_silent = False

    def _look(self) -> None:
        questions, failures = map(int, self._store.multi_get([_QUESTIONS, _FAILURES]))
        for number in range(len(self.failures) + 1, failures + 1):
            if not self._store.check([f"{_FAILURES}/{number}"]):
                break  # counted, and not written yet
            self.failures.append((self._store.get(f"{_FAILURES}/{number}").decode(), time.monotonic()))
        if questions != self._heard:
            self._heard = questions
            for group in self._answers:
                self._say(group)

    def _say(self, group: str, *, has_left: bool = False) -> None:
        answer, call = self._answers[group]()
        # The call first: whoever sees the answer finds it.
        self._store.set(_call_key(group, self.rank), call)
        said = asdict(answer) | {"question": self._heard, "words": self.words, "has_left": has_left}
        self._store.set(_answer_key(group, self.rank), json.dumps(said))

    def _ask(self, request: Callable[[], _Result]) -> _Result | None:
        """What ``request`` returns from the thread; None if the store is gone or silent."""
        results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._requests.put(lambda: results.put(request()))
        deadline = time.monotonic() + LISTENING_SECONDS
        while self._can_answer():
            with contextlib.suppress(queue.Empty):
                return results.get(timeout=0.1)
            self._is_silent = time.monotonic() > deadline
        with contextlib.suppress(queue.Empty):
            return results.get_nowait()
        return None

    def _can_answer(self) -> bool:
        """Whether there is a thread, and it does not hang in the store."""
        return self._thread.is_alive() and not self._is_silent


def _answer_key(group: str, rank: int) -> str:
    return f"{_PREFIX}/answer/{group}/{rank}"


def _call_key(group: str, rank: int) -> str:
    return f"{_PREFIX}/call/{group}/{rank}"
