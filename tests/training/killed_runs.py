"""Runs that are killed at random moments and taken up: they end bit for bit where a run ends that was left alone.

    python tests/training/killed_runs.py FOLDER [--meshes ddp fsdp ...] [--optimizers muon adamw] [--kills 5] [--seed 0]

For each mesh and optimizer one run is left alone and another is killed: one of its ranks, or all of them, while it
computes or writes. All weights, optimizer states, losses and figures of the end must be the same bits; and each step
is taken with the learning rate that the schedule says. Ranks are forked from this process, so that none imports anew.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from dilated_attention_pytorch.training import TrainSettings, resume, train
from dilated_attention_pytorch.training.callbacks import read_metrics
from dilated_attention_pytorch.training.checkpoint import STAGING, checkpoint_step, latest_checkpoint
from dilated_attention_pytorch.training.distribution import leaving_together
from dilated_attention_pytorch.training.optimizer import MuonWithAdamW, ShardedMuon
from dilated_attention_pytorch.training.trainer import LongNetTrainer
from support.processes import free_port
from training.compared import furthest
from training.runs import leave_out_figures, quiet, small_settings, weights, write_texts

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "ddp": (2, {}),
    "ddp of 4": (4, {}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "tensor": (2, {"tensor_parallel": 2}),
    "context": (2, {"context_parallel": 2}),
    "fsdp x context": (4, {"data_parallel": "fsdp", "context_parallel": 2}),
    "fsdp x tensor": (4, {"data_parallel": "fsdp", "tensor_parallel": 2}),
    "ring x heads": (4, {"context_parallel": 4, "heads_parallel": 2, "strategy": "ring"}),
}
_FORK = multiprocessing.get_context("fork")
HANGS = 900.0
"""Seconds after which a run that says nothing hangs: no run takes a tenth of it."""


def settings_of(texts: Path, mesh: str, optimizer: str, steps: int) -> TrainSettings:
    """With dropout, so that the state of the random numbers matters, and a checkpoint every third step."""
    return small_settings(
        texts,
        optimizer=optimizer,
        steps=steps,
        save_steps=3,
        eval_steps=5,
        eval_windows=2,
        final_eval_windows=2,
        quarter_files=1,
        dropout=0.1,
        **MESHES[mesh][1],
    )


@dataclass
class Attempt:
    """The ranks of one launch."""

    ranks: list[BaseProcess]
    reached: Connection
    """Has a message when the first rank begins the step that was asked for."""
    log: Path

    def wait(self, seconds: float) -> bool:
        """Whether all ranks have ended within ``seconds``."""
        end = time.monotonic() + seconds
        for rank in self.ranks:
            rank.join(max(0.0, end - time.monotonic()))
        return all(rank.exitcode is not None for rank in self.ranks)

    def has_reached(self) -> bool:
        """Wait for that step."""
        try:
            return self.reached.poll(HANGS) and self.reached.recv() is not None
        except EOFError:  # no rank is left that could say so
            return False

    def kill(self, ranks: Sequence[BaseProcess]) -> None:
        """SIGKILL."""
        for rank in ranks:
            rank.kill()

    def end(self) -> None:
        """Leave none of them."""
        self.kill(self.ranks)
        assert self.wait(HANGS)

    def said(self) -> str:
        """How each of them ended, and the end of what it printed."""
        logs = sorted(self.log.iterdir())
        return "\n".join(
            f"{path.name} ({rank.exitcode}): {path.read_text()[-3000:]}"
            for path, rank in zip(logs, self.ranks, strict=True)
        )


def launch(
    settings: TrainSettings,
    output: Path,
    size: int,
    log: Path,
    *,
    note_step: int | None = None,
    disturb: Callable[[int], None] | None = None,
) -> Attempt:
    """Begin the run, or take it up where it has a checkpoint, in ``size`` processes; each first calls ``disturb``."""
    shutil.rmtree(log, ignore_errors=True)
    log.mkdir(parents=True)
    if latest_checkpoint(output) is None:
        shutil.rmtree(output, ignore_errors=True)
    reached, reach = _FORK.Pipe(duplex=False)
    port = free_port()
    ranks = [
        _FORK.Process(
            target=_rank, args=(settings, output, rank, size, port, log, reach, note_step, disturb), daemon=True
        )
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    reach.close()
    return Attempt(ranks, reached, log)


def _rank(
    settings: TrainSettings,
    output: Path,
    rank: int,
    size: int,
    port: int,
    log: Path,
    reach: Connection,
    note_step: int | None,
    disturb: Callable[[int], None] | None,
) -> None:
    descriptor = os.open(log / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a test that forks this process has its own
    if size > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
        )
    leave_out_figures(pytest.MonkeyPatch())
    _watch(reach, note_step if rank == 0 else None)
    if disturb is not None:
        disturb(rank)
    with leaving_together():
        if latest_checkpoint(output) is None:
            train(settings, output, quiet())
        else:
            torch.manual_seed(12345)
            resume(output, quiet())


def _watch(reach: Connection, note_step: int | None) -> None:
    """Say through ``reach`` that a step is begun, and hold every step to the schedule."""
    take, load = LongNetTrainer.training_step, LongNetTrainer._load_optimizer_and_scheduler
    schedule: list[Any] = []

    def forget_and_load(self: LongNetTrainer, checkpoint: str | None) -> None:
        schedule.clear()  # of a trainer before, from which the run has gone back
        load(self, checkpoint)

    def take_and_note(self: LongNetTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == note_step:
            reach.send(note_step)
        schedule[:] = [self.lr_scheduler]
        return take(self, *args, **kwargs)

    def compare(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not schedule or isinstance(optimizer, MuonWithAdamW | ShardedMuon):
            return  # not training yet, or made of those that are seen here too
        said = schedule[0].get_last_lr()
        expected = said[:1] if isinstance(optimizer, torch.optim.Muon) else said[-len(optimizer.param_groups) :]
        assert [group["lr"] for group in optimizer.param_groups] == expected

    LongNetTrainer.training_step = take_and_note  # type: ignore[method-assign]
    LongNetTrainer._load_optimizer_and_scheduler = forget_and_load  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(compare)


def finish(
    settings: TrainSettings, output: Path, size: int, log: Path, disturb: Callable[[int], None] | None = None
) -> None:
    """Begin the run or take it up, and let it come to its end."""
    attempt = launch(settings, output, size, log, disturb=disturb)
    ended = attempt.wait(HANGS)
    attempt.end()
    assert ended, f"the run hangs: {attempt.said()}"
    assert [rank.exitcode for rank in attempt.ranks] == [0] * size, attempt.said()


def left_alone(folder: Path, mesh: str, optimizer: str, steps: int) -> tuple[TrainSettings, Path]:
    """The settings of a run, and such a run that came to its end undisturbed; it stays there for other trials."""
    texts, output = folder / "texts", folder / f"{mesh}-{optimizer}-{steps}".replace(" ", "")
    if not texts.exists():
        write_texts(texts)
    settings = settings_of(texts, mesh, optimizer, steps)
    if not (output / "model.safetensors").exists():
        finish(settings, output, MESHES[mesh][0], folder / "log")
    return settings, output


def what_differs(run: Path, other: Path, steps: int) -> list[str]:
    """Names of what is not the same bits in two finished runs."""
    differing = []
    ours, theirs = weights(run), weights(other)
    if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in theirs):
        differing.append(f"weights by {furthest(ours, theirs):.2g}")
    states = [torch.load(folder / f"checkpoint-{steps}" / "optimizer.pt", weights_only=True) for folder in (run, other)]
    if not _equal(*states):
        differing.append("optimizer states")
    # How fast it was, and where it was taken up, are other.
    named = ("step", "loss", "bits_per_byte", "eval_bits_per_byte", "grad_norm", "learning_rate")
    figures = [
        [
            {name: entry[name] for name in named if name in entry}
            for entry in read_metrics(folder)
            if "matrix_product_flops" not in entry
        ]
        for folder in (run, other)
    ]
    if figures[0] != figures[1]:
        differing.append("metrics")
    results = [json.loads((folder / "training.json").read_text())["result"] for folder in (run, other)]
    if any(results[0][name] != results[1][name] for name in results[0] if name != "evaluation_seconds"):
        differing.append("result")
    return differing


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


@dataclass
class Trial:
    """What killing one run showed."""

    kills: list[str]
    """Which rank, after the beginning of which step, and whether a checkpoint was being written."""
    alone: int
    """Kills of one rank after which the others ended by themselves, out of those of one rank of several."""
    differing: list[str]


def kill_and_resume(
    folder: Path,
    mesh: str,
    optimizer: str,
    *,
    steps: int,
    kills: int,
    earliest: int,
    longest_delay: float,
    drawn: random.Random,
) -> Trial:
    """A run that is left alone, and runs that are killed ``kills`` times in all; what of them differs."""
    size, log = MESHES[mesh][0], folder / "log"
    settings, whole = left_alone(folder, mesh, optimizer, steps)
    trial = Trial([], 0, [])
    runs = 0
    while len(trial.kills) < kills:
        output = whole.with_name(f"{whole.name}-killed-{runs}")
        runs += 1
        while len(trial.kills) < kills and not (output / "model.safetensors").exists():
            begun = latest_checkpoint(output)
            at = 0 if begun is None else checkpoint_step(begun)
            if at == steps:
                break  # killed while its end was measured
            # What is left of the run is spread over the kills that are left.
            until = at + math.ceil((steps - at) / (kills - len(trial.kills)))
            step = min(max(drawn.randint(at, until), at, earliest), steps - 1)
            attempt = launch(settings, output, size, log, note_step=step)
            victim = drawn.choice([None, *range(size)])
            assert attempt.has_reached(), f"step {step} is not reached: {attempt.said()}"
            time.sleep(drawn.uniform(0.0, longest_delay))  # the moment is drawn; nothing waits for it
            attempt.kill(attempt.ranks if victim is None else [attempt.ranks[victim]])
            ended = attempt.wait(60.0)
            killed = [rank for rank in attempt.ranks if rank.exitcode == -9]
            attempt.end()
            if not killed:
                assert [rank.exitcode for rank in attempt.ranks] == [0] * size, attempt.said()
                continue  # it had come to its end
            if victim is not None and size > 1:
                trial.alone += ended
            writing = " (writing)" if any(output.glob(f"{STAGING}*")) else ""
            trial.kills.append(f"{'all' if victim is None else f'rank {victim}'} at {step}{writing}")
        if not (output / "model.safetensors").exists():
            finish(settings, output, size, log)
        trial.differing += what_differs(output, whole, steps)
        shutil.rmtree(output)
    return trial


def main() -> None:
    """Do what the command line asks for; end with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--optimizers", nargs="+", default=["muon", "adamw"], choices=["muon", "adamw"])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--earliest", type=int, default=0, help="first step that a run may be killed at")
    parser.add_argument("--longest-delay", type=float, default=0.5, help="seconds from the drawn step to the kill")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    any_differs = False
    for mesh in given.meshes:
        for optimizer in given.optimizers:
            start = time.monotonic()
            trial = kill_and_resume(
                given.folder,
                mesh,
                optimizer,
                steps=given.steps,
                kills=given.kills,
                earliest=given.earliest,
                longest_delay=given.longest_delay,
                drawn=random.Random(f"{given.seed} {mesh} {optimizer}"),
            )
            any_differs |= bool(trial.differing)
            one_of_several = sum(MESHES[mesh][0] > 1 and kill.startswith("rank") for kill in trial.kills)
            print(
                f"{mesh}, {optimizer}: killed {len(trial.kills)} times ({', '.join(trial.kills)}); after {trial.alone} "
                f"of {one_of_several} kills of one rank the others ended by themselves; "
                f"{'differs: ' + ', '.join(trial.differing) if trial.differing else 'the same bits'}; "
                f"{time.monotonic() - start:.0f} s",
                flush=True,
            )
    sys.exit(any_differs)


if __name__ == "__main__":
    main()
