"""The study of patterns for a pretrained model: blocks that are chosen, and its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from benchmarks.long_context import (
    BLOCK,
    CONTENT,
    LongContext,
    blocks_by_content,
    content_stand_in,
    density,
    draw,
    fixed_patterns,
    pretrain,
)
from benchmarks.study_texts import prepare
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from benchmarks import tables
from dilated_attention_pytorch.integrations import set_pattern
from dilated_attention_pytorch.training.evaluation import binned, draw_positions
from dilated_attention_pytorch.training.pattern_choice import window


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


def test_blocks_by_content_have_about_as_many_pairs_as_the_window_of_extend() -> None:
    patterns = fixed_patterns(LongContext(), 8192)
    assert density(patterns["dense in all layers"], 8192, 6) == 1.0
    assert density(patterns[CONTENT], 8192, 6) == pytest.approx(density((window(1024),), 8192, 6), rel=0.01)


def test_the_table_has_the_choice_and_the_others_best_first() -> None:
    def record(replaced: float, trained: float) -> dict[str, Any]:
        states = {"before": 3.5, "replaced": replaced, "trained": trained}
        return {
            "density": 0.254,
            "measured": {state: {"bits_per_byte": {"1024": 9.0, "8192": bits}} for state, bits in states.items()},
        }

    values = {"runs": {"8192": {"segments": record(2.5, 2.4), "dense in some": record(2.6, 2.3)}}}
    assert tables.long_context(values).splitlines()[2:] == [
        "| 8,192 | dense, positions not scaled | 100 % | 3.500 | |",
        "| 8,192 | dense in some | 25 % | 2.600 | 2.300 |",
        "| 8,192 | segments (chosen) | 25 % | 2.500 | 2.400 |",
    ]


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


def test_a_stopped_pretraining_goes_on_and_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [(str(seed), "".join(f"{seed} {index * seed % 97}\n" for index in range(400))) for seed in range(20)]
    texts, tokenizer = prepare(tmp_path / "text", made, 300)
    given = LongContext(tiny=True, vocab_size=300, width=64, layers=1, pretraining_steps=4, short=32)
    record = pretrain(tmp_path / "whole", texts, tokenizer, given)
    step, taken = Trainer.training_step, []

    def stopping(*args: Any, **options: Any) -> Any:
        taken.append(1)
        if len(taken) == 3:
            raise KeyboardInterrupt
        return step(*args, **options)

    monkeypatch.setattr(Trainer, "training_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        pretrain(tmp_path / "stopped", texts, tokenizer, given)
    assert pretrain(tmp_path / "stopped", texts, tokenizer, given) == record
    assert len(taken) == 5  # two, the stop, and the two that are left
    whole, stopped = ((tmp_path / one / "model.safetensors").read_bytes() for one in ("whole", "stopped"))
    assert whole == stopped
