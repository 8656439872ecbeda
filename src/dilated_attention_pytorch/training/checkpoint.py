"""File names and locations of a run's checkpoints."""

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
STAGING = ".unfinished"
"""Beginning of the name of a folder for checkpoints that are being written; the token of the job's lease follows."""
OF_ALL = (CONFIG_NAME, WEIGHTS_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, STATE_NAME)
"""Files of a checkpoint that every process reads, independent of the number of processes."""
ALSO_WRITTEN = ("generation_config.json", SCALER_NAME)
"""Optional files of a checkpoint: of transformers models, and of float16 runs."""
RESTORE = "restore the folder from a copy, or begin anew into another --output"
"""Remedy for a damaged checkpoint."""

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})", re.ASCII)


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of the run folder, latest step first; not verified."""
    found = [path for path in run.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=checkpoint_step, reverse=True)


def staging_folder(run: Path, token: str) -> Path:
    """The folder in which the job with this lease token writes checkpoints; no other job writes to it."""
    return run / f"{STAGING}-{token}"


def latest_checkpoint(run: Path) -> Path | None:
    """The checkpoint of the run folder with the latest step; None if there is none."""
    return next(iter(checkpoints(run)), None)


def checkpoint_step(checkpoint: Path) -> int:
    """The step of a checkpoint, from its name."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def file_names(processes: int, rank: int | None = None) -> list[str]:
    """Files of a checkpoint that process ``rank`` reads; None = all processes."""
    ranks = range(processes) if rank is None else [rank]
    random = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in ranks]
    return [*OF_ALL, *random]
