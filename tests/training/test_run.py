"""Runs: what they leave, and that stopping changes nothing."""

from __future__ import annotations

import io
import json
import math
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dilated_attention_pytorch import progress
from dilated_attention_pytorch.models import LongNetLM
from dilated_attention_pytorch.parallel import RankFailure
from dilated_attention_pytorch.training import RunError, lifecycle, preflight, resume, run_checkpoints, train
from dilated_attention_pytorch.training.callbacks import read_metrics
from dilated_attention_pytorch.training.checkpoint import latest_checkpoint
from dilated_attention_pytorch.training.evaluation import (
    bits_by_quarter,
    bits_of_last_quarter_alone,
    draw_losses,
    xz_bits_per_byte,
)
from dilated_attention_pytorch.training.record import Outcome
from dilated_attention_pytorch.training.trained_model import load_model
from training.runs import Heard, assert_same_weights, quiet, stopped_run, tiny_settings


@pytest.fixture(scope="module")
def finished(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tiny_settings(texts), tmp_path_factory.mktemp("training") / "finished", quiet())


def test_a_run_leaves_every_file_it_promises(finished: Outcome) -> None:
    names = {path.name for path in finished.run.iterdir()}
    expected = {
        "config.json",
        "training.json",
        "metrics.jsonl",
        "tensorboard",
        "model.safetensors",
        "sample.txt",
    }
    assert expected <= names
    assert not any(name.endswith(".part") or name.startswith(".unfinished") for name in names)
    assert any((finished.run / "tensorboard").iterdir())
    card = (finished.run / "README.md").read_text()
    assert "AutoModelForCausalLM.from_pretrained('.')" in card
    assert "Attention pattern: `segments [" in card
    drawn = draw_losses(finished.run, xz=2.0, final=(9, finished.bits_per_byte))
    assert (drawn.name, drawn.read_bytes()[:4]) == ("loss.png", b"\x89PNG")
    record = json.loads((finished.run / "training.json").read_text())
    assert record["settings"]["steps"] == 9
    assert record["machine"]["versions"]["torch"] == torch.__version__.partition("+")[0] or "+" in torch.__version__
    assert record["result"]["bits_per_byte"] == finished.bits_per_byte


def test_metrics_hold_training_and_evaluation_in_bits(finished: Outcome) -> None:
    entries = read_metrics(finished.run)
    assert [entry["step"] for entry in entries if "bits_per_byte" in entry] == [2, 4, 6, 8]
    assert [entry["step"] for entry in entries if "eval_bits_per_byte" in entry] == [5, 9]
    assert all(0 < entry.get("bits_per_byte", 1) < 12 for entry in entries)


def test_as_many_checkpoints_are_kept_as_the_settings_say(finished: Outcome, texts: Path, tmp_path: Path) -> None:
    assert {path.name for path in finished.run.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-9"}
    for keep, kept in ((1, {9}), (3, {6, 8, 9})):
        run = train(tiny_settings(texts, save_steps=2, keep_checkpoints=keep), tmp_path / f"{keep}", quiet()).run
        assert {path.name for path in run.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in kept}


def test_bits_over_the_context_are_the_mean_of_its_quarters(finished: Outcome) -> None:
    model = load_model(finished.run)
    file = torch.randint(1, 256, (257,))
    quarters = bits_by_quarter(model.model, [file], "float32")
    with torch.no_grad():
        loss = model(file[None], labels=file[None]).loss
    assert math.isclose(sum(quarters) / 4, float(loss) / math.log(2), rel_tol=1e-5)


def test_the_last_quarter_alone_is_the_loss_on_its_bytes_by_themselves(finished: Outcome) -> None:
    model = load_model(finished.run)
    file = torch.randint(1, 256, (257,))
    with torch.no_grad():
        loss = model(file[None, 192:], labels=file[None, 192:]).loss
    alone = bits_of_last_quarter_alone(model.model, [file], "float32")
    assert math.isclose(alone, float(loss) / math.log(2), rel_tol=1e-5)


def test_xz_is_measured_in_bits_per_byte() -> None:
    noise = torch.randint(256, (10_000,), dtype=torch.uint8).numpy().tobytes()
    assert 8.0 <= xz_bits_per_byte(noise) < 8.2
    assert xz_bits_per_byte(b"a" * 10_000) < 0.2


@pytest.mark.parametrize(
    "optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.slow), "adamw-bf16", "adamw-8bit"]
)
def test_a_run_that_was_stopped_ends_bit_for_bit_where_one_that_was_not_ends(
    texts: Path, finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    settings = tiny_settings(texts, optimizer=optimizer)
    whole = finished if optimizer == "muon" else train(settings, tmp_path / "whole", quiet())
    stopped = stopped_run(monkeypatch, settings, tmp_path / "stopped", 6)
    assert (stopped.stopped_by, stopped.step) == (signal.SIGINT, 7)
    checkpoint = latest_checkpoint(stopped.run)
    assert checkpoint is not None
    assert checkpoint.name == "checkpoint-7"
    assert not (stopped.run / "model.safetensors").exists()
    torch.manual_seed(12345)
    resumed = resume(stopped.run, quiet())
    assert_same_weights(resumed.run, whole.run)
    assert resumed.bits_per_byte == whole.bits_per_byte
    assert resumed.sample == whole.sample
    evaluations = [
        [entry["eval_bits_per_byte"] for entry in read_metrics(run) if "eval_bits_per_byte" in entry]
        for run in (whole.run, resumed.run)
    ]
    assert evaluations[0] == evaluations[1]


def test_metrics_after_the_checkpoint_are_written_anew_not_twice(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = stopped_run(monkeypatch, tiny_settings(texts), tmp_path / "run", 2)
    with (stopped.run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "seconds": 1.0, "bits_per_byte": 99.0}\n{"step": 9, "sec')
    resume(stopped.run, quiet())
    steps = [entry["step"] for entry in read_metrics(stopped.run) if "bits_per_byte" in entry]
    assert steps == sorted(set(steps))
    assert 99.0 not in [entry.get("bits_per_byte") for entry in read_metrics(stopped.run)]


def test_what_torch_says_about_a_full_disk_is_understood(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", fill_up)
    with pytest.raises(RunError, match=r"the disk is full .* no checkpoint was complete yet"):
        train(tiny_settings(texts), tmp_path / "run", quiet())


def test_a_limit_on_the_size_of_files_is_said_before_and_while_a_checkpoint_is_written(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two moments are one file, twice as large as that of the weights.
    size = tiny_settings(texts).model.num_parameters
    monkeypatch.setattr(preflight, "file_limit", lambda: 8 * size - 1)
    with pytest.raises(RunError, match=r"a file may have .* MB here, and the largest of a checkpoint .* raise the lim"):
        train(tiny_settings(texts), tmp_path / "run", quiet())
    assert not (tmp_path / "run").exists()

    def fill_up(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(preflight, "file_limit", lambda: 8 * size)
    monkeypatch.setattr(run_checkpoints, "file_limit", lambda: 8 * size - 1)
    monkeypatch.setattr(torch, "save", fill_up)
    with pytest.raises(
        RunError, match=r"limit on the size of a file is reached \(ulimit -f\) while the checkpoint .*; raise it, no ch"
    ):
        train(tiny_settings(texts), tmp_path / "run", quiet())


def test_a_process_that_fails_says_what_is_left(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RankFailure("rank 3 died")

    monkeypatch.setattr(LongNetLM, "_attend", fail)
    # It takes the step with tensors that hold nothing, and would fail there.
    monkeypatch.setattr("dilated_attention_pytorch.training.preflight.check_training_memory", lambda *arguments: None)
    with pytest.raises(RunError, match="rank 3 died; no checkpoint was complete yet"):
        train(tiny_settings(texts), tmp_path / "run", quiet())


def test_a_run_that_diverges_says_so(texts: Path, tmp_path: Path) -> None:
    settings = tiny_settings(texts, optimizer="adamw", learning_rate=1e30, max_grad_norm=1e30, warmup_fraction=0.0)
    with pytest.raises(RunError, match=r"step 2 is not taken: NaN .* no checkpoint was .* lower --learning-rate"):
        train(settings, tmp_path / "run", quiet())


def test_a_run_is_checked_in_the_same_order_when_it_begins_and_when_it_is_resumed(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    names = ["check_train_command", "check_settings", "check_current_processes", "check_train_machine"]
    for name in names:
        monkeypatch.setattr(preflight, name, lambda *subject, name=name: made.append(name))
    run = stopped_run(monkeypatch, tiny_settings(texts, steps=4), tmp_path / "run", 2).run
    begun = list(dict.fromkeys(made))
    made.clear()
    resume(run, quiet())
    assert begun == made == names


def test_what_takes_time_is_counted_where_the_output_is_no_terminal(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, evaluations and the final one; with ten seconds in between a run of a second says none of it."""
    console = Heard()
    train(tiny_settings(texts, steps=3), tmp_path / "quiet", console)
    assert "left\n" not in console.said
    assert "batches\n" not in console.said
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    console = Heard()
    train(tiny_settings(texts, steps=4), tmp_path / "run", console)
    assert re.search(r"^step 3/4: training [0-9.]+ bits per byte, [0-9,]+ tokens/s, about .* left$", console.said, re.M)
    for words in (
        "step 4/4: evaluating, 1 of 1 batches",
        "evaluating on the held-out text, 1 of 1 batches",
        "evaluating by quarter of the context, 0 of 1 files",
        "sampling, 2 of 5 tokens",
    ):
        assert f"{words}\n" in console.said


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_writing_of_the_last_checkpoint_and_of_the_model_is_shown(
    is_terminal: bool, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(write: Callable[..., None]) -> Callable[..., None]:
        def wait_and_write(*args: Any, **options: Any) -> None:
            time.sleep(0.2)
            write(*args, **options)

        return wait_and_write

    monkeypatch.setattr(progress, "LINE_SECONDS", 0.02)
    monkeypatch.setattr(run_checkpoints, "publish", slowly(run_checkpoints.publish))
    monkeypatch.setattr(lifecycle, "save_finished", slowly(lifecycle.save_finished))
    said = io.StringIO()
    console = Console(file=said, force_terminal=is_terminal, width=200, _environ={})
    train(tiny_settings(texts, steps=2, save_steps=2), tmp_path / "run", console)
    for words in ("writing the last checkpoint", "writing the trained model"):
        assert words in said.getvalue()
