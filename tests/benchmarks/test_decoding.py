"""Busy processes beside the benchmark of decoding end with it."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.decoding import BUSY


def test_a_busy_process_ends_when_its_parent_is_killed() -> None:
    parent = f"""if True:
        import os, signal, subprocess, sys
        busy = subprocess.Popen([sys.executable, "-c", {BUSY!r}, str(os.getpid())])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    # Returns when both have closed their output.
    done = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == -9
