"""Runs of several processes that survive a fault of one: a NaN, and memory that runs out.

    python tests/training/faulty_runs.py FOLDER [--meshes ddp fsdp ...] [--faults nan memory]

A batch that is NaN on the last rank is left out by all of them: the bits of the end are those of a run that left it out
from its beginning. Where the last rank has memory for one window and not for two, the weights of the end are those of a
run that has, to rounding.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from dilated_attention_pytorch.training import TrainSettings
from dilated_attention_pytorch.training.faults import cost_of_faults, read_faults
from dilated_attention_pytorch.training.lifecycle import OpenRun
from training.broken_runs import break_at
from training.killed_runs import HANGS, MESHES, launch
from training.runs import weights, write_texts
from training.spread_runs import small_settings

STEP, STEPS = 5, 7


def leave_out(step: int) -> None:
    """Have the run of this process leave out a batch from its beginning."""
    build = OpenRun.__init__

    def build_with_step(self: OpenRun, **given: Any) -> None:
        build(self, **given | {"skipped": frozenset({step})})

    OpenRun.__init__ = build_with_step  # type: ignore[method-assign]


def lack_memory(step: int) -> None:
    """Have no memory for more than one window in this process, from a step on."""
    compute = Trainer.compute_loss

    def compute_or_fail(self: Trainer, model: Any, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and len(inputs["input_ids"]) > 1 and self.state.global_step + 1 >= step:
            torch.empty(1 << 60, dtype=torch.uint8)
        return compute(self, model, inputs, *args, **options)

    Trainer.compute_loss = compute_or_fail  # type: ignore[method-assign]


def run_to_the_end(settings: TrainSettings, output: Path, size: int, disturb: Any = None) -> int:
    """Begin a run and take it up until it is finished; how often it was started."""
    log = output.with_name("log")
    shutil.rmtree(output, ignore_errors=True)
    for started in range(1, 4):
        attempt = launch(settings, output, size, log, disturb=disturb)
        ended = attempt.wait(HANGS)
        attempt.end()
        assert ended, f"the run hangs: {attempt.said()}"
        if (output / "model.safetensors").exists():
            return started
    raise AssertionError(attempt.said())


def furthest(run: Path, other: Path) -> float:
    """The largest difference of a weight."""
    found, expected = weights(run), weights(other)
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--faults", nargs="+", default=["nan", "memory"], choices=["nan", "memory"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    texts = given.folder / "texts"
    if not texts.exists():
        write_texts(texts)
    for mesh in given.meshes:
        size, changes = MESHES[mesh]
        settings = small_settings(
            texts,
            steps=STEPS,
            save_steps=3,
            eval_steps=STEPS,
            eval_windows=2,
            final_eval_windows=2,
            quarter_files=1,
            **changes,
        )
        for fault in given.faults:
            run, other = given.folder / "run", given.folder / "other"
            told = dataclasses.replace(settings, on_nan="skip") if fault == "nan" else settings

            def disturb(rank: int, last: int = size - 1, fault: str = fault) -> None:
                if rank == last and fault == "nan":
                    break_at(pytest.MonkeyPatch(), "loss", STEP)
                elif rank == last:
                    lack_memory(STEP)

            started = run_to_the_end(told, run, size, disturb)
            run_to_the_end(settings, other, size, (lambda rank: leave_out(STEP)) if fault == "nan" else None)
            difference = furthest(run, other)
            kinds = [entry["kind"] for entry in read_faults(run)]
            print(
                f"{mesh}, {fault}: started {started} times, {', '.join(kinds)}; {cost_of_faults(run).seconds_lost} s "
                f"lost; furthest weight {difference:.1g}",
                flush=True,
            )
            assert difference == 0 if fault == "nan" else difference < 1e-5, difference


if __name__ == "__main__":
    main()
