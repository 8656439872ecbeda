"""The call that lets a model attend under a pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.patterns import Pattern

from .config import FIELD, NAME, check_pattern, chosen_parts, keep_implementation, text_config
from .layers import check_is_in_no_part, look_through, watch
from .registration import register

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def set_pattern(model: PreTrainedModel, pattern: Pattern | Sequence[Pattern | None]) -> PreTrainedModel:
    """Let a model attend under a pattern; both are written into its configuration, saved and loaded with it.

    It does what ``model.set_attn_implementation("dilated")`` does as well, and looks every layer of the model through:
    one that computes attention itself would attend to everything.

    Args:
        model: a model of transformers. Of a model with parts it is the text part whose pattern is set.
        pattern: one for all layers that have no window of their own, or one per layer. A layer with a sliding window of
            w tokens attends under ``local_window(w - 1)``; its entry is None.

    Returns:
        the model itself.

    Raises:
        TypeError: what came is no pattern.
        ValueError: a layer would have both a pattern and a window, or neither; the number of patterns is not that of
            the layers.
        NotImplementedError: the model, or a layer that is named, does not use transformers' attention interface, or
            more than one part may be meant.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from dilated_attention_pytorch import DilatedPattern
    >>> from dilated_attention_pytorch.integrations import set_pattern
    >>> config = LlamaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> set_pattern(LlamaForCausalLM(config), DilatedPattern([16], [2])).config.dilated_attention
    {'pattern': '[[[16], [2], [0], "modulo", "ragged"]]'}
    """
    from transformers import PreTrainedModel

    config = text_config(model.config)
    configs = [config, *_copies(model, config)]
    look_through(model, configs, is_whole=True)
    entry = check_pattern(pattern, config)
    register()
    for module in model.modules():
        # Other parts may have the implementation as well.
        if isinstance(module, PreTrainedModel):
            watch(module)
    before = [(one, one._attn_implementation) for one in configs]
    model.set_attn_implementation(chosen_parts(model.config, lambda part: part is config))
    stays = [one._attn_implementation for one in configs if one._attn_implementation != NAME]
    if stays:
        for one, implementation in before:
            one._attn_implementation = implementation
        check_is_in_no_part(model, configs)
        raise NotImplementedError(
            f"{type(model).__name__} does not use transformers' attention interface, through which a layer gets its "
            f'pattern (its attention stays "{stays[0]}")'
        )
    for one in configs:
        setattr(one, FIELD, dict(entry))
    keep_implementation(model.config)
    return model


def _copies(model: PreTrainedModel, config: Any) -> list[Any]:
    """Configurations that parts of the model copied from ``config``, as the two stacks of T5 do."""
    from transformers import PreTrainedModel

    named: list[Any] = []
    todo = [model.config]
    while todo:
        named.append(one := todo.pop())
        todo += [part for name in one.sub_configs if (part := getattr(one, name, None)) is not None]
    copies: list[Any] = []
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or type(module.config) is not type(config):
            continue
        if all(module.config is not one for one in (*named, *copies)):
            copies.append(module.config)
    return copies
