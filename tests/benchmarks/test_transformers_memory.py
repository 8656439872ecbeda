"""The models whose memory is compared compute what their names say."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import DilatedPattern

pytest.importorskip("transformers")

from benchmarks.transformers_memory import check_equality, model_of


@torch.no_grad()
def test_only_the_dilated_model_has_the_pattern() -> None:
    tokens, pattern = torch.randint(256, (1, 64)), DilatedPattern([8], [2])
    dilated, sdpa, eager = (
        model_of(attention, 64, "cpu", pattern).eval()(tokens).logits for attention in ("dilated", "sdpa", "eager")
    )
    torch.testing.assert_close(sdpa, eager)
    assert not torch.allclose(dilated, sdpa, atol=1e-3)


def test_a_pattern_that_covers_the_length_equals_sdpa() -> None:
    assert 0 < check_equality() < 1e-5
