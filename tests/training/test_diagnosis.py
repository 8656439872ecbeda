"""What takes a run's time and memory, and what a failure means."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.training import RunError, TrainSettings, resume, train
from dilated_attention_pytorch.training.checkpoint import latest_checkpoint
from dilated_attention_pytorch.training.diagnosis import Diagnosis, diagnose_run, in_words
from dilated_attention_pytorch.training.failures import FAILURES, known_failures
from dilated_attention_pytorch.training.faults import note_fault
from dilated_attention_pytorch.training.profiled_step import measure_step, saved_bytes
from training.broken_runs import break_at
from training.runs import quiet, tiny_settings, write_texts


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, a run that is finished, and one that NaN has ended."""
    folder = tmp_path_factory.mktemp("diagnosis")
    settings = _settings(write_texts(folder / "texts"))
    train(settings, folder / "run", quiet())
    with pytest.MonkeyPatch.context() as patch:
        break_at(patch, "loss", 3)
        with pytest.raises(RunError):
            train(settings, folder / "broken", quiet())
    return folder


def _settings(texts: Path) -> TrainSettings:
    few = {"eval_windows": 1, "final_eval_windows": 1, "quarter_files": 1, "sample_length": 1}
    return tiny_settings(texts, steps=4, save_steps=2, precision="float32", optimizer="adamw", **few)


def _memory_of_a_cpu() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def _full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/mine/model.safetensors")


def _torchvision() -> None:
    torch.library.register_fake("torchvision::nms", lambda: None)


def _missing_package() -> None:
    __import__("no_such_package_of_any_kind")


RAISED: dict[str, Callable[[], None]] = {
    "out of memory": _memory_of_a_cpu,
    "the disk is full": _full_disk,
    "torchvision does not fit torch": _torchvision,
    "a package is missing": _missing_package,
}
LOGGED = {
    # What torch 2.13, its gloo and NCCL, torchrun and the kernel print.
    "out of memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total",
    "a collective timed out": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out "
    "waiting 1800000ms for recv operation to complete",
    "a rank was lost": "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by "
    "peer [127.0.0.1]:43210",
    "killed by the system": "  exitcode  : -9 (pid: 4711)",
    "the driver is too old": "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
}


@pytest.mark.parametrize("name", RAISED)
def test_errors_as_they_are_raised_here_are_known(name: str) -> None:
    with pytest.raises((RuntimeError, OSError, ImportError)) as raised:
        RAISED[name]()
    log = f"epoch 1\nTraceback (most recent call last):\n  File ...\n{type(raised.value).__name__}: {raised.value}\n"
    assert [found.failure.name for found in known_failures(log)] == [name]


@pytest.mark.parametrize("name", LOGGED)
def test_errors_of_other_machines_are_known(name: str) -> None:
    (found,) = known_failures(f"before\n{LOGGED[name]}\nafter")
    assert (found.failure.name, found.line) == (name, LOGGED[name].strip())


def test_a_log_without_an_error_tells_of_none_and_names_are_used_once() -> None:
    assert known_failures("step 100/200: training 2.1, held-out 2.2 bits per byte, 5,000 tokens/s\n") == []
    names = [failure.name for failure in FAILURES]
    assert len(set(names)) == len(names)


def test_a_run_that_nan_has_ended_and_a_checkpoint_that_is_damaged_are_told(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["diagnose", str(world / "broken")])
    said = capsys.readouterr().out
    assert said.startswith("NaN or infinity: step 3 is not taken: NaN or infinity is in 1 of 1 losses (nan);")
    assert "--on-nan skip" in said
    kept = latest_checkpoint(world / "broken")
    assert kept is not None
    damaged = kept / "optimizer.pt"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(RunError) as raised:
        resume(world / "broken", quiet())
    damaged.write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"dilated-attention: {raised.value}\n".encode())))
    main(["diagnose", "-"])
    assert capsys.readouterr().out.startswith("a checkpoint does not verify: dilated-attention: broken checkpoint: ")


def test_time_is_told_by_the_log_and_changes_are_in_the_order_of_their_effect(world: Path) -> None:
    """A log of 40 steps of 2 s, 10 evaluations of 6 s, 30 s of steps done again, and a rank that others wait for."""
    run = world / "made"
    run.mkdir()
    (run / "training.json").write_text((world / "run" / "training.json").read_text())
    entries = [{"step": 0, "seconds": 0.0, "matrix_product_flops": 1e9}]
    for step in range(4, 44, 4):
        seconds = entries[-1]["seconds"] + 8.0
        ranks = {"slowest_rank": 2, "slowest_rank_seconds": 1.5, "other_ranks_seconds": 0.5}
        entries.append({"step": step, "seconds": seconds, "loss": 1.0, "peak_memory_bytes": 7e8, **ranks})
        entries.append({"step": step, "seconds": seconds + 6.0, "eval_bits_per_byte": 2.0})
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    note_fault(run, "resumed", after="killed", step=2, processes=1, down_seconds=10.0, redone_seconds=30.0)
    found = diagnose_run(run)
    at_end = found.time.pop("evaluation at the end", 0.0)
    assert found.time == pytest.approx({"steps": 80.0, "evaluations on the way": 60.0, "lost by faults": 40.0})
    assert found.peak == 700_000_000
    whole = 180.0 + at_end
    by_log = {change.what: change.time for change in found.changes if change.by == "the log"}
    assert by_log == pytest.approx(
        {
            "a machine for rank 2 as fast as those of the others, which wait for it": 0.5,
            "--eval-steps 10": 30.0 / whole,
            "--save-steps 1, as faults come again": 15.0 / whole,
        }
    )
    effects = [max(change.time, change.memory / sum(found.memory.values())) for change in found.changes]
    assert effects == sorted(effects, reverse=True)


def test_what_is_kept_for_the_backward_pass_is_counted_once_and_without_weights() -> None:
    """x is kept for the first product, its output for tanh and for the second; the weights are there anyway."""
    first, second = nn.Linear(7, 11, bias=False), nn.Linear(11, 13, bias=False)
    x = torch.randn(5, 7)
    result, size = saved_bytes(lambda: second(first(x).tanh()).sum(), nn.Sequential(first, second))
    assert size == 4 * (5 * 7 + 5 * 11)
    result.backward()
    assert first.weight.grad is not None


def test_a_measured_step_has_the_bytes_of_its_weights_and_recomputing_keeps_less(world: Path) -> None:
    found = diagnose_run(world / "run", step=True)
    settings = _settings(world / "texts")
    number = settings.model.num_parameters
    assert found.memory["weights"] == found.memory["gradients"] == 4 * number
    # Two moments, and the count of the steps of each of 31 tensors.
    assert found.memory["optimizer"] == 8 * number + 4 * 31
    measured = {change.what: change for change in found.changes if change.by == "measured"}
    less = measured["--model.gradient-checkpointing"].memory
    assert 0.3 * found.memory["kept for the backward pass"] < less < found.memory["kept for the backward pass"]
    assert measured["--optimizer adamw-bf16"].memory == pytest.approx(4 * number, rel=0.01)
    assert sum(part for _, part in found.operators) <= 1.0
    said = "\n".join(in_words(found))
    assert "a step: backward" in said
    assert "--model.gradient-checkpointing: " in said


def test_a_checkpointed_model_keeps_its_blocks_inputs(world: Path) -> None:
    settings = _settings(world / "texts")
    batch = {"input_ids": torch.randint(256, (2, 256))}
    batch["labels"] = batch["input_ids"]
    model = dataclasses.replace(settings.model, gradient_checkpointing=True)
    sizes = {
        layers: measure_step(
            dataclasses.replace(settings, model=dataclasses.replace(model, num_layers=layers)), batch, "cpu"
        ).saved
        for layers in (2, 4)
    }
    # Two more blocks keep their inputs alone, in float32, and the state of the random numbers of each.
    width = 4 * batch["input_ids"].numel() * model.embed_dim
    assert 2 * width <= sizes[4] - sizes[2] <= 2 * width + 20_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["no-such-thing"],
            "diagnose no-such-thing: there is no such run folder or file; name one, or quote the words",
        ),
        (["all is well here"], "no known failure is in the 1 lines; the last is 'all is well here'"),
        (["out of memory", "--step"], "--step measures a run, and out of memory is not a run folder; leave it out"),
        (["{}"], "training.json does not exist; name the --output of a `train` or `extend` command"),
    ],
)
def test_wrong_calls_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["diagnose", *(word.format(tmp_path) for word in words)])
    assert said in capsys.readouterr().err


def test_nothing_to_change_is_said() -> None:
    assert "No setting is known to save 1 % of anything." in list(in_words(Diagnosis(time={"steps": 1.0})))
