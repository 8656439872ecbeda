"""Runs whose second rank is started otherwise than the first; what both say."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.machine import machine
from dilated_attention_pytorch.training import RunError
from dilated_attention_pytorch.training import run as training_run
from dilated_attention_pytorch.training.process_group import process_rank
from training.runs import leave_out_figures

TRAIN = "train --preset tiny --steps 4 --save-steps 2 --device cpu --threads 1 --precision float32 --sample-length 1"
SETTINGS = {
    "seed 7": "--seed 7",
    "learning_rate 0.5": "--learning-rate 0.5",
    "optimizer 'adamw'": "--optimizer adamw",
    "gradient_accumulation 3": "--gradient-accumulation 3",
    "steps 5": "--steps 5",
    "save_steps 3": "--save-steps 3",
    "eval_steps 3": "--eval-steps 3",
    "model.embed_dim 16": "--model.embed-dim 16",
    "data_parallel 'fsdp'": "--data-parallel fsdp",
    "context_parallel 2": "--context-parallel 2",
    "tensor_parallel 2": "--tensor-parallel 2",
    "timeout 700": "--timeout 700",
}
MESHES = ("--context-parallel 2", "--tensor-parallel 2", "--data-parallel fsdp")


def _end(*args: Any) -> None:
    raise RunError("the run is not finished")


def _read_other_text(monkeypatch: pytest.MonkeyPatch, other: Path) -> None:
    read = training_run.read_data
    monkeypatch.setattr(
        training_run, "read_data", lambda told, *rest: read(dataclasses.replace(told, data=(other,)), *rest)
    )


def _be_other_code(monkeypatch: pytest.MonkeyPatch, other: Path) -> None:
    monkeypatch.setattr(training_run, "package_digest", lambda: "other")


def _have_other_torch(monkeypatch: pytest.MonkeyPatch, other: Path) -> None:
    monkeypatch.setattr(training_run, "versions", lambda: {**machine()["versions"], "torch": "2.0"})


def trials(begin: str, go_on: str) -> Iterator[tuple[str, str, Any]]:
    """What differs, the command line, and what is added to it, or done, in the second rank."""
    for name, flags in SETTINGS.items():
        yield name, begin, flags
    for mesh in MESHES:
        yield "seed 7", f"{begin} {mesh}", "--seed 7"
        yield "text.checksum", f"{begin} {mesh}", _read_other_text
    yield "on_nan 'skip'", go_on, "--on-nan skip"
    for command in (begin, go_on):
        yield "versions.dilated_attention_pytorch", command, _be_other_code
        yield "versions.torch '2.0'", command, _have_other_torch
        yield "text.checksum", command, _read_other_text


def _try(words: list[str]) -> tuple[Any, str]:
    err = io.StringIO()
    with contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code, err.getvalue()


def start_unlike(place: str, texts: str) -> None:
    """Leave ``place/said-RANK.json``: for each trial what differs, the exit code, the message and the seconds."""
    folder, rank = Path(place), process_rank()
    begin, go_on = f"{TRAIN} --data {texts} --output {folder}/new", f"train --resume {folder}/run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        leave_out_figures(monkeypatch)
        monkeypatch.setattr(training_run, "_finish", _end)
        _try([*f"{TRAIN} --data {texts} --output {folder}/run".split()])
    other = folder / f"texts-{rank}"
    shutil.copytree(texts, other)
    changed = min(other.iterdir())
    changed.write_bytes(changed.read_bytes().swapcase())
    said = []
    for name, command, otherwise in trials(begin, go_on):
        words = command.split()
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rank == 1 and isinstance(otherwise, str):
                words += otherwise.split()
            elif rank == 1:
                otherwise(monkeypatch, other)
            dist.barrier()
            start = time.monotonic()
            said.append((name, *_try(words), time.monotonic() - start))
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()
