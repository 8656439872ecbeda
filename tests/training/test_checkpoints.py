"""What a run goes on from: checkpoints that are whole and its own, and nothing that would be executed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.training import RunError, evaluation, resume, train
from dilated_attention_pytorch.training.callbacks import read_metrics
from dilated_attention_pytorch.training.run_trainer import RunTrainer
from dilated_attention_pytorch.training.trained_model import load_model
from training.damage import Payload
from training.mangling import NEW, OLD
from training.runs import Heard, assert_same_weights, quiet, seal_again, stopped_run, tiny_settings, write_texts


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 7, with the checkpoints of steps 4 and 7, and the same one undisturbed."""
    world = tmp_path_factory.mktemp("checkpoints")
    settings = tiny_settings(write_texts(world / "texts"), threads=1, device="cpu")
    train(settings, world / "whole", quiet())
    with pytest.MonkeyPatch.context() as monkeypatch:
        stopped_run(monkeypatch, settings, world / "stopped", NEW - 1)
    return world


@pytest.fixture
def run(world: Path, tmp_path: Path) -> Path:
    """A copy of the run that was stopped."""
    return Path(shutil.copytree(world / "stopped", tmp_path / "run"))


def _flip(path: Path) -> None:
    found = bytearray(path.read_bytes())
    found[len(found) // 2] ^= 1
    path.write_bytes(found)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_damaged_checkpoint_is_left_for_the_one_before_which_is_said_and_ends_bit_for_bit_alike(
    world: Path, run: Path, name: str
) -> None:
    _flip(run / f"checkpoint-{NEW}" / name)
    console = Heard()
    assert resume(run, console).step == 9
    assert f"checkpoint-{NEW} is skipped, checkpoint-{OLD} is used instead: broken checkpoint: " in console.said
    assert f"{name} is damaged: its bytes are not those that were written (SHA-256)" in console.said
    assert f"going on after step {OLD}" in console.said
    assert_same_weights(run, world / "whole")
    # What was damaged has gone, as the run has written better ones.
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-9"}


def test_a_damaged_older_checkpoint_does_not_count_among_those_that_are_kept(run: Path) -> None:
    os.rename(run / f"checkpoint-{NEW}", run / "aside")
    shutil.copytree(run / f"checkpoint-{OLD}", run / "checkpoint-5")
    assert resume(run, quiet()).step == 9
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-9"}


def test_a_whole_checkpoint_under_the_name_of_a_damaged_one_is_kept(run: Path) -> None:
    os.rename(run / f"checkpoint-{NEW}", run / "checkpoint-8")  # which is left, and written again after step 8
    assert resume(run, quiet()).step == 9
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-9"}


def test_where_no_checkpoint_is_whole_each_is_said(run: Path) -> None:
    for step in (OLD, NEW):
        _flip(run / f"checkpoint-{step}" / "scheduler.pt")
    with pytest.raises(RunError, match=rf"-{NEW}/scheduler.pt is damaged.*Nor can the one before.*-{OLD}/scheduler.pt"):
        resume(run, quiet())


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_pickle_that_a_strangers_manifest_speaks_for_is_refused_in_words_and_not_executed(
    run: Path, tmp_path: Path, name: str
) -> None:
    shutil.rmtree(run / f"checkpoint-{OLD}")
    torch.save({"state": Payload(tmp_path / "canary")}, run / f"checkpoint-{NEW}" / name)
    seal_again(run / f"checkpoint-{NEW}")
    with pytest.raises(RunError, match=f"{name} is not a state of a training run, and was not unpickled"):
        resume(run, quiet())
    assert not (tmp_path / "canary").exists()


def test_states_of_another_kind_are_refused_in_words(run: Path) -> None:
    torch.save({"state": {}, "param_groups": []}, run / f"checkpoint-{NEW}" / "optimizer.pt")
    seal_again(run / f"checkpoint-{NEW}")
    with pytest.raises(RunError, match=r"the states in .* do not fit this run"):
        resume(run, quiet())


def test_a_checkpoint_holds_what_is_read_and_nothing_else(run: Path) -> None:
    assert {path.name for path in (run / f"checkpoint-{NEW}").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
        "manifest.json",
    }


def test_links_in_a_run_folder_are_replaced_and_what_they_lead_to_is_left_alone(
    run: Path, tmp_path: Path, draw_losses: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "draw_losses", draw_losses)
    precious = tmp_path / "precious"
    files = [".training.json.part", ".metrics.jsonl.part", "loss.png", ".loss.png.part", "sample.txt", "config.json"]
    for name in (*files, ".unfinished-theirs/file", "checkpoint-8/file"):
        target, link = precious / name, run / name.partition("/")[0]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(name)
        link.unlink(missing_ok=True)
        link.symlink_to(precious / link.name)
    before = sorted(precious.rglob("*"))
    assert resume(run, quiet()).step == 9
    assert sorted(precious.rglob("*")) == before
    assert all(path.read_text() == str(path.relative_to(precious)) for path in before if path.is_file())
    assert not any(path.is_symlink() for path in run.rglob("*"))


@pytest.mark.parametrize(
    "rest",
    [
        b'{"step": 8, "sec',
        b"[1]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"step": "4", "seconds": 1.0}',
        b"null",
        b'{"step": 4, "seconds": 1.0, "bits_per_byte": "low"}',
    ],
)
def test_metrics_are_read_up_to_the_first_line_that_is_none(tmp_path: Path, rest: bytes) -> None:
    entry = {"step": 2, "seconds": 0.5, "bits_per_byte": 3.0}
    later = b'{"step": 9, "seconds": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(json.dumps(entry).encode() + b"\n" + rest + b"\n" + later)
    assert read_metrics(tmp_path) == [entry]


@pytest.mark.parametrize("changes", [
    {"num_layers": 10**30}, {"num_layers": "x"}, {"embed_dim": 1e9}, {"dtype": "banana"}, {"dtype": 5},
    {"id2label": 3}, {"quantization_config": 3}, {"attn_implementation": "x"}, {"vocab_size": None},
], ids=str)  # fmt: skip
def test_a_configuration_that_describes_no_model_is_refused_in_words(
    world: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(world / "whole" / name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(RunError, match=r"config\.json describes"):
        load_model(tmp_path)


def test_generate_says_which_checkpoint_it_leaves(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _flip(run / f"checkpoint-{NEW}" / "model.safetensors")
    main(["generate", str(run), "--prompt", "def", "--max-new-tokens", "3"])
    captured = capsys.readouterr()
    assert captured.out.startswith("def")
    assert f"checkpoint-{NEW} is skipped, checkpoint-{OLD} is used instead: broken checkpoint: " in captured.err


@pytest.mark.parametrize(
    ("save_steps", "kept"),
    [
        (100, "no checkpoint was complete yet"),
        (1, "the checkpoint of step 1 is kept"),
    ],
)
def test_what_is_kept_of_a_run_that_diverges_is_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_steps: int, kept: str
) -> None:
    log: Callable[..., None] = RunTrainer.log

    def diverge(self: RunTrainer, logs: dict[str, float], start_time: float | None = None) -> None:
        log(self, {**logs, "loss": float("nan")} if self.state.global_step == 2 else logs, start_time)

    monkeypatch.setattr(RunTrainer, "log", diverge)
    with pytest.raises(RunError, match=rf"the loss is nan after step 2; {kept}.*diverges"):
        train(tiny_settings(write_texts(tmp_path / "texts"), save_steps=save_steps), tmp_path / "run", quiet())


def test_a_disk_that_is_full_is_said_once_where_a_thread_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = RecordWriter.write
    numbers = iter(range(100_000))

    def write(self: RecordWriter, data: bytes) -> None:
        if next(numbers) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(self, data)

    monkeypatch.setattr(RecordWriter, "write", write)
    with pytest.raises(RunError, match=r"the disk is full after step \d; make room and allow writing, no checkpoint"):
        train(tiny_settings(write_texts(tmp_path / "texts"), save_steps=100), tmp_path / "run", quiet())
    assert capsys.readouterr().err == ""
