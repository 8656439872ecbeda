"""Run under torchrun: a training run in which a rank is stopped, and what the other ranks say.

    torchrun --nproc-per-node 4 tests/training/stopped_rank.py FOLDER TEXTS CHANGES

CHANGES is JSON: changes of the settings. Rank 3 stops itself (SIGSTOP) in the backward pass of its third step. Every
rank leaves what it said in ``FOLDER/said-RANK.json``, rank 3 before it stops.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.training import RunError, train
from dilated_attention_pytorch.training.trainer import LongNetTrainer
from training.runs import quiet
from training.spread_runs import small_settings

CULPRIT = 3
STEP = 3


def main() -> None:
    """Train until that happens."""
    folder, texts, changes = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    rank = int(os.environ["RANK"])
    said = folder / f"said-{rank}.json"
    torch.set_num_threads(1)
    compute_loss, done = LongNetTrainer.compute_loss, [0]

    def stop(grad: Tensor) -> None:
        said.write_text(json.dumps({"pid": os.getpid(), "at": time.monotonic()}))
        os.kill(os.getpid(), signal.SIGSTOP)

    def compute_and_stop(*args: Any, **options: Any) -> Any:
        loss = compute_loss(*args, **options)
        done[0] += 1
        if rank == CULPRIT and done[0] == STEP:
            loss.register_hook(stop)
        return loss

    dist.init_process_group("gloo")  # on a busy machine some import for longer than the timeout of the run
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(LongNetTrainer, "compute_loss", compute_and_stop)
        try:
            train(small_settings(texts, **changes), folder / "run", quiet())
        except RunError as error:
            if rank != CULPRIT:
                said.write_text(json.dumps({"message": str(error), "at": time.monotonic()}))
            raise


if __name__ == "__main__":
    main()
