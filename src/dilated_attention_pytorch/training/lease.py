"""A run folder belongs to one job at a time: a lease that the job renews while it lives."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from dilated_attention_pytorch.errors import RunError

from .process import Mark, mark_of

LEASE_NAME = "lease.json"
RENEWAL_SECONDS = 5.0
"""How often a holder renews its lease."""
LEASE_SECONDS = 30.0
"""A lease that was not renewed for so long is abandoned, where its holder cannot be asked after."""
_LONGEST = 1 << 14
"""Bytes of the largest file that can be a lease."""


class Lease:
    """The right to write to a run folder, held while the context lasts.

    The holder writes its name into a file that can be made by one alone, and renews it. Who finds such a file leaves
    the folder alone, unless the holder is provably gone (its process was one of this machine and has ended), or has not
    renewed the lease for :data:`LEASE_SECONDS`, by the clock of who waits. Jobs of one machine change the file one
    after the other, by a lock of the system. Such locks do not reach over every file system that hosts share. There a
    file must be made once and renamed at once, and a holder whose lease was taken all the same ends at :meth:`check`.

    Args:
        run: the run folder, which exists.
        tell: is told a line if it must be waited whether the holder of an old lease is still alive.

    Raises:
        RunError: another job holds it.
    """

    def __init__(self, run: Path, tell: Callable[[str], None] = lambda line: None) -> None:
        self.run = run
        self.path = run / LEASE_NAME
        self._token = secrets.token_hex(8)
        self._tell = tell
        self._file = -1
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="dilated-attention-lease", daemon=True)
        self._record: dict[str, Any] = {}

    def __enter__(self) -> Lease:
        self._record = {
            "token": self._token,
            "holder": mark_of(os.getpid()).to_dict(),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv)[:1000],
        }
        while True:
            with alone_in(self.run):
                try:
                    self._file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o644)
                except FileExistsError:
                    pass
                else:
                    self._write_first()
                    break
            self._take_over()
        self._thread.start()
        return self

    def _write_first(self) -> None:
        try:
            self._renew(0)
        except OSError:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join(timeout=RENEWAL_SECONDS)
        if self.is_held():
            self.path.unlink(missing_ok=True)
        # A thread that still hangs in the file system must not find another file under this number.
        if not self._thread.is_alive():
            os.close(self._file)

    def check(self) -> None:
        """Raise :class:`RunError` if another job has taken the folder: before anything is written to it."""
        if not self.is_held():
            raise RunError(
                f"{self.run} was taken by another job ({_in_words(_read(self.path))}) while this one did not renew its "
                f"lease, or {LEASE_NAME} was removed; this job ends here and writes nothing more"
            )

    def is_held(self) -> bool:
        """Whether this job still has the folder."""
        return _token_of(_read(self.path)) == self._token

    def _keep(self) -> None:
        beats = 0
        while not self._is_over.wait(RENEWAL_SECONDS):
            beats += 1
            # A file system that does not answer now may answer the next time.
            with contextlib.suppress(OSError):
                self._renew(beats)

    def _renew(self, beats: int) -> None:
        # Into the file that this job has made: if another one lies in its place by now, that is left alone.
        text = json.dumps({**self._record, "renewed": f"{beats:012}"})
        os.pwrite(self._file, text.encode(), 0)
        os.fsync(self._file)

    def _take_over(self) -> None:
        """Remove the lease that is there if its holder has abandoned it.

        Raises:
            RunError: it has not.
        """
        found = _read(self.path)
        if found is None:
            return  # released meanwhile
        holder = _holder_of(found)
        if not (holder is not None and holder.is_gone()):
            if holder is not None and holder.is_alive():
                raise self._held(found)
            self._tell(
                f"{self.run} has the lease of another job ({_in_words(found)}): waiting for up to {LEASE_SECONDS:.0f} "
                "s to see whether that is alive"
            )
            deadline = time.monotonic() + LEASE_SECONDS
            while time.monotonic() < deadline:
                time.sleep(min(0.2, LEASE_SECONDS / 4))
                now = _read(self.path)
                if now is None:
                    return
                if now != found:
                    raise self._held(now)
        with alone_in(self.run):
            if _read(self.path) == found:
                self._remove(found)

    def _remove(self, found: bytes) -> None:
        aside = self.path.with_name(f"{LEASE_NAME}.{self._token}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return  # a job of another machine was faster
        try:
            # It may have taken the folder just before: then it gets its lease back.
            moved = _read(aside)
            if moved is not None and _token_of(moved) != _token_of(found):
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self.path, follow_symlinks=False)
                raise self._held(moved)
        finally:
            aside.unlink(missing_ok=True)

    def _held(self, found: bytes) -> RunError:
        holder = _holder_of(found)
        ending = "" if holder is None else f" (kill {holder.pid} on {holder.host})"
        return RunError(
            f"{self.run} is in use: {_in_words(found)}. Two jobs in one folder would destroy each other's checkpoints; "
            f"wait until that one has ended, or end it{ending}"
        )


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """No other process of this machine is in this context for ``folder`` meanwhile, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes | None:
    """What lies there; None if there is nothing."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path} is no lease of a run ({error.strerror}); remove it") from error
    try:
        return os.read(file, _LONGEST)
    except OSError as error:
        raise RunError(f"{path} is no lease of a run ({error.strerror}); remove it") from error
    finally:
        os.close(file)


def _record_of(found: bytes | None) -> dict[str, Any]:
    try:
        record = json.loads(found or b"{}")
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _token_of(found: bytes | None) -> Any:
    return _record_of(found).get("token")


def _holder_of(found: bytes | None) -> Mark | None:
    try:
        return Mark.from_dict(_record_of(found)["holder"])
    except (KeyError, TypeError, ValueError):
        return None


def _in_words(found: bytes | None) -> str:
    record, holder = _record_of(found), _holder_of(found)
    if holder is None:
        return "a job that does not say who it is"
    return f"process {holder.pid} on {holder.host} holds it since {record.get('since')}: {record.get('command')}"
