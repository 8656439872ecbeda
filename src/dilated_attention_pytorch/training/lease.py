"""A lease that gives one job exclusive use of a run folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.output import write_text

from .process_identity import ProcessId, mark_of

LEASE_NAME = "lease.lock"
"""The lock, which its holder renews."""
HOLDER_NAME = "lease.json"
"""Who holds it."""
LEASE_FILES = "*lease.*"
"""Pattern of both names, and of what a killed job leaves of writing them."""
LEASE_SECONDS = 30.0
"""Seconds without renewal after which the lease of a process that cannot be checked counts as abandoned."""
_RENEWALS = 6
"""Renewals in that time."""
_POLL_SECONDS = 0.2


class Lease:
    """The exclusive right to write to a run folder, held within the context.

    :class:`filelock.SoftFileLease` creates, renews and takes over the lock; it needs no file system that supports
    locks, only atomic creation and renaming. The lock of a process of this machine that has ended is free at once,
    that of another host's after :data:`LEASE_SECONDS` without renewal. A holder that loses the lock stops at
    :meth:`check`. Three promises of a run folder are kept here:

    - a process of this machine that is stopped (SIGSTOP) keeps the lock, although it does not renew it;
    - a refusal names the process that holds the lock, since when it does, and its command;
    - a lock whose file is empty, as after a crash of its host, is abandoned as well.

    Args:
        run: existing run folder.
        tell: called with a message while waiting to see whether an old lease is still alive.

    Raises:
        RunError: another job holds the lease.
    """

    def __init__(self, run: Path, tell: Callable[[str], None] = lambda line: None) -> None:
        from filelock import SoftFileLease

        self.run = run
        self.token = ""
        """Unique id of this holder."""
        self._tell = tell
        self._lock = SoftFileLease(
            run / LEASE_NAME,
            lease_duration=LEASE_SECONDS,
            heartbeat_interval=LEASE_SECONDS / _RENEWALS,
            poll_interval=min(_POLL_SECONDS, LEASE_SECONDS / _RENEWALS),
            thread_local=False,
        )

    def __enter__(self) -> Lease:
        from filelock import Timeout

        try:
            if self._has_living_holder():
                raise self._held()
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                self._take_over()
            self.token = self._lock.token or ""
            record = {
                "token": self.token,
                "holder": mark_of(os.getpid()).to_dict(),
                "since": datetime.now().astimezone().isoformat(timespec="seconds"),
                "command": shlex.join(sys.argv)[:1000],
            }
            try:
                write_text(self.run / HOLDER_NAME, json.dumps(record))
            except OSError:
                self._lock.release()
                raise
        except OSError as error:
            raise RunError(
                f"{self.run} cannot be held ({error.strerror}): look at its disk, and remove {self.run / LEASE_FILES} "
                "if no job runs there"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # of a disk that refuses to write, which has ended the run
            if self.is_held():
                (self.run / HOLDER_NAME).unlink(missing_ok=True)
            self._lock.release()

    def check(self) -> None:
        """Raise :class:`RunError` if another job has taken the folder or it is gone; call it before each change."""
        check_exists(self.run)
        if not self.is_held():
            raise RunError(
                f"{self.run} was taken by another job ({self._describe()}) while this one did not renew its lease, or "
                f"{LEASE_NAME} was removed; this job ends here and writes nothing more"
            )

    def is_held(self) -> bool:
        """Whether this job still holds the lease."""
        owner = self._lock.owner
        return owner is not None and owner.token == self.token

    def _take_over(self) -> None:
        """Wait until the lock counts as abandoned, and take it.

        Raises:
            RunError: it is in use.
        """
        from filelock import Timeout

        self._tell(
            f"{self.run} has the lease of another job ({self._describe()}): waiting for up to {LEASE_SECONDS:.0f} s to "
            "see whether that is alive"
        )
        before = self._renewed()

        def is_alive() -> bool:
            return self._has_living_holder() or self._renewed() not in (before, None)

        with contextlib.suppress(Timeout):
            self._lock.acquire(timeout=LEASE_SECONDS + 4 * _POLL_SECONDS, cancel_check=is_alive)
        if not (self._lock.is_locked or is_alive() or self._lock.owner):
            # filelock would wait for the writer of an empty file without end.
            self._lock.force_break()
            with contextlib.suppress(Timeout):
                self._lock.acquire(timeout=0)
        if not self._lock.is_locked:
            raise self._held()

    def _renewed(self) -> tuple[int, int] | None:
        """What every renewal and every new holder changes; None without a lock."""
        try:
            status = (self.run / LEASE_NAME).lstat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _has_living_holder(self) -> bool:
        """Whether a process of this machine holds the lease, running or stopped."""
        holder = _mark(self._record())
        return holder is not None and holder.is_alive()

    def _held(self) -> RunError:
        holder = _mark(self._record())
        ending = "" if holder is None else f" (kill {holder.pid} on {holder.host})"
        return RunError(
            f"{self.run} is in use: {self._describe()}. Two jobs in one folder would destroy each other's checkpoints; "
            f"wait until that one has ended, or end it{ending}"
        )

    def _record(self) -> dict[str, Any]:
        """What the holder says about itself; empty if it is not legible."""
        try:
            descriptor = os.open(self.run / HOLDER_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                record = json.loads(file.read(1 << 14))
        except (OSError, ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def _describe(self) -> str:
        record = self._record()
        holder = _mark(record)
        if holder is None:
            return "a job that does not say who it is"
        return f"process {holder.pid} on {holder.host} holds it since {record.get('since')}: {record.get('command')}"


def _mark(record: dict[str, Any]) -> ProcessId | None:
    try:
        return ProcessId.from_dict(record["holder"])
    except (KeyError, TypeError, ValueError):
        return None


def check_exists(run: Path) -> None:
    """Raise :class:`RunError` if the run folder is gone."""
    if not run.is_dir():
        raise RunError(
            f"{run} is gone: it was removed or renamed, or its disk was detached, while this job ran; the job ends "
            "here and writes nothing more. Restore the folder and continue with --resume, or start a new run"
        )


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Context with mutual exclusion between this machine's processes for ``folder``, given file locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
