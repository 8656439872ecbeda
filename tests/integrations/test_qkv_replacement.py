"""timm-style blocks under a pattern, alone and in a ViT, give what dense attention with its counts gives."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.integrations import QkvReplacement, replace_attention
from integrations.plain_models import (
    CAUSAL,
    DILATED,
    HOLES,
    ROWS,
    Attention,
    Block,
    VisionTransformer,
    assert_equal,
    padding,
    results,
    vision_transformer,
    with_oracle,
)
from support.drawn import DENSE, examples, groups, pattern_of
from support.oracle import Groups

COVERING = DilatedPattern([ROWS], [1])


VIT_OPTIONS = [
    {},
    {"qkv_bias": True, "qk_norm": True, "fused_attn": False},
    {"attn_dim": 15, "scale_norm": True, "qkv_bias": True},
]


@pytest.mark.parametrize("options", VIT_OPTIONS)
def test_a_vision_transformer_under_one_covering_group_gives_what_it_gave(options: dict[str, Any]) -> None:
    model, images, weight = vision_transformer(**options)
    expected = results(model, images, weight)
    report = replace_attention(model, DilatedPattern([26], [1]))
    assert [layer.name for layer in report.replaced] == ["blocks.0.attn", "blocks.1.attn"]
    assert_equal(results(model, images, weight), expected)


@pytest.mark.parametrize("seen", [DILATED, HOLES], ids=["dilated", "with rows that see nothing"])
@pytest.mark.parametrize("options", VIT_OPTIONS)
def test_a_vision_transformer_under_a_dilated_pattern_equals_the_oracle(options: dict[str, Any], seen: Groups) -> None:
    model, images, weight = vision_transformer(**options)
    expected = results(with_oracle(model, seen), images, weight)
    replace_attention(model, pattern_of(seen))
    assert_equal(results(model, images, weight), expected)


@pytest.mark.parametrize("fused_attn", [True, False])
def test_a_block_under_a_dilated_pattern_gives_the_block_with_the_counts_as_mask(fused_attn: bool) -> None:
    block = Attention(12, 3, qk_norm=True, fused_attn=fused_attn).double()
    x, weight = torch.randn(2, 2, ROWS, 12, dtype=torch.float64)
    counts = pattern_of(DILATED).counts(torch.arange(ROWS), torch.arange(ROWS), 3)
    expected = results(block, x, weight, attn_mask=counts.double().log())
    assert_equal(results(QkvReplacement(block, pattern_of(DILATED)), x, weight), expected)


@examples(20)
@given(st.data())
def test_a_drawn_block_equals_the_oracle(data: st.DataObject) -> None:
    heads, head_dim = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 3, 8]))
    rows, is_causal = data.draw(st.sampled_from([1, 7, 63, 100])), data.draw(st.booleans())
    drawn = data.draw(groups("ragged", DENSE))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    block = Attention(
        11,
        heads,
        heads * head_dim,
        qkv_bias=data.draw(st.booleans()),
        qk_norm=data.draw(st.booleans()),
        scale_norm=data.draw(st.booleans()),
    ).double()
    x, weight = torch.randn(2, 2, rows, 11, dtype=torch.float64)
    expected = results(with_oracle(block, drawn), x, weight, is_causal=is_causal)
    assert_equal(results(QkvReplacement(block, pattern_of(drawn)), x, weight, is_causal=is_causal), expected)
    by_itself = QkvReplacement(block, pattern_of(drawn), is_causal=is_causal)
    assert_equal(results(by_itself, x, weight), expected)


def test_masks_of_a_block_are_the_causal_one_and_padding() -> None:
    block = QkvReplacement(Attention(12, 3).double(), pattern_of(DILATED))
    x = torch.randn(2, ROWS, 12, dtype=torch.float64)
    causal = block(x, is_causal=True)
    torch.testing.assert_close(block(x, CAUSAL(ROWS)), causal)
    torch.testing.assert_close(block(x, torch.ones(ROWS, ROWS, dtype=torch.bool).tril()), causal)
    padded = padding([ROWS, 9])
    torch.testing.assert_close(block(x, ~padded[:, None, None])[1, :9], block(x[1:, :9])[0])
    causal_mask = CAUSAL(ROWS).double()
    torch.testing.assert_close(block(x, causal_mask[None, None]), causal)
    least = torch.finfo(torch.float32).min
    for hidden in (least, -torch.inf):
        floats = torch.zeros(2, 1, 1, ROWS).masked_fill(padded[:, None, None], hidden)
        assert torch.equal(block(x, floats), block(x, ~padded[:, None, None]))
        torch.testing.assert_close(block(x, floats[1:])[1, :9], block(x[1:, :9])[0])
    with pytest.raises(ValueError, match="other values would bias scores"):
        block(x, torch.full((2, 1, 1, ROWS), 0.5))
    for wrong in (torch.zeros(ROWS, ROWS), torch.ones(ROWS, ROWS, dtype=torch.bool), torch.zeros(2, 3, ROWS, ROWS)):
        with pytest.raises(NotImplementedError, match="attn_mask can be the causal mask"):
            block(x, wrong)
    with pytest.raises(NotImplementedError, match="attn_bias must be None"):
        block(x, attn_bias=torch.zeros(()))
    with pytest.raises(ValueError, match=r"x must be \[batch, sequence, 12\], got shape \(2, 4, 4, 12\)"):
        block(torch.zeros(2, 4, 4, 12))


def test_a_block_that_is_causal_stays_so() -> None:
    class CausalAttention(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, CAUSAL(x.shape[1], dtype=x.dtype))

    block = CausalAttention(12, 3).double()
    x = torch.randn(2, ROWS, 12, dtype=torch.float64)
    replacement = QkvReplacement(block, COVERING)
    assert replacement.is_causal
    torch.testing.assert_close(replacement(x), block(x), rtol=1e-10, atol=1e-10)


class UnnamedDropout(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(super().forward(x), 0.4, self.training)


class CausalUnlessTold(Attention):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = True) -> Tensor:
        return super().forward(x, CAUSAL(x.shape[1], dtype=x.dtype) if is_causal else attn_mask)


class OtherOrder(Attention):
    def forward(self, x: Tensor, is_causal: bool = False, attn_mask: Tensor | None = None) -> Tensor:
        return super().forward(x, CAUSAL(x.shape[1], dtype=x.dtype) if is_causal else attn_mask)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (UnnamedDropout, "in training mode it computes something else"),
        (CausalUnlessTold, "is causal by default, and is_causal=False"),
        (OtherOrder, "takes is_causal, attn_mask in this order"),
    ],
)
def test_a_block_whose_call_or_training_would_be_another_is_left(kind: type[Attention], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QkvReplacement(kind(12, 3).double(), COVERING)


class NoisyAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("its author says something", stacklevel=1)
        return super().forward(x)


def test_a_compiled_vision_transformer_is_one_graph_with_the_same_result() -> None:
    model, images, weight = vision_transformer(qk_norm=True)
    replace_attention(model, pattern_of(DILATED))
    expected = results(model, images, weight)
    actual = results(torch.compile(model, fullgraph=True, backend="aot_eager"), images, weight)
    assert_equal({name.removeprefix("_orig_mod."): tensor for name, tensor in actual.items()}, expected)


def test_a_trial_of_a_block_is_silent_and_changes_nothing() -> None:
    block = NoisyAttention(12, 3, attn_drop=0.5)
    before, state = copy.deepcopy(block.state_dict()), torch.get_rng_state()
    replacement = QkvReplacement(block, COVERING)
    assert torch.equal(torch.get_rng_state(), state)
    assert block.training
    assert replacement.training
    torch.testing.assert_close(replacement.state_dict(), before, rtol=0, atol=0)


def test_a_model_on_the_meta_device_is_replaced_before_its_weights_are_there() -> None:
    with torch.device("meta"):
        model = VisionTransformer(15, 3, 12, 3, 2)
    assert len(replace_attention(model, COVERING).replaced) == 2


def test_a_loop_over_the_blocks_of_a_vision_transformer_is_the_same_as_the_call() -> None:
    model, images, _ = vision_transformer()
    by_hand = copy.deepcopy(model)
    replace_attention(model, pattern_of(DILATED))
    for block in by_hand.blocks:
        assert isinstance(block, Block)
        block.attn = QkvReplacement(block.attn, pattern_of(DILATED))
    torch.testing.assert_close(by_hand(images), model(images), rtol=0, atol=0)
