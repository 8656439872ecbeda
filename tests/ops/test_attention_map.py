"""Attention maps and their rollout against dense probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from dilated_attention_pytorch import (
    DilatedPattern,
    LongNetConfig,
    LongNetLM,
    attend,
    attend_with_lse,
    local_window,
)
from dilated_attention_pytorch.ops import (
    attend_blocks,
    attention_calls,
    attention_map,
    attention_maps,
    attention_rollout,
)
from support.drawn import DrawnCall, block_calls, calls, examples
from support.oracle import dense_attention

PATTERN = DilatedPattern([16, 64], [1, 4])


def dense_probabilities(call: DrawnCall, query: Tensor, key: Tensor) -> Tensor:
    """``P [B, N, H, M]``: the oracle's output for values that are the unit vectors."""
    batch, num_keys, kv_heads, _ = key.shape
    values = torch.eye(num_keys, dtype=key.dtype).view(1, num_keys, 1, num_keys).expand(batch, -1, kv_heads, -1)
    scale = 1 / math.sqrt(call.head_dim) if call.scale is None else call.scale
    return dense_attention(query, key, values, *call.counts(), scale)[0]


@pytest.mark.parametrize("kind", ["dilated", "block"])
def test_maps_and_their_gradients_equal_dense_probabilities(kind: str, figure: Any) -> None:
    worst: dict[str, float] = {}

    @examples(20)
    @given(calls() if kind == "dilated" else block_calls())
    def check(call: DrawnCall) -> None:
        query, key, *_ = (x.requires_grad_() for x in call.tensors(torch.float64))
        generator = torch.Generator().manual_seed(call.seed)
        rows = torch.randint(call.num_queries, (3,), generator=generator)
        weights = torch.randn(call.batch, 2, call.num_queries, generator=generator, dtype=torch.float64)
        dense = dense_probabilities(call, query, key)
        cases: dict[str, tuple[Any, Tensor]] = {
            "rows": (rows, dense[:, rows]),
            "weights": (weights, torch.einsum("brn,bnhm->brhm", weights, dense)),
            "mean": ("mean", dense.mean(1, keepdim=True)),
        }
        for name, (queries, expected) in cases.items():
            found = attention_map(
                query, key, call.pattern, queries, is_causal=call.is_causal, scale=call.scale, **call.options
            )
            toward = torch.randn(found.shape, generator=generator, dtype=torch.float64)
            grads = [
                torch.autograd.grad((x * toward).sum(), (query, key), retain_graph=True, materialize_grads=True)
                for x in (found, expected)
            ]
            pairs = zip((found, *grads[0]), (expected, *grads[1]), strict=True)
            error = max(float((x - y).detach().abs().max()) if x.numel() else 0.0 for x, y in pairs)
            assert error <= 1e-12, (name, error)
            worst[name] = max(worst.get(name, 0.0), error)

    check()
    figure(f"attention maps, {kind} patterns, largest errors", {name: f"{x:.1e}" for name, x in worst.items()})


@pytest.mark.parametrize("impl", ["native", "aten", "triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_implementation_gives_the_weighted_maps(impl: Any, dtype: torch.dtype) -> None:
    query, key = torch.randn(1, 40, 4, 16, dtype=dtype), torch.randn(1, 40, 2, 16, dtype=dtype)
    pattern = PATTERN + local_window(3)
    found = attention_map(query, key, pattern, "mean", impl=impl)
    rows = attention_map(query, key, pattern, list(range(40)))
    assert found.dtype == rows.dtype == torch.float32
    # The maps are as exact as the log-sum-exp, of which PyTorch's bfloat16 kernel has five digits without AVX-512.
    value = torch.randn(1, 40, 2, 16, dtype=dtype)
    lse, exact = (attend_with_lse(query, key, value, pattern, impl=kind).lse for kind in (impl, "reference"))
    error = float((lse - exact).abs().max())
    assert error < 1e-4
    torch.testing.assert_close(found, rows.mean(1, keepdim=True), rtol=error, atol=1e-6)
    torch.testing.assert_close(rows.sum(-1), torch.ones(1, 40, 4))


def test_a_padded_key_may_hold_anything() -> None:
    query, key = torch.randn(2, 1, 40, 2, 8).requires_grad_().unbind()
    mask = torch.zeros(1, 40, dtype=torch.bool)
    mask[:, 30:] = True
    key = key.masked_fill(mask[:, :, None, None], math.nan)
    for queries in ([0, 39], "mean"):
        found = attention_map(query, key, PATTERN, queries, key_padding_mask=mask)  # type: ignore[arg-type]
        assert found.isfinite().all()
        assert not found[..., 30:].any()
        assert torch.autograd.grad(found[..., 3].sum(), query, retain_graph=True)[0].isfinite().all()


def test_maps_of_a_model_are_those_of_its_layers() -> None:
    config = LongNetConfig(
        embed_dim=32, num_layers=3, num_heads=4, num_kv_heads=2, segment_lengths=[16, 64], dilation_rates=[1, 4]
    )
    model, tokens = LongNetLM(config).eval(), torch.randint(256, (1, 50))
    with torch.inference_mode():
        expected = model(tokens)
        with attention_calls() as layers, attention_maps([7, 49]) as maps, attention_maps("mean") as means:
            torch.testing.assert_close(model(tokens), expected, rtol=0, atol=0)
    assert [x.shape for x in maps] == [(1, 2, 4, 50)] * 3
    assert [x.shape for x in means] == [(1, 1, 4, 50)] * 3
    for layer, found, mean in zip(layers, maps, means, strict=True):
        values = torch.randn_like(layer.key)
        out = attend(layer.query, layer.key, values, layer.pattern, is_causal=True)  # type: ignore[arg-type]
        values = values.repeat_interleave(2, 2)
        torch.testing.assert_close(torch.einsum("brhm,bmhd->brhd", found, values), out[:, [7, 49]])
        torch.testing.assert_close(torch.einsum("brhm,bmhd->brhd", mean, values), out.mean(1, keepdim=True))
    with attention_maps([0]) as maps:
        pass
    model(tokens)
    assert not maps  # nothing is collected after the context


def test_a_rollout_is_the_product_of_the_layers() -> None:
    with attention_calls() as layers:
        for _ in range(3):
            attend(*torch.randn(3, 2, 60, 4, 8, dtype=torch.float64).unbind(), PATTERN, is_causal=True)
    product = torch.eye(60, dtype=torch.float64)
    for layer in layers:
        dense = attention_map(layer.query, layer.key, PATTERN, list(range(60)), is_causal=True).mean(2)
        product = (torch.eye(60, dtype=torch.float64) + dense) / 2 @ product
    torch.testing.assert_close(attention_rollout(layers, [5, 59]), product[:, [5, 59]], rtol=0, atol=1e-12)
    torch.testing.assert_close(attention_rollout(layers, "mean"), product.mean(1, keepdim=True), rtol=0, atol=1e-12)
    torch.testing.assert_close(product.sum(-1), torch.ones(2, 60, dtype=torch.float64))


def test_what_has_no_map_is_refused() -> None:
    query = key = torch.randn(1, 20, 2, 8)
    for queries, error, words in (
        ([20], ValueError, "rows 0 to 19 of query, got 20"),
        ([-1], ValueError, "rows 0 to 19 of query, got -1"),
        (torch.ones(1, 19), ValueError, "weights of queries must be"),
        (torch.ones(20), ValueError, "weights of queries must be"),
        (torch.ones(20, dtype=torch.bool), TypeError, "queries must be the numbers of rows"),
        ("class", ValueError, "or \"mean\", got 'class'"),
    ):
        with pytest.raises(error, match=words):
            attention_map(query, key, PATTERN, queries)  # type: ignore[arg-type]
    with attention_maps([0]), pytest.raises(NotImplementedError, match="blocks selected by content"):
        attend_blocks(query, key, key, torch.zeros(1, 2, 2, 1, dtype=torch.int64), block_size=16)
    with pytest.raises(ValueError, match="one call of attention per layer"):
        attention_rollout([], [0])
    with attention_calls() as layers:
        attend(query[:, :5], key, key, PATTERN)
    with pytest.raises(ValueError, match="self-attention over the same rows"):
        attention_rollout(layers, [0])
