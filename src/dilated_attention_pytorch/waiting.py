"""The OpenMP wait policy: spinning, which is fastest on an idle machine, or sleeping, which suits a shared one.

The OpenMP runtime of PyTorch's CPU builds lets waiting threads spin for a while. If another program
needs the same core, the thread that they wait for is delayed, and every parallel loop takes as long as a scheduler
time slice. The policy is read from the environment when the runtime is loaded, so this module does not import
PyTorch, and the package calls it first.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from .interrupt import is_own_command

VARIABLE = "OMP_WAIT_POLICY"
_SET_BY_USER = (VARIABLE, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_LOOKS, _SECONDS_BETWEEN = 3, 0.01
_BUSY_LOAD = 0.5
_LOAD = Path("/proc/loadavg")


def choose_waiting(environment: MutableMapping[str, str], command: Sequence[str]) -> None:
    """Select sleeping if ``command`` is this package's own command, the machine is shared, and no policy is set.

    Args:
        environment: environment of the process.
        command: arguments that started the interpreter.
    """
    if is_own_command(command) and not any(name in environment for name in _SET_BY_USER) and is_shared():
        environment[VARIABLE] = "PASSIVE"


def is_shared() -> bool:
    """Whether other programs compute on this machine, or a CPU quota limits this process.

    That is: its control group has a quota below its cores; or the load of the last minute was at least half a core; or
    other threads were runnable at each of three checks.
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
        # Format "0.10 0.20 0.30 2/345 678": two runnable threads, including this one.
        if int(_LOAD.read_text().split()[3].partition("/")[0]) < 2:
            return False
    return True


def _quota() -> float:
    """CPU quota of this process's control group, in cores; infinite without a limit."""
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
    """Description of the wait policy."""
    chosen = [f"{name}={os.environ[name]}" for name in _SET_BY_USER if name in os.environ]
    return ", ".join(chosen) or "as OpenMP has it: awake for a while, then asleep"
