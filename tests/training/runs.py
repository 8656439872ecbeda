"""Small runs for the tests: a folder of text, settings that take seconds, and runs that are stopped on the way."""

from __future__ import annotations

import dataclasses
import io
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from dilated_attention_pytorch.training import PRESETS, Outcome, TrainSettings, train
from dilated_attention_pytorch.training.callbacks import Metrics
from dilated_attention_pytorch.training.manifest import MANIFEST_NAME, read_sealed, sealed, write_manifest


def quiet() -> Console:
    """A console that shows nothing."""
    return Console(file=io.StringIO())


def write_texts(folder: Path) -> Path:
    """A folder with text files, some longer than the context of the runs."""
    folder.mkdir(parents=True)
    for number in range(23):
        lines = [f"def f{number}_{line}(x): return x * {line % 7} + {number}\n" for line in range(9 + 2 * number)]
        (folder / f"module{number}.py").write_text("".join(lines))
    return folder


def tiny_settings(data: Path, **changes: Any) -> TrainSettings:
    """The preset ``tiny`` on ``data``, with dropout, so that the state of the random numbers matters."""
    settings = PRESETS["tiny"]()
    model = dataclasses.replace(settings.model, dropout=0.1)
    given: dict[str, Any] = {
        "data": (data,), "steps": 9, "save_steps": 4, "log_steps": 2, "eval_steps": 5, "sample_length": 20,
        "model": model, **changes,
    }  # fmt: skip
    return dataclasses.replace(settings, **given)


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Signal this process once, when the metrics of ``step`` are written."""
    write = Metrics.on_log

    def write_and_signal(self: Metrics, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        write(self, args, state, control, logs, **kwargs)
        if state.global_step == step and "loss" in logs:
            monkeypatch.setattr(Metrics, "on_log", write)
            signal.raise_signal(number)

    monkeypatch.setattr(Metrics, "on_log", write_and_signal)


def stopped_run(monkeypatch: pytest.MonkeyPatch, settings: TrainSettings, output: Path, step: int) -> Outcome:
    """A run that got SIGINT at ``step`` and stopped after the next one."""
    stop_after(monkeypatch, step, signal.SIGINT)
    return train(settings, output, quiet())


def change_sealed(path: Path, **values: Any) -> None:
    """Change values of a file with a checksum of its own, as the program itself would write it."""
    path.write_text(sealed({**read_sealed(path, what="test", remedy=""), **values}))


def seal_again(checkpoint: Path, *others: str, **values: Any) -> None:
    """Give a checkpoint that was changed, and got ``others``, a manifest to which it is whole."""
    about = read_sealed(checkpoint / MANIFEST_NAME, what="test", remedy="") | values
    names = [*about.pop("files"), *others]
    del about["format"]
    write_manifest(checkpoint, names, **about)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights in a folder."""
    return load_file(run / "model.safetensors")
