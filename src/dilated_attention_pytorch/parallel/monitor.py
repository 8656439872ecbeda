"""What every process shows the others through the store, by a thread that works while the main thread is blocked.

Under its own key a process writes its state twice a second: a beat that changes, its last call and wait in each group,
and why it makes no further calls. Failures are appended to one list, which all read in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import queue
import select
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from .heartbeats import Heartbeats

if TYPE_CHECKING:
    from torch.distributed import Store

_Result = TypeVar("_Result")

POLL_SECONDS = 0.5
"""Interval at which a process writes its state and reads failures."""
SILENT_SECONDS = 3.0
"""Six polls: a process whose state stands still for this long is stopped or dead, however busy the machine is."""
KNOWN_SECONDS = 2.5 * POLL_SECONDS
"""Seconds after which all live processes know of a failure."""
WATCHED = 8
"""Number of group members whose state each member watches."""
_PREFIX = "dilated_attention_pytorch"
_FAILURES = f"{_PREFIX}/failures"


@dataclass(frozen=True, slots=True)
class InGroup:
    """A process in one group."""

    number: int = 0
    """Number of calls made."""
    call: str = ""
    """Digest of the last call."""
    waits: str = ""
    """Description of its wait for other ranks; empty if it does not wait in this group."""


@dataclass(frozen=True, slots=True)
class State:
    """A process, as it shows itself."""

    life: str = ""
    """Id of its monitor; a process that initialises its process group again gets a new one."""
    beat: int = 0
    """Number of states written in this life."""
    reason: str = ""
    """Why it makes no further calls."""
    got_sigterm: bool = False
    """Whether it received SIGTERM and looks for the cause."""
    has_left: bool = False
    """Whether the process or its process group has ended."""
    groups: Mapping[str, InGroup] = field(default_factory=dict)

    @property
    def heartbeat(self) -> tuple[str, int]:
        """Changes with every state that the process writes."""
        return self.life, self.beat

    def waits_outside(self, group: str) -> str:
        """Descriptions of its waits in other groups."""
        return "; ".join(one.waits for name, one in self.groups.items() if name != group and one.waits)

    @classmethod
    def read(cls, value: bytes) -> State:
        """Parse a state."""
        values = json.loads(value)
        groups = {name: InGroup(**one) for name, one in values.pop("groups").items()}
        return cls(**values, groups=groups)


@dataclass(frozen=True, slots=True)
class Failure:
    """A published diagnosis."""

    cause: str
    silent: tuple[int, ...] = ()
    """Ranks without a sign of life for the timeout; every wait for them fails."""
    at: float = field(default=0.0, compare=False)
    """Time, on this process's clock, at which it learned of the failure."""


class Monitor:
    """This process among the processes of a store.

    Waits for other ranks happen in the transport's C++ code, which neither exceptions nor signals interrupt. The thread
    interrupts such a wait if a rank is silent for the timeout, or if the process received SIGTERM and has not yet
    reported what it waited for.

    Args:
        store: the store.
        rank: this process's global rank.
        num_ranks: number of processes.
        timeout: seconds without a sign of life after which a process counts as failed.
        is_over: whether the process group of ``store`` has been destroyed.
        break_off: makes every wait of this process raise ``RuntimeError``.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        timeout: float,
        is_over: Callable[[], bool],
        break_off: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.wait_at_most(timeout)
        self.reason = ""
        """Why this process makes no further calls, while that is so."""
        self.got_sigterm = False
        """Whether SIGTERM came while this process waited."""
        self.failures: list[Failure] = []
        """Published failures, in the same order on all processes."""
        self._store = store.clone()  # type: ignore[attr-defined]
        # A get of a key that was just deleted would block.
        self._store.set_timeout(timedelta(seconds=SILENT_SECONDS))
        self._is_over, self._break_off = is_over, break_off
        self._groups: dict[str, Callable[[], tuple[InGroup, Mapping[str, str]]]] = {}
        self._written: dict[str, tuple[int, str]] = {}
        self._life, self._beat = uuid.uuid4().hex, 0
        self._earlier_lives: set[str] = set()
        self._heartbeats = Heartbeats(2 * POLL_SECONDS)
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_handled = 0
        self._is_connected = True
        self._began: float | None = None  # when the request began that the thread makes now
        self._is_watching = False
        # Python delivers signals only to its main thread and to a wakeup file descriptor.
        self._wakeup_read, self._wakeup_write = socket.socketpair()
        self._wakeup_read.setblocking(False)
        self._wakeup_write.setblocking(False)
        if self._store.check([_state_key(rank)]):
            # Initialised again on the same store: ranks that left the former process group have not left this one.
            earlier = self._read_states(range(num_ranks))
            self._earlier_lives = {state.life for state in earlier.values() if state.has_left}
        self._poll(0.0)
        self._num_handled = len(self.failures)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dilated-attention-monitor", daemon=True)
        self._thread.start()
        # A thread that returns from C++ code during interpreter shutdown would abort the process.
        atexit.register(self.stop)

    def wait_at_most(self, seconds: float) -> None:
        """Declare a process failed after this many seconds of silence."""
        self.timeout = max(seconds, SILENT_SECONDS)

    def show(self, group: str, ranks: Sequence[int], about: Callable[[], tuple[InGroup, Mapping[str, str]]]) -> None:
        """Show the result of ``about``, the state and the last call, under ``group`` from now on.

        Watches the members of ``ranks`` that come after this one.
        """
        own_index = ranks.index(self.rank)

        def show() -> None:
            self._groups[group] = about
            self._heartbeats.watch([*ranks[own_index + 1 :], *ranks[:own_index]][:WATCHED])
            self._write_state()

        self._ask(show)

    def expect(self, ranks: Sequence[int]) -> None:
        """Record that these processes took part in a call; their silence counts from now on."""
        self._requests.put(lambda: self._heartbeats.expect(ranks))

    def states(self, ranks: Sequence[int]) -> dict[int, State] | None:
        """The latest states of those ``ranks`` that ever wrote one; None if the store does not respond."""
        states = self._ask(lambda: self._read_states(ranks))
        if states is None:
            return None
        return {rank: state for rank, state in states.items() if state.life not in self._earlier_lives}

    def calls(self, group: str, ranks: Sequence[int]) -> dict[int, dict[str, str]] | None:
        """The last calls of ``ranks`` in a group; None if the store does not respond or lacks one of them."""

        calls = self._ask(lambda: self._values({rank: _call_key(group, rank) for rank in ranks}))
        if calls is None or len(calls) < len(ranks):
            return None
        return {rank: json.loads(call) for rank, call in calls.items()}

    def publish(self, failure: Failure) -> None:
        """Add to the :attr:`failures` of all processes."""
        self._ask(lambda: self._publish(failure))

    def look(self) -> None:
        """Read failures now."""
        self._ask(self._read_failures)

    def waits(self) -> str:
        """Description of this process's wait in a call of this package; empty if there is none."""
        return "; ".join(filter(None, (about()[0].waits for about in list(self._groups.values()))))

    @contextlib.contextmanager
    def watching(self, report: Callable[[], None]) -> Iterator[None]:
        """Context in which SIGTERM, if it has the default handler, ends the process only after ``report`` ran.

        A context within another one leaves the report to the outer one.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or self._is_watching or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return

        def note(*_: Any) -> None:
            self.got_sigterm = True

        before = signal.set_wakeup_fd(self._wakeup_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, note)
        self._is_watching = True
        try:
            yield
        finally:
            if self.got_sigterm:
                report()
            self._is_watching = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(before)
            if self.got_sigterm:
                signal.raise_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the thread, publishing what only this process knows while it can."""
        if self.reason and not self.failures and self._is_connected and self._thread.is_alive():
            self.publish(Failure(self.reason))
            time.sleep(KNOWN_SECONDS)
        self._is_ending.set()
        self._wake()
        self._thread.join(timeout=SILENT_SECONDS)
        for failure in self.failures[self._num_handled :]:
            if failure.silent and not self.reason:
                self._print(failure.cause)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        last = time.monotonic()
        with self._wakeup_read, self._wakeup_write:
            while not self._is_ending.is_set() and not self._is_over():
                left = max(0.0, last + POLL_SECONDS - time.monotonic())
                if select.select([self._wakeup_read], [], [], left)[0] and (
                    signal.SIGTERM in self._wakeup_read.recv(4096)
                ):
                    self._break_off()
                with contextlib.suppress(queue.Empty):
                    while self._is_connected:
                        self._try_to(self._requests.get_nowait())
                if (seconds := time.monotonic() - last) >= POLL_SECONDS:
                    last += seconds
                    if self._is_connected:
                        self._try_to(functools.partial(self._poll, seconds))
                    self._interrupt()
            if self._is_connected:
                self._try_to(functools.partial(self._write_state, has_left=True))

    def _try_to(self, request: Callable[[], None]) -> None:
        """Make a request; without the store there is no communication."""
        from torch.distributed import DistNetworkError

        self._began = time.monotonic()
        try:
            request()
        except RuntimeError as error:
            # A request may time out while the connection still stands.
            self._is_connected = "imeout" in str(error) and not isinstance(error, DistNetworkError)
        self._began = None

    def _ask(self, request: Callable[[], _Result]) -> _Result | None:
        """The result of ``request``, run on the thread; None if the store does not respond.

        A request of the store's client blocks for as long as the process that holds the store is stopped.
        """
        results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._requests.put(lambda: results.put(request()))
        self._wake()
        # A request that has already taken long shows that the store does not respond.
        now, began = time.monotonic(), self._began
        deadline = max(now + 2 * POLL_SECONDS, (now if began is None else began) + SILENT_SECONDS)
        while self._thread.is_alive() and self._is_connected and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return results.get(timeout=0.1)
        with contextlib.suppress(queue.Empty):
            return results.get_nowait()
        return None

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wakeup_write.send(b"\0")

    def _interrupt(self) -> None:
        """Interrupt the waits for silent ranks, once the others had time to learn of them: this process may host the
        store, and exits now."""
        failures = self.failures[self._num_handled :]
        if failures and time.monotonic() - failures[0].at >= KNOWN_SECONDS:
            self._num_handled += 1
            if failures[0].silent:
                if not self.waits():
                    # A wait in the program's own collective ends with an error that names no rank.
                    self._print(failures[0].cause)
                self._break_off()

    def _print(self, cause: str) -> None:
        print(f"rank {self.rank}: {cause}", file=sys.stderr, flush=True)

    def _poll(self, seconds: float) -> None:
        """Write this process's state, and read failures and the watched states, ``seconds`` after the last time."""
        self._write_state()
        self._read_failures()
        states = self._read_states(self._heartbeats.watched)
        left = {rank for rank, state in states.items() if state.has_left}
        self._heartbeats.look({rank: state.heartbeat for rank, state in states.items()}, left, seconds)
        named = {rank for failure in self.failures for rank in failure.silent}
        if any(rank not in named for rank in self._heartbeats.silent(self.timeout)):
            # Together with ranks that fell silent at the same time, such as the others on its host.
            silent = self._heartbeats.silent(self.timeout - 2 * POLL_SECONDS)
            self._publish(Failure(f"{no_answer(silent)} (no sign of life for {self.timeout:g} s)", tuple(silent)))

    def _write_state(self, *, has_left: bool = False) -> None:
        groups = {}
        for group, about in self._groups.items():
            groups[group], call = about()
            written = groups[group].number, groups[group].call
            if self._written.get(group) != written:
                # The call first, so that a reader of the state finds it.
                self._store.set(_call_key(group, self.rank), json.dumps(dict(call)))
                self._written[group] = written
        self._beat += 1
        state = State(self._life, self._beat, self.reason, self.got_sigterm, has_left, groups)
        self._store.set(_state_key(self.rank), json.dumps(asdict(state)))

    def _read_states(self, ranks: Sequence[int]) -> dict[int, State]:
        values = self._values({rank: _state_key(rank) for rank in ranks})
        return {rank: State.read(value) for rank, value in values.items()}

    def _read_failures(self) -> None:
        if self._store.check([_FAILURES]):
            for line in self._store.get(_FAILURES).splitlines()[len(self.failures) :]:
                cause, silent = json.loads(line)
                self.failures.append(Failure(cause, tuple(silent), time.monotonic()))

    def _publish(self, failure: Failure) -> None:
        self._store.append(_FAILURES, json.dumps([failure.cause, failure.silent]) + "\n")
        self._read_failures()

    def _values(self, keys: Mapping[int, str]) -> dict[int, bytes]:
        """By rank, the values of those keys that exist."""
        if not self._store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return dict(zip(keys, self._store.multi_get(list(keys.values())), strict=True))


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


def _state_key(rank: int) -> str:
    return f"{_PREFIX}/state/{rank}"


def _call_key(group: str, rank: int) -> str:
    return f"{_PREFIX}/call/{group}/{rank}"
