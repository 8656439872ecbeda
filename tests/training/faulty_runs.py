"""Runs of several processes that survive a NaN of one.

    python tests/training/faulty_runs.py FOLDER [--meshes ddp fsdp ...]

A batch that is NaN on the last rank is left out by all of them: the bits of the end are those of a run that left it out
from its beginning.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.training import TrainSettings
from dilated_attention_pytorch.training.faults import cost_of_faults, read_faults
from dilated_attention_pytorch.training.lifecycle import OpenRun
from training.broken_runs import break_at
from training.compared import furthest
from training.killed_runs import HANGS, MESHES, launch
from training.runs import small_settings, weights, write_texts

STEP, STEPS = 5, 7


def leave_out(step: int) -> None:
    """Have the run of this process leave out a batch from its beginning."""
    build = OpenRun.__init__

    def build_with_step(self: OpenRun, **given: Any) -> None:
        build(self, **given | {"skipped": frozenset({step})})

    OpenRun.__init__ = build_with_step  # type: ignore[method-assign]


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


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=list(MESHES))
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
        run, other = given.folder / "run", given.folder / "other"

        def break_last(rank: int, last: int = size - 1) -> None:
            if rank == last:
                break_at(pytest.MonkeyPatch(), "loss", STEP)

        started = run_to_the_end(dataclasses.replace(settings, on_nan="skip"), run, size, break_last)
        run_to_the_end(settings, other, size, lambda rank: leave_out(STEP))
        difference = furthest(weights(run), weights(other))
        kinds = [entry["kind"] for entry in read_faults(run)]
        print(
            f"{mesh}, nan: started {started} times, {', '.join(kinds)}; {cost_of_faults(run).seconds_lost} s lost; "
            f"furthest weight {difference:.1g}",
            flush=True,
        )
        assert difference == 0, difference


if __name__ == "__main__":
    main()
