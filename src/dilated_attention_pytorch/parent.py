"""Ending a process together with its parent, by the kernel (Linux): also while it imports, is blocked or is stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .interrupt import is_own_command

LAUNCH = "TORCHELASTIC_RUN_ID"
"""Variable in the environment of every process that torchrun starts."""
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends; no-op on other systems than Linux.

    Exits at once if the parent has ended already; of an unknown one, only where process 1 inherits orphans.

    Args:
        parent: process id of the parent; None if unknown.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    found = os.getppid()
    if found == parent or (parent is None and not _is_init(found)):
        return
    print(f"process {os.getpid()}: the process that started this one has ended, so this one ends", file=sys.stderr)
    os._exit(1)


def end_with_launcher(environment: Mapping[str, str]) -> None:
    """:func:`end_with_parent` in a process that torchrun started.

    Otherwise the ranks of a killed launch would stay, or train next to those of the next one.
    """
    if LAUNCH in environment:
        end_with_parent()


def end_command_with_launcher(environment: Mapping[str, str], command: Sequence[str]) -> None:
    """:func:`end_with_launcher` if ``command`` is this package's own; programs that import the package are left alone.

    Args:
        environment: environment of the process.
        command: arguments that started the interpreter.
    """
    if is_own_command(command):
        end_with_launcher(environment)


def end_worker_with_trainer(trainer: int, worker: int) -> None:
    """``worker_init_fn`` of a ``DataLoader`` in process ``trainer``: its own check misses one killed before it."""
    end_with_parent(trainer)


def _is_init(pid: int) -> bool:
    """Whether the process inherits orphans; a container's first process may be torchrun itself."""
    return pid == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes()
