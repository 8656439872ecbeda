"""Settings and presets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.training import PRESETS, TrainSettings


@pytest.mark.parametrize("name", PRESETS)
def test_settings_survive_json(name: str) -> None:
    settings = PRESETS[name]()
    assert TrainSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"tiny"}))
def test_presets_for_real_runs_see_8192_bytes_and_more(name: str) -> None:
    settings = PRESETS[name]()
    assert settings.context_length >= 8192
    model, last = settings.model, torch.arange(settings.context_length - 64, settings.context_length)
    assert model.num_kv_heads is not None
    # All of the last 64 bytes of a window see some of the first 64, in some head and layer.
    seen = [one.counts(last, torch.arange(64), model.num_kv_heads, is_causal=True) for one in model.different_patterns]
    assert torch.stack([one.any(dim=-1).any(dim=0) for one in seen]).any(dim=0).all()


@pytest.mark.parametrize("name", PRESETS)
def test_no_rate_of_a_preset_exceeds_the_number_of_key_value_heads(name: str) -> None:
    model = PRESETS[name]().model
    assert model.num_kv_heads is not None
    dilated = [pattern for pattern in model.different_patterns if isinstance(pattern, DilatedPattern)]
    assert dilated
    assert max(rate for pattern in dilated for rate in pattern.dilation_rates) <= model.num_kv_heads


def test_heads_over_all_processes_and_over_some_of_them_exclude_each_other() -> None:
    values = PRESETS["tiny"]().to_dict() | {"context_parallel": 4, "heads_parallel": 2, "strategy": "heads"}
    with pytest.raises(ValueError, match="To split the heads over all processes, leave heads_parallel out"):
        TrainSettings.from_dict(values)


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(TypeError, match="stepz"):
        TrainSettings.from_dict(PRESETS["tiny"]().to_dict() | {"stepz": 3})


def test_settings_that_an_earlier_version_wrote_are_read() -> None:
    settings = dataclasses.replace(PRESETS["tiny"](), data=(Path("a"), Path("b")), data_weights=(0.7, 0.3))
    values = settings.to_dict()
    values["weights"] = values.pop("data_weights")
    assert TrainSettings.from_dict(values).data_weights == settings.data_weights
