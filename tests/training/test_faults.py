"""Faults that a run survives: nothing is lost, what was done is written down, and how long it took is a figure."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.memory import is_out_of_memory
from dilated_attention_pytorch.training import RunError, TrainSettings, resume, run_checkpoints, train
from dilated_attention_pytorch.training.callbacks import read_metrics
from dilated_attention_pytorch.training.checkpoint import latest_checkpoint, publish
from dilated_attention_pytorch.training.faults import FAULTS_NAME, Cost, cost_of_faults, note_fault, read_faults
from dilated_attention_pytorch.training.measures import WorkDone
from dilated_attention_pytorch.training.trainer import ExtensionTrainer, LongNetTrainer
from training.broken_runs import break_at, left_out
from training.runs import Heard, assert_same_weights, quiet, stop_after, tiny_settings, weights


def small(texts: Path, **changes: Any) -> TrainSettings:
    return tiny_settings(texts, **{"log_steps": 1} | changes)


# Checkpoints beside the computation.


def test_checkpoints_that_are_written_beside_the_steps_are_byte_for_byte_those_that_steps_wait_for(
    texts: Path, tmp_path: Path
) -> None:
    beside, between = (
        train(small(texts, optimizer="adamw", async_checkpoints=choice), tmp_path / str(choice), quiet()).run
        for choice in (True, False)
    )
    for step in (8, 9):
        files = {path.name for path in (between / f"checkpoint-{step}").iterdir()}
        assert {path.name for path in (beside / f"checkpoint-{step}").iterdir()} == files
        for name in files - {"manifest.json", "trainer_state.json"}:  # which name the run, and its speed
            one, other = (run / f"checkpoint-{step}" / name for run in (beside, between))
            assert one.read_bytes() == other.read_bytes(), name


def test_steps_go_on_while_a_checkpoint_is_written_and_the_next_checkpoint_waits_for_it(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_done, seen = threading.Event(), []
    take = LongNetTrainer.training_step

    def publish_late(*args: Any, **options: Any) -> None:
        assert step_done.wait(60)
        seen.append(threading.current_thread() is threading.main_thread())
        publish(*args, **options)

    def take_and_tell(self: LongNetTrainer, *args: Any, **options: Any) -> Tensor:
        if self.state.global_step == 6:
            assert not list(self.run.folder.glob("checkpoint-*"))
            step_done.set()
        return take(self, *args, **options)

    monkeypatch.setattr(run_checkpoints, "publish", publish_late)
    monkeypatch.setattr(LongNetTrainer, "training_step", take_and_tell)
    run = train(small(texts), tmp_path / "run", quiet()).run
    assert seen == [False] * 3
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-9"}


def test_a_disk_that_fills_up_beside_the_steps_ends_the_run_before_the_next_checkpoint(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def fill_up(state: Any, path: Any) -> None:
        if str(path).endswith("checkpoint-4/optimizer.pt"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        save(state, path)

    monkeypatch.setattr(torch, "save", fill_up)
    with pytest.raises(RunError, match=r"the disk is full while the checkpoint of step 4 .* step 2 is kept"):
        train(small(texts, save_steps=2), tmp_path / "run", quiet())
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    assert not list((tmp_path / "run").glob(".unfinished*"))
    monkeypatch.undo()
    (failed,) = read_faults(tmp_path / "run", "failed")
    assert failed["step"] <= 6
    assert failed["reason"].startswith("the disk is full while the checkpoint of step 4 was written")
    # TensorBoard's files are closed, and the writer of checkpoints is gone.
    assert not [thread.name for thread in threading.enumerate() if type(thread).__name__ == "_AsyncWriterThread"]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("dilated-attention-check")]
    assert resume(tmp_path / "run", quiet()).step == 9


# Out of memory.


def run_out_of_memory(monkeypatch: pytest.MonkeyPatch, rows: int, step: int) -> None:
    """Have no memory for more than so many rows from ``step`` on."""
    compute = LongNetTrainer.compute_loss

    def compute_or_fail(self: LongNetTrainer, model: Any, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Any:
        loss = compute(self, model, inputs, *args, **options)
        if torch.is_grad_enabled() and len(inputs["input_ids"]) > rows and self.state.global_step + 1 >= step:
            torch.empty(1 << 60, dtype=torch.uint8)
        return loss

    monkeypatch.setattr(LongNetTrainer, "compute_loss", compute_or_fail)


def test_a_run_whose_memory_ran_out_resumes_with_a_smaller_batch_size_and_is_the_same_to_rounding(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any
) -> None:
    settings = small(texts, steps=6, batch_size=4, precision="float32", optimizer="adamw")
    settings.model.dropout = 0.0
    whole = train(settings, tmp_path / "whole", quiet()).run
    run_out_of_memory(monkeypatch, rows=2, step=5)
    words = (
        r"memory ran out in step 5 \(\[enforce fail at alloc_cpu.*\): resume with a smaller --batch-size, .*step 4 is"
    )
    with pytest.raises(RunError, match=words):
        train(settings, tmp_path / "run", quiet())
    (failed,) = read_faults(tmp_path / "run", "failed")
    assert failed["reason"].startswith("memory ran out in step 5")
    assert resume(tmp_path / "run", quiet(), {"batch_size": 2}).step == 6
    found, expected = weights(tmp_path / "run"), weights(whole)
    furthest = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    figure("out of memory in step 5 of 6: furthest weight from that of the undisturbed run", f"{furthest:.1e}")
    assert furthest < 1e-5


@pytest.mark.parametrize(
    ("trainer", "settings", "remedy"),
    [
        (
            LongNetTrainer,
            {"batch_size": 2, "max_tokens": 0},
            "resume with a smaller --batch-size, or start a new run wi",
        ),
        (
            LongNetTrainer,
            {"batch_size": 1, "max_tokens": 0},
            "start a new run with --model.gradient-checkpointing or a",
        ),
        (
            LongNetTrainer,
            {"batch_size": 1, "max_tokens": 9},
            "start a new run with a smaller --max-tokens and more --g",
        ),
        (
            ExtensionTrainer,
            {},
            "start a new run with --gradient-checkpointing, or fewer --batch-tokens and more --gradi",
        ),
    ],
)
def test_a_run_without_memory_is_told_the_flag_that_takes_less(trainer: Any, settings: Any, remedy: str) -> None:
    assert trainer.memory_remedy(SimpleNamespace(settings=SimpleNamespace(**settings))).startswith(remedy)


@pytest.mark.parametrize(("error", "is_one"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True), (MemoryError(), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                  "tried to allocate 9 bytes."), True),
    (RuntimeError("Expected all tensors to be on the same device"), False), (ValueError("out of memory"), False),
])  # fmt: skip
def test_errors_of_memory_are_told_from_others(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


# NaN and spikes.


def break_batches(monkeypatch: pytest.MonkeyPatch, loss: float, *steps: int) -> None:
    """Have the batches of ``steps`` give this loss more."""
    compute = LongNetTrainer.compute_loss

    def compute_and_break(self: LongNetTrainer, *args: Any, **options: Any) -> Any:
        found = compute(self, *args, **options)
        return found + loss if torch.is_grad_enabled() and self.state.global_step + 1 in steps else found

    monkeypatch.setattr(LongNetTrainer, "compute_loss", compute_and_break)


def expected_without(texts: Path, folder: Path, *steps: int, **changes: Any) -> Path:
    """A run that leaves out the batches of ``steps``, and knew it from its beginning."""
    with pytest.MonkeyPatch.context() as patch:
        left_out(patch, *steps)
        return train(small(texts, **changes), folder, quiet()).run


@pytest.mark.parametrize(
    ("changes", "loss", "said"),
    [
        ({"on_nan": "skip"}, float("nan"), r"step 7 is not taken: NaN or infinity is in 2 of 2 losses \(nan, nan\)"),
        (
            {"spike_deviations": 30.0, "spike_window": 4},
            1e3,
            r"step 7 is not taken: its loss 200\d is .* deviations above .*, the median of the last 4 steps",
        ),
    ],
    ids=["nan", "spike"],
)
def test_a_batch_that_breaks_the_run_is_left_out_and_nothing_else(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Any, changes: Any, loss: float, said: str
) -> None:
    console = Heard()
    with monkeypatch.context() as patch:
        break_batches(patch, loss, 7)
        run = train(small(texts, gradient_accumulation=2, **changes), tmp_path / "run", console).run
    assert re.search(
        said + "; rewinding to the newest checkpoint, to skip batches 24 to 27 of step 7",
        console.said,
    )
    assert "going on after step 4" in console.said
    expected = expected_without(texts, tmp_path / "other", 7, gradient_accumulation=2, **changes)
    assert_same_weights(run, expected)
    (skipped,) = read_faults(run, "skipped")
    assert (skipped["step"], skipped["batches"]) == (7, [24, 27])
    (resumed,) = read_faults(run, "resumed")
    assert (resumed["after"], resumed["step"]) == ("skipped", 4)
    assert cost_of_faults(run).restarts == 1
    assert "faults: 1 restarts, 1 steps without their batch, " in console.said
    figure(f"a batch whose loss is {loss} more: seconds lost", cost_of_faults(run).seconds_lost)
    # An entry has the mean of the steps that were taken: of this one there is none.
    entries = {entry["step"]: entry for entry in read_metrics(run) if "learning_rate" in entry}
    assert [step for step, entry in entries.items() if "bits_per_byte" not in entry] == [7]


def test_a_batch_that_is_left_out_is_no_part_of_the_tokens_a_second(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates, worked = WorkDone.rates, []

    def note_tokens(self: WorkDone, first: int, last: int, *given: float) -> dict[str, float]:
        worked.append((last, self.tokens_after(last) - self.tokens_after(first)))
        return rates(self, first, last, *given)

    left_out(monkeypatch, 7)
    monkeypatch.setattr(WorkDone, "rates", note_tokens)
    train(small(texts, log_steps=3), tmp_path / "run", quiet())
    # A step has two windows of 256 bytes; the time of the evaluation after step 5 is no part of the next entry.
    assert worked == [(3, 3 * 512), (6, 512), (9, 2 * 512)]


def test_a_run_that_nan_has_ended_may_be_told_to_go_on_and_leaves_the_batch_out_whenever_it_is_taken_up(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_batches(patch, float("nan"), 6)
        write = note_fault

        def note_and_stop(run: Path, kind: Any, **values: Any) -> None:
            write(run, kind, **values)
            if kind == "resumed" and values["after"] == "skipped":
                stop_after(patch, 5, signal.SIGTERM)

        with pytest.raises(RunError, match="step 6 is not taken"):
            train(small(texts), tmp_path / "run", quiet())
        patch.setattr("dilated_attention_pytorch.training.faults.note_fault", note_and_stop)
        assert resume(tmp_path / "run", quiet(), {"on_nan": "skip"}).stopped_by == signal.SIGTERM
    assert latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-6"
    resume(tmp_path / "run", quiet())
    assert_same_weights(tmp_path / "run", expected_without(texts, tmp_path / "other", 6, on_nan="skip"))


def test_a_signal_in_a_step_that_rewinds_is_not_lost(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_batches(patch, float("nan"), 6)
        stop_after(patch, 5, signal.SIGINT)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
        try:
            with pytest.raises(KeyboardInterrupt):
                train(small(texts, on_nan="skip"), tmp_path / "run", quiet())
        finally:
            signal.signal(signal.SIGINT, before)
    assert [fault["kind"] for fault in read_faults(tmp_path / "run")] == ["skipped"]
    resume(tmp_path / "run", quiet())
    assert_same_weights(tmp_path / "run", expected_without(texts, tmp_path / "other", 6, on_nan="skip"))


def test_two_batches_in_a_row_that_break_the_run_end_it(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_batches(monkeypatch, float("nan"), 2, 6, 7)
    with pytest.raises(
        RunError,
        match=r"step 7 is not taken: .*, after a rewind for that reason; the check"
        r"point of step 4 is kept: .* the run diverges: start a new run with a lower",
    ):
        train(small(texts, on_nan="skip"), tmp_path / "run", quiet())
    assert [fault["step"] for fault in read_faults(tmp_path / "run", "skipped")] == [2, 6]


def test_a_state_that_is_broken_by_no_batch_is_computed_again_and_ends_the_run_if_it_breaks_again(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_at(patch, "weight", 8)
        with pytest.raises(
            RunError, match=r"the checkpoint of step 8 is not written: .* after a rewind for that reason; the"
        ):
            train(small(texts, on_nan="skip"), tmp_path / "run", quiet())
    assert [fault["kind"] for fault in read_faults(tmp_path / "run")] == ["broken", "resumed", "failed"]
    resume(tmp_path / "run", quiet())
    assert_same_weights(tmp_path / "run", train(small(texts), tmp_path / "whole", quiet()).run)


# What is written down.


def _cut(data: bytes) -> bytes:
    return data[:-20]


def _flip(data: bytes) -> bytes:
    return data.replace(b'"step": 7', b'"step": 6')


@pytest.mark.parametrize("damage", [_cut, _flip])
def test_a_damaged_line_of_faults_is_none_and_the_next_one_stands_by_itself(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    note_fault(tmp_path, "resumed", after="killed", step=4, down_seconds=2.0, redone_seconds=0.5)
    note_fault(tmp_path, "skipped", step=7)
    path = tmp_path / FAULTS_NAME
    path.write_bytes(damage(path.read_bytes()))
    note_fault(tmp_path, "resumed", after="stopped", step=8, down_seconds=3600.0, redone_seconds=0.0)
    assert [fault["step"] for fault in read_faults(tmp_path)] == [4, 8]
    assert cost_of_faults(tmp_path) == Cost(restarts=1, skipped_steps=0, seconds_lost=2.5)
    assert all(line.startswith("{") for line in path.read_text().splitlines())


def test_a_link_in_the_place_of_the_faults_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("dear")
    (tmp_path / FAULTS_NAME).symlink_to(precious)
    note_fault(tmp_path, "stopped", step=1, signal=15)
    assert precious.read_text() == "dear"
    assert json.loads((tmp_path / FAULTS_NAME).read_text())["kind"] == "stopped"
