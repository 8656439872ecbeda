"""What offloads, builds, loads, shards, adapts, quantises or prunes a module leaves its result as it is."""

from __future__ import annotations

import pytest
import torch

from models.fsdp_ranks import sharded_from_meta
from models.wrapping import CASES, WAYS, silent
from parallel.ranks import run_ranks


@pytest.mark.parametrize("name", CASES)
def test_a_hook_on_every_module_with_parameters_fires(name: str) -> None:
    assert silent(CASES[name]) == []


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:`?torch.ao.quantization:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_a_module_computes_the_same(way: str, name: str) -> None:
    if way == "LoRA all-linear":
        pytest.importorskip("peft")
    try:
        found, expected = WAYS[way](CASES[name])
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    torch.testing.assert_close(found, expected)


def test_shards_of_modules_built_on_meta_compute_the_same() -> None:
    for found in run_ranks(2, sharded_from_meta):
        assert found.keys() == CASES.keys()
        assert all(difference < 1e-5 for difference in found.values()), found
