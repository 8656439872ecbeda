"""Runs of seconds: few resamples, and memory that is known."""

from __future__ import annotations

import functools

import pytest

from dilated_attention_pytorch.slides.finetune import metrics, results, run
from dilated_attention_pytorch.slides.memory import TileLimits, TrainingBytes
from slides.finetune.made_cohort import Cohort, make_cohort


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = TileLimits(tile_bytes=10**6, of_batch=1, of_slide=10**9)
    monkeypatch.setattr(run, "measure_limits", lambda *_, **__: limits)
    monkeypatch.setattr(run, "measure_training_bytes", lambda *_: TrainingBytes(tile_bytes=10**6, fixed_bytes=0))
    monkeypatch.setattr(run, "return_freed_blocks", lambda: True)
    monkeypatch.setattr(results, "write_page", lambda *_: None)
    monkeypatch.setattr(results, "with_intervals", functools.partial(metrics.with_intervals, resamples=20))


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Cohort:
    return make_cohort(tmp_path_factory.mktemp("cohort"))
