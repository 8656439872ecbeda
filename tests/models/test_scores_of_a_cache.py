"""Decoding with a bounded cache under terms of the scores equals one call over all rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import attend
from dilated_attention_pytorch.integrations.transformers.bounded import _PatternCache
from dilated_attention_pytorch.kernels.select import Impl, refusal
from dilated_attention_pytorch.ops import implementation
from support.drawn import block_calls, calls, examples
from support.oracle import Groups
from support.scored_calls import ScoredCall, scored


@pytest.mark.parametrize(
    ("impl", "dtype", "tolerance"), [("aten", torch.float64, 1e-10), ("native", torch.float32, 2e-5)]
)
def test_decoded_rows_equal_those_of_one_call(impl: Impl, dtype: torch.dtype, tolerance: float, figure: Any) -> None:
    if refusal(impl, torch.device("cpu"), dtype, 1) is not None:
        pytest.skip("not on this machine")
    worst = 0.0

    @examples(20)
    @given(scored(st.one_of(calls(with_padding=False), block_calls(with_padding=False))), st.data())
    @torch.no_grad()
    def check(call: ScoredCall, data: st.DataObject) -> None:
        nonlocal worst
        ragged = (
            dataclasses.replace(one, tail="ragged") if isinstance(one, Groups) else one for one in call.call.summands
        )
        rows = call.call.num_queries
        call.call = dataclasses.replace(
            call.call, summands=tuple(ragged), num_keys=rows, options={}, is_causal=True, scale=None
        )
        call.names, call.is_in_the_plane = call.names - {"key_bias"}, False
        tensors, *_ = call.tensors(dtype)
        scores, pattern = call.scores(tensors), call.call.pattern
        q, k, v = (tensors[name] for name in "qkv")
        expected = attend(q, k, v, pattern, is_causal=True, scores=scores, impl="reference")
        cache, done = _PatternCache((pattern,), k.shape[2]), 0
        with implementation(impl):
            while done < rows:
                new = data.draw(st.sampled_from([1, 1, 1, 2, 5, 20]))
                some = slice(done, done + new)
                step = cache.step(q.shape[0], q[:, some].shape[1], None, q.device)
                out = step.attend(0, q[:, some], k[:, some], v[:, some], 0.0, scores)
                worst = max(worst, float((out - expected[:, some]).abs().max()))
                done += new
        assert worst <= tolerance

    check()
    figure(f"scores with a bounded cache, {impl}, largest error", f"{worst:.1e}")
