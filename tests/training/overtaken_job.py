"""A job, as if of another host, that stops itself (SIGSTOP) while it publishes a checkpoint.

    python tests/training/overtaken_job.py STEP train ...

The processes of another host cannot be seen: whether it is alive shows only in its lease. The file ``stopped`` beside
the run folder says that the checkpoint of STEP is in its place and nothing is removed yet.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.training import checkpoint, lease, process_identity


def stop_after_publishing(step: int) -> None:
    """Have this process stop itself there, once."""
    sync = checkpoint.sync

    def sync_and_stop(path: Path) -> None:
        sync(path)
        stopped = path.with_name("stopped")
        if (path / f"checkpoint-{step}").exists() and not stopped.exists():
            stopped.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    checkpoint.sync = sync_and_stop


if __name__ == "__main__":
    process_identity._place = socket.gethostname = lambda: "another-host"
    lease.LEASE_SECONDS = 1.0
    stop_after_publishing(int(sys.argv[1]))
    main(sys.argv[2:])
