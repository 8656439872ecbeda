"""What a model under a pattern does not honour raises, and names it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import DilatedPattern, LongNetConfig, LongNetForCausalLM, LongNetLM
from dilated_attention_pytorch.installation import install_command
from dilated_attention_pytorch.integrations import BoundedCache, extend_context, register, set_pattern
from dilated_attention_pytorch.integrations.transformers import attention
from dilated_attention_pytorch.models import LongNetCausalLMConfig
from integrations.tiny_models import PATTERN, draw, tiny

register()
TOKENS = draw(2, 12)
LONGNET = LongNetConfig(embed_dim=8, num_layers=1, num_heads=2, segment_lengths=[4], dilation_rates=[1])
BOUNDARIES = torch.tensor([0, 5, 12], dtype=torch.int32)


def model(name: str = "llama", pattern: Any = PATTERN, **changes: Any) -> Any:
    return set_pattern(tiny(name, **changes), pattern)


def sharing_keys() -> Any:
    from transformers import Gemma3nTextConfig

    types = ["sliding_attention", "full_attention"] * 2
    config = Gemma3nTextConfig(num_hidden_layers=4, intermediate_size=8, num_kv_shared_layers=2, layer_types=types)
    config.dilated_attention = {"pattern": PATTERN.spec}
    config._attn_implementation = "dilated"
    return config


def twice() -> Any:
    differential = model("DiffLlama", num_attention_heads=4, num_key_value_heads=2, head_dim=12)
    with torch.no_grad():
        return differential(TOKENS, past_key_values=BoundedCache(differential.config))


def padded_between() -> Any:
    mask, llama = torch.ones_like(TOKENS), model()
    mask[1, 4] = 0
    with torch.no_grad():
        return llama(TOKENS, attention_mask=mask, past_key_values=BoundedCache(llama.config))


def prefix_in_a_bounded_cache() -> Any:
    llama = model()
    seen = torch.ones(2, 1, 12, 12).tril().bool()
    seen[..., :5, :5] = True
    with torch.no_grad():
        return llama(TOKENS, attention_mask=seen, past_key_values=BoundedCache(llama.config))


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no pattern": (lambda: tiny("llama")(TOKENS), ValueError, r"needs a pattern.*set_pattern\(model"),
    "unknown key": (
        lambda: tiny("llama", dilated_attention={"segments": [4]})(TOKENS), ValueError, "dilated_attention must be",
    ),
    "no text": (lambda: tiny("llama", dilated_attention={"pattern": 7})(TOKENS), TypeError, "must be a text or a list"),
    "no sum of calls": (
        lambda: tiny("llama", dilated_attention={"pattern": "dense"})(TOKENS), ValueError, "expected a sum of calls",
    ),
    "no pattern at all": (lambda: model(pattern=[7, 7]), TypeError, "pattern must be a Pattern.*got 7"),
    "a misspelt text": (
        lambda: model(pattern="DilatedPatern([4], [1])"), ValueError, r"sum of calls of .*got 'DilatedPatern\(",
    ),
    "neither pattern nor text": (
        lambda: model(pattern=7), TypeError, "pattern must be a Pattern .* its text, or a sequence .*got 7 of type int",
    ),
    "a name for a model": (
        lambda: set_pattern("gpt2", PATTERN), TypeError,
        r"model must be a model of transformers, got 'gpt2' of type str; call set_pattern with what AutoModelFor",
    ),
    "a configuration for a model": (
        lambda: set_pattern(tiny("llama").config, PATTERN), TypeError,
        r"got LlamaConfig; build the model first, or write config\.dilated_attention = ",
    ),
    "a model of PyTorch": (
        lambda: extend_context(torch.nn.Linear(2, 2), 9, PATTERN), TypeError, r"got Linear; .*call replace_attention\(",
    ),
    "a LongNet": (
        lambda: set_pattern(LongNetLM(LONGNET), PATTERN), TypeError, "got LongNetLM; .*segment_lengths and dilation",
    ),
    "a LongNet of transformers": (
        lambda: set_pattern(LongNetForCausalLM(LongNetCausalLMConfig.from_longnet_config(LONGNET)), PATTERN), TypeError,
        "got LongNetForCausalLM; .*segment_lengths and dilation_rates, or layer_patterns",
    ),
    "arguments in the other order": (
        lambda: set_pattern(PATTERN, tiny("llama")), TypeError, "got DilatedPattern; call set_pattern with what",
    ),
    "too many layers": (lambda: model(pattern=[PATTERN] * 3), ValueError, "one per layer of 2, got a list of 3"),
    "a layer without": (lambda: model(pattern=[PATTERN, None]), ValueError, "None for layer 1"),
    "window and pattern": (
        lambda: model("mistral", sliding_window=9), ValueError, "every layer .* sliding window of 9 .* to None before",
    ),
    "window and pattern of a layer": (
        lambda: model("mistral", [PATTERN, None], sliding_window=9), ValueError, "layer 0 has a sliding window of 9",
    ),
    "window and pattern in the configuration": (
        lambda: tiny("mistral", sliding_window=9, dilated_attention={"pattern": PATTERN.spec})(TOKENS),
        ValueError, "every layer of the model has a sliding window",
    ),
    "a pattern per layer of two stacks": (
        lambda: model("bart", [PATTERN, PATTERN]), ValueError, "two stacks of layers",
    ),
    "position bias": (
        lambda: attention.dilated_attention_forward(
            model().model.layers[0].self_attn, *torch.randn(3, 1, 3, 12, 8), None, position_bias=torch.ones(1, 3, 9, 9)
        ),
        NotImplementedError, r"bias of its own for every pair of queries and keys to the scores, got \(1, 3, 9, 9\)",
    ),
    "keys at another rate": (
        lambda: attention.dilated_attention_forward(
            model().model.layers[0].self_attn, torch.randn(1, 3, 12, 8), *torch.randn(2, 1, 3, 4, 8), None,
            is_causal=False,
        ),
        NotImplementedError, r"got 12 queries and 4 keys in LlamaAttention.* placed at the positions of the others",
    ),
    "weights": (
        lambda: model()(TOKENS, output_attentions=True), NotImplementedError, "output_attentions: the N x N weights",
    ),
    "mask of other pairs": (
        lambda: model()(TOKENS, attention_mask=(torch.ones(2, 1, 12, 12).tril() > torch.eye(12).roll(3, 0))),
        NotImplementedError, "LlamaAttention is none of them: in row 0 of the batch query 3 does not see key 0",
    ),
    "mask of every head": (
        lambda: model()(TOKENS, attention_mask=torch.ones(2, 6, 12, 12).tril().cumsum(1) > 1), NotImplementedError,
        "a mask that differs between heads",
    ),
    "bias of every pair": (
        lambda: model()(TOKENS, attention_mask=-torch.ones(2, 1, 12, 12)), NotImplementedError,
        "neither 0 nor at most -10000",
    ),
    "mask of three dimensions": (
        lambda: attention.dilated_attention_forward(
            model().model.layers[0].self_attn, *torch.randn(3, 1, 3, 12, 8), torch.ones(2, 12, 12).bool()
        ),
        NotImplementedError, r"got torch.bool of shape \(2, 12, 12\) in LlamaAttention",
    ),
    "keys of other lengths, both ways": (
        lambda: attention.dilated_attention_forward(
            model().model.layers[0].self_attn, torch.randn(1, 3, 5, 8), *torch.randn(2, 1, 3, 12, 8), None,
            is_causal=False,
        ),
        NotImplementedError, "of a sequence to itself, got 5 queries and 12 keys in LlamaAttention",
    ),
    "boundaries of several rows": (
        lambda: model()(TOKENS, cu_seq_lens_q=BOUNDARIES, cu_seq_lens_k=BOUNDARIES, use_cache=False), ValueError,
        "documents of one packed row .* got 2 rows of 12 queries and 12 keys",
    ),
    "a prefix in a bounded cache": (
        lambda: prefix_in_a_bounded_cache(), NotImplementedError, "the mask has a prefix that sees itself",
    ),
    "padding between tokens in a bounded cache": (
        lambda: padded_between(), NotImplementedError, "2 runs in row 1",
    ),
    "unknown argument": (lambda: model()(TOKENS, sinks=3), NotImplementedError, "does not honour sinks"),
    "gradients in a bounded cache": (
        lambda: model()(TOKENS, past_key_values=BoundedCache(model().config)), RuntimeError, "has no gradient",
    ),
    "assisted generation with a bounded cache": (
        lambda: (m := model()).generate(
            TOKENS[:1], past_key_values=BoundedCache(m.config), assistant_model=model(), max_new_tokens=4,
        ),
        NotImplementedError, "cannot roll back tokens",
    ),
    "prompt lookup with a bounded cache": (
        lambda: (m := model()).generate(
            TOKENS[:1], past_key_values=BoundedCache(m.config), prompt_lookup_num_tokens=3, max_new_tokens=4,
        ),
        NotImplementedError, "cannot roll back tokens.*prompt lookup",
    ),
    "bounded cache of an encoder-decoder": (
        lambda: BoundedCache(model("bart").config), NotImplementedError, "one stack of causal layers",
    ),
    "bounded cache of convolutions": (
        lambda: BoundedCache(model("Lfm2", layer_types=["conv", "full_attention"]).config), NotImplementedError,
        "what layer 0 of this model keeps is a LinearAttentionLayer",
    ),
    "bounded cache of layers that share keys": (
        lambda: BoundedCache(sharing_keys()), NotImplementedError,
        r"layer 2 of this model keeps is a DummyLayer|2 layers of .* keep none of their own",
    ),
    "bounded cache of two calls": (
        lambda: twice(), NotImplementedError, "saw 12 tokens in layer 0, and its attention reaches token 24",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_says_what_is_wrong(case: str) -> None:
    call, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        call()


def test_a_bounded_cache_of_another_pattern_is_refused() -> None:
    changed = model()
    cache = BoundedCache(changed.config)
    set_pattern(changed, DilatedPattern([7], [1]))
    with torch.no_grad(), pytest.raises(ValueError, match="make a new one after set_pattern"):
        changed(TOKENS, past_key_values=cache)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=re.escape(install_command("train"))):
        register()
    with pytest.raises(ImportError, match=re.escape(install_command("train"))):
        set_pattern(torch.nn.Linear(2, 2), PATTERN)
