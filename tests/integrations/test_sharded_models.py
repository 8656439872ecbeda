"""Models under a pattern with FSDP2 on several ranks compute what the whole model computes."""

from __future__ import annotations

import pytest

from integrations.sharded_models import train_two_steps
from ranks import run_ranks


@pytest.mark.parametrize(
    ("world", "name", "recomputing", "extended"), [(2, "llama", False, True), (3, "gemma", True, False)]
)
def test_fsdp2_gives_the_logits_and_gradients_of_the_whole_model(
    world: int, name: str, recomputing: bool, extended: bool
) -> None:
    for found in run_ranks(world, train_two_steps, name, recomputing, extended):
        print(f"FSDP2, {world} ranks, {name}: { {key: f'{value:.2g}' for key, value in found.items()} }")
        assert found.pop("kept") < 1.2 / world
        assert all(value < 1e-10 for value in found.values()), found
