"""Drawn hostile command lines end in a sentence, within their time and without a signal."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cli.hostile_lines import drawn_line, make_world, outcome, run_lines


@pytest.mark.slow
def test_drawn_hostile_command_lines_end_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "world").mkdir()
    make_world(tmp_path / "world")
    draw = random.Random(7)
    lines = [drawn_line(draw) for _ in range(100)]
    results = run_lines(lines, tmp_path / "world", tmp_path / "lines", seconds=300)
    bad = [(line, result) for line, result in zip(lines, results, strict=True) if outcome(result) != "ok"]
    assert not bad
