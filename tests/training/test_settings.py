"""Settings and presets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.settings import SampleSettings


@pytest.mark.parametrize("name", PRESETS)
def test_settings_survive_json(name: str) -> None:
    settings = PRESETS[name]()
    assert TrainSettings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"tiny"}))
def test_presets_for_real_runs_see_8192_bytes_and_more(name: str) -> None:
    settings = PRESETS[name]()
    assert settings.context_length >= 8192
    assert max(settings.model.segment_lengths) >= settings.context_length


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, "steps must be at least 1, got 0"),
        ("context_length", 1, "context_length must be at least 8, got 1"),
        ("learning_rate", -1.0, "learning_rate must be above 0, got -1.0"),
        ("muon_learning_rate", float("nan"), "muon_learning_rate must be a finite number, got nan"),
        ("file_start_fraction", 1.5, "file_start_fraction must be at most 1, got 1.5"),
        ("adam_beta2", 1.0, "adam_beta2 must be below 1, got 1.0"),
        ("context_parallel", 0, "context_parallel must be at least 1, got 0"),
        ("heads_parallel", 2, "heads_parallel must divide context_parallel, .* got 2 of 1"),
        ("threads", -2, "threads must be at least 0, got -2"),
    ],
)
def test_a_number_out_of_range_is_named(name: str, value: Any, message: str) -> None:
    values = PRESETS["tiny"]().to_dict() | {name: value}
    with pytest.raises(ValueError, match=message):
        TrainSettings.from_dict(values)


def test_heads_over_all_processes_and_over_some_of_them_exclude_each_other() -> None:
    values = PRESETS["tiny"]().to_dict() | {"context_parallel": 4, "heads_parallel": 2, "strategy": "heads"}
    with pytest.raises(ValueError, match="To split the heads over all processes, leave heads_parallel out"):
        TrainSettings.from_dict(values)


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(TypeError, match="stepz"):
        TrainSettings.from_dict(PRESETS["tiny"]().to_dict() | {"stepz": 3})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be at most 1"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ],
)
def test_a_way_of_drawing_that_does_not_exist_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleSettings(**values)
