"""Small runs for the tests: a folder of text, settings that take seconds, and runs that are stopped on the way."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from dilated_attention_pytorch import machine
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import (
    PRESETS,
    Outcome,
    TrainSettings,
    checkpoint,
    evaluation,
    lifecycle,
    preflight,
    train,
)
from dilated_attention_pytorch.training.callbacks import Metrics
from dilated_attention_pytorch.training.checkpoint import Start, staging_folder
from dilated_attention_pytorch.training.lifecycle import OpenRun
from dilated_attention_pytorch.training.manifest import MANIFEST_NAME, read_sealed, sealed, write_manifest
from dilated_attention_pytorch.training.stages import StageSettings
from dilated_attention_pytorch.training.trainer import LongNetTrainer


def quiet() -> Console:
    """A console that shows nothing."""
    return Console(file=io.StringIO())


def leave_out_figures(patch: pytest.MonkeyPatch) -> None:
    """Have runs draw no chart, take the rate of the machine as given, read versions once and not wait for the disk.

    Together they take longer than the steps of a run. What a killed process has written is read without ``fsync``, too.
    """
    patch.setattr(evaluation, "draw_losses", lambda *args, **options: None)
    patch.setattr(evaluation, "xz_bits_per_byte", functools.cache(evaluation.xz_bits_per_byte))
    patch.setattr(lifecycle, "matrix_product_rate", lambda device, dtype: 1e10)
    for module in (checkpoint, machine):
        patch.setattr(module, "package_version", functools.cache(machine.package_version))
    patch.setattr(os, "fsync", lambda file: None)


class Heard(Console):
    """A console that keeps what it is told."""

    def __init__(self) -> None:
        self.kept = io.StringIO()
        super().__init__(file=self.kept, width=1000)

    @property
    def said(self) -> str:
        return self.kept.getvalue()


def write_texts(folder: Path) -> Path:
    """A folder with text files, some longer than the context of the runs."""
    folder.mkdir(parents=True)
    for number in range(23):
        lines = [f"def f{number}_{line}(x): return x * {line % 7} + {number}\n" for line in range(9 + 2 * number)]
        (folder / f"module{number}.py").write_text("".join(lines))
    return folder


def tiny_settings(data: Path, **changes: Any) -> TrainSettings:
    """The preset ``tiny`` on ``data``, with dropout, so that the state of the random numbers matters.

    Little is evaluated and sampled: a run takes a second, of which the steps are less than half.
    """
    settings = PRESETS["tiny"]()
    model = dataclasses.replace(settings.model, dropout=0.1)
    given: dict[str, Any] = {
        "data": (data,),
        "steps": 9,
        "save_steps": 4,
        "log_steps": 2,
        "eval_steps": 5,
        "eval_windows": 1,
        "final_eval_windows": 2,
        "quarter_files": 1,
        "sample_length": 5,
        "model": model,
        **changes,
    }
    return dataclasses.replace(settings, **given)


def small_settings(texts: Path, **changes: Any) -> TrainSettings:
    """Grouped heads, groups below, at and above the rows of a process, and a length that 4 processes do not divide.

    Keys are made of rows of other processes too, and layers have positions, scales and gates of their own.
    """
    recomputing, dropout = changes.pop("recomputing", False), changes.pop("dropout", 0.0)
    embed_dim, ffn_dim = changes.pop("widths", (32, 56))
    layer_patterns = changes.pop("layer_patterns", ())
    segments: dict[str, Any] = {
        "segment_lengths": (13, 48, 97), "dilation_rates": (1, 2, 3), "layer_segment_shifts": (0, 24)
    }  # fmt: skip
    model = LongNetConfig(
        embed_dim=embed_dim,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=ffn_dim,
        layer_patterns=layer_patterns,
        layer_rope_thetas=(0.0, 1e4),
        layer_scale_lengths=(20, 0),
        head_gates=True,
        key_convolution=3,
        gradient_checkpointing=recomputing,
        dropout=dropout,
        **({} if layer_patterns else segments),
    )
    given: dict[str, Any] = {
        "model": model, "data": (texts,), "context_length": 97, "steps": 20, "batch_size": 2, "threads": 1,
        "optimizer": "adamw", "precision": "float32", "device": "cpu", "log_steps": 1, "eval_steps": 10,
        "eval_windows": 5, "final_eval_windows": 7, "quarter_files": 2, "save_steps": 10, "sample_length": 9,
        "stages": StageSettings.from_dict(changes.pop("stages", {})),
        **changes,
    }  # fmt: skip
    return TrainSettings(**given)


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Signal this process once, when the metrics of ``step`` are written."""
    write = Metrics.on_log

    def write_and_signal(self: Metrics, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        write(self, args, state, control, logs, **kwargs)
        if state.global_step == step and "loss" in logs:
            monkeypatch.setattr(Metrics, "on_log", write)
            signal.raise_signal(number)

    monkeypatch.setattr(Metrics, "on_log", write_and_signal)


def without_checks_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs begin without the checks of packages and trackers."""
    monkeypatch.setattr(preflight, "check_settings", lambda settings: None)


def record_samples(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have every process of a run write down what it trains on, step by step."""
    compute_loss = LongNetTrainer.compute_loss

    def record(self: LongNetTrainer, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if model.training and self.distribution.rows_rank % self.distribution.context_size == 0:
            # Of a batch of windows each row is a sample; packed documents are joined into one row.
            ends = inputs["cu_seqlens"].tolist() if "cu_seqlens" in inputs else None
            tokens = inputs["input_ids"].tolist()
            rows = tokens if ends is None else [tokens[0][first:after] for first, after in pairwise(ends)]
            with open(folder / f"{self.distribution.rows_rank}.jsonl", "a") as file:
                file.writelines(json.dumps([self.state.global_step, row]) + "\n" for row in rows)
        return compute_loss(self, model, inputs, *args, **kwargs)

    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(LongNetTrainer, "compute_loss", record)


def samples_of(folder: Path) -> list[Any]:
    """What was recorded, by step; the samples of a step in an order of their own, as processes share them."""
    lines = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    return sorted(lines)


def stopped_run(monkeypatch: pytest.MonkeyPatch, settings: TrainSettings, output: Path, step: int) -> Outcome:
    """A run that got SIGINT at ``step`` and stopped after the next one."""
    stop_after(monkeypatch, step, signal.SIGINT)
    return train(settings, output, quiet())


def open_run(folder: Path) -> OpenRun:
    """A run that begins in ``folder``, for what needs nothing else of it."""
    return OpenRun(
        folder=folder,
        run_id="of-a-test",
        start=Start(checkpoint=None, rejected={}),
        lease=None,
        staging=staging_folder(folder, "of-a-test"),
        console=quiet(),
    )


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


def assert_same_weights(run: Path, other: Path) -> None:
    """Bit for bit."""
    found, expected = weights(run), weights(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
