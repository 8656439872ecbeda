"""The checkpoints of a run folder: what is in them by name, and where they are."""

from __future__ import annotations

import re
from pathlib import Path

SETTINGS_NAME = "training.json"
WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
STATE_NAME = "trainer_state.json"
SCALER_NAME = "scaler.pt"
STAGING_NAME = ".unfinished"
"""Where a checkpoint is written before it gets its name: whatever lies in it is not complete."""
OF_ALL = (CONFIG_NAME, WEIGHTS_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, STATE_NAME)
"""What every process reads of a checkpoint, whoever wrote it."""
ALSO_WRITTEN = ("generation_config.json", SCALER_NAME)
"""What models of transformers may add to a checkpoint, and runs in float16."""
RESTORE = "restore the folder from a copy, or begin anew into another --output"
"""What to do about one that is damaged."""

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})", re.ASCII)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of the run folder, the one that is furthest on first. Nothing of them is looked at."""
    found = [path for path in run.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=checkpoint_step, reverse=True)


def latest_checkpoint(run: Path) -> Path | None:
    """The checkpoint of the run folder that is furthest on; None if there is none."""
    return next(iter(checkpoints(run)), None)


def checkpoint_step(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def file_names(processes: int, rank: int | None = None) -> list[str]:
    """What is read of a checkpoint: by the process ``rank``, or by all."""
    ranks = range(processes) if rank is None else [rank]
    random = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in ranks]
    return [*OF_ALL, *random]
