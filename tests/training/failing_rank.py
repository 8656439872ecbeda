"""Run under torchrun: the command ``train``, in which a rank fails or stands still at a step.

    torchrun --nproc-per-node N tests/training/failing_rank.py WAY RANK STEPS train ...

WAY is ``dies`` (killed, once at each of STEPS, which are given as 2,6) or ``waits`` (for ever, so that the others do in
a collective). A file ``reached-STEP`` beside the run folder, with the number of the process, says that it was reached.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import Trainer

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.training.process_group import process_rank
from training.runs import leave_out_figures


def fail(way: str, rank: int, steps: set[int], folder: Path) -> None:
    """Have this process fail at ``steps``, if it is the one."""
    train_one = Trainer.training_step

    def training_step(self: Trainer, *args: Any, **options: Any) -> Any:
        reached = folder / f"reached-{self.state.global_step}"
        if self.state.global_step in steps and process_rank() == rank and not reached.exists():
            part = reached.with_suffix(".part")
            part.write_text(str(os.getpid()))
            part.rename(reached)
            if way == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()
        return train_one(self, *args, **options)

    Trainer.training_step = training_step


def run(way: str, rank: str, steps: str, *words: str) -> None:
    """Be one of the ranks."""
    leave_out_figures(pytest.MonkeyPatch())
    output = Path(words[words.index("--output") + 1])
    fail(way, int(rank), set(map(int, steps.split(","))), output.parent)
    main(list(words))


def launch(max_restarts: int, *words: str) -> None:
    """The agent of torchrun for one rank, which it forks."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=1,
        run_id="of-a-test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, run)(*words)


if __name__ == "__main__":
    run(*sys.argv[1:])
