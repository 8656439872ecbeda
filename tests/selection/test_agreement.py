"""All ranks choose the same segments, from the scarcest rank's memory."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch.parallel.selection import agreed_selector
from dilated_attention_pytorch.selection import DynamicSegmentSelector
from ranks import run_ranks
from selection.agreeing import CONFIG, everything, of_rank
from selection.cases import GIB


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree_on_the_scarcest_memory_and_the_first_rank_s_rates(world: int) -> None:
    found = run_ranks(world, everything)
    for axes in ("one axis", "two axes"):
        patterns, free, name = found[0][axes]
        assert all(rank[axes] == (patterns, free, name) for rank in found)
        assert (free, name) == ((5 - world) * GIB, "node 0")
        hardware, profile = of_rank(0)
        alone = DynamicSegmentSelector(CONFIG, hardware=hardware, profile=profile)
        assert patterns == [alone.select(rows, 2, 8, 64, torch.float32, "cpu") for rows in (100, 3000, 20000)]
    for rank in found:
        assert "SegmentSelectionConfig.memory_safety_factor" in rank["refusal"]
        assert "0.5" in rank["refusal"]


def test_one_process_has_its_own() -> None:
    hardware, profile = of_rank(1)
    assert agreed_selector(CONFIG, hardware=hardware, profile=profile).machine("cpu") == (hardware, profile)
