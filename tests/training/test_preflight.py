"""What a run chooses for the machine it is on."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch.training.preflight import choose_precision


@pytest.mark.parametrize(("avx512_bf16", "amx", "expected"), [
    (True, False, "bfloat16"), (False, True, "bfloat16"), (False, False, "float32"),
])  # fmt: skip
def test_bfloat16_is_chosen_where_it_is_in_hardware(
    avx512_bf16: bool, amx: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert choose_precision("auto", "cpu") == expected
    assert choose_precision("float32", "cpu") == "float32"
    assert choose_precision("bfloat16", "cpu") == "bfloat16"
