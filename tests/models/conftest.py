"""Small models whose sizes are distinct, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dilated_attention_pytorch.models import LongNetConfig, LongNetLM


@pytest.fixture
def make_config() -> Callable[..., LongNetConfig]:
    def make(**changes: Any) -> LongNetConfig:
        sizes: dict[str, Any] = {
            "vocab_size": 29,
            "embed_dim": 60,
            "num_layers": 2,
            "num_heads": 6,
            "num_kv_heads": 3,
            "ffn_dim": 53,
            "segment_lengths": [7, 23],
            "dilation_rates": [1, 3],
            "layer_segment_shifts": (0, 5),
        }
        return LongNetConfig(**{**sizes, **changes})

    return make


@pytest.fixture
def make_model(make_config: Callable[..., LongNetConfig]) -> Callable[..., LongNetLM]:
    def make(**changes: Any) -> LongNetLM:
        return LongNetLM(make_config(**changes)).double().eval()

    return make
