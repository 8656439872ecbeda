"""Runs of several processes that are killed, or in which a value breaks: taken up, they end where others end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.forked import run_forked
from support.processes import TESTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs lie that are left alone: the trials share them."""
    return tmp_path_factory.mktemp("disturbed")


def _lines(script: str, folder: Path, words: str) -> list[str]:
    run = run_forked(TESTS / "training" / script, str(folder), *words.split(), folder=folder)
    assert run["code"] == 0, run["output"][-8000:]
    return run["output"].splitlines()


def test_a_killed_run_is_taken_up_bit_for_bit_with_the_rates_of_the_schedule(folder: Path, figure: Any) -> None:
    """All meshes, both optimizers, and kills at any moment: `make sweep-resume`."""
    words = "--meshes fsdp --optimizers muon --kills 1 --steps 7 --earliest 4 --longest-delay 0"
    (line,) = _lines("killed_runs.py", folder, words)
    assert "killed 1 times" in line
    assert "the same bits" in line
    figure("killed and taken up", line)


def test_what_breaks_on_one_rank_ends_all_of_them_in_the_same_words_and_nothing_is_lost(folder: Path) -> None:
    """All meshes, kinds and steps: `make sweep-resume`."""
    words = "--meshes fsdp --kinds gradient --steps 6 --total 7"
    (line,) = _lines("broken_runs.py", folder, words)
    assert "step 6 is not taken: NaN or infinity is in 1 of 35 gradients (model.layernorm.bias) on rank 1;" in line
    assert "the checkpoint of step 3 is kept" in line


def test_a_nan_on_one_rank_is_survived_by_all_of_them(folder: Path) -> None:
    """All meshes: `make sweep-resume`."""
    (line,) = _lines("broken_runs.py", folder, "--meshes ddp --kinds skip --steps 5 --total 7")
    assert line == "ddp, muon, skip of step 5: skipped, resumed"
