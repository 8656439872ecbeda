"""The study of patterns for a pretrained model: blocks that are chosen, and its picture."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.image
import pytest
import torch
from benchmarks.long_context import BLOCK, LongContext, blocks_by_content, content_stand_in, draw, patterns_of
from transformers import LlamaConfig, LlamaForCausalLM

from dilated_attention_pytorch.integrations import set_pattern
from dilated_attention_pytorch.patterns import pattern_from_expression
from dilated_attention_pytorch.training.evaluation import binned, draw_positions


def model_with(pattern: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_proj" in name:
                weight.normal_(0.0, 0.3)
    set_pattern(model, pattern)
    return model


def test_all_blocks_chosen_are_dense_attention_and_few_are_not() -> None:
    rows = 3 * BLOCK
    ids = torch.randint(97, (1, rows), generator=torch.Generator().manual_seed(1))
    expected = model_with(f"DilatedPattern([{rows}], [1])")(ids).logits
    for short, is_dense in ((rows, True), (2 * BLOCK, False)):
        model = model_with(content_stand_in(short))
        with blocks_by_content(short):
            found = model(ids, labels=ids)
        found.loss.backward()
        assert all(weight.grad is not None for weight in model.parameters())
        assert torch.allclose(found.logits, expected, atol=1e-4) == is_dense
        # Rows of the first blocks see all before them, whatever is chosen.
        assert torch.allclose(found.logits[:, : 2 * BLOCK], expected[:, : 2 * BLOCK], atol=1e-4)
    assert not torch.allclose(model(ids).logits, found.logits, atol=1e-2)  # the window, outside the context


def test_blocks_by_content_have_about_as_many_pairs_as_the_window_that_stands_for_them() -> None:
    patterns = {name: pattern_from_expression(text) for name, text in patterns_of(LongContext(), 8192).items() if text}
    densities = {name: one.density(8192, num_kv_heads=6, is_causal=True) for name, one in patterns.items()}
    assert densities["dense"] == 1.0
    assert densities["blocks by content"] == pytest.approx(densities["windows and first tokens"], rel=0.01)


def test_the_picture_is_drawn_from_the_results(tmp_path: Path) -> None:
    torch.manual_seed(0)
    curves = {name: 2 + torch.rand(63, dtype=torch.float64) for name in ("dense", "chosen")}
    records = {
        name: {
            "settings": {"context_length": 64},
            "own_length": 16,
            "measured": {"trained": {"bits_per_byte": {"64": curve.mean().item()}, "by_position": binned(curve)}},
        }
        for name, curve in curves.items()
    }
    draw(json.loads(json.dumps(records)), tmp_path / "results.png")
    points = {f"{name}, mean {curve.mean():.3f}": binned(curve) for name, curve in curves.items()}
    draw_positions(tmp_path / "run.png", points, 16)
    drawn, run = (matplotlib.image.imread(tmp_path / f"{name}.png") for name in ("results", "run"))
    assert (drawn == run).all()
