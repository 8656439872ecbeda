"""The pattern of an extended model: candidates are measured, and the best is taken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.integrations import extend_context, register, set_pattern
from dilated_attention_pytorch.patterns import pattern_from_expression
from dilated_attention_pytorch.training import ExtensionSettings, extend, pattern_choice
from dilated_attention_pytorch.training.data.corpus import read_corpus
from dilated_attention_pytorch.training.data.windows import EvaluationWindows
from dilated_attention_pytorch.training.pattern_choice import CLOSE, Candidate, layers_by_need, measure_candidates
from training.runs import Heard, quiet

OWN, LONG = 32, 128
SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": OWN,
}


def model_of(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | changes)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.normal_(0.0, 0.3)  # attention far from uniform
    return model


def texts(number: int, length: int) -> list[torch.Tensor]:
    return list(torch.randint(256, (number, length), generator=torch.Generator().manual_seed(1)))


def measured(model: Any, windows: Sequence[torch.Tensor], patterns: Sequence[str]) -> float:
    """Bits per token, attention as a dense matrix of the patterns' log counts, a layer at a time."""
    positions = torch.arange(len(windows[0]) - 1)
    texts_of = [patterns[0]] * len(model.model.layers) if len(patterns) == 1 else patterns
    for layer, text in zip(model.model.layers, texts_of, strict=True):
        counts = pattern_from_expression(text).counts(positions, positions, 2, is_causal=True)
        mask = counts.double().log().float().repeat_interleave(2, dim=0)[None]
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
        )
    total = 0.0
    for window in windows:
        with torch.no_grad():
            logits = model(window[None, :-1], use_cache=False).logits[0]
        total += torch.nn.functional.cross_entropy(logits, window[1:]).item()
    return total / len(windows) / torch.tensor(2.0).log().item()


@pytest.mark.parametrize("rotary", ["auto", "linear", "none"])
def test_every_candidate_is_measured_as_it_is_the_best_first(rotary: Any) -> None:
    windows = texts(2, LONG)
    found = measure_candidates(model_of(), windows, OWN, 2, rotary=rotary, precision="float32", console=quiet())
    far, near = (
        f"DilatedPattern([{OWN}, 64, {LONG}], [1, 2, 2])",
        f"local_window({OWN - 1}) + global_tokens(4, beyond={OWN - 1})",
    )
    uniform = {one.name: one.patterns for one in found if len(one.patterns) == 1}
    assert uniform == {"segments in all layers": (far,), "windows and first tokens": (near,)}
    by_layer = [one.patterns for one in found if len(one.patterns) > 1]
    (layer,) = (index for index, text in enumerate(by_layer[0]) if text != near)
    expected = {pattern_choice.dense(LONG), far}
    assert {one[layer] for one in by_layer} == expected
    assert all(one[:layer] + one[layer + 1 :] == (near, near) for one in by_layer)
    for one in found:
        is_window = one.patterns == (near,)
        assert one.rotary == (rotary if rotary != "auto" else "none" if is_window else "yarn")
        again = extend_context(model_of(attn_implementation="eager"), LONG, far, rotary=one.rotary)
        again.set_attn_implementation("eager")
        assert one.bits == pytest.approx(measured(again, windows, one.patterns), rel=1e-5)
        densities = [
            pattern_from_expression(text).density(LONG, num_kv_heads=2, is_causal=True) for text in one.patterns
        ]
        assert one.density == pytest.approx(sum(densities) / len(densities))
    least = min(one.bits for one in found)
    assert found[0].bits <= (1.0 + CLOSE) * least


def test_layers_that_lose_most_with_a_short_window_and_the_first_tokens_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, losses = model_of(), [1.5, 3.0, 2.0]

    def loss(*_: Any) -> float:
        (entry,) = model.config.dilated_attention.values()
        (layer,) = (index for index, text in enumerate(entry) if text != pattern_choice.dense(OWN))
        assert entry[layer] == "local_window(3) + global_tokens(4, beyond=3)"
        return losses[layer]

    monkeypatch.setattr(pattern_choice, "mean_bits", loss)
    assert layers_by_need(model, [0, 1, 2], texts(2, OWN), "float32", quiet()) == [1, 2, 0]


def test_windows_and_first_tokens_change_nothing_within_the_models_own_length() -> None:
    (ids,) = texts(1, OWN)
    expected = model_of()(ids[None]).logits
    found = set_pattern(model_of(), pattern_choice.window(OWN))(ids[None]).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_candidates_that_are_about_as_good_are_chosen_by_their_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = iter([5.004, 5.0, 4.997, 7.0])
    monkeypatch.setattr(pattern_choice, "layers_by_need", lambda model, layers, *others: list(layers))
    monkeypatch.setattr(pattern_choice, "mean_bits", lambda *arguments: next(bits))
    found = measure_candidates(model_of(), texts(1, LONG), OWN, 2, rotary="yarn", precision="float32", console=quiet())
    assert [one.bits for one in found] == [5.004, 5.0, 4.997, 7.0]
    assert [one.density for one in found[:3]] == sorted(one.density for one in found[:3])


def test_a_model_whose_attention_knows_no_layer_gets_one_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(config: Any) -> list[int]:
        raise NotImplementedError("no num_hidden_layers")

    monkeypatch.setattr(pattern_choice, "layers_with_pattern", unknown)
    console = Heard()
    found = measure_candidates(model_of(), texts(1, LONG), OWN, 2, rotary="yarn", precision="float32", console=console)
    assert {len(one.patterns) for one in found} == {1}
    assert len(found) == 2
    assert "all layers get one pattern: no num_hidden_layers" in console.said


def test_layers_with_a_window_keep_it() -> None:
    sizes = {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9}
    config = transformers.Gemma2Config(**SIZES | sizes | {"num_hidden_layers": 4, "pad_token_id": 0})
    model = AutoModelForCausalLM.from_config(config)
    found = measure_candidates(model, texts(1, LONG), OWN, 2, rotary="yarn", precision="float32", console=quiet())
    by_layer = [one.patterns for one in found if len(one.patterns) > 1]
    assert len(by_layer) == 2
    assert all(one[0] == one[2] == "" and one[1] and one[3] for one in by_layer)


def test_layers_without_attention_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_hidden_layers": 4}
    model = AutoModelForCausalLM.from_config(transformers.Lfm2Config(**SIZES | sizes))
    looked_at: list[int] = []

    def by_need(model: Any, layers: Sequence[int], *others: Any) -> list[int]:
        looked_at.extend(layers)
        return layers_by_need(model, layers, *others)

    monkeypatch.setattr(pattern_choice, "layers_by_need", by_need)
    found = measure_candidates(model, texts(1, LONG), OWN, 2, rotary="yarn", precision="float32", console=quiet())
    assert looked_at == [1, 3]
    assert len(found) == 4


def test_a_run_without_a_pattern_records_what_it_chose(texts: Path, tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path / "short")
    settings = ExtensionSettings(
        model=str(tmp_path / "short"), data=(texts,), context_length=LONG, steps=2, precision="float32", device="cpu",
        threads=1, eval_steps=2, save_steps=2, eval_windows=1, final_eval_windows=1,
    )  # fmt: skip
    console = Heard()
    run = extend(settings, tmp_path / "run", console).run
    record = json.loads((run / "training.json").read_text())
    best = record["candidates"][0]
    assert len(record["candidates"]) == 4
    assert "128 tokens, pattern and rotary scaling chosen by measurement" in console.said
    assert record["settings"]["rotary"] == best["rotary"]
    assert f"chosen: {best['name']}: {best['bits_per_byte']:.3f} bits per byte" in console.said
    assert console.said.count("instead: ") == 3
    set_patterns = (
        [record["settings"]["pattern"]] if len(best["patterns"]) == 1 else record["settings"]["layer_patterns"]
    )
    assert set_patterns == best["patterns"]
    register()
    saved = AutoModelForCausalLM.from_pretrained(run, attn_implementation="dilated").config.dilated_attention["pattern"]
    assert saved == (best["patterns"][0] if len(best["patterns"]) == 1 else best["patterns"])
    # The candidates are compared on the text to train on, and not on what is held out.
    windows = EvaluationWindows(read_corpus([texts]).training, LONG, 4)
    again = model_of(attn_implementation="eager")
    extend_context(again, LONG, "DilatedPattern([32, 64, 128], [1, 2, 2])", rotary=best["rotary"])
    again.set_attn_implementation("eager")
    bits = measured(again, [windows[index]["input_ids"] for index in range(4)], best["patterns"])
    assert best["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    # A second command with the same words finds the run finished, whatever it chose.
    assert extend(settings, tmp_path / "run", quiet(), may_resume=True).step == 2


@pytest.mark.parametrize(("rotary", "rope_type"), [("auto", "default"), ("linear", "linear")])
def test_windows_are_chosen_with_the_positions_of_the_model_unless_a_scaling_is_given(
    rotary: Any, rope_type: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "windows and first tokens"
    monkeypatch.setattr(pattern_choice, "mean_bits", lambda *arguments: 1.0 if arguments[-1] == name else 2.0)
    model_of().save_pretrained(tmp_path / "short")
    settings = ExtensionSettings(
        model=str(tmp_path / "short"), data=(texts,), context_length=LONG, rotary=rotary, steps=1, precision="float32",
        device="cpu", threads=1, eval_steps=1, save_steps=1, eval_windows=1, final_eval_windows=1,
    )  # fmt: skip
    run = extend(settings, tmp_path / "run", quiet()).run
    begun = json.loads((run / "training.json").read_text())["settings"]
    assert begun["pattern"] == pattern_choice.window(OWN)
    assert begun["rotary"] == ("none" if rotary == "auto" else rotary)
    register()
    config = AutoModelForCausalLM.from_pretrained(run, attn_implementation="dilated").config
    assert config.rope_parameters["rope_type"] == rope_type
    assert config.max_position_embeddings == LONG
    assert extend(settings, tmp_path / "run", quiet(), may_resume=True).step == 1


def test_a_pattern_without_a_scaling_takes_yarn() -> None:
    given = ExtensionSettings(model="m", pattern="local_window(3)", context_length=LONG)
    assert given.complete(OWN).rotary == "yarn"
    assert ExtensionSettings(model="m", context_length=LONG).complete(OWN).rotary == "auto"
    assert given.with_patterns(["local_window(3)"], "none").rotary == "none"


def test_a_list_of_one_pattern_is_not_that_of_all_layers(texts: Path, tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path / "short")
    settings = ExtensionSettings(
        model=str(tmp_path / "short"), data=(texts,), context_length=LONG, layer_patterns=("local_window(31)",)
    )
    with pytest.raises(RunError, match="one pattern, or one per layer of 3, got a list of 1"):
        extend(settings, tmp_path / "run", quiet())
    assert not (tmp_path / "run").exists()


def test_a_pattern_for_all_layers_and_one_for_each_are_refused_together() -> None:
    with pytest.raises(ValueError, match="pattern is that of all layers, and layer_patterns are given too"):
        ExtensionSettings(model="m", pattern="local_window(3)", layer_patterns=("local_window(3)",))
    with pytest.raises(ValueError, match=r"layer_patterns: .*local_windows"):
        ExtensionSettings(model="m", layer_patterns=("", "local_windows(3)"))


def test_what_is_said_of_the_candidates() -> None:
    found = [
        Candidate(name="windows", patterns=("local_window(3)",), bits=4.0, density=0.25, rotary="none"),
        Candidate(name="dense", patterns=("DilatedPattern([9], [1])",), bits=5.0, density=1.0, rotary="yarn"),
    ]
    assert pattern_choice.described(found, 2.0) == [
        "chosen: windows: 2.000 bits per byte, 25.0% of the pairs of dense attention, rotary scaling none",
        "instead: dense: 2.500 bits per byte, 100.0% of the pairs of dense attention, rotary scaling yarn",
    ]
