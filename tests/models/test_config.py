"""A configuration says what is wrong with it, and survives JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dilated_attention_pytorch.models import LongNetConfig


def test_a_configuration_survives_json(make_config: Any) -> None:
    config = make_config(activation="gelu", ffn_dim=None, dropout=0.5)
    assert LongNetConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_layers_take_their_shifts_in_turn(make_config: Any) -> None:
    config = make_config(num_layers=5, layer_segment_shifts=[0, 3])
    assert [config.pattern(layer).segment_shift for layer in range(5)] == [0, 3, 0, 3, 0]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"embed_dim": 61}, ValueError, ["num_heads", "61", "6 heads"]),
        ({"embed_dim": 18}, ValueError, ["even width", "18"]),
        ({"num_kv_heads": 4}, ValueError, ["num_kv_heads", "4 of 6"]),
        ({"num_layers": 0}, ValueError, ["num_layers", "at least 1", "got 0"]),
        ({"num_layers": 2.5}, TypeError, ["num_layers", "integer", "2.5"]),
        ({"activation": "relu"}, ValueError, ["activation", '"swiglu" or "gelu"', "'relu'"]),
        ({"dropout": 1.0}, ValueError, ["dropout", "below 1", "1.0"]),
        ({"attention_dropout": "a"}, TypeError, ["attention_dropout", "number", "'a'"]),
        ({"rope_theta": 0}, ValueError, ["rope_theta", "above 0", "0.0"]),
        ({"tie_embeddings": "yes"}, TypeError, ["tie_embeddings", "'yes'"]),
        ({"layer_rope_thetas": 1e4}, ValueError, ["layer_rope_thetas", "list", "10000.0"]),
        ({"layer_rope_thetas": [1e4, -1]}, ValueError, ["layer_rope_thetas", "above 0", "-1.0"]),
        ({"layer_rope_thetas": [0], "rope_theta": 500.0}, ValueError, ["leave rope_theta out", "500.0"]),
        ({"layer_scale_lengths": [0, 1]}, ValueError, ["layer_scale_lengths", "at least 2", "got 1"]),
        ({"layer_scale_lengths": [False]}, TypeError, ["layer_scale_lengths must be an integer", "got False"]),
        ({"layer_rope_thetas": None}, ValueError, ["layer_rope_thetas must be a list", "got None"]),
        ({"head_gates": 1}, TypeError, ["head_gates", "True or False", "1"]),
        ({"key_convolution": 5}, ValueError, ["key_convolution", "at most 4", "got 5"]),
        ({"key_convolution": 2, "shifted_keys": True}, ValueError, ["leave one of them out", "key_convolution 2"]),
        ({"dilation_rates": [1]}, ValueError, ["segment_lengths", "dilation_rates", "2", "1"]),
        ({"segment_lengths": [0, 23]}, ValueError, ["segment_lengths", "at least 1", "got 0"]),
        ({"layer_segment_shifts": []}, ValueError, ["layer_segment_shifts", "at least one"]),
        ({"layer_segment_shifts": 3}, ValueError, ["layer_segment_shifts", "list", "3"]),
        ({"layer_segment_shifts": [-1]}, ValueError, ["segment_shift", "at least 0", "-1"]),
    ],
)
def test_what_is_wrong_is_said(make_config: Any, changes: dict[str, Any], error: type, words: list[str]) -> None:
    with pytest.raises(error) as raised:
        make_config(**changes)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_an_unknown_key_is_an_error_that_names_the_known_ones(make_config: Any) -> None:
    with pytest.raises(ValueError, match=r"'widht'.*its fields are vocab_size.*rope_theta"):
        LongNetConfig.from_dict({**make_config().to_dict(), "widht": 3})
