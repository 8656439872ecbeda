"""Models of drawn configurations equal their definition, written out densely, padded, packed, cached and alone."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch.models import LongNetCache, LongNetConfig, LongNetLM
from models.dense import WRITTEN_OUT, Dense
from support.drawn import examples

TOLERANCE = 1e-11  # float64, logits of order one, a few hundred roundings


@st.composite
def configurations(draw: st.DrawFn) -> LongNetConfig:
    """Few layers with drawn positions, gates, keys and patterns."""
    heads, kv_heads, head_dim = draw(st.sampled_from([(1, 1, 6), (4, 2, 4), (6, 3, 2), (3, 3, 4)]))
    fields: dict[str, Any] = {
        "layer_patterns": draw(st.lists(st.sampled_from([*WRITTEN_OUT][1:]), min_size=1, max_size=3))
    }
    if draw(st.booleans()):
        fields = {
            "segment_lengths": draw(st.sampled_from([(5, 13), (1, 40), (100,)])),
            "layer_segment_shifts": draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        }
        fields["dilation_rates"] = (1, 3)[: len(fields["segment_lengths"])]
    thetas = st.sampled_from([0.0, 10.0, 1e4, 1e6])
    lengths = st.sampled_from([0, 2, 7, 30, 1000])
    width = draw(st.integers(1, 4))
    return LongNetConfig(
        vocab_size=29,
        embed_dim=heads * head_dim,
        num_layers=draw(st.integers(1, 3)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_dim=11,
        activation=draw(st.sampled_from(["swiglu", "gelu"])),
        layer_rope_thetas=draw(st.lists(thetas, max_size=3)),
        layer_scale_lengths=draw(st.lists(lengths, max_size=3)),
        head_gates=draw(st.booleans()),
        key_convolution=width,
        shifted_keys=width == 1 and draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
        **fields,
    )


def drawn_model(config: LongNetConfig, seed: int) -> LongNetLM:
    """Every weight moved off its start: ones, zeros and equal gates would hide a fault."""
    torch.manual_seed(seed)
    model = LongNetLM(config).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def defined(model: LongNetLM, ids: Tensor) -> Tensor:
    """The logits by the definition."""
    dense = Dense(model.config, dict(model.named_parameters()))
    head = dense.weight("embedding.weight" if model.config.tie_embeddings else "head.weight")
    return dense.states(dense.embedded(ids), is_causal=True) @ head.T


@examples(20, is_shrunk=False)
@given(configurations(), st.integers(1, 40), st.integers(0, 2**31))
def test_logits_and_gradients_are_those_of_the_definition(config: LongNetConfig, length: int, seed: int) -> None:
    model = drawn_model(config, seed)
    assert config.num_parameters == sum(weight.numel() for weight in model.parameters())
    ids = torch.randint(29, (2, length))
    actual, expected = model(ids), defined(model, ids)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
    weight = torch.randn_like(actual)
    found, wanted = (torch.autograd.grad((x * weight).sum(), list(model.parameters())) for x in (actual, expected))
    for gradient, reference in zip(found, wanted, strict=True):
        scale = max(1.0, float(reference.abs().max()))
        torch.testing.assert_close(gradient, reference, atol=100 * TOLERANCE * scale, rtol=0)


@examples(20, is_shrunk=False)
@given(configurations(), st.data())
@torch.no_grad()
def test_padded_and_packed_rows_give_what_they_give_alone(config: LongNetConfig, data: st.DataObject) -> None:
    model, length = drawn_model(config, data.draw(st.integers(0, 2**31))), 30
    ids = torch.randint(29, (2, length))
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    packed = model(ids, cu_seqlens=torch.tensor([0, *cuts, length], dtype=torch.int32))
    for start, stop in itertools.pairwise([0, *cuts, length]):
        if start < stop:
            torch.testing.assert_close(
                packed[:, start:stop], defined(model, ids[:, start:stop]), atol=TOLERANCE, rtol=0
            )
    runs = [sorted(data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True))) for _ in range(2)]
    mask = torch.zeros(2, length, dtype=torch.int64)
    for row, (start, stop) in enumerate(runs):
        mask[row, start:stop] = 1
    padded = model(ids, attention_mask=mask)
    for row, (start, stop) in enumerate(runs):
        alone = defined(model, ids[row : row + 1, start:stop])
        torch.testing.assert_close(padded[row, start:stop], alone[0], atol=TOLERANCE, rtol=0)


@examples(20, is_shrunk=False)
@given(configurations(), st.data())
@torch.no_grad()
def test_cached_rows_are_those_of_one_call(config: LongNetConfig, data: st.DataObject) -> None:
    model, length, prompt = drawn_model(config, data.draw(st.integers(0, 2**31))), 30, 17
    ids = torch.randint(29, (3, length))
    mask = torch.ones(3, length, dtype=torch.int64)
    starts = [data.draw(st.integers(0, prompt)) for _ in range(3)]
    for row, start in enumerate(starts):
        mask[row, :start] = 0
    cache, logits, done = LongNetCache(config), [], 0
    while done < length:
        some = slice(done, min(done + data.draw(st.sampled_from([1, 1, 2, 3, 9])), length))
        logits.append(model(ids[:, some], attention_mask=mask[:, : some.stop], cache=cache))
        done = some.stop
    together = torch.cat(logits, dim=1)
    for row, start in enumerate(starts):
        alone = defined(model, ids[row : row + 1, start:])
        torch.testing.assert_close(together[row, start:], alone[0], atol=TOLERANCE, rtol=0)
