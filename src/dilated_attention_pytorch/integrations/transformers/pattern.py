"""Setting the attention pattern of a transformers model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dilated_attention_pytorch.installation import importing

from .config import (
    FIELD,
    NAME,
    PatternOfModel,
    check_model,
    check_pattern,
    chosen_parts,
    keep_implementation,
    text_config,
)
from .layers import check_is_in_no_part, look_through, watch
from .registration import register

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def set_pattern(model: PreTrainedModel, pattern: PatternOfModel) -> PreTrainedModel:
    """Set the attention pattern of a model; pattern and implementation are stored in its configuration.

    Includes ``model.set_attn_implementation("dilated")``, and checks every layer of the model. A layer that computes
    attention itself gets a forward in which its scores are read from its operations and computed under the pattern.

    Args:
        model: a transformers model; for a multimodal model, the pattern of the text part is set.
        pattern: one for all layers without a sliding window, or one per layer; a :class:`Pattern` or the text of
            :func:`pattern_from_expression`, which the configuration holds. A layer with a sliding window of w tokens
            attends under ``local_window(w - 1)``; its entry is None.

    Returns:
        the model itself.

    Raises:
        ImportError: transformers is not installed, or cannot be imported.
        TypeError: ``model`` is not a model of transformers, or an entry is not a pattern.
        ValueError: a text is not a pattern; a layer would have both a pattern and a window, or neither; the number of
            patterns differs from the number of layers.
        NotImplementedError: the model, or a layer that is named, has no attention of queries, keys and values that a
            pattern can be given to, or the text part is ambiguous.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from dilated_attention_pytorch import DilatedPattern
    >>> from dilated_attention_pytorch.integrations import set_pattern
    >>> config = LlamaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> set_pattern(LlamaForCausalLM(config), DilatedPattern([16], [2])).config.dilated_attention
    {'pattern': 'DilatedPattern([16], [2])'}
    """
    with importing("set_pattern", "train"):
        from transformers import PreTrainedModel

    check_model("set_pattern", model)
    config = text_config(model.config)
    configs = [config, *_copies(model, config)]
    written_out = look_through(model, configs, is_all_attention=True)
    entry = check_pattern(pattern, config)
    register()
    for module in model.modules():
        # Other parts may use the implementation as well.
        if isinstance(module, PreTrainedModel):
            watch(module)
    before = [(part_config, part_config._attn_implementation) for part_config in configs]
    if any(all(part_config is not other for other in written_out) for part_config in configs) or not written_out:
        model.set_attn_implementation(chosen_parts(model.config, lambda part: part is config))
    for part_config in written_out:  # transformers sets it only where all layers use its interface
        part_config._attn_implementation_internal = NAME
    stays = [part_config._attn_implementation for part_config in configs if part_config._attn_implementation != NAME]
    if stays:
        for part_config, implementation in before:
            part_config._attn_implementation = implementation
        check_is_in_no_part(model, configs)
        raise NotImplementedError(
            f"{type(model).__name__} does not use transformers' attention interface, through which a layer gets its "
            f'pattern (its attention stays "{stays[0]}")'
        )
    for part_config in configs:
        setattr(part_config, FIELD, dict(entry))
    keep_implementation(model.config)
    return model


def _copies(model: PreTrainedModel, config: Any) -> list[Any]:
    """Copies of ``config`` held by parts of the model, as by the two stacks of T5."""
    from transformers import PreTrainedModel

    named: list[Any] = []
    todo = [model.config]
    while todo:
        named.append(part_config := todo.pop())
        todo += [part for name in part_config.sub_configs if (part := getattr(part_config, name, None)) is not None]
    copies: list[Any] = []
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or type(module.config) is not type(config):
            continue
        if all(module.config is not part_config for part_config in (*named, *copies)):
            copies.append(module.config)
    return copies
