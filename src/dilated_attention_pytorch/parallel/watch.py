"""A thread that interrupts waits in C++ code when a rank has failed or the process receives SIGTERM."""

from __future__ import annotations

import atexit
import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from .roll_call import KNOWN_SECONDS, LOOK_SECONDS, RollCall


class Watch:
    """Waits for other ranks happen in the transport's C++ code, which neither exceptions nor signals interrupt.

    This thread interrupts such a wait in two cases: a failure was published, or the process received SIGTERM and has
    not yet reported what it waited for.

    Args:
        roll: this process's index among all processes.
        break_off: makes every wait of this process raise ``RuntimeError``.
        is_over: whether the process group has been destroyed.
    """

    def __init__(
        self,
        roll: RollCall,
        break_off: Callable[[], None],
        is_over: Callable[[], bool],
    ) -> None:
        self.is_told = False
        """Whether SIGTERM came while this process waited."""
        self._roll = roll
        self._break_off = break_off
        self._waits: list[Callable[[], str]] = []
        self._is_over = is_over
        self._num_known = len(roll.failures)
        self._is_heeding = False
        # Python delivers signals only to its main thread and to a wakeup file descriptor.
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dilated-attention-watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def ask(self, waits: Callable[[], str]) -> None:
        """Register another source of descriptions of this process's waits."""
        self._waits.append(waits)

    def waits(self) -> str:
        """Description of this process's wait in a call of this package; empty if there is none."""
        return "; ".join(filter(None, (waits() for waits in self._waits)))

    @contextlib.contextmanager
    def heeding(self, say: Callable[[], None]) -> Iterator[None]:
        """Context in which SIGTERM, if it has the default handler, ends the process only after ``say`` ran."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or self._is_heeding or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        before = signal.set_wakeup_fd(self._button.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._note)
        self._is_heeding = True
        try:
            yield
        finally:
            if self.is_told:
                say()
            self._is_heeding = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(before)
            if self.is_told:
                signal.raise_signal(signal.SIGTERM)

    @property
    def is_heeding(self) -> bool:
        """Whether SIGTERM is deferred until this rank has reported its wait."""
        return self._is_heeding

    def stop(self) -> None:
        """End the thread: returning from C++ code during interpreter shutdown would abort the process."""
        self._end.set()
        self._thread.join(timeout=2 * LOOK_SECONDS)
        for heard in self._roll.failures[self._num_known :]:
            if heard.failure.silent and not self._roll.words:
                self._tell(heard.failure.cause)
        atexit.unregister(self.stop)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_told = True

    def _run(self) -> None:
        with self._bell, self._button:
            while not self._end.wait(LOOK_SECONDS) and not self._is_over():
                self._look()

    def _look(self) -> None:
        if self._rings():
            self._break_off()
        known = self._roll.failures[self._num_known :]
        # Only after the others had time to learn of it: this process may host the store, and exits now.
        if known and time.monotonic() - known[0].at >= KNOWN_SECONDS:
            self._num_known += 1
            if known[0].failure.silent:
                self._give_up(known[0].failure.cause)

    def _give_up(self, cause: str) -> None:
        if not self.waits():
            # A wait in the program's own collective ends with an error that names no rank.
            self._tell(cause)
        self._break_off()

    def _tell(self, cause: str) -> None:
        print(f"rank {self._roll.rank}: {cause}", file=sys.stderr, flush=True)

    def _rings(self) -> bool:
        """Whether SIGTERM has arrived."""
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            numbers = self._bell.recv(4096)
        return signal.SIGTERM in numbers
