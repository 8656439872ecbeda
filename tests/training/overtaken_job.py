"""A job, as if of another host, that stops itself (SIGSTOP) while it publishes a checkpoint."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.training import checkpoint, lease, process_identity
from training.runs import leave_out_figures


def train_and_stop(step: int, line: str) -> None:
    """Run the command ``line``, and stop when the checkpoint of ``step`` is in its place and nothing is removed yet.

    The file ``stopped`` beside the run folder, with the number of the process, says so. The processes of another host
    cannot be seen: whether it is alive shows only in its lease.
    """
    process_identity._place = socket.gethostname = lambda: "another-host"
    lease.LEASE_SECONDS = 1.0
    leave_out_figures(pytest.MonkeyPatch())
    sync = checkpoint.sync

    def sync_and_stop(path: Path) -> None:
        sync(path)
        stopped = path.with_name("stopped")
        if (path / f"checkpoint-{step}").exists() and not stopped.exists():
            stopped.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    checkpoint.sync = sync_and_stop
    main(line.split())
