"""Nothing attends to everything in silence: layers that do not come to the pattern, masks in other hands, loading."""

from __future__ import annotations

import copy
import importlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dilated_attention_pytorch import DilatedPattern, from_block_mask, local_window
from dilated_attention_pytorch.integrations import BoundedCache, register, set_pattern
from dilated_attention_pytorch.integrations.transformers.attention import dilated_attention_forward
from dilated_attention_pytorch.integrations.transformers.config import check_pattern, same_entry
from dilated_attention_pytorch.integrations.transformers.mask import documents_mask
from integrations.test_extend_context import llava
from integrations.tiny_models import PATTERN, draw, tiny

register()
WORDS = {"pattern": str(PATTERN)}

_BERT = {
    "vocab_size": 31,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 53,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_THEIR_OWN: dict[str, tuple[str, dict[str, Any], str]] = {
    # Keys of blocks, some of them drawn.
    "BigBird": (
        "ForMaskedLM",
        _BERT,
        r'BigBirdBlockSparseAttention \("bert.encoder.layer.0.attention.self"\) computes attention itself',
    ),
    # Attention in two streams, with positions in the scores.
    "XLNet": (
        "LMHeadModel",
        {"vocab_size": 31, "d_model": 48, "n_layer": 1, "n_head": 6, "d_inner": 53},
        r'XLNetRelativeAttention \("transformer.layer.0.rel_attn"\) computes attention itself',
    ),
    # Uses the interface in its decoder alone.
    "PegasusX": (
        "ForConditionalGeneration",
        {
            "vocab_size": 31,
            "d_model": 48,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 6,
            "decoder_attention_heads": 6,
            "encoder_ffn_dim": 53,
            "decoder_ffn_dim": 53,
            "block_size": 8,
            "num_global_tokens": 2,
        },
        r'PegasusXGlobalLocalAttention \("model.encoder.layers.0.self_attn"\) computes',
    ),
    # No softmax in it, and no use of the interface.
    "Yoso": ("ForMaskedLM", _BERT, r'YosoAttention \("yoso.encoder.layer.0.attention"\) is something else'),
}


def model_of_its_own(name: str, attention: str | None, **changes: Any) -> Any:
    suffix, sizes, _ = OF_THEIR_OWN[name]
    config = getattr(transformers, name + "Config")(**sizes, **changes)
    config._attn_implementation = attention
    torch.manual_seed(0)
    return getattr(transformers, name + suffix)(config).eval()


@pytest.mark.parametrize("name", OF_THEIR_OWN)
@pytest.mark.parametrize("attention", ["dilated", None])
def test_set_pattern_refuses_a_model_that_computes_attention_itself(name: str, attention: str | None) -> None:
    model = model_of_its_own(name, attention)
    before = model.config.to_dict()
    with pytest.raises(NotImplementedError, match=OF_THEIR_OWN[name][2]) as caught:
        set_pattern(model, PATTERN)
    assert "does not use transformers' attention interface" in str(caught.value)
    assert model.config.to_dict() == before


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_such_a_model_with_a_pattern_in_its_configuration_computes_nothing(name: str) -> None:
    model = model_of_its_own(name, "dilated", dilated_attention=WORDS)
    tokens = draw(1, 12)
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with pytest.raises(NotImplementedError, match="does not use transformers' attention interface"):
        model(tokens, **more)


@pytest.mark.parametrize("name", ["Falcon", "GPTJ"])
def test_a_model_with_a_table_of_attention_classes_is_built_with_that_of_eager(name: str) -> None:
    config = getattr(transformers, name + "Config")(**_BERT, n_embd=48, n_layer=1, n_head=6, rotary_dim=8)
    config.num_hidden_layers, config._attn_implementation = 1, "dilated"
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    with pytest.raises(ValueError, match="needs a pattern, and the model has none"):
        model(draw(1, 12))
    set_pattern(model, PATTERN)(draw(1, 12))


def by_itself(hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    """In place of an attention, one that looks at no mask and does not use the interface."""
    return hidden_states.mean(dim=1, keepdim=True).expand_as(hidden_states), None


def test_a_layer_that_does_not_come_to_the_attention_is_named() -> None:
    model, tokens = set_pattern(tiny("llama"), PATTERN), draw(1, 12)
    attention = model.model.layers[1].self_attn
    attention.forward = by_itself
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r'LlamaAttention \("model.layers.1.self_attn"\) did not come to'):
            model(tokens)
    del attention.forward
    model(tokens)
    model.set_attn_implementation("sdpa")
    attention.forward = by_itself
    model(tokens)


def test_attention_that_chooses_its_keys_by_content_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[1].self_attn.indexer = type("KeyIndexer", (torch.nn.Module,), {})()
    with pytest.raises(NotImplementedError, match=r'chooses by content .*KeyIndexer of "model.layers.1.self_attn"'):
        set_pattern(model, PATTERN)


_DECODER = {**_BERT, "num_key_value_heads": 3, "head_dim": 8}
READERS: dict[str, tuple[str, dict[str, Any], str]] = {
    # Writes a mask of its own into transformers'.
    "Doge": ("Model", _DECODER, r'values of its attention mask in DogeAttention \("layers.0.self_attn"\)'),
    # Attends to its own tokens and the encoder's at once.
    "T5Gemma2Decoder": (
        "",
        {**_DECODER, "dropout_rate": 0.0},
        r'in one softmax \(T5Gemma2MergedAttention of "layers.0.self_attn"\)',
    ),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("attention", ["dilated", "eager"])
def test_a_model_that_reads_the_values_of_its_mask_is_refused(name: str, attention: str) -> None:
    suffix, sizes, words = READERS[name]
    config = getattr(transformers, name + "Config")(**sizes)
    config._attn_implementation = attention
    model = (getattr(transformers, name + suffix, None) or modeling(name))._from_config(config).eval()
    with pytest.raises(NotImplementedError, match=words):
        set_pattern(model, PATTERN)
    assert not hasattr(config, "dilated_attention")


def modeling(name: str) -> Any:
    """A class of transformers that is in no list of its own."""
    return getattr(importlib.import_module("transformers.models.t5gemma2.modeling_t5gemma2"), name)


@pytest.mark.parametrize("name", ["Musicgen", "MusicgenMelody"])
def test_of_several_parts_with_text_one_must_be_chosen(name: str) -> None:
    small = {"num_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, name + "Config")(
        text_encoder={"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, **small},
        audio_encoder={"model_type": "encodec", "num_filters": 2, "hidden_size": 4, "codebook_size": 16},
        decoder={
            "vocab_size": 31,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 16,
            "pad_token_id": 30,
            "bos_token_id": 30,
            "num_codebooks": 2,
        },
    )
    model = getattr(transformers, name + "ForConditionalGeneration")(config).eval()
    with pytest.raises(NotImplementedError, match=r"got text_encoder, audio_encoder, decoder: .*\(model.decoder, pat"):
        set_pattern(model, PATTERN)
    with pytest.raises(NotImplementedError, match="got text_encoder, audio_encoder, decoder"):
        BoundedCache(config)
    tokens = draw(2, 20) % 30
    with torch.no_grad():
        expected = model.decoder(tokens).logits
        torch.testing.assert_close(set_pattern(model.decoder, DilatedPattern([20], [1]))(tokens).logits, expected)
        assert not torch.allclose(set_pattern(model.decoder, PATTERN)(tokens).logits, expected, atol=1e-3)


def test_windows_of_their_own_of_every_layer_are_kept() -> None:
    """NeoMME has windows of two sizes, and no window in every sixth layer and the last."""
    sizes = {**_DECODER, "num_hidden_layers": 4, "embedding_rank": 16, "head_dim": 16, "num_attention_heads": 3}
    config = transformers.NeoMMEConfig(**sizes, sliding_window=3, attn_implementation="eager")
    torch.manual_seed(0)
    model, tokens = transformers.NeoMMEModel(config).double().eval(), draw(1, 40)
    with torch.no_grad():
        # Those that write into the residual stream begin as zeros.
        for weight in model.parameters():
            weight.normal_(std=0.3)
        expected = model(tokens).last_hidden_state
        found = set_pattern(model, DilatedPattern([40], [1]))(tokens).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert not torch.allclose(set_pattern(model, PATTERN)(tokens).last_hidden_state, expected, atol=1e-3)
    config.layer_types = ["sliding_attention"] * 4
    config.per_layer_config = {layer: {"sliding_window": 3 + layer} for layer in range(4)}
    with pytest.raises(ValueError, match="every layer of the model has a sliding window of 3, 4, 5, 6 tokens"):
        set_pattern(model, PATTERN)


def test_a_configuration_that_does_not_say_how_many_layers_there_are_takes_one_pattern() -> None:
    config = transformers.CvtConfig()
    assert check_pattern(PATTERN, config) == WORDS
    with pytest.raises(NotImplementedError, match="CvtConfig has no num_hidden_layers: give one pattern for the whole"):
        check_pattern([PATTERN], config)


def test_heads_that_pool_and_attention_to_others_stay_as_they_are() -> None:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 53}
    config = transformers.SiglipVisionConfig(image_size=16, patch_size=4, **sizes)
    torch.manual_seed(0)
    model = transformers.SiglipVisionModel(config).double().eval()
    image = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        expected = model(image)
        found = set_pattern(model, DilatedPattern([16], [1]))(image)
        torch.testing.assert_close(found.pooler_output, expected.pooler_output, rtol=0, atol=1e-10)
        changed = set_pattern(model, PATTERN)(image)
        assert not torch.allclose(changed.pooler_output, expected.pooler_output, atol=1e-6)


def test_other_parts_that_were_told_of_the_implementation_need_a_pattern_as_well() -> None:
    model = llava("sdpa")
    model.set_attn_implementation("dilated")
    set_pattern(model, PATTERN)
    tokens = torch.cat([torch.full((1, 4), 30), draw(1, 9) % 30], dim=1)
    model(input_ids=tokens[:, 4:])
    with pytest.raises(ValueError, match="needs a pattern, and the model has none"):
        model(input_ids=tokens, pixel_values=torch.randn(1, 3, 8, 8))


def test_a_window_that_a_model_gives_to_layers_without_one_is_not_the_pattern_s_end() -> None:
    sizes = {**_BERT, "intermediate_size": 64, "num_key_value_heads": 3, "head_dim": 8, "num_local_experts": 2}
    types = ["linear_attention", "full_attention"]
    config = transformers.MiniMaxConfig(**sizes, sliding_window=8, layer_types=types)
    model = set_pattern(transformers.MiniMaxForCausalLM(config).eval(), PATTERN)
    with pytest.raises(ValueError, match=r'layer 1 is "full_attention" in config.* a sliding window of 8 tokens'):
        model(draw(1, 20))


def test_a_layer_of_a_model_that_was_not_looked_through_is_refused() -> None:
    model = tiny("llama", "sdpa")
    model.set_attn_implementation("dilated")
    model.config.dilated_attention = WORDS
    with pytest.raises(ValueError, match=r"LlamaAttention is in a model of which .* call set_pattern\(model"):
        model(draw(1, 12))
    set_pattern(model, PATTERN)(draw(1, 12))


def test_set_pattern_is_enough_for_a_model_of_another_attention() -> None:
    model, same = set_pattern(tiny("llama", "eager"), PATTERN), set_pattern(tiny("llama"), PATTERN)
    assert model.config._attn_implementation == "dilated"
    with torch.no_grad():
        assert torch.equal(model(draw(1, 50)).logits, same(draw(1, 50)).logits)


@pytest.mark.parametrize("way", ["copied", "pickled"])
def test_a_copy_of_a_model_is_looked_through_as_the_model_is(way: str) -> None:
    model = set_pattern(tiny("gpt_neox"), PATTERN)
    if way == "copied":
        again = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    attention = again.gpt_neox.layers[0].attention
    attention.forward = by_itself
    with pytest.raises(NotImplementedError, match=r'"gpt_neox.layers.0.attention"\) did not come to'):
        again(draw(1, 12))
    del attention.forward
    assert torch.equal(again(draw(1, 50)).logits, model(draw(1, 50)).logits)


def a_mask(length: int = 7, real: Tensor | None = None, **more: Any) -> Any:
    return documents_mask(2, length, length, attention_mask=real, **more)


def attended(query: Tensor, mask: Any, **options: Any) -> Tensor:
    """What a layer under the pattern makes of queries, the first three heads of which are keys and values too."""
    layer = set_pattern(tiny("llama"), PATTERN).model.layers[0].self_attn
    return dilated_attention_forward(layer, query, query[:, :3], query[:, :3], mask, **options)[0]


COMPUTED = {
    "add": lambda scores, mask: scores + mask[:, :, :, :7],
    "add the other way": lambda scores, mask: mask + scores,
    "subtract": lambda scores, mask: (1.0 - mask) * -1e9 + scores,
    "fill": lambda scores, mask: scores.masked_fill(mask == 0, -1e9),
    "fill with it": lambda scores, mask: scores.masked_fill(mask, -1e9),
    "where": lambda scores, mask: torch.where(mask, scores, -1e9),
    "in place": lambda scores, mask: scores.add_(mask),
    "to the dtype of the scores": lambda scores, mask: scores + mask.to(scores.dtype),
    "as bool": lambda scores, mask: scores.masked_fill(~mask.bool(), -1e9),
    "one minus it": lambda scores, mask: 1 - mask,
    "the greater": lambda scores, mask: torch.maximum(scores, mask),
    "padded": lambda scores, mask: functional.pad(mask, (0, 1)),
    "scaled_dot_product_attention": lambda scores, mask: functional.scaled_dot_product_attention(
        scores, scores, scores, attn_mask=mask
    ),
    "the value": lambda scores, mask: mask.tolist(),
    "the truth": lambda scores, mask: scores if mask.all() else mask,
}


@pytest.mark.parametrize("what", COMPUTED)
@pytest.mark.parametrize("is_padded", [False, True])
def test_code_that_computes_attention_itself_cannot_use_the_mask(what: str, is_padded: bool) -> None:
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, :3] = not is_padded
    with pytest.raises((RuntimeError, TypeError)):
        COMPUTED[what](torch.randn(2, 6, 7, 7), a_mask(real=real))


# Importing inductor scripts functions of PyTorch's own.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("is_padded", "backend"),
    [(False, "aot_eager"), (True, "aot_eager"), pytest.param(True, "inductor", marks=pytest.mark.slow)],
)
def test_the_compiler_takes_the_mask_as_eager_does(is_padded: bool, backend: str) -> None:
    """Made within a graph, and handed to one, as generate does with a static cache."""
    attention = set_pattern(tiny("llama"), PATTERN).model.layers[0].self_attn
    query = torch.randn(2, 6, 7, 8, dtype=torch.float64)
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, :3] = not is_padded

    def made(query: Tensor, real: Tensor) -> Tensor:
        return given(query, a_mask(real=real))

    def given(query: Tensor, mask: Tensor) -> Tensor:
        return dilated_attention_forward(attention, query, query[:, :3], query[:, :3], mask)[0]

    expected = made(query, real)
    for function, what in ((made, real), (given, a_mask(real=real))):
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        assert torch.equal(compiled(query, what), expected)
    with pytest.raises(RuntimeError, match="Invalid dtype"):
        torch.compile(lambda scores, real: scores + a_mask(real=real), backend="eager")(torch.randn(2, 6, 7, 7), real)


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("more", [{}, {"allow_is_bidirectional_skip": True}])
def test_there_is_a_mask_for_every_call(is_given: bool, more: dict[str, Any]) -> None:
    mask = a_mask(real=torch.ones(2, 7, dtype=torch.bool) if is_given else None, **more)
    assert mask is not None
    assert mask.shape == (1, 1, 2, 7)
    with pytest.raises(RuntimeError):
        torch.randn(1, 6, 2, 7) + mask


@pytest.mark.parametrize("said", [None, False, True])
def test_who_sees_whom_is_what_the_mask_says(said: bool | None) -> None:
    """Moonshine says that nothing is causal where it has a mask, because a dense one would say it."""
    query = torch.randn(2, 6, 7, 8, dtype=torch.float64)
    causal, both = (
        attended(query, a_mask(**more), is_causal=said) for more in ({}, {"allow_is_bidirectional_skip": True})
    )
    changed = query.clone()
    changed[:, :, 6] = 0
    again = attended(changed, a_mask(), is_causal=said)
    assert torch.equal(again[:, :6], causal[:, :6])
    assert not torch.allclose(causal[:, :6], both[:, :6])


def test_a_causal_layer_without_a_mask_is_what_sdpa_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """BridgeTower's layers say that they are causal, get no mask, and with "eager" see everything."""
    query = torch.randn(2, 6, 7, 8, dtype=torch.float64)
    assert torch.equal(attended(query, None), attended(query, a_mask()))
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_supports_sdpa", False)
    with pytest.raises(NotImplementedError, match="LlamaAttention says that it is causal and came without a mask"):
        attended(query, None)


def test_a_mask_of_other_columns_than_the_keys_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="LlamaAttention passed 7 keys with a mask of 9 columns"):
        attended(torch.randn(2, 6, 7, 8, dtype=torch.float64), a_mask(9))


def saved(model: Any, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def test_a_model_that_is_saved_comes_back_under_its_pattern_however_often(tmp_path: Path) -> None:
    model, tokens = set_pattern(tiny("qwen3", "sdpa"), PATTERN).float(), draw(1, 50)
    with torch.no_grad():
        expected = model.save_pretrained(tmp_path / "0") or AutoModelForCausalLM.from_pretrained(tmp_path / "0")(tokens)
        for turn in range(1, 3):
            again = AutoModelForCausalLM.from_pretrained(tmp_path / str(turn - 1))
            assert again.config._attn_implementation == "dilated"
            assert torch.equal(again(tokens).logits, expected.logits)
            assert saved(again, tmp_path / str(turn))["attn_implementation"] == "dilated"
        dense = AutoModelForCausalLM.from_pretrained(tmp_path / "0")
        dense.set_attn_implementation("sdpa")
        assert not torch.allclose(dense(tokens).logits, expected.logits, atol=1e-3)
        fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "0"))
        assert fresh.config._attn_implementation == "dilated"


def test_the_configuration_holds_the_text_of_the_pattern(tmp_path: Path) -> None:
    text = "local_window(3) + DilatedPattern([16, 64], [1, 4])"
    by_text, by_pattern = (
        set_pattern(tiny("llama"), pattern) for pattern in (text, local_window(3) + DilatedPattern([16, 64], [1, 4]))
    )
    assert by_text.config.dilated_attention == by_pattern.config.dilated_attention == {"pattern": text}
    assert saved(by_pattern, tmp_path)["dilated_attention"] == {"pattern": text}
    layers = set_pattern(tiny("llama"), [text, DilatedPattern([8], [2])])
    assert layers.config.dilated_attention == {"pattern": [text, "DilatedPattern([8], [2])"]}
    tokens = draw(2, 50)
    with torch.no_grad():
        assert torch.equal(by_text(tokens).logits, by_pattern(tokens).logits)


@pytest.mark.parametrize("mask", [PATTERN, from_block_mask(torch.ones(1, 4, 4).tril().bool(), 16)])
def test_a_configuration_that_holds_a_spec_loads(tmp_path: Path, mask: Any) -> None:
    """As earlier versions saved every pattern, and as a mask of blocks is saved, which has no expression."""
    model, tokens = set_pattern(tiny("llama"), mask).float(), draw(2, 50)
    values = saved(model, tmp_path)
    values["dilated_attention"] = {"pattern": mask.spec}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, model(tokens).logits)


def test_an_entry_of_specs_is_that_of_expressions() -> None:
    """A run that began under an earlier version resumes: its record holds specs, its new checkpoints expressions."""
    spec, text = PATTERN.spec, str(PATTERN)
    assert same_entry({"pattern": spec}, {"pattern": text})
    assert same_entry({"pattern": [spec, None]}, {"pattern": [text, None]})
    assert same_entry(None, None)
    for other in ({"pattern": "local_window(3)"}, {"pattern": [text]}, {"pattern": "[1"}, {"pattern": 7}, None, 7):
        assert not same_entry({"pattern": spec}, other)


def test_the_text_part_of_a_model_comes_back_under_its_pattern(tmp_path: Path) -> None:
    model = set_pattern(llava("sdpa"), PATTERN)
    for turn in range(2):
        assert saved(model, tmp_path / str(turn))["attn_implementation"] == {"text_config": "dilated"}
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / str(turn))
        assert model.config.text_config._attn_implementation == "dilated"
        assert model.config.vision_config._attn_implementation == "sdpa"
    with torch.no_grad():
        model(input_ids=draw(1, 12) % 30)


def test_dense_attention_that_is_asked_for_is_given_and_said(tmp_path: Path) -> None:
    set_pattern(tiny("llama"), PATTERN).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r'LlamaModel has a pattern in config.* attends to everything \("sdpa"\)'):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "dilated"
    # Looked through when it was built, so it may change.
    model.set_attn_implementation("dilated")
    model(draw(1, 12))


def test_a_pattern_that_was_written_by_hand_without_the_implementation_is_not_dense_in_silence(tmp_path: Path) -> None:
    config = tiny("llama", "sdpa").config
    config.dilated_attention = WORDS
    config.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match='pass attn_implementation="dilated", or call set_pattern'):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))


def test_models_without_a_pattern_are_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tiny("llama", "sdpa")
    assert not model._forward_pre_hooks
    assert "attn_implementation" not in model.config.to_dict()
