"""Runs trained by workers of Ray are those of one command."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilated_attention_pytorch.slides.finetune import ray_runs
from slides.finetune.made_cohort import Cohort
from slides.finetune.test_run import FOLDS, results_of


def test_workers_train_what_is_left_and_the_command_writes_the_metrics(
    cohort: Cohort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cluster: what a worker does is done here."""
    asked = []

    def train(
        slides: object, labels: object, checkpoint: object, output: Path, settings: object, *rest: object
    ) -> None:
        asked.append(rest[0])
        cohort.tuner(output, **FOLDS).run()

    monkeypatch.setattr(ray_runs, "train_on_ray", train)
    cohort.tuner(tmp_path / "alone", **FOLDS).run()
    for runs in (0, 0):
        outcome = cohort.tuner(tmp_path / "out", **FOLDS, engine="ray").run()
        assert (outcome.runs, outcome.finished) == (runs, 2)
    assert asked == [2]
    assert results_of(tmp_path / "out") == results_of(tmp_path / "alone")


@pytest.mark.slow
def test_two_workers_train_two_folds(cohort: Cohort, tmp_path: Path) -> None:
    cohort.tuner(tmp_path / "alone", **FOLDS).run()
    said: list[str] = []
    outcome = cohort.tuner(tmp_path / "out", **FOLDS, engine="ray", threads=1).run(say=said.append)
    assert "2 workers of the Ray cluster share 2 runs" in said
    assert (outcome.runs, outcome.finished, outcome.total) == (0, 2, 2)
    assert results_of(tmp_path / "out").keys() == results_of(tmp_path / "alone").keys()
    one, other = (results_of(tmp_path / name)["metrics.json"] for name in ("alone", "out"))
    assert one == other
