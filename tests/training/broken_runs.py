"""Runs in which a value becomes NaN or infinite: all ranks end in the same words, and nothing is lost.

    python tests/training/broken_runs.py FOLDER [--meshes ddp fsdp ...] [--kinds loss gradient ...] [--steps 8 9 10]

What is broken is broken on the last rank alone, at the end of a drawn step. The run is then taken up, and must end bit
for bit where one ends that was left alone. With the kind "skip" a batch that is NaN there is left out by all ranks: the
bits of the end are those of a run that left it out from its beginning.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from dilated_attention_pytorch.training.checkpoint import checkpoint_step, latest_checkpoint
from dilated_attention_pytorch.training.faults import read_faults
from dilated_attention_pytorch.training.lifecycle import OpenRun
from dilated_attention_pytorch.training.run_trainer import RunTrainer
from dilated_attention_pytorch.training.trainer import LongNetTrainer
from training.killed_runs import HANGS, MESHES, finish, launch, left_alone, settings_of, what_differs
from training.runs import assert_same_weights, write_texts

KINDS = ("loss", "gradient", "weight", "state")
VALUES = {"loss": math.nan, "gradient": math.inf, "weight": math.nan, "state": math.inf}


def break_at(monkeypatch: pytest.MonkeyPatch, kind: str, step: int, trainer: type[RunTrainer] = LongNetTrainer) -> None:
    """Have trainers of this process find what is broken: in the loss or the gradient of ``step``, or after it."""
    if kind == "loss":
        compute = trainer.compute_loss

        def compute_and_break(self: RunTrainer, *args: Any, **kwargs: Any) -> Any:
            loss = compute(self, *args, **kwargs)
            # What is added has no part in the gradient, which stays finite.
            return loss + VALUES[kind] if torch.is_grad_enabled() and self.state.global_step + 1 == step else loss

        monkeypatch.setattr(trainer, "compute_loss", compute_and_break)
        return
    if kind == "gradient":
        take = trainer.training_step

        def take_and_break(self: RunTrainer, *args: Any, **kwargs: Any) -> Tensor:
            loss = take(self, *args, **kwargs)
            grads = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
            if self.state.global_step + 1 == step and grads:  # none of a batch that is left out
                _break(grads, VALUES[kind])
            return loss

        monkeypatch.setattr(trainer, "training_step", take_and_break)
        return
    build = trainer.__init__

    def build_with_break(self: RunTrainer, **given: Any) -> None:
        build(self, **given)
        self.add_callback(_AfterStep(lambda: _break(_kept(self, kind), VALUES[kind]), step))

    monkeypatch.setattr(trainer, "__init__", build_with_break)


class _AfterStep(TrainerCallback):
    """Calls ``do`` at the end of a step, before anything is saved."""

    def __init__(self, do: Callable[[], None], step: int) -> None:
        self.do = do
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Call it."""
        if state.global_step == self.step:
            self.do()


def _kept(trainer: RunTrainer, kind: str) -> list[Tensor]:
    if kind == "weight":
        return list(trainer.model.parameters())
    assert trainer.optimizer is not None
    return [value for state in trainer.optimizer.state.values() for value in state.values() if value.dim()]


@torch.no_grad()
def _break(tensors: list[Tensor], value: float) -> None:
    """One value of the last tensor that this process has anything of."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    next(tensor for tensor in reversed(local) if tensor.numel()).view(-1)[0] = value


def break_and_resume(folder: Path, mesh: str, optimizer: str, *, kind: str, step: int, steps: int) -> str:
    """What the ranks said, after everything about it was checked."""
    size, log = MESHES[mesh][0], folder / "log"
    settings, whole = left_alone(folder, mesh, optimizer, steps)
    output = whole.with_name(f"{whole.name}-broken")
    attempt = launch(
        settings,
        output,
        size,
        log,
        disturb=lambda rank: break_at(pytest.MonkeyPatch(), kind, step) if rank == size - 1 else None,
    )
    assert attempt.wait(HANGS), f"the run hangs: {attempt.said()}"
    assert all(rank.exitcode == 1 for rank in attempt.ranks), attempt.said()
    said = {
        re.findall(r"^dilated_attention_pytorch.errors.RunError: (.*)$", path.read_text(), re.MULTILINE)[-1]
        for path in log.iterdir()
    }
    assert len(said) == 1, said
    (words,) = said
    kept = latest_checkpoint(output)
    assert kept is not None
    assert f"the checkpoint of step {checkpoint_step(kept)} is kept: resume from it with --resume" in words, words
    # What was broken in a step leaves the checkpoint before it; what was broken after it too, at a save step or beside.
    assert checkpoint_step(kept) == (step - 1) // settings.save_steps * settings.save_steps, words
    assert not list(output.glob(".unfinished*"))
    assert not (output / "model.safetensors").exists()
    finish(settings, output, size, log)
    differing = what_differs(output, whole, steps)
    assert not differing, differing
    shutil.rmtree(output)
    return words


def left_out(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Have runs of this process leave out the batches of ``steps`` from their beginning."""
    build = OpenRun.__init__

    def build_with_steps(self: OpenRun, **given: Any) -> None:
        build(self, **given | {"skipped": frozenset(steps)})

    monkeypatch.setattr(OpenRun, "__init__", build_with_steps)


def break_and_skip(folder: Path, mesh: str, optimizer: str, *, step: int, steps: int) -> str:
    """What became of a run that leaves out a batch, after its weights were compared."""
    size, log = MESHES[mesh][0], folder / "log"
    settings = dataclasses.replace(settings_of(folder / "texts", mesh, optimizer, steps), on_nan="skip")
    run, other = folder / "skipping", folder / "left-out"

    def break_last(rank: int) -> None:
        if rank == size - 1:
            break_at(pytest.MonkeyPatch(), "loss", step)

    finish(settings, run, size, log, break_last)
    finish(settings, other, size, log, lambda rank: left_out(pytest.MonkeyPatch(), step))
    assert_same_weights(run, other)
    kinds = ", ".join(fault["kind"] for fault in read_faults(run))
    for place in (run, other):
        shutil.rmtree(place)
    return kinds


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--optimizers", nargs="+", default=["muon"], choices=["muon", "adamw"])
    parser.add_argument("--kinds", nargs="+", default=[*KINDS, "skip"], choices=[*KINDS, "skip"])
    parser.add_argument("--steps", nargs="+", type=int, default=[8, 9, 10], help="steps to break; every third is saved")
    parser.add_argument("--total", type=int, default=11, help="steps of the whole run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not (given.folder / "texts").exists():
        write_texts(given.folder / "texts")
    for mesh in given.meshes:
        for optimizer in given.optimizers:
            for kind in given.kinds:
                for step in given.steps:
                    if kind == "skip":
                        words = break_and_skip(given.folder, mesh, optimizer, step=step, steps=given.total)
                    else:
                        words = break_and_resume(given.folder, mesh, optimizer, kind=kind, step=step, steps=given.total)
                    print(f"{mesh}, {optimizer}, {kind} of step {step}: {words}", flush=True)


if __name__ == "__main__":
    main()
