"""The earlier package's figures: each has a finding, which is the planner's, and the verdict follows the figure."""

from __future__ import annotations

import dataclasses
import json

import pytest
from benchmarks.claims import CLAIMS, bytes_of, saving
from benchmarks.options import RESULTS

FINDINGS = json.loads((RESULTS / "claims.json").read_text(encoding="utf-8"))["findings"]


def test_every_claim_has_a_finding() -> None:
    assert list(FINDINGS) == list(CLAIMS)


@pytest.mark.parametrize("name", ["AdamW8bit: 5.3 GB of states"])
def test_the_planner_says_today_what_the_file_has(name: str) -> None:
    assert dataclasses.asdict(CLAIMS[name]()) == FINDINGS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_the_planner_says_today_what_the_file_has_of_every_claim(name: str) -> None:
    assert dataclasses.asdict(CLAIMS[name]()) == FINDINGS[name]


def test_another_figure_has_another_verdict() -> None:
    for claimed, verdict in ((10.5e9, "confirmed"), (15.8e9, "refuted"), (8e9, "refuted")):
        assert bytes_of("optimizer", claimed, "1.3B", 8192, "mixed precision").verdict == verdict
    for least, verdict in ((3.9, "confirmed"), (5, "refuted")):
        found = saving("optimizer", least, "1.3B", 8192, "mixed precision", "all optimizations")
        assert found.verdict == verdict
