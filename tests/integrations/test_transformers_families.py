"""Models with caps, sinks, biases, values of their own width, or attention of their own code: equal to eager ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.integrations import BoundedCache, register, set_pattern
from dilated_attention_pytorch.integrations.transformers.config import window_of_layer
from dilated_attention_pytorch.integrations.transformers.distances import bias_by_distance
from integrations.tiny_models import PATTERN, dense_mask, draw

register()
WHOLE = DilatedPattern([100], [1])
LENGTH = 23

_TOKENS = {"vocab_size": 31, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_SIZES = {**_TOKENS, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 17, "n_group": 1, "topk_group": 1}
_LATENT = {
    **_SIZES,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
}
_T5 = {
    **_TOKENS,
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 29,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 13,
    "decoder_start_token_id": 1,
    "dropout_rate": 0.0,
}
_GPT = {**_TOKENS, "n_embd": 24, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}

SIZES: dict[str, dict[str, Any]] = {
    "GptOss": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "Gemma2": {**_GROUPED, "attn_logit_softcapping": 0.7, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "Gemma3": {**_GROUPED, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "DeepseekV3": _LATENT,
    "T5": _T5,
    "Bloom": {**_TOKENS, "hidden_size": 24, "n_layer": 2, "n_head": 4},
    "Mpt": {**_TOKENS, "d_model": 24, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "KimiLinear": {**_LATENT, "layer_types": ["full_attention"] * 2},
    "Mistral4": _LATENT,
    "Llama4": {
        **_GROUPED,
        "attention_chunk_size": 20,
        "layer_types": ["chunked_attention", "full_attention"],
        "num_local_experts": 2,
        "intermediate_size_mlp": 29,
    },
    "GPTJ": _GPT,
    "Falcon": {**_SIZES, "multi_query": True},
    "UMT5": _T5,
}
SLOW = {"Gemma3", "KimiLinear", "Mistral4", "GPTJ", "Falcon", "UMT5"}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SIZES]


def with_random_weights(model: Any) -> Any:
    """The model in float64 for inference; equal weights for equal calls."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.double().parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model.eval()


def built(name: str, attention: str = "eager", **changes: Any) -> Any:
    """A model with random numbers for all its weights."""
    prefix = f"{name}Text" if name in ("Gemma3", "Llama4") else name
    config = getattr(transformers, f"{prefix}Config")(**SIZES[name] | changes)
    config._attn_implementation = attention
    config._experts_implementation = "eager"
    suffix = "ForConditionalGeneration" if "T5" in name else "ForCausalLM"
    return with_random_weights(getattr(transformers, name + suffix)(config))


def logits(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    if model.config.is_encoder_decoder:
        return model(tokens, attention_mask=mask, decoder_input_ids=tokens, decoder_attention_mask=mask).logits
    return model(tokens, attention_mask=mask, use_cache=False).logits


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal to float32, in which models compute norms, rotations, experts and softmax whatever their dtype is."""
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6 * max(1.0, scale))


@pytest.mark.parametrize("name", NAMES)
def test_one_group_over_the_whole_length_gives_outputs_and_gradients_of_eager(name: str) -> None:
    model, eager, tokens = set_pattern(built(name), WHOLE), built(name), draw(2, LENGTH)
    out, expected = logits(model, tokens), logits(eager, tokens)
    close(out, expected)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    for each in ((out * weights).sum(), (expected * weights).sum()):
        each.backward()
    theirs = dict(eager.named_parameters())
    for path, weight in model.named_parameters():
        grad = theirs[path].grad
        assert (weight.grad is None) == (grad is None), path
        if grad is not None:
            close(weight.grad, grad)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_rows_alone_of_eager(name: str, side: str) -> None:
    model, eager, tokens = set_pattern(built(name), WHOLE), built(name), draw(2, LENGTH)
    mask = torch.ones_like(tokens)
    mask[1, slice(0, 6) if side == "left" else slice(LENGTH - 6, LENGTH)] = 0
    with torch.no_grad():
        out = logits(model, tokens, mask)
        for row, real in enumerate(mask.bool()):
            close(out[row, real], logits(eager, tokens[row : row + 1, real])[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_changes_results_and_cached_text_is_that_without_a_cache(name: str) -> None:
    model, tokens = set_pattern(built(name), DilatedPattern([8, 24], [1, 3])), draw(2, 11)
    with torch.no_grad():
        assert not torch.allclose(logits(model, draw(2, LENGTH)), logits(built(name), draw(2, LENGTH)), atol=1e-3)
    texts = [
        model.generate(
            tokens, max_new_tokens=7, do_sample=False, use_cache=use_cache, output_logits=True,
            return_dict_in_generate=True,
        )
        for use_cache in (False, True)
    ]  # fmt: skip
    assert torch.equal(texts[0].sequences, texts[1].sequences)
    for one, other in zip(texts[0].logits, texts[1].logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Bloom", "GPTJ"])
def test_attention_of_their_own_code_under_a_pattern_is_eager_with_its_counts(name: str) -> None:
    model, eager, tokens = set_pattern(built(name), PATTERN), built(name), draw(2, LENGTH)
    counts = dense_mask(PATTERN, LENGTH, "gpt_neox", is_causal=True)[:, :4]
    out = logits(model, tokens)
    with torch.no_grad():
        seen = counts.clamp(min=torch.finfo(torch.float32).min).expand(2, -1, -1, -1)
        close(out, eager(tokens, attention_mask=seen, use_cache=False).logits if name == "GPTJ" else with_counts(
            eager, tokens, counts))  # fmt: skip


def with_counts(eager: Any, tokens: Tensor, counts: Tensor) -> Tensor:
    """Bloom makes its positions of a mask [batch, tokens], so the counts are added where it takes its softmax."""
    softmax = functional.softmax
    functional.softmax = lambda scores, dim, dtype=None: softmax(scores + counts.clamp(max=9.0), dim)
    try:
        return eager(tokens, use_cache=False).logits
    finally:
        functional.softmax = softmax


def test_the_bias_of_t5_is_never_one_of_every_pair() -> None:
    model = set_pattern(built("T5"), PATTERN)
    layers = [module for module in model.modules() if getattr(module, "has_relative_attention_bias", False)]
    assert len(layers) == 2
    for layer in layers:
        table = layer.compute_bias(1000, 1000)
        assert table.shape == (4, 27)
        pairs = type(layer).compute_bias(layer, 40, 40)[0]
        distance = (torch.arange(40) - torch.arange(40)[:, None]).clamp(-13, 13) + 13
        assert torch.equal(table[:, distance], pairs)
    model.set_attn_implementation("eager")
    assert bias_by_distance(layers[0], 5, 7).shape == (1, 4, 5, 7)


def test_longer_inputs_than_mpt_has_biases_for_are_computed() -> None:
    model, longer = (set_pattern(built("Mpt", max_seq_len=length), WHOLE) for length in (8, 64))
    with torch.no_grad():
        close(logits(model, draw(2, LENGTH)), logits(longer, draw(2, LENGTH)))


def test_a_model_of_its_own_code_goes_back_to_eager_and_copies_attend_as_it_does() -> None:
    model, tokens = set_pattern(built("Bloom"), PATTERN), draw(2, LENGTH)
    with torch.no_grad():
        expected = logits(model, tokens)
        close(logits(copy.deepcopy(model), tokens), expected)
        model.config._attn_implementation = "eager"
        close(logits(model, tokens), logits(built("Bloom"), tokens))


def bert(**changes: Any) -> Any:
    config = transformers.MegatronBertConfig(**_SIZES, **changes)
    return set_pattern(transformers.MegatronBertModel(config).double().eval(), PATTERN)


def test_dropout_of_a_module_s_own_code_drops_probabilities() -> None:
    model, tokens = bert(attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0), draw(2, LENGTH)
    model.train()
    torch.manual_seed(0)
    first, second = (model(tokens).last_hidden_state for _ in range(2))
    assert not torch.allclose(first, second)
    torch.manual_seed(0)
    assert torch.equal(model(tokens).last_hidden_state, first)


class Odd(nn.Module):
    """What a layer of Megatron's BERT may do to its scores, and attention under a pattern does not."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.num_attention_heads = what, 4

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        query = hidden.unflatten(-1, (4, -1)).transpose(1, 2)
        scores = query @ query.transpose(-1, -2)
        match self.what:
            case "calls sigmoid of its scores":
                weights = scores.sigmoid()
            case "calls sigmoid with its scores":
                weights = torch.sigmoid(scores)
            case "multiplies its scores by a tensor":
                weights = (scores * torch.rand(LENGTH, LENGTH)).softmax(-1)
            case "adds a bias of its own":
                weights = (scores + torch.rand(4, 1, LENGTH)).softmax(-1)
            case "adds a bias of its own to":
                weights = (scores + nn.Parameter(torch.zeros(4, LENGTH, LENGTH))).softmax(-1)
            case "adds scores to its scores":
                weights = (scores + scores).softmax(-1)
            case "divides by its scores":
                weights = (1.0 / scores).softmax(-1)
            case "calls cat with its scores":
                weights = torch.cat([scores, scores], -1).softmax(-1)
            case "calls getitem with its scores":
                weights = scores[..., 1:].softmax(-1)
            case "calls add with its scores .*alpha":
                weights = torch.add(scores, torch.zeros(1, 1, 1, LENGTH), alpha=2).softmax(-1)
            case "takes the softmax of its scores over dimension 1":
                weights = scores.softmax(1)
            case "replaces scores by 0":
                weights = scores.masked_fill(torch.rand(LENGTH, LENGTH) > 0.5, 0.0).softmax(-1)
            case "keeps its scores where a mask is False":
                weights = torch.where(torch.rand(LENGTH, LENGTH) > 0.5, -1e9, scores).softmax(-1)
            case "reshapes its scores":
                weights = scores.view(2, -1).softmax(-1)
            case "calls masked_fill of its weights":
                weights = scores.softmax(-1).masked_fill(torch.rand(LENGTH, LENGTH) > 0.5, 0.0)
            case "takes a softmax of something else":
                weights = query.softmax(-1)
            case "does not say how many heads":
                del self.num_attention_heads
                flat = query.flatten(0, 1)
                return torch.bmm(torch.bmm(flat, flat.transpose(1, 2)).softmax(-1), flat), None
            case "multiplies a tensor .* that does not have its 4 heads":
                weights = torch.bmm(hidden[:1], hidden[:1].transpose(1, 2)).softmax(-1)
            case _:
                raise AssertionError(self.what)
        return (weights @ query).transpose(1, 2).flatten(2), None


Odd.__name__ = "OddAttention"
ODD = [
    "calls sigmoid of its scores", "calls sigmoid with its scores", "multiplies its scores by a tensor",
    "adds a bias of its own", "takes the softmax of its scores over dimension 1", "replaces scores by 0",
    "keeps its scores where a mask is False", "reshapes its scores", "calls masked_fill of its weights",
    "takes a softmax of something else", "does not say how many heads", "adds a bias of its own to",
    "adds scores to its scores", "divides by its scores", "calls cat with its scores", "calls getitem with its scores",
    "calls add with its scores .*alpha", "multiplies a tensor .* that does not have its 4 heads",
]  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_what_is_no_attention_in_a_module_s_own_code_is_refused_by_name(what: str) -> None:
    config = transformers.MegatronBertConfig(**_SIZES)
    model = transformers.MegatronBertModel(config).eval()
    model.encoder.layer[1].attention.self = Odd(what)
    set_pattern(model, PATTERN)
    with pytest.raises(NotImplementedError, match=f"OddAttention computes attention itself and .*{what}"):
        model(draw(2, LENGTH))


SEEN = torch.ones(LENGTH, LENGTH).tril().bool()
ADDED = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~SEEN, -1e9)


def in_place(query: Tensor, softmax: Any) -> Tensor:
    scores = query @ query.transpose(-1, -2)
    scores.mul_(2.0)
    scores.div_(6.0)
    scores.masked_fill_(~SEEN, -1e9)
    scores.add_(torch.zeros(1, 1, 1, LENGTH))
    return softmax(scores, -1) @ query


def in_memory(query: Tensor, softmax: Any) -> Tensor:
    """The memory that a product is written to is read with the factor 0, whatever it holds."""
    flat, memory = query.flatten(0, 1), torch.full((8, LENGTH, LENGTH), torch.nan)
    scores = torch.baddbmm(memory, flat, flat.transpose(1, 2), beta=0, alpha=0.3)
    weights = softmax(scores.view(2, 4, LENGTH, LENGTH) + ADDED, dim=-1)
    return torch.bmm(weights.view(8, LENGTH, LENGTH), flat).view(query.shape)


def on_scores(change: Callable[[Any], Any]) -> Callable[[Tensor, Any], Tensor]:
    return lambda query, softmax: softmax(change(torch.matmul(query, query.transpose(-1, -2)) / 3), dim=-1) @ query


FORMS = {
    "in place": in_place,
    "in memory": in_memory,
    "in one call": lambda query, _: functional.scaled_dot_product_attention(query, query, query, is_causal=True),
    "in one call with a mask": lambda query, _: functional.scaled_dot_product_attention(query, query, query, ADDED),
    "added to the mask": on_scores(lambda scores: ADDED + 0.5 * scores),
    "where": on_scores(lambda scores: torch.where(SEEN, scores, -1e9)),
    "where of scores": on_scores(lambda scores: scores.where(SEEN, -1e9)),
    "filled": on_scores(lambda scores: torch.masked_fill(scores, (~SEEN).expand_as(scores), -1e9)),
    "no less than": on_scores(lambda scores: torch.max(scores + ADDED, torch.tensor(-3e38))),
}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_a_module_s_own_code_may_be_written_in_many_forms(form: str) -> None:
    class Form(Odd):
        def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            query = hidden.unflatten(-1, (4, -1)).transpose(1, 2)
            return FORMS[form](query, functional.softmax).transpose(1, 2).flatten(2), None

    Form.__name__ = "OwnAttention"
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(transformers.MegatronBertModel(transformers.MegatronBertConfig(**_SIZES)).eval())
        for layer in models[-1].encoder.layer:
            layer.attention.self = Form("")
    expected, out, other = (
        (model if pattern is None else set_pattern(model, pattern))(draw(2, LENGTH)).last_hidden_state
        for model, pattern in zip(models, (None, WHOLE, PATTERN), strict=True)
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(other, expected, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_module_s_own_code_may_attend_to_another_sequence(is_padded: bool) -> None:
    torch.manual_seed(0)
    config = transformers.MegatronBertConfig(**_SIZES, is_decoder=True, add_cross_attention=True)
    model, other = (
        transformers.MegatronBertModel(config).double().eval(),
        torch.randn(2, LENGTH, 24, dtype=torch.float64),
    )
    seen = torch.ones(2, LENGTH, dtype=torch.int64)
    seen[1, 16:] = 1 - is_padded
    options = {"encoder_hidden_states": other, "encoder_attention_mask": seen, "use_cache": False}
    expected = model(draw(2, LENGTH), **options).last_hidden_state
    close(set_pattern(model, WHOLE)(draw(2, LENGTH), **options).last_hidden_state, expected)


def test_a_part_without_a_pattern_computes_nothing_by_its_own_code() -> None:
    """GroupViT's configuration of images is in no model of its own, only in layers."""
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 29}
    config = transformers.GroupViTConfig(
        text_config={**sizes, **_TOKENS, "num_hidden_layers": 1},
        vision_config={**sizes, "depths": [1, 1, 1], "image_size": 32, "num_output_groups": [8, 4, 0]},
    )
    model = transformers.GroupViTModel._from_config(config, attn_implementation="dilated").eval()
    set_pattern(model, PATTERN)
    with pytest.raises(ValueError, match="needs a pattern, and the model has none in its GroupViTVisionConfig"):
        model(draw(2, LENGTH), torch.randn(2, 3, 32, 32))


def test_weights_of_a_module_s_own_code_are_not_given() -> None:
    model = built("Bloom")
    set_pattern(model, PATTERN)
    with pytest.raises(NotImplementedError, match="BloomAttention computes attention itself and returns the N x N"):
        model(draw(2, LENGTH), output_attentions=True)


@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
@torch.no_grad()
def test_a_bounded_cache_has_caps_and_sinks(name: str) -> None:
    model = set_pattern(built(name, layer_types=["full_attention"] * 2), PATTERN)
    tokens = draw(2, LENGTH)
    cache = BoundedCache(model.config)
    parts = [model(part, past_key_values=cache).logits for part in tokens.split([9, 1, 1, 5, 1, 6], dim=1)]
    close(torch.cat(parts, 1), model(tokens).logits)
    assert max(cache.rows_per_head(layer=0)) < LENGTH


def test_a_bounded_cache_refuses_a_model_that_changes_keys_before_its_attention() -> None:
    model = set_pattern(built("DeepseekV3"), PATTERN)
    cache = BoundedCache(model.config)
    with torch.no_grad():
        model(draw(2, 3), past_key_values=cache)
        with pytest.raises(RuntimeError, match="changes keys between its cache and its attention"):
            model(draw(2, 3), past_key_values=cache)


def test_falcon_s_alibi_is_refused_in_words() -> None:
    model = set_pattern(built("Falcon", alibi=True), PATTERN)
    with pytest.raises(NotImplementedError, match="FalconAttention came with numbers for every pair"):
        model(draw(2, LENGTH))


def test_a_list_of_patterns_leaves_a_layer_its_chunks() -> None:
    models = [set_pattern(built("Llama4"), pattern) for pattern in (PATTERN, [None, PATTERN])]
    with torch.no_grad():
        assert torch.equal(logits(models[0], draw(2, LENGTH)), logits(models[1], draw(2, LENGTH)))
    with pytest.raises(ValueError, match="every layer of the model has a sliding window of 20 tokens"):
        set_pattern(built("Llama4", layer_types=["chunked_attention"] * 2), PATTERN)


@torch.no_grad()
def test_a_list_of_patterns_leaves_gpt_neo_its_windows() -> None:
    def model(*kinds: str) -> Any:
        sizes = {"hidden_size": 24, "num_layers": 2, "num_heads": 4, "window_size": 5, "attention_types": [[kinds, 1]]}
        config = transformers.GPTNeoConfig(**_TOKENS, **sizes, max_position_embeddings=64)
        return with_random_weights(transformers.GPTNeoForCausalLM(config))

    for length in (4, LENGTH):
        one, other = (
            logits(set_pattern(model("global", "local"), pattern), draw(2, length))
            for pattern in (PATTERN, [PATTERN, None])
        )
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="layer 1 has a sliding window of 5 tokens and a pattern"):
        set_pattern(model("global", "local"), [PATTERN, PATTERN])
    with pytest.raises(ValueError, match=r'window of 5 tokens.*, or leave "local" out of config.attention_types'):
        set_pattern(model("local", "local"), PATTERN)


def test_the_shared_layers_of_zamba2_have_no_window() -> None:
    assert window_of_layer(transformers.Zamba2Config(), -1) is None


def test_chunks_need_all_tokens_of_a_sequence() -> None:
    model = set_pattern(built("Llama4", attention_chunk_size=8), WHOLE)
    with pytest.raises(NotImplementedError, match=r"attention_chunk_size=8\).*pass use_cache=False"):
        model.generate(draw(2, 7), max_new_tokens=9, do_sample=False)


@torch.no_grad()
@pytest.mark.parametrize("is_padded", [False, True])
def test_attention_to_another_sequence_has_the_model_s_cap(is_padded: bool) -> None:
    stack = {**SIZES["Gemma2"], "sliding_window": 30}
    config = transformers.T5GemmaConfig(encoder=stack, decoder=stack, **_TOKENS)
    config._attn_implementation = "eager"
    kind = transformers.T5GemmaForConditionalGeneration
    eager, model = (with_random_weights(kind(copy.deepcopy(config))) for _ in range(2))
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, 17:] = 1 - is_padded
    out, expected = (
        each(draw(2, LENGTH), attention_mask=mask, decoder_input_ids=draw(2, 11), use_cache=False).logits
        for each in (set_pattern(model, WHOLE), eager)
    )
    close(out, expected)


def matcher(name: str) -> Any:
    """A model that matches the keypoints of two images."""
    points = {"model_type": "superpoint", "encoder_hidden_sizes": [8] * 4, "decoder_hidden_size": 8}
    sizes: dict[str, Any] = {"keypoint_detector_config": {**points, "descriptor_decoder_dim": 16}}
    if name == "LightGlue":
        sizes |= {"descriptor_dim": 16, "num_hidden_layers": 2}
    else:
        sizes |= {"hidden_size": 16, "keypoint_encoder_sizes": [8], "gnn_layers_types": ["self", "cross"] * 2}
    config = getattr(transformers, f"{name}Config")(**sizes, num_attention_heads=4, initializer_range=0.3)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForKeypointMatching")(config).double().eval()


@torch.no_grad()
@pytest.mark.parametrize("name", ["LightGlue", "SuperGlue"])
def test_keypoints_of_two_images_are_matched_as_by_eager(name: str) -> None:
    images = torch.rand(2, 2, 3, 48, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, eager = set_pattern(matcher(name), WHOLE), matcher(name)
    for pairs in (images, images[:1, :1].expand(2, 2, -1, -1, -1)):
        out, expected = model(pairs), eager(pairs)
        real = expected.mask.bool()
        assert bool(real.all()) == (pairs is not images)  # padding in the first call alone
        scale = expected.matching_scores.max()
        close(out.matching_scores[real] / scale, expected.matching_scores[real] / scale)
        assert torch.equal(out.matches[real], expected.matches[real])
    changed = set_pattern(model, PATTERN)(pairs).matching_scores
    assert not torch.allclose(changed / scale, expected.matching_scores / scale, atol=1e-3)
