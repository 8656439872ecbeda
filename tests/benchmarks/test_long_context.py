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
    DENSE,
    LongContext,
    beyond_dense,
    blocks_by_content,
    content_stand_in,
    density,
    draw,
    fixed_patterns,
    pretrain,
)
from benchmarks.study_texts import prepare
from benchmarks.tables import RESULTS, ROOT
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from benchmarks import tables
from dilated_attention_pytorch.integrations import set_pattern
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
        with blocks_by_content(short):
            model = model_with(content_stand_in(short))  # as `extend`, which gives the pattern inside the context
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


def test_the_table_has_a_row_for_each_attention_the_best_at_the_longest_first() -> None:
    def record(share: float, **bits: float) -> dict[str, Any]:
        states = {"before": 3.5, **bits}
        lengths = ("4096", "8192")
        measured = {state: {"bits_per_byte": dict.fromkeys(lengths, value)} for state, value in states.items()}
        return {"density": share, "measured": measured}

    values = {
        "runs": {
            "4096": {
                "segments": record(0.4, replaced=2.51, trained=2.2),
                "dense in layers 3, 11": record(0.5, replaced=2.52, trained=2.1),
                "dense in all layers": record(1.0, replaced=2.53, trained=2.0),
            },
            "8192": {
                "dense in layers 0, 5": record(0.3, replaced=2.6, trained=2.3),
                "segments": record(0.2, replaced=2.5, trained=2.4),
                "dense in all layers": record(1.0, replaced=2.7, trained=2.35),
            },
        }
    }
    assert tables.long_context(values).splitlines()[2:] == [
        "| dense, positions not scaled | 100 | 3.500 | | 100 | 3.500 | |",
        "| dense in 2 layers (chosen at 8,192) | 50 | 2.520 | 2.100 | 30 | 2.600 | 2.300 |",
        "| dense in all layers | 100 | 2.530 | 2.000 | 100 | 2.700 | 2.350 |",
        "| segments (chosen at 4,096) | 40 | 2.510 | 2.200 | 20 | 2.500 | 2.400 |",
    ]


def test_a_curve_is_the_bits_beyond_those_of_dense_attention() -> None:
    def record(*bits: float) -> dict[str, Any]:
        return {"measured": {"trained": {"by_position": [[2.0, 40.0], list(bits)]}}}

    found = beyond_dense({"windows": record(2.5, 1.25), DENSE: record(2.0, 1.5), CONTENT: record(2.0, 1.0)})
    assert found == {"windows": ([2.0, 40.0], [0.5, -0.25]), CONTENT: ([2.0, 40.0], [0.0, -0.5])}


def test_the_picture_of_the_page_is_drawn_from_the_results(tmp_path: Path) -> None:
    longest = list(json.loads((RESULTS / "long_context.json").read_text())["runs"].values())[-1]
    draw(longest, tmp_path / "long-context.png")
    new, old = (matplotlib.image.imread(path) for path in (tmp_path / "long-context.png", ROOT / LongContext().picture))
    assert new.shape == old.shape
    assert abs(new - old).mean() < 0.0005


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
