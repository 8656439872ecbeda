"""Models of transformers with random weights, small and in float64, and what they give under a dense mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from dilated_attention_pytorch import DilatedPattern, Pattern

VOCABULARY, WIDTH, HEADS, KV_HEADS = 31, 48, 6, 3
PATTERN = DilatedPattern([8, 35], [1, 3])
"""Three residues for three key/value heads; a pair may count twice."""

_NAMES = {
    "llama": ("Llama", "ForCausalLM"),
    "qwen3": ("Qwen3", "ForCausalLM"),
    "mistral": ("Mistral", "ForCausalLM"),
    "gemma": ("Gemma", "ForCausalLM"),
    "gpt_neox": ("GPTNeoX", "ForCausalLM"),
    "bert": ("Bert", "ForMaskedLM"),
    "bart": ("Bart", "ForConditionalGeneration"),
}
# Layers of some are as those of Llama: further cases of the same law.
ARCHITECTURES = [
    pytest.param(name, marks=pytest.mark.slow) if name in ("qwen3", "mistral") else pytest.param(name)
    for name in _NAMES
]
DECODERS = ARCHITECTURES[:5]


def tiny(name: str, attention: str = "dilated", **changes: Any) -> Any:
    """A model of one architecture, in evaluation mode; equal weights for equal calls."""
    prefix, suffix = _NAMES.get(name, (name, "ForCausalLM"))
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "initializer_range": 0.3,
    }
    if name == "bart":
        sizes |= {
            "d_model": WIDTH,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS,
            "encoder_ffn_dim": 53,
            "decoder_ffn_dim": 59,
            "init_std": 0.3,
            "max_position_embeddings": 300,
            "decoder_start_token_id": 1,
            "forced_eos_token_id": None,
        }
        del sizes["initializer_range"]
    else:
        sizes |= {
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "intermediate_size": 53,
            "max_position_embeddings": 300,
        }
        if name not in ("gpt_neox", "bert"):
            sizes |= {"num_key_value_heads": KV_HEADS, "head_dim": WIDTH // HEADS}
        if name == "mistral":
            sizes["sliding_window"] = None
    config = getattr(transformers, prefix + ("TextConfig" if name == "Gemma3" else "Config"))(**sizes | changes)
    config._attn_implementation = attention
    torch.manual_seed(3)
    model = getattr(transformers, prefix + suffix)(config).double().eval()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm_in_its_dtype(module)
    return model


def _norm_in_its_dtype(module: Any) -> Any:
    """The norm without its rounding to float32, which would blow up differences in the last bit of float64."""
    is_gemma = type(module).__name__.startswith("Gemma")

    def norm(hidden: Tensor) -> Tensor:
        eps = module.eps if is_gemma else module.variance_epsilon
        return functional.rms_norm(hidden, hidden.shape[-1:], module.weight + is_gemma, eps)

    return norm


def kv_heads(name: str) -> int:
    """Key/value heads of a model of :func:`tiny`."""
    return HEADS if name in ("gpt_neox", "bert", "bart") else KV_HEADS


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Tokens, none of them padding."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal to rounding in float64."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def dense_mask(pattern: Pattern, length: int, name: str, *, is_causal: bool) -> Tensor:
    """``log c`` for every query head, ``[1, H, N, N]``: what eager attention adds to its scores."""
    positions = torch.arange(length)
    counts = pattern.counts(positions, positions, kv_heads(name), is_causal=is_causal)
    return counts.double().log().repeat_interleave(HEADS // kv_heads(name), dim=0)[None]


@contextmanager
def softmax_in_its_dtype() -> Iterator[None]:
    """Eager attention takes its softmax in float32; within this context in the dtype of the scores."""
    original = functional.softmax
    nn.functional.softmax = lambda scores, dim, dtype=None: original(scores, dim)
    try:
        yield
    finally:
        nn.functional.softmax = original


def dense_logits(model: Any, name: str, tokens: Tensor, pattern: Pattern) -> Tensor:
    """What the model gives with eager attention under the dense counts of a pattern."""
    with softmax_in_its_dtype():
        if name != "bart":
            mask = dense_mask(pattern, tokens.shape[1], name, is_causal=name != "bert")
            return model(tokens, attention_mask=mask.expand(len(tokens), -1, -1, -1)).logits
        both, causal = (
            dense_mask(pattern, tokens.shape[1], name, is_causal=is_causal).expand(len(tokens), -1, -1, -1)
            for is_causal in (False, True)
        )
        encoded = model.model.encoder(tokens, attention_mask=both)
        return model(encoder_outputs=encoded, decoder_input_ids=tokens, decoder_attention_mask=causal).logits


def logits(model: Any, name: str, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """What the model gives, positions counted from a row's first real token; an encoder-decoder reads tokens twice."""
    if name == "bart":
        return model(
            tokens, attention_mask=mask, decoder_input_ids=tokens, decoder_attention_mask=mask, use_cache=False
        ).logits
    positions = None if mask is None else (mask.cumsum(dim=1) - 1).clamp(min=0)
    return model(tokens, attention_mask=mask, position_ids=positions).logits
