"""Runs in float16: what they compute in, the scale of their loss, and that an overflow loses no batch."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dilated_attention_pytorch.models import LongNetForCausalLM
from dilated_attention_pytorch.training import RunError, TrainSettings, resume, run_trainer, train
from dilated_attention_pytorch.training.autocast import autocast
from dilated_attention_pytorch.training.callbacks import read_metrics
from dilated_attention_pytorch.training.data.tokenizer import train_tokenizer
from dilated_attention_pytorch.training.faults import read_faults
from dilated_attention_pytorch.training.measures import ByteCount
from dilated_attention_pytorch.training.preflight import check_processes
from training.broken_runs import break_at
from training.runs import assert_same_weights, quiet, record_samples, samples_of, stopped_run, tiny_settings, weights

LARGE = 2.0**40
"""A scale with which every gradient of these runs overflows in float16."""


def half(texts: Path, **changes: Any) -> TrainSettings:
    """Dropout would draw anew for a batch that is taken again."""
    settings = tiny_settings(texts, precision="float16", **{"log_steps": 1} | changes)
    settings.model.dropout = 0.0
    return settings


def begin_with(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    monkeypatch.setattr(run_trainer, "_SCALE", scale)


@pytest.fixture
def dtypes() -> Iterator[set[torch.dtype]]:
    """What linear layers give in training steps from here on."""
    found: set[torch.dtype] = set()

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Linear) and module.training:
            found.add(output.dtype)

    hook = nn.modules.module.register_module_forward_hook(look)
    yield found
    hook.remove()


def test_a_run_computes_in_float16_keeps_float32_and_goes_on_bit_for_bit(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtypes: set[torch.dtype]
) -> None:
    """accelerate computes in float32 on a CPU when it is told float16. The scale grows on the way, after step 3."""
    monkeypatch.setattr(run_trainer, "_SCALE", LARGE)
    monkeypatch.setattr(run_trainer, "GradScaler", functools.partial(torch.amp.GradScaler, growth_interval=3))
    settings = tiny_settings(texts, precision="float16", steps=5, save_steps=2, log_steps=1)
    whole = train(settings, tmp_path / "whole", quiet()).run
    assert dtypes == {torch.float16}
    assert {tensor.dtype for tensor in weights(whole).values()} == {torch.float32}
    scales = [entry["loss_scale"] for entry in read_metrics(whole) if "loss" in entry]
    assert scales[:3] == [scales[0]] * 2 + [2 * scales[0]]
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        stopped_run(patch, settings, run, 1)
    saved = torch.load(run / "checkpoint-2" / "scaler.pt", weights_only=True)
    assert (saved["scale"], saved["_growth_tracker"]) == (scales[1], 2)
    resume(run, quiet())
    assert [entry["loss_scale"] for entry in read_metrics(run) if "loss" in entry] == scales
    assert_same_weights(run, whole)


def test_gradients_in_float16_are_nearer_to_float32_than_those_in_bfloat16_and_need_the_scale(
    texts: Path, figure: Callable[[str, object], None]
) -> None:
    """Its 11 bits of mantissa beside 8: an eighth of the rounding. Without a scale, small gradients are 0."""
    torch.manual_seed(0)
    model = LongNetForCausalLM.from_longnet_config(half(texts).model)
    tokens = torch.randint(256, (1, 257))

    def gradient(precision: str, scale: float = 1.0) -> torch.Tensor:
        model.zero_grad()
        with autocast(precision, "cpu"):
            # As one of the 4,096 windows of a step.
            loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=256 * 4096).loss
        (loss * scale).backward()
        return torch.cat([(weight.grad / scale).flatten() for weight in model.parameters() if weight.grad is not None])

    exact = gradient("float32")
    errors = {
        name: float((gradient(*given) - exact).norm() / exact.norm())
        for name, given in {
            "bfloat16": ("bfloat16",),
            "float16": ("float16", 2.0**28),
            "float16 unscaled": ("float16",),
        }.items()
    }
    figure("error of the gradient beside float32's", {name: f"{error:.1e}" for name, error in errors.items()})
    assert errors["float16"] < errors["bfloat16"] / 4
    assert errors["float16"] < errors["float16 unscaled"] / 2


def test_batches_whose_gradients_overflow_are_taken_again_and_end_as_if_the_scale_had_been_right(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = half(texts, gradient_accumulation=2, steps=3)
    with monkeypatch.context() as patch:
        record_samples(patch, tmp_path / "seen")
        begin_with(patch, LARGE)
        run = train(settings, tmp_path / "run", quiet()).run
    faults = read_faults(run)
    assert {fault["kind"] for fault in faults} == {"overflow"}
    scale = faults[-1]["scale"]
    assert [fault["scale"] for fault in faults] == [LARGE / 2**number for number in range(1, len(faults) + 1)]
    with monkeypatch.context() as patch:
        record_samples(patch, tmp_path / "expected")
        begin_with(patch, scale)
        other = train(settings, tmp_path / "other", quiet()).run
    assert not read_faults(other)
    assert_same_weights(run, other)
    samples, again = (list(map(json.dumps, samples_of(tmp_path / name))) for name in ("expected", "seen"))
    a_step = len(samples) // settings.steps
    assert len(again) == len(samples) + a_step * len(faults)
    assert set(again) == set(samples)


def test_bytes_of_a_step_that_is_repeated_are_counted_once(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_tokenizer([path.read_bytes() for path in sorted(texts.iterdir())], 300).save(tmp_path)
    settings = half(texts, steps=3, gradient_accumulation=2, tokenizer=tmp_path)
    settings.model.vocab_size = 300
    counts: list[list[list[float]]] = []
    take, scale = ByteCount.take, LARGE

    def take_and_note(self: ByteCount) -> torch.Tensor:
        taken = take(self)
        counts[-1] += taken.tolist()
        return taken

    monkeypatch.setattr(ByteCount, "take", take_and_note)
    for name in ("run", "other"):
        counts.append([])
        with monkeypatch.context() as patch:
            begin_with(patch, scale)
            faults = read_faults(train(settings, tmp_path / name, quiet()).run)
        scale = faults[-1]["scale"] if faults else scale
    assert scale < LARGE
    assert counts[0] == counts[1]


def test_a_loss_that_is_nan_is_no_overflow_and_its_batch_is_left_out(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_at(monkeypatch, "loss", 6)
    run = train(half(texts, on_nan="skip"), tmp_path / "run", quiet()).run
    assert [(fault["kind"], fault["step"]) for fault in read_faults(run)] == [("skipped", 6), ("resumed", 4)]
    entries = {entry["step"]: entry for entry in read_metrics(run) if "grad_norm" in entry}
    assert "loss" not in entries[6]
    assert math.isfinite(entries[9]["loss"])


def test_a_gradient_that_overflows_with_every_scale_ends_the_run(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_at(monkeypatch, "gradient", 3)
    with pytest.raises(RunError, match=re.escape("step 3 is not taken: NaN or infinity is in 1 of 31 gradients")):
        train(half(texts), tmp_path / "run", quiet())
    scales = [fault["scale"] for fault in read_faults(tmp_path / "run", "overflow")]
    assert scales == [2.0**power for power in range(15, -1, -1)]


def test_deepspeed_refuses_float16(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    settings = half(texts, data_parallel="zero2", optimizer="adamw")
    with pytest.raises(RunError, match=r"zero2 does not go with --precision float16, as .*; take --precision bfloat16"):
        check_processes(settings, 1)
