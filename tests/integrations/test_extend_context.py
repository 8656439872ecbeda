"""Rotary scaling and a pattern in one call: frequencies by their formulas, logits by dense attention."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.integrations import extend_context, register
from integrations.tiny_models import PATTERN, dense_logits, draw, tiny

OWN, LONG = 20, 90
FACTOR = LONG / OWN
THETA = 10_000.0


def expected(rotary: str, channels: int) -> tuple[Tensor, float]:
    """Radians a token of every pair of channels, and the factor of cosines and sines, from the papers' formulas."""
    pairs = torch.arange(0, channels, 2, dtype=torch.float64)
    frequencies = THETA ** (-pairs / channels)
    if rotary == "linear":
        return frequencies / FACTOR, 1.0
    if rotary == "ntk":
        return (THETA * FACTOR ** (channels / (channels - 2))) ** (-pairs / channels), 1.0
    if rotary == "none":
        return frequencies, 1.0
    # YaRN: the pair (as a real number) that makes so many turns within the old length, rounded outwards.
    first, last = (channels * math.log(OWN / (turns * 2 * math.pi)) / (2 * math.log(THETA)) for turns in (32.0, 1.0))
    low, high = max(math.floor(first), 0), min(math.ceil(last), channels - 1)
    ramp = ((pairs / 2 - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / FACTOR * ramp + frequencies * (1 - ramp), 0.1 * math.log(FACTOR) + 1


@pytest.mark.parametrize("rotary", ["yarn", "linear", "ntk", "none"])
@pytest.mark.parametrize(("name", "channels"), [("llama", 8), ("qwen3", 8), ("mistral", 8), ("gpt_neox", 2)])
def test_frequencies_are_those_of_the_papers(rotary: Any, name: str, channels: int) -> None:
    model = tiny(name, "sdpa", max_position_embeddings=OWN)
    if rotary == "ntk" and channels == 2:
        with pytest.raises(ValueError, match="more than one pair of channels"):
            extend_context(model, LONG, PATTERN, rotary=rotary)
        assert not hasattr(model.config, "dilated_attention")
        return
    assert extend_context(model, LONG, PATTERN, rotary=rotary) is model
    (embedding,) = (module for module in model.modules() if hasattr(module, "inv_freq"))
    frequencies, factor = expected(rotary, channels)
    assert torch.allclose(embedding.inv_freq.double(), frequencies, rtol=1e-6)
    assert embedding.attention_scaling == pytest.approx(factor)
    assert model.config.max_position_embeddings == LONG


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt_neox"])
def test_logits_are_those_of_dense_attention_with_scaled_positions_and_survive_saving(
    name: str, tmp_path: Path
) -> None:
    model = extend_context(tiny(name, "sdpa", max_position_embeddings=OWN), LONG, PATTERN)
    tokens = draw(2, 70)
    with torch.no_grad():
        out = model(tokens).logits
        # A model that transformers builds from the changed configuration, with the same weights.
        scaling = dict(model.config.rope_parameters)
        dense = tiny(name, "eager", max_position_embeddings=LONG, rope_parameters=scaling)
        dense.load_state_dict(model.state_dict())
        assert torch.allclose(out, dense_logits(dense, name, tokens, PATTERN), rtol=0, atol=1e-10)
        original = tiny(name, "eager", max_position_embeddings=OWN)
        assert not torch.allclose(out, dense_logits(original, name, tokens, PATTERN), rtol=0, atol=1e-4)
    model.save_pretrained(tmp_path)
    register()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="dilated", dtype=torch.float64).eval()
    with torch.no_grad():
        # transformers' norms round to float32.
        assert torch.allclose(again(tokens).logits, out, rtol=0, atol=1e-4)
    assert again.config.dilated_attention == model.config.dilated_attention


def test_layers_with_a_window_keep_it_and_their_positions() -> None:
    types = ["sliding_attention", "full_attention"]
    own = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    model = tiny(
        "Gemma3", "sdpa", layer_types=types, sliding_window=9, rope_parameters=own, max_position_embeddings=OWN
    )
    extend_context(model, LONG, PATTERN, rotary="linear")
    parameters = model.config.rope_parameters
    assert parameters["sliding_attention"] == own["sliding_attention"]
    assert parameters["full_attention"] == {**own["full_attention"], "rope_type": "linear", "factor": FACTOR}
    rotary = model.model.rotary_emb
    pairs = torch.arange(0, 8, 2, dtype=torch.float64) / 8
    assert torch.allclose(rotary.sliding_attention_inv_freq.double(), 1e4**-pairs, rtol=1e-6)
    assert torch.allclose(rotary.full_attention_inv_freq.double(), 1e6**-pairs / FACTOR, rtol=1e-6)
    assert model(draw(1, 70)).logits.shape == (1, 70, 31)


def llava(attention: str) -> Any:
    """A tower of 16-wide patches before a Llama."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=32, **sizes),
        text_config=LlamaConfig(vocab_size=31, max_position_embeddings=OWN, **sizes),
        image_token_index=30,
        image_token_id=30,
        vision_feature_layer=-1,
    )
    torch.manual_seed(3)
    model = LlavaForConditionalGeneration(config).eval()
    model.set_attn_implementation(attention)
    return model


def test_of_a_model_with_parts_the_text_part_is_changed() -> None:
    model = extend_context(llava("sdpa"), LONG, DilatedPattern([LONG], [1]), rotary="none")
    assert model.config.text_config._attn_implementation == "dilated"
    assert model.config.vision_config._attn_implementation == "sdpa"
    tokens = torch.cat([torch.full((1, 4), 30), draw(1, 40) % 30], dim=1)
    image = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        expected = llava("sdpa")(input_ids=tokens, pixel_values=image).logits
        torch.testing.assert_close(model(input_ids=tokens, pixel_values=image).logits, expected, rtol=0, atol=1e-5)
    scaled = extend_context(llava("sdpa"), LONG, PATTERN)
    assert scaled.config.text_config.rope_parameters["factor"] == FACTOR
    assert scaled.config.text_config.dilated_attention == {"pattern": str(PATTERN)}


def test_rotary_embeddings_of_other_configurations_stay() -> None:
    model = tiny("llama", "sdpa", max_position_embeddings=OWN)
    other = tiny("llama", "sdpa", max_position_embeddings=OWN, head_dim=16).model.rotary_emb
    model.other = torch.nn.ModuleDict({"rotary": other})
    extend_context(model, LONG, PATTERN)
    assert model.other["rotary"] is other
    assert model.model.rotary_emb.config is model.config


@pytest.mark.parametrize(
    ("name", "rotary", "words"),
    [
        ("llama", "yarn", "LlamaForCausalLM chooses by content which keys a query sees"),
        ("Phi3", "yarn", "Phi3Config does not take the rotary parameters"),
        ("Phi3", "linear", "Phi3Config does not take the rotary parameters"),
    ],
)
def test_models_that_would_be_half_changed_are_refused(name: str, rotary: Any, words: str) -> None:
    model = tiny(name, "sdpa", max_position_embeddings=OWN)
    if name == "llama":
        model.model.layers[0].self_attn.indexer = type("KeyIndexer", (torch.nn.Module,), {})()
    before, modules = model.config.to_dict(), list(model.modules())
    with pytest.raises(NotImplementedError, match=words):
        extend_context(model, LONG, PATTERN, rotary=rotary)
    assert model.config.to_dict() == before
    assert not hasattr(model.config, "dilated_attention")
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_follow_from_the_length_are_not_kept(kind: str) -> None:
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": THETA}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 10}
    else:
        parameters["factor"] = 2.0
    model = tiny("llama", "sdpa", max_position_embeddings=OWN, rope_parameters=parameters)
    with pytest.raises(NotImplementedError, match='rotary="none" keeps positions'):
        extend_context(model, LONG, PATTERN, rotary="none")


@pytest.mark.parametrize(
    ("name", "changes", "arguments", "error", "words"),
    [
        ("llama", {}, {"length": OWN}, ValueError, "length must be more than the 20 tokens"),
        ("llama", {}, {"length": 90.0}, TypeError, "length must be a number of tokens"),
        ("llama", {}, {"rotary": "dynamic"}, ValueError, 'rotary must be "yarn"'),
        ("llama", {}, {"pattern": 7}, TypeError, "pattern must be a Pattern"),
        ("bert", {}, {}, NotImplementedError, "BertForMaskedLM has no rotary positions"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            {},
            ValueError,
            r'scaled already \(rope_type "linear"',
        ),
        ("mistral", {"sliding_window": 8}, {}, ValueError, "every layer of the model has a sliding window"),
    ],
)
def test_what_cannot_be_honoured_raises_and_changes_nothing(
    name: str, changes: dict[str, Any], arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = tiny(name, "sdpa", **{"max_position_embeddings": OWN, **changes})
    before = model.config.to_dict()
    modules = list(model.modules())
    with pytest.raises(error, match=words):
        extend_context(model, **{"length": LONG, "pattern": PATTERN, **arguments})
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == "sdpa"
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))


def test_an_already_scaled_model_keeps_its_positions_when_told() -> None:
    scaled = {"rope_type": "linear", "rope_theta": THETA, "factor": 2.0}
    model = tiny("llama", "sdpa", max_position_embeddings=OWN, rope_parameters=scaled)
    extend_context(model, LONG, DilatedPattern([LONG], [1]), rotary="none")
    assert model.config.rope_parameters == scaled
    dense = tiny("llama", "sdpa", max_position_embeddings=OWN, rope_parameters=scaled)
    tokens = draw(1, 60)
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, dense(tokens).logits, rtol=0, atol=1e-10)
