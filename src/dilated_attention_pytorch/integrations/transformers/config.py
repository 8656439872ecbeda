"""The pattern in a model's configuration, which is saved and loaded with the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.patterns.expression import pattern_from_text, text_of
from dilated_attention_pytorch.tracing import constant_of_graph

PatternOfModel = Pattern | str | Sequence[Pattern | str | None]
"""A pattern or its text for all layers, or one per layer."""
NAME = "dilated"
"""Name under which the attention and its masks are registered with transformers."""
FIELD = "dilated_attention"
_HOW = (
    "set_pattern(model, DilatedPattern([2048, 8192], [1, 4])), or before the model is built "
    'config.dilated_attention = {"pattern": "DilatedPattern([2048, 8192], [1, 4])"}'
)
_WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "moe", "mlp"})
"""Layer types without attention."""
_READ: dict[str, Pattern] = {}
"""Parsed patterns by text; torch.compile can trace a pattern only if it is looked up in a container."""


def configuration_errors() -> tuple[type[Exception], ...]:
    """Exceptions that transformers raises for an invalid configuration or invalid model parts."""
    from huggingface_hub.errors import StrictDataclassError

    return (
        StrictDataclassError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    )


def check_model(name: str, model: Any) -> None:
    """Raise TypeError unless the first argument of the function ``name`` is a model of transformers."""
    from transformers import PreTrainedConfig

    config = getattr(model, "config", None)
    is_longnet = getattr(config, "layer_patterns", None) is not None
    # By its configuration: PEFT and torch.compile wrap models in classes of their own.
    if isinstance(model, nn.Module) and isinstance(config, PreTrainedConfig) and not is_longnet:
        return
    if is_longnet:
        remedy = (
            "a LongNet has its pattern from its configuration: segment_lengths and dilation_rates, or layer_patterns"
        )
    elif isinstance(model, PreTrainedConfig):
        remedy = (
            f'build the model first, or write config.{FIELD} = {{"pattern": "DilatedPattern([2048, 8192], [1, 4])"}}'
        )
    elif isinstance(model, nn.Module):
        remedy = "for other models call replace_attention(model, pattern), or adopt(model) if it is built on torchscale"
    else:
        remedy = f"call {name} with what AutoModelForCausalLM.from_pretrained(...) returns"
    value = f"{model!r} of type " if isinstance(model, str) else ""
    raise TypeError(f"model must be a model of transformers, got {value}{type(model).__name__}; {remedy}")


def check_pattern(pattern: PatternOfModel, config: Any) -> dict[str, Any]:
    """The value for ``config.dilated_attention``.

    Raises:
        TypeError, ValueError: see :func:`set_pattern`.
    """
    if isinstance(pattern, (Pattern, str)) or not isinstance(pattern, Sequence):
        text = _text(pattern)
        _check_windows_leave_a_layer(config)
        return {"pattern": text}
    texts = [None if one is None else _text(one) for one in pattern]
    for layer in range(max(len(texts), num_layers(config))):
        text_of_layer({"pattern": texts}, config, layer, window_of_layer(config, layer))
    return {"pattern": texts}


def chosen_parts(config: Any, is_chosen: Callable[[Any], bool]) -> Any:
    """The ``attn_implementation`` argument that selects ours for the chosen parts of a configuration.

    Our name, a dict of it by part name, or None if no part is chosen.
    """
    inside = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    chosen = {name: chosen_parts(part, is_chosen) for name, part in inside.items()}
    parts = {name: choice for name, choice in chosen.items() if choice is not None}
    if not is_chosen(config):
        return parts or None
    # The bare name would apply to every part.
    return {"": NAME, **parts} if inside else NAME


def keep_implementation(config: Any) -> None:
    """Store the implementation in a configuration with a pattern, where transformers reads it on loading.

    transformers reads ``attn_implementation`` from a saved configuration, but does not write it there.
    """
    chosen = chosen_parts(config, lambda part: getattr(part, FIELD, None) is not None)
    if chosen is not None:
        config.attn_implementation = chosen
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            keep_implementation(part)


def layer_pattern(config: Any, layer: int | None, window: int | None, *, is_causal: bool) -> Pattern:
    """The pattern of one layer; that of its sliding window of ``window`` tokens, or of its chunks, if it has them.

    Raises:
        TypeError, ValueError: the configuration has no pattern for the layer, or an invalid one.
    """
    entry = getattr(config, FIELD, None)
    chunk = _chunk_of_layer(config, layer)
    window = chunk if window is None else window
    text = None if entry is None and window is not None else text_of_layer(entry, config, layer, window)
    if text is None and chunk is not None:
        text = f"DilatedPattern([{chunk}], [1])"
    elif text is None:
        assert window is not None
        text = f"local_window({window - 1}, {0 if is_causal else window - 1})"
    return _READ[_read(text)]


def text_of_layer(entry: Any, config: Any, layer: int | None, window: int | None) -> str | None:
    """The pattern text of a layer in ``config.dilated_attention``; None if its sliding window applies."""
    if entry is None:
        raise ValueError(
            f'attn_implementation="dilated" needs a pattern, and the model has none in its {type(config).__name__}: '
            f"{_HOW}; a part that is to stay as it is needs another implementation, as in "
            'attn_implementation={"text_config": "dilated"}'
        )
    if not isinstance(entry, dict) or list(entry) != ["pattern"]:
        raise ValueError(
            f'config.dilated_attention must be {{"pattern": text}} or {{"pattern": [text or None, ...]}}, one per '
            f"layer, got {entry!r}; write for example {_HOW}"
        )
    texts = entry["pattern"]
    if isinstance(texts, str):
        if window is None:
            return texts
        _check_windows_leave_a_layer(config)
        if layer is not None and window_of_layer(config, layer) is None and getattr(config, "layer_types", None):
            raise ValueError(
                f'layer {layer} is "{config.layer_types[layer]}" in config.layer_types, and its model gives it a '
                f"sliding window of {window} tokens, so the pattern would be that of none: set config.sliding_window "
                "to None before the model is built"
            )
        return None
    if not isinstance(texts, (list, tuple)) or not all(text is None or isinstance(text, str) for text in texts):
        raise TypeError(f"the pattern in config.dilated_attention must be a text or a list of them, got {texts!r}")
    if config.is_encoder_decoder:
        raise ValueError(
            "an encoder-decoder has two stacks of layers, so config.dilated_attention takes one pattern for all of "
            f"them, got a list of {len(texts)}"
        )
    if len(texts) != num_layers(config):
        raise ValueError(
            f"config.dilated_attention must hold one pattern, or one per layer of {num_layers(config)}, got a list of "
            f"{len(texts)}"
        )
    if layer is None:
        raise NotImplementedError(
            "config.dilated_attention holds a pattern per layer, and an attention of this model does not know its "
            "layer: use one pattern for all"
        )
    text = texts[layer]
    if text is not None and window is not None:
        raise ValueError(
            f"layer {layer} has a sliding window of {window} tokens and a pattern, and one of them holds: put None in "
            f"its place in config.dilated_attention to keep the window, or {_without_windows(config)} before "
            "the model is built (a sum such as local_window(4095) + DilatedPattern([65536], [16]) has both)"
        )
    if text is None and window is None:
        raise ValueError(f"config.dilated_attention has None for layer {layer}, which has no sliding window: {_HOW}")
    return text


def window_of_layer(config: Any, layer: int) -> int | None:
    """Size of a layer's own sliding window in tokens, the query included, or of its chunks; None without either."""
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    chunk = _chunk_of_layer(config, layer)
    if chunk is not None:
        return chunk
    local = local_window_of_layer(config, layer)
    if local is not None:
        return local
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[layer]
    window: int | None = getattr(config, "sliding_window", None)
    if not window:  # some configurations use 0 for no window
        return None
    if types is None:
        return window
    return window if layer < len(types) and "sliding" in types[layer] else None


def local_window_of_layer(config: Any, layer: int | None) -> int | None:
    """Size of a layer's window in GPT-Neo, whose mask shows it for longer texts alone; None without."""
    kinds: Sequence[str] = getattr(config, "attention_layers", None) or ()
    # The shared layers of Zamba 2 have the number -1.
    if layer is None or not 0 <= layer < len(kinds) or kinds[layer] != "local":
        return None
    size: int = config.window_size
    return size


def _chunk_of_layer(config: Any, layer: int | None) -> int | None:
    """Size of the chunks in which a layer attends, as in Llama 4; None without."""
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    if layer is None or types is None or layer >= len(types) or "chunked" not in types[layer]:
        return None
    size: int | None = config.attention_chunk_size
    return size


def check_no_window(config: Any, layer: int) -> None:
    """Raise if the configuration gives a layer a sliding window that its model did not pass on.

    Raises:
        NotImplementedError: it does, so the pattern would be wider than the model's own mask.
    """
    window = window_of_layer(config, layer)
    if window is not None and _chunk_of_layer(config, layer) is None:  # chunks are in no argument
        raise NotImplementedError(
            f"layer {layer} has a sliding window of {window} tokens in the configuration, and this model does not tell "
            "its attention: set config.sliding_window to None before the model is built and give the window as a "
            f'pattern, local_window({window - 1}), or use "sdpa"'
        )


def layers_with_pattern(config: Any) -> list[int]:
    """The layers of one stack that have attention and no sliding window or chunks of their own.

    Raises:
        NotImplementedError: the configuration does not give the number of layers.
    """
    return [layer for layer, window in _windows(config).items() if window is None]


def _windows(config: Any) -> dict[int, int | None]:
    """:func:`window_of_layer` of the layers that have attention."""
    types: Sequence[str] = getattr(config, "layer_types", None) or ()
    idle = {layer for layer, kind in enumerate(types) if kind in _WITHOUT_ATTENTION}
    return {layer: window_of_layer(config, layer) for layer in range(num_layers(config)) if layer not in idle}


def _check_windows_leave_a_layer(config: Any) -> None:
    names = ("attention_chunk_size", "attention_layers", "is_heterogeneous", "sliding_window")
    if not any(getattr(config, name, None) for name in names):
        return
    windows = _windows(config)
    if windows and None not in windows.values():
        sizes = ", ".join(map(str, dict.fromkeys(windows.values())))
        raise ValueError(
            f"every layer of the model has a sliding window of {sizes} tokens, so its pattern would be that of none: "
            f"remove config.dilated_attention to keep the windows, or {_without_windows(config)} before the "
            "model is built (a sum such as local_window(4095) + DilatedPattern([65536], [16]) has both)"
        )


def _without_windows(config: Any) -> str:
    is_gpt_neo = getattr(config, "attention_layers", None)
    return 'leave "local" out of config.attention_types' if is_gpt_neo else "set config.sliding_window to None"


def text_config(config: Any) -> Any:
    """The configuration of the text part, or the configuration itself if it has no parts.

    Raises:
        NotImplementedError: several parts process text, such as a text encoder and an audio decoder.
    """
    try:
        return config.get_text_config()
    except ValueError as error:
        parts = [name for name in config.sub_configs if getattr(config, name, None) is not None]
        raise NotImplementedError(
            f"more than one part of a model with a {type(config).__name__} may be meant, got {', '.join(parts)}: call "
            f"set_pattern on one of them, as in set_pattern(model.{parts[-1]}, pattern)"
        ) from error


def num_layers(config: Any) -> int:
    """The number of layers of one stack.

    Raises:
        NotImplementedError: the configuration does not give it.
    """
    number: int | None = getattr(config, "num_hidden_layers", None)
    if number is None:
        raise NotImplementedError(
            f"a pattern per layer, or one in addition to sliding windows, needs the number of layers, and "
            f"{type(config).__name__} has no num_hidden_layers: give one pattern for the whole model"
        )
    return number


def same_entry(one: Any, other: Any) -> bool:
    """Whether two values of ``config.dilated_attention`` hold the same patterns, as expressions or specs."""
    try:
        return bool(one == other or _patterns(one) == _patterns(other))
    except ValueError:  # damaged text
        return False


def _patterns(entry: Any) -> Any:
    held = entry.get("pattern") if isinstance(entry, dict) and list(entry) == ["pattern"] else None
    if isinstance(held, str):
        return pattern_from_text(held)
    return [text if text is None else pattern_from_text(text) for text in held] if isinstance(held, list) else entry


def _text(pattern: Pattern | str) -> str:
    """A pattern as a configuration holds it: its expression, or its spec if it has none."""
    if isinstance(pattern, str):
        pattern = pattern_from_text(pattern)
    if not isinstance(pattern, Pattern):
        raise TypeError(
            "pattern must be a Pattern such as DilatedPattern([2048, 8192], [1, 4]), its text, or a sequence of one "
            f"per layer, got {pattern!r} of type {type(pattern).__name__}"
        )
    return text_of(pattern)


@constant_of_graph
def _read(text: str) -> str:
    """Parse the text of a pattern; returns its key in the cache."""
    if text not in _READ:
        _READ[text] = pattern_from_text(text)
    return text
