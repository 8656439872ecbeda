"""The attention pattern of a pretrained model for longer texts, chosen by measurement.

A model of L tokens is to read N. Candidates:

- segments of L tokens in full and of 2 L, 4 L, ... N with rates 2, 4, ..., in all layers;
- a window of L tokens and the first :data:`SINKS` of the text, in all layers, with the model's positions as they are:
  distances within the window do not grow;
- that window in most layers, and dense attention in the quarter that needs it most;
- the same with the segments in that quarter.

Which layers need distant tokens is found at the model's own length: with a window of L / 8 and the first tokens in one
layer at a time, the loss rises most for those that read further (layers chosen by likelihood: arXiv:2606.27791). The
candidates are compared at N tokens, before any training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dilated_attention_pytorch.estimate.flops import pretrained_flops
from dilated_attention_pytorch.integrations import extend_context, set_pattern
from dilated_attention_pytorch.integrations.transformers.config import (
    PatternOfModel,
    layers_with_pattern,
    num_layers,
    text_config,
    window_of_layer,
)

from .evaluation import bits_of_tokens
from .extension_settings import Rotary, rising_lengths, scaling

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

SINKS = 4
"""First tokens of a text that a window is given in addition: softmax puts there what it needs nowhere else
(StreamingLLM, arXiv:2309.17453)."""
FAR_PART = 4
"""One of so many layers looks far."""
ABLATION_WINDOW = 8
"""One layer at a time sees the model's own length divided by this."""
CLOSE = 0.002
"""Candidates with so little more loss, as a part of the least, are as good: the one with fewest pairs is chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Patterns of a model's layers, measured."""

    name: str
    patterns: tuple[str, ...]
    """One for all layers, or one per layer; empty for a layer that keeps its sliding window."""
    bits: float
    """Bits per token."""
    density: float
    """Fraction of the pairs of dense attention in all layers."""
    rotary: Rotary
    """Scaling of the positions."""


def dense(length: int) -> str:
    """Dense attention over ``length`` tokens."""
    return f"DilatedPattern([{length}], [1])"


def segments(own_length: int, length: int, num_kv_heads: int) -> str:
    """Segments of the model's own length in full, and of twice, four times, ... that with rates 2, 4, ...

    No rate exceeds the number of key/value heads, so that every token attends over the whole length in some head.
    """
    lengths = rising_lengths(own_length, length)
    rates = [min(2 << level, num_kv_heads) for level in range(len(lengths))]
    return f"DilatedPattern({[own_length, *lengths]}, {[1, *rates]})"


def window(length: int) -> str:
    """A window of ``length`` tokens, and the first tokens of the text where it does not reach them."""
    return f"local_window({length - 1}) + global_tokens({SINKS}, beyond={length - 1})"


def of_model(patterns: Sequence[str]) -> PatternOfModel:
    """The argument of :func:`set_pattern` for one pattern of all layers, or one per layer."""
    return patterns[0] if len(patterns) == 1 else [one or None for one in patterns]


def by_layer(model: PreTrainedModel, layers: Sequence[int], far: str, near: str) -> tuple[str, ...]:
    """The pattern ``far`` for ``layers`` and ``near`` for the others, but none for those with a sliding window."""
    config = text_config(model.config)
    windows = [window_of_layer(config, layer) for layer in range(num_layers(config))]
    return tuple((far if layer in layers else near) if window is None else "" for layer, window in enumerate(windows))


def layers_apart(model: PreTrainedModel, pattern: str, console: Console) -> list[int]:
    """Layers that can have patterns of their own: none if the model's attention does not know its layer."""
    try:
        layers = layers_with_pattern(text_config(model.config))
        set_pattern(model, of_model(by_layer(model, layers, pattern, pattern)))
        with torch.inference_mode():
            model(torch.zeros(1, 16, dtype=torch.int64, device=next(model.parameters()).device), use_cache=False)
    except NotImplementedError as error:
        sentence = f"all layers get one pattern: {error}"
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
        return []
    return layers


def layers_by_need(
    model: PreTrainedModel, layers: Sequence[int], texts: Sequence[Tensor], precision: str, console: Console
) -> list[int]:
    """Layers, those first whose attention loses most from seeing a short window and the first tokens alone.

    Args:
        model: the model; its pattern is changed.
        layers: its layers that can take a pattern.
        texts: int64 ``[L]`` each, of the model's own length L.
        precision: computation precision.
        console: console for the progress.
    """
    own_length = max(map(len, texts))
    near = window(max(1, own_length // ABLATION_WINDOW))
    loss: dict[int, float] = {}
    for index, layer in enumerate(layers):
        set_pattern(model, of_model(by_layer(model, [layer], near, dense(own_length))))
        what = f"layer {index + 1} of {len(layers)} with a short window"
        loss[layer] = mean_bits(model, texts, own_length, precision, console, what)
    return sorted(layers, key=lambda layer: -loss[layer])


def mean_bits(
    model: PreTrainedModel, texts: Sequence[Tensor], length: int, precision: str, console: Console, what: str
) -> float:
    """Bits per token of ``texts``."""
    return torch.cat(bits_of_tokens(model, texts, length, precision, console, what)).mean().item()


def measure_candidates(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    own_length: int,
    num_kv_heads: int,
    *,
    rotary: Rotary,
    precision: str,
    console: Console,
) -> list[Candidate]:
    """The candidates, best first.

    Args:
        model: a model of ``own_length`` tokens, changed in place.
        texts: int64 ``[N]`` each, of the new length N.
        own_length: its length in tokens.
        num_kv_heads: key/value heads of a layer.
        rotary: scaling of its positions in all candidates, see :func:`.extension_settings.scaling`.
        precision: computation precision.
        console: console for the progress.
    """
    length = max(map(len, texts))
    far, near = segments(own_length, length, num_kv_heads), window(own_length)
    named: dict[str, tuple[str, ...]] = {"windows and first tokens": (near,), "segments in all layers": (far,)}
    layers = layers_apart(model, dense(own_length), console)
    if len(layers) > 1:
        own_texts = [text[start : start + own_length] for text in texts for start in (0, length - own_length)]
        needed = layers_by_need(model, layers, own_texts, precision, console)
        chosen = needed[: math.ceil(len(layers) / FAR_PART)]
        words = ", ".join(str(layer) for layer in sorted(chosen))
        for name, pattern in ((f"dense in layers {words}", dense(length)), (f"segments in layers {words}", far)):
            named[f"{name}, windows in others"] = by_layer(model, chosen, pattern, near)
    found = []
    scaled: Rotary = "none"
    for name, patterns in named.items():
        wanted = scaling(rotary, is_near=patterns == (near,))
        if wanted != "none" and scaled == "none":  # the others follow with the same scaling
            extend_context(model, length, far, rotary=wanted)
            scaled = wanted
        set_pattern(model, of_model(patterns))
        bits = mean_bits(model, texts, length, precision, console, name)
        density = pretrained_flops(model).density(length)
        found.append(Candidate(name=name, patterns=patterns, bits=bits, density=density, rotary=wanted))
    least = min((one.bits for one in found if math.isfinite(one.bits)), default=math.inf)
    is_close = {one.name: one.bits <= (1.0 + CLOSE) * least for one in found}
    found.sort(key=lambda one: (not is_close[one.name], one.density if is_close[one.name] else one.bits))
    return found


def described(found: Sequence[Candidate], bytes_per_token: float) -> list[str]:
    """A line for each candidate."""
    return [
        f"{'chosen' if one is found[0] else 'instead'}: {one.name}: {one.bits / bytes_per_token:.3f} bits per byte, "
        f"{one.density:.1%} of the pairs of dense attention, rotary scaling {one.rotary}"
        for one in found
    ]


def recorded(found: Sequence[Candidate], bytes_per_token: float) -> list[dict[str, Any]]:
    """The candidates, for the record of the run."""
    return [
        {
            "name": one.name,
            "patterns": list(one.patterns),
            "rotary": one.rotary,
            "bits_per_byte": one.bits / bytes_per_token,
            "density": one.density,
        }
        for one in found
    ]
