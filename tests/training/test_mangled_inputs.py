"""Files that commands read, mangled at random: a few of the trials of :mod:`training.mangled_inputs`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from training.mangled_inputs import KINDS, Kind, World, attempt, limited, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("mangled"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_mangled_input_is_read_or_refused_in_a_sentence_and_nothing_is_executed_or_lost(
    kind: Kind, world: World, tmp_path: Path
) -> None:
    outcomes = set()
    with limited():
        for seed in range(40 if kind.name == "run folder" else 2):
            trial = attempt(world, random.Random(f"{kind.name}:{seed}"), tmp_path / "trial", kind)
            outcomes.add(trial.outcome)
            assert bool(trial.sentence) == (trial.outcome == "refused")
    assert outcomes <= {"refused", "done", "checkpoint-4", "checkpoint-7"}
    if kind.name == "run folder":
        assert outcomes == {"refused", "checkpoint-4", "checkpoint-7"}
