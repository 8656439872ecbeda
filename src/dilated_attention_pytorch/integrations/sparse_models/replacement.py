"""Replacement of the sparse attention of transformers' models by the same attention in linear memory."""

from __future__ import annotations

from typing import Any

from torch import nn

from dilated_attention_pytorch.integrations.parts import NotReplaceable

from .big_bird import BigBirdReplacement
from .long_t5 import LongT5Replacement
from .longformer import LongformerReplacement
from .pegasus_x import PegasusXReplacement

_REPLACEMENTS = {
    "big_bird.modeling_big_bird.BigBirdAttention": BigBirdReplacement,
    "bigbird_pegasus.modeling_bigbird_pegasus.BigBirdPegasusEncoderAttention": BigBirdReplacement,
    "led.modeling_led.LEDEncoderSelfAttention": LongformerReplacement,
    "longt5.modeling_longt5.LongT5LocalAttention": LongT5Replacement,
    "longt5.modeling_longt5.LongT5TransientGlobalAttention": LongT5Replacement,
    "longformer.modeling_longformer.LongformerSelfAttention": LongformerReplacement,
    "pegasus_x.modeling_pegasus_x.PegasusXGlobalLocalAttention": PegasusXReplacement,
}


def replace_sparse_attention(model: nn.Module) -> tuple[str, ...]:
    """Replace the sparse attention layers of a transformers model in place, with equal results and linear memory.

    The models are Longformer, LED, BigBird, BigBird-Pegasus, LongT5 and Pegasus-X, and those with an encoder of these.
    Each layer keeps its pattern, its masks and its dropout rate. The replacements hold the same submodule objects
    under the same names: state dicts are interchangeable and existing optimizers stay valid. Other attention of the
    model, such as a decoder's, is unchanged. All layers are checked before the first is replaced.

    Outputs and gradients equal the original's up to rounding, except that dropout draws other random numbers, and that
    LongT5's rows of padding have other values.

    Args:
        model: changed in place.

    Returns:
        the names of the replaced layers.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: it has no such layer, or a layer has hooks, unknown parts, or is of a BigBird decoder.

    >>> from transformers import LongformerConfig, LongformerModel
    >>> from dilated_attention_pytorch.integrations import replace_sparse_attention
    >>> sizes = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    >>> model = LongformerModel(LongformerConfig(attention_window=8, num_hidden_layers=2, **sizes))
    >>> replace_sparse_attention(model)
    ('encoder.layer.0.attention.self', 'encoder.layer.1.attention.self')
    >>> model(torch.randint(2, 97, (2, 100))).last_hidden_state.shape
    torch.Size([2, 100, 32])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    replacements: dict[str, nn.Module] = {}
    configs: dict[str, Any] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        kind = type(layer)
        configs[name] = vars(layer).get("config", configs.get(name.rpartition(".")[0]))
        replacement = _REPLACEMENTS.get(f"{kind.__module__}.{kind.__qualname__}".removeprefix("transformers.models."))
        if replacement is None:
            continue
        if not name:
            raise ValueError(f"model must contain its attention layers, got one layer, a {kind.__name__}")
        try:
            replacements[name] = replacement(layer, configs[name])
        except NotReplaceable as reason:
            raise NotReplaceable(f"{name} ({kind.__name__}) cannot be replaced: {reason}") from None
    if not replacements:
        raise ValueError(
            f"nothing was replaced: {type(model).__name__} has no sparse attention layer of Longformer, LED's encoder, "
            "BigBird, BigBird-Pegasus, LongT5 or Pegasus-X; for another model of transformers use set_pattern, for "
            "plain PyTorch replace_attention"
        )
    for name, module in replacements.items():
        model.set_submodule(name, module)
    return tuple(replacements)
