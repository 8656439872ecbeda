"""Runs of seconds: few resamples, and memory that is known."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from dilated_attention_pytorch.slides import worker
from dilated_attention_pytorch.slides.finetune import page, run
from dilated_attention_pytorch.slides.memory import TileLimits, TrainingBytes
from slides.finetune.made_cohort import Cohort, make_cohort


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    limits = TileLimits(tile_bytes=10**6, of_batch=1, of_slide=10**9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "measure_limits", lambda *_, **__: limits)
        patch.setattr(worker, "measure_limits", lambda *_, **__: limits)
        patch.setattr(run, "measure_training_bytes", lambda *_: TrainingBytes(tile_bytes=10**6, fixed_bytes=0))
        patch.setattr(run, "return_freed_blocks", lambda: True)
        patch.setattr(page, "results", functools.partial(page.results, resamples=20))
        yield


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Cohort:
    return make_cohort(tmp_path_factory.mktemp("cohort"))
