"""What the learning rate of a run is at every step, and how a run is spread where nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate import parallel_choice
from dilated_attention_pytorch.estimate.memory import Footprint
from dilated_attention_pytorch.estimate.parallel_choice import choose_parallel
from dilated_attention_pytorch.training import preflight
from dilated_attention_pytorch.training.run_trainer import training_arguments
from training.runs import small_settings


def test_wsd_rises_stays_and_falls_in_a_line(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, schedule="wsd", warmup_fraction=0.2, decay_fraction=0.25, learning_rate=1.0)
    args = training_arguments(settings, tmp_path, "cpu")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    schedule = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        args.warmup_steps,
        args.max_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    rates = []
    for _ in range(settings.steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    # 20 steps: 4 up, 11 at the peak, 5 down to 0 after the last.
    assert rates == pytest.approx([0, 0.25, 0.5, 0.75, *[1.0] * 11, 1.0, 0.8, 0.6, 0.4, 0.2])
    with pytest.raises(ValueError, match=r'at most 1 together for the schedule "wsd", got 0\.5 and 0\.6'):
        small_settings(tmp_path, schedule="wsd", warmup_fraction=0.5, decay_fraction=0.6)


def test_the_first_way_that_fits_is_taken_and_the_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small_settings(Path("x"), parallel="auto")
    ways = [(1, "ddp"), (1, "fsdp"), (2, "fsdp"), (4, "fsdp")]
    # Less with every way, whatever a step of these settings takes.
    sizes = {way: Footprint(1000 - 100 * place, 0, 0, 0) for place, way in enumerate(ways)}
    monkeypatch.setattr(
        parallel_choice, "footprint", lambda way, processes: sizes[way.context_parallel, way.data_parallel]
    )
    needed = [int(1.25 * size.total) for size in sizes.values()]
    for place, (context, data) in enumerate(ways):
        monkeypatch.setattr(parallel_choice, "free_memory", lambda where, place=place: needed[place])
        chosen, reason = choose_parallel(settings, "cpu", 4)
        assert (chosen.context_parallel, chosen.data_parallel, chosen.parallel) == (context, data, "manual")
        assert reason.count("would take") == place
    monkeypatch.setattr(parallel_choice, "free_memory", lambda where: needed[-1] - 1)
    chosen, reason = choose_parallel(settings, "cpu", 4)
    assert chosen.context_parallel == 4
    assert "though nothing is sure to fit: ddp would take" in reason
    with pytest.raises(ValueError, match='parallel "auto" chooses data_parallel and context_parallel itself'):
        small_settings(Path("x"), parallel="auto", data_parallel="fsdp")


def test_tf32_is_refused_where_there_is_none() -> None:
    with pytest.raises(RunError, match=r"--precision tf32 is how CUDA GPUs .* take --precision float32"):
        preflight.choose_precision("tf32", "cpu")
