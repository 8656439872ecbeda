"""Mangled slides and checkpoints are refused in a sentence, or embedded as they are."""

from __future__ import annotations

import pytest

from slides.mangling import run_batch


@pytest.mark.parametrize(("seed", "number"), [(0, 10), pytest.param(1, 400, marks=pytest.mark.slow)])
def test_no_mangled_file_ends_the_command_or_is_embedded_wrongly(seed: int, number: int) -> None:
    counts = run_batch(seed, number)
    assert sum(counts.values()) == number
    assert {outcome.partition(" ")[2] for outcome in counts} <= {"refused", "taken"}
