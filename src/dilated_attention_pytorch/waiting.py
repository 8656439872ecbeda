"""How threads wait for each other: awake, which is fastest on a machine of one's own, or asleep, which shares it.

The OpenMP runtime of PyTorch's CPU builds lets a thread that waits turn in circles for a while. Where another program
wants the same core, the thread that is waited for does not get it meanwhile, and every parallel loop takes as long as a
turn of the scheduler. How to wait is read from the environment when the runtime is loaded, so this module imports
nothing of PyTorch, and the package asks it before it does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path

VARIABLE = "OMP_WAIT_POLICY"
_SET_BY_USER = (VARIABLE, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_LOOKS, _SECONDS_BETWEEN = 3, 0.01
_BUSY_LOAD = 0.5
_LOAD = Path("/proc/loadavg")


def choose_waiting(environment: MutableMapping[str, str], command: Sequence[str]) -> None:
    """Let waiting threads sleep if ``command`` is this package's own command, the machine is shared, and nobody chose.

    Args:
        environment: of the process.
        command: the words that started the interpreter.
    """
    if _is_own_command(command) and not any(name in environment for name in _SET_BY_USER) and is_shared():
        environment[VARIABLE] = "PASSIVE"


def _is_own_command(command: Sequence[str]) -> bool:
    words = iter(command[1:])
    for word in words:
        if word == "-m":
            return next(words, "").partition(".")[0] == __name__.partition(".")[0]
        if word in ("-W", "-X"):  # options of Python with a word of their own
            next(words, "")
        elif not word.startswith("-"):
            return Path(word).stem == "dilated-attention"
    return False


def is_shared() -> bool:
    """Whether other programs compute on this machine, or this one may not use its cores all the time.

    That is: its control group has a quota below its cores; or the load of the last minute was at least half a core; or
    other threads were running, or wanted to, at each of three looks.
    """
    if sys.platform == "win32":
        return False
    return _quota() < (os.cpu_count() or 1) or os.getloadavg()[0] >= _BUSY_LOAD or _others_run()


def _others_run() -> bool:
    if not _LOAD.is_file():
        return False
    for look in range(_LOOKS):
        if look:
            time.sleep(_SECONDS_BETWEEN)
        # "0.10 0.20 0.30 2/345 678": two threads run or want to, of which one is this.
        if int(_LOAD.read_text().split()[3].partition("/")[0]) < 2:
            return False
    return True


def _quota() -> float:
    """Cores' worth of time that the control group of this process may use; infinite without a limit."""
    own = Path("/sys/fs/cgroup/cpu.max")
    if own.is_file():
        most, period = own.read_text().split()
        return float("inf") if most == "max" else int(most) / int(period)
    older = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    if older.is_file():
        most = older.read_text().strip()
        return float("inf") if int(most) < 0 else int(most) / int(older.with_name("cpu.cfs_period_us").read_text())
    return float("inf")


def waiting_in_words() -> str:
    """How the threads of this process wait, for a person."""
    chosen = [f"{name}={os.environ[name]}" for name in _SET_BY_USER if name in os.environ]
    return ", ".join(chosen) or "as OpenMP has it: awake for a while, then asleep"
