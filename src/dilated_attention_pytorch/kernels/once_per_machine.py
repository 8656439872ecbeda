"""What is found out once per machine: by one process, and kept in a file of the cache folder for all others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.output import write_text

T = TypeVar("T")
_ONE_AT_A_TIME = threading.Lock()


def once_per_machine(
    file: Path | None,
    find: Callable[[], T],
    *,
    decode: Callable[[Any], T | None],
    encode: Callable[[T], Any],
    waiting_seconds: float,
) -> T:
    """What ``file`` keeps, or what ``find`` returns, which is then kept.

    Processes that start at once wait for the one that finds it out. Where the folder cannot be used, every process
    finds it out.

    Args:
        file: see :func:`file_of`; None = nothing is kept.
        find: finds it out; one thread and one process at a time.
        decode: the finding from JSON values; None, or an error of the values, if they are no finding.
        encode: JSON values of a finding; None if it is not to be kept.
        waiting_seconds: how long to wait for another process.
    """
    with _ONE_AT_A_TIME:
        if (kept := read_kept(file, decode)) is not None:
            return kept
        with _locked(file, waiting_seconds):
            if (kept := read_kept(file, decode)) is not None:
                return kept
            found = find()
            keep(file, encode(found))
            return found


def file_of(subject: str, *identity: str) -> Path | None:
    """The file of a subject for what determines the finding, such as versions; None without a home folder."""
    digest = hashlib.blake2b("\0".join(identity).encode(), digest_size=12)
    with contextlib.suppress(RuntimeError):
        return cache_folder() / f"{subject}-{digest.hexdigest()}.json"
    return None


def read_kept(file: Path | None, decode: Callable[[Any], T | None]) -> T | None:
    """The kept finding; None if there is none, or it is damaged."""
    if file is None:
        return None
    try:
        return decode(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def keep(file: Path | None, values: Any) -> None:
    """Write JSON values, None for nothing, where the folder allows it."""
    if file is None or values is None:
        return
    with contextlib.suppress(OSError):  # a folder that cannot be written, a full disk
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_text(file, json.dumps(values))


@contextlib.contextmanager
def _locked(file: Path | None, seconds: float) -> Iterator[None]:
    """Mutual exclusion between processes, where the folder allows it; the system releases a dead process's lock."""
    from filelock import FileLock  # PyTorch depends on it

    with contextlib.ExitStack() as held:
        if file is not None:
            with contextlib.suppress(OSError, NotImplementedError):  # NotImplementedError: a file system without locks
                file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                held.enter_context(FileLock(file.with_suffix(".lock"), timeout=seconds))
        yield
