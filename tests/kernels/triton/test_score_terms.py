"""Caps, biases and values of their own width in the Triton kernels, against the dense oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch.kernels.select import is_interpreted
from dilated_attention_pytorch.kernels.triton import configurations
from support.drawn import SWEEP, Sizes, block_calls, calls, examples
from support.planned import with_candidates
from support.scored_calls import ScoredCall, check_budget, scored
from support.triton_calls import DEVICE, poisoned, surrounded

DRAWS = 30
"""500 in the sweep."""
TINY = Sizes(
    st.sampled_from([1, 7, 13, 15, 16, 17, 19]),
    batch=2,
    kv_heads=2,
    head_dims=(5, 16, 20),
    groups=1,
    summands=(1,),
    segments=st.one_of(st.integers(5, 40), st.sampled_from([8, 16])),
    ratios=(1, 1, 2),
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if is_interpreted():
        with_candidates(monkeypatch, configurations.BlockSizes(16, 16, 4, 1))


def placed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the device; query, key, value and the gradient of the output in storage that is NaN elsewhere."""
    return {
        name: surrounded(x).detach() if name in ("q", "k", "v", "of_out") else x.to(DEVICE)
        for name, x in tensors.items()
    }


def test_drawn_calls_stay_within_the_error_budget(figure: Any) -> None:
    used: dict[str, float] = {}
    drawn = 0

    @examples(50 if SWEEP else DRAWS, is_shrunk=False)
    @given(
        scored(st.one_of(calls(sizes=TINY), calls(sizes=TINY), block_calls(sizes=TINY))),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        st.integers(0, 2**31),
    )
    def check(call: ScoredCall, dtype: torch.dtype, seed: int) -> None:
        nonlocal drawn
        drawn += 1
        call.call.seed = seed
        with poisoned():
            check_budget(call, dtype, "triton", used, placed)

    check()
    assert drawn >= DRAWS
    figure(
        f"Triton, terms of the scores, {drawn} drawn calls, part of the error budget",
        {k: f"{v:.2f}" for k, v in used.items()},
    )
