"""What every process shows the others through the store, by a thread that works while the main thread is blocked.

Under its own key a process writes its state twice a second: a beat that changes, its last call and wait in each group,
and why it makes no further calls. Failures are a list that all read in one order; the first process to write one wins.
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
_MOST_FAILURES = 64
_MOST_COMPLAINTS = 16
_MOST_BYTES = 1 << 24
_MOST_NUMBER = 1 << 62
_SHOWN = 40
_PREFIX = "dilated_attention_pytorch"


class UnreadableValueError(ValueError):
    """A value in the store that this package did not write."""


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

    def waits_outside(self, group: str) -> str:
        """Descriptions of its waits in other groups."""
        return "; ".join(one.waits for name, one in self.groups.items() if name != group and one.waits)


@dataclass(frozen=True, slots=True)
class Failure:
    """A published diagnosis."""

    cause: str
    silent: tuple[int, ...] = ()
    """Ranks without a sign of life for the timeout; every wait for them fails."""


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A failure and the time at which this process learned of it."""

    failure: Failure
    at: float


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
        self.failures: list[KnownFailure] = []
        """Published failures, in the same order on all processes."""
        self.unreadable: dict[str, str] = {}
        """Values in the store that are not of this package, by key."""
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
        self._num_read = 0  # failures read, including unreadable ones
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

        def show() -> bool:
            self._groups[group] = about
            self._heartbeats.watch([*ranks[own_index + 1 :], *ranks[:own_index]][:WATCHED])
            self._write_state()
            return True

        self._ask(show)

    def has_met(self, ranks: Sequence[int]) -> None:
        """Record that these processes took part in a call; their silence counts from now on."""
        self._requests.put(lambda: self._heartbeats.has_met(ranks))

    def states(self, ranks: Sequence[int]) -> dict[int, State] | None:
        """The latest states of those ``ranks`` that ever wrote one; None if the store does not respond."""
        found = self._ask(lambda: self._read_states(ranks))
        if found is None:
            return None
        return {rank: state for rank, state in found.items() if state.life not in self._earlier_lives}

    def calls(self, group: str, ranks: Sequence[int]) -> dict[int, dict[str, str]] | None:
        """The last calls of ``ranks`` in a group; None if the store does not respond or lacks one of them."""

        def read() -> dict[int, dict[str, str]]:
            values = self._read({_call_key(group, rank): rank for rank in ranks})
            found = {rank: self._parsed(_call_key(group, rank), read_call, value) for rank, value in values}
            return {rank: call for rank, call in found.items() if call is not None}

        calls = self._ask(read)
        return calls if calls is not None and len(calls) == len(ranks) else None

    def publish(self, failure: Failure) -> None:
        """Add to the :attr:`failures` of all processes."""
        self._ask(lambda: self._publish(failure))

    def look(self) -> None:
        """Read failures now."""
        self._ask(self._read_failures)

    def waits(self) -> str:
        """Description of this process's wait in a call of this package; empty if there is none."""
        return "; ".join(filter(None, (about()[0].waits for about in list(self._groups.values()))))

    @property
    def is_watching(self) -> bool:
        """Whether SIGTERM is deferred until this rank has reported its wait."""
        return self._is_watching

    @contextlib.contextmanager
    def watching(self, report: Callable[[], None]) -> Iterator[None]:
        """Context in which SIGTERM, if it has the default handler, ends the process only after ``report`` ran."""
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
        for known in self.failures[self._num_handled :]:
            if known.failure.silent and not self.reason:
                self._print(known.failure.cause)
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
        known = self.failures[self._num_handled :]
        if known and time.monotonic() - known[0].at >= KNOWN_SECONDS:
            self._num_handled += 1
            if known[0].failure.silent:
                if not self.waits():
                    # A wait in the program's own collective ends with an error that names no rank.
                    self._print(known[0].failure.cause)
                self._break_off()

    def _print(self, cause: str) -> None:
        print(f"rank {self.rank}: {cause}", file=sys.stderr, flush=True)

    def _poll(self, seconds: float) -> None:
        """Write this process's state, and read failures and the watched states, ``seconds`` after the last time."""
        self._write_state()
        self._read_failures()
        values = dict(self._read({_state_key(rank): rank for rank in self._heartbeats.watched}))
        left = {
            rank
            for rank, value in values.items()
            if (state := self._parsed(_state_key(rank), read_state, value)) and state.has_left
        }
        self._heartbeats.look(values, left, seconds)
        named = {rank for known in self.failures for rank in known.failure.silent}
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
        values = self._read({_state_key(rank): rank for rank in ranks})
        found = {rank: self._parsed(_state_key(rank), read_state, value) for rank, value in values}
        return {rank: state for rank, state in found.items() if state is not None}

    def _read_failures(self) -> bool:
        for _ in range(_MOST_FAILURES):
            key = _failure_key(self._num_read + 1)
            if not self._store.check([key]):
                break
            self._num_read += 1
            failure = self._parsed(key, read_failure, self._store.get(key))
            if failure is not None:
                self.failures.append(KnownFailure(failure, time.monotonic()))
        return True

    def _publish(self, failure: Failure) -> bool:
        value = json.dumps(asdict(failure))
        for _ in range(_MOST_FAILURES):
            self._read_failures()
            # The first process to write wins.
            if self._store.compare_set(_failure_key(self._num_read + 1), "", value) == value.encode():
                break
        return self._read_failures()

    def _read(self, ranks: Mapping[str, int]) -> list[tuple[int, bytes]]:
        """The values of the keys that exist, by rank."""
        keys = list(ranks)
        if keys and not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        return (
            [(ranks[key], value) for key, value in zip(keys, self._store.multi_get(keys), strict=True)] if keys else []
        )

    def _parsed(self, key: str, read: Callable[[bytes], _Result], value: bytes) -> _Result | None:
        """``read(value)``. An unreadable value is reported once and skipped."""
        try:
            found = read(value)
        except UnreadableValueError as error:
            if key not in self.unreadable and len(self.unreadable) < _MOST_COMPLAINTS:
                self._print(f"ignoring {key!r} in the store, which this package did not write: {error}")
            self.unreadable[key] = str(error)
            return None
        self.unreadable.pop(key, None)
        return found


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


def read_state(value: bytes) -> State:
    """Parse a state.

    Raises:
        UnreadableValueError: the value has another format; the other functions here raise it too.
    """
    values = _read_object(value)
    groups = values.pop("groups", None)
    is_state = isinstance(groups, dict) and _has_types(values, State(), without="groups")
    if not is_state or not all(isinstance(one, dict) and _has_types(one, InGroup()) for one in groups.values()):
        raise UnreadableValueError(f"expected the state of a rank, got {_shown(value)}")
    return State(**values, groups={name: InGroup(**one) for name, one in groups.items()})


def read_failure(value: bytes) -> Failure:
    """Parse a failure."""
    values = _read_object(value)
    cause, silent = values.get("cause"), values.get("silent")
    if not isinstance(cause, str) or not cause or not isinstance(silent, list) or len(values) != 2:
        raise UnreadableValueError(f"expected the failure of a rank, got {_shown(value)}")
    if any(type(rank) is not int or rank < 0 for rank in silent):
        raise UnreadableValueError(f"expected numbers of ranks, got {_shown(value)}")
    return Failure(cause, tuple(silent))


def read_call(value: bytes) -> dict[str, str]:
    """Parse a call's arguments by name."""
    values = _read_object(value)
    if any(not isinstance(argument, str) for argument in values.values()):
        raise UnreadableValueError(f"expected the arguments of a call, got {_shown(value)}")
    return values


def _has_types(values: Mapping[str, Any], like: State | InGroup, without: str = "") -> bool:
    """Whether the values have the names and types of a dataclass, and no number is negative or huge."""
    kinds = {name: type(value) for name, value in asdict(like).items() if name != without}
    return {name: type(value) for name, value in values.items()} == kinds and all(
        0 <= value < _MOST_NUMBER for value in values.values() if type(value) is int
    )


def _read_object(value: bytes) -> dict[str, Any]:
    if len(value) > _MOST_BYTES:
        raise UnreadableValueError(f"expected at most {_MOST_BYTES:,} bytes, got {_shown(value)}")
    try:
        values = json.loads(value.decode())
    except (ValueError, RecursionError) as error:
        raise UnreadableValueError(f"expected JSON, got {_shown(value)}") from error
    if not isinstance(values, dict):
        raise UnreadableValueError(f"expected an object of JSON, got {_shown(value)}")
    return values


def _shown(value: bytes) -> str:
    return f"{value[:_SHOWN]!r}{'' if len(value) <= _SHOWN else f' ... ({len(value):,} bytes)'}"


def _state_key(rank: int) -> str:
    return f"{_PREFIX}/state/{rank}"


def _failure_key(number: int) -> str:
    return f"{_PREFIX}/failures/{number}"


def _call_key(group: str, rank: int) -> str:
    return f"{_PREFIX}/call/{group}/{rank}"
