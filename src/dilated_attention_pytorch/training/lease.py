"""A lease that gives one job exclusive use of a run folder."""

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
"""Seconds between renewals."""
LEASE_SECONDS = 30.0
"""Seconds without renewal after which a lease counts as abandoned if its holder cannot be checked."""
_LONGEST = 1 << 14
"""Size limit of a lease file in bytes."""


class Lease:
    """The exclusive right to write to a run folder, held within the context.

    The holder creates a file exclusively with its identity, and renews it. Another job that finds the file leaves
    the folder alone, unless the holder has certainly ended (a process of this machine), or has not
    renewed the lease for :data:`LEASE_SECONDS` by the waiting job's clock. Jobs on one machine serialise their changes
    with a file lock. Not every shared file system supports such locks; without them, exclusive
    creation and renaming must be atomic, and a holder that loses its lease stops at :meth:`check`.

    Args:
        run: existing run folder.
        tell: called with a message while waiting to see whether an old lease is still alive.

    Raises:
        RunError: another job holds the lease.
    """

    def __init__(self, run: Path, tell: Callable[[str], None] = lambda line: None) -> None:
        self.run = run
        self.path = run / LEASE_NAME
        self.token = secrets.token_hex(8)
        """Unique id of this holder."""
        self._tell = tell
        self._file = -1
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="dilated-attention-lease", daemon=True)
        self._record: dict[str, Any] = {}

    def __enter__(self) -> Lease:
        self._record = {
            "token": self.token,
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
        # A thread still blocked in the file system must not use a reused file descriptor.
        if not self._thread.is_alive():
            os.close(self._file)

    def check(self) -> None:
        """Raise :class:`RunError` if another job has taken the folder or it is gone; call it before each change."""
        check_exists(self.run)
        if not self.is_held():
            raise RunError(
                f"{self.run} was taken by another job ({_in_words(_read(self.path))}) while this one did not renew its "
                f"lease, or {LEASE_NAME} was removed; this job ends here and writes nothing more"
            )

    def is_held(self) -> bool:
        """Whether this job still holds the lease."""
        return _token_of(_read(self.path)) == self.token

    def _keep(self) -> None:
        beats = 0
        while not self._is_over.wait(RENEWAL_SECONDS):
            beats += 1
            # The error may be temporary; the next renewal tries again.
            with contextlib.suppress(OSError):
                self._renew(beats)

    def _renew(self, beats: int) -> None:
        # Write to this job's own open file: if another one has replaced it, that one is not changed.
        text = json.dumps({**self._record, "renewed": f"{beats:012}"})
        os.pwrite(self._file, text.encode(), 0)
        os.fsync(self._file)

    def _take_over(self) -> None:
        """Remove an abandoned lease.

        Raises:
            RunError: the lease is in use.
        """
        found = _read(self.path)
        if found is None:
            return  # released in the meantime
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
        aside = self.path.with_name(f"{LEASE_NAME}.{self.token}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return  # a job on another machine was faster
        try:
            # If its holder renewed it just before, restore the lease.
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


def check_exists(run: Path) -> None:
    """Raise :class:`RunError` if the run folder is gone."""
    if not run.is_dir():
        raise RunError(
            f"{run} is gone: it was removed or renamed, or its disk was detached, while this job ran; the job ends "
            "here and writes nothing more. Restore the folder and go on with --resume, or begin anew"
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


def _read(path: Path) -> bytes | None:
    """The contents of a lease file; None if it does not exist."""
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
