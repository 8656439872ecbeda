"""In-place replacement of self-attention layers in plain PyTorch models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.patterns import Pattern

from .multihead_replacement import MultiheadReplacement
from .parts import NotReplaceable, parts_of
from .qkv_replacement import QkvReplacement

PatternChoice = Callable[[str, nn.Module], Pattern | None]
_REPLACEMENTS = (MultiheadReplacement, QkvReplacement)
_BLOCK = {"qkv", "proj"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacedLayer:
    """A layer that now attends under a pattern."""

    name: str
    """Name in the model."""
    kind: str
    """Original class."""
    pattern: Pattern
    """Its pattern."""

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}): {self.pattern}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftLayer:
    """A layer that was left unchanged."""

    name: str
    """Name in the model; empty for the model itself."""
    kind: str
    """Its class."""
    reason: str
    """Reason for leaving it unchanged."""

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} ({self.kind}): {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacementReport:
    """Result of :func:`replace_attention`; prints one line per layer."""

    replaced: tuple[ReplacedLayer, ...]
    """Layers that now attend under a pattern, in the model's order."""
    left: tuple[LeftLayer, ...]
    """Recognised attention layers that were left unchanged. Attention in other forms, such as separate projections for
    queries/keys and values, is not recognised."""
    nested_tensors_off: tuple[str, ...]
    """Each ``nn.TransformerEncoder`` whose ``use_nested_tensor`` was turned off."""

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)}", *(f"  {layer}" for layer in self.replaced)]
        lines += [f"left {len(self.left)}", *(f"  {layer}" for layer in self.left)]
        lines += [
            f"use_nested_tensor off: {name or 'the model itself'} (rows hidden by src_key_padding_mask keep their "
            "values in eval, as in training, instead of being zeroed)"
            for name in self.nested_tensors_off
        ]
        return "\n".join(lines)


def replace_attention(
    model: nn.Module,
    pattern: Pattern | PatternChoice,
    *,
    is_causal: bool = False,
    separate_keys: bool = False,
    impl: Impl = "auto",
) -> ReplacementReport:
    """Replace the self-attention layers of a model in place: softmax over ``s`` becomes softmax over ``s + log c``.

    Layers are ``nn.MultiheadAttention``, also inside ``nn.TransformerEncoderLayer`` and ``nn.TransformerDecoderLayer``,
    and timm-style blocks with ``qkv``, ``proj`` and ``num_heads``. The replacements hold the same parameter objects
    under the same names: state dicts are interchangeable and existing optimizers stay valid. The fused fast path of
    ``nn.TransformerEncoderLayer`` is disabled for replaced layers, and ``use_nested_tensor`` is turned off in each
    ``nn.TransformerEncoder`` that contains one.

    Not replaced, with the reason in the report: the cross-attention of ``nn.TransformerDecoderLayer``, layers with
    ``add_bias_kv`` or ``add_zero_attn``, a custom forward, position biases, hooks or unknown parts.
    Other cross-attention is detected when it is called, and raises. All decisions are made before the first
    replacement.

    Args:
        model: the model; a layer that appears in several places stays shared.
        pattern: attention pattern; or a function of a layer's name and the layer that returns its pattern, or None to
            skip the layer.
        is_causal: make replaced layers causal, whatever their calls' arguments. Otherwise calls request it with
            ``is_causal=True`` or a causal ``attn_mask``.
        separate_keys: allow an ``nn.MultiheadAttention`` to be called with a key tensor other than the query, of equal
            length, with row t of both at position t.
        impl: see :func:`attend`.

    Returns:
        A printable report of the replaced layers and of those left unchanged, with reasons.

    Raises:
        TypeError: ``model`` is not a module, or a pattern not a :class:`Pattern`.
        ValueError: no layer could be replaced; the message lists what was found.

    >>> from dilated_attention_pytorch.integrations import replace_attention
    >>> model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> report = replace_attention(model, DilatedPattern([16, 64], [1, 4]))
    >>> [(layer.name, layer.kind) for layer in report.replaced], report.left
    ([('self_attn', 'MultiheadAttention')], ())
    >>> model(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(pattern, Pattern) and not callable(pattern):
        raise TypeError(
            "pattern must be a pattern such as DilatedPattern([2048, 4096], [1, 2]) or a function "
            f"(name, module) -> pattern or None, got {pattern!r} of type {type(pattern).__name__}"
        )
    replacements: dict[str, MultiheadReplacement | QkvReplacement] = {}
    decided: dict[int, MultiheadReplacement | QkvReplacement | str] = {}
    kinds: dict[str, str] = {}
    left: list[LeftLayer] = []
    for name, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, (nn.MultiheadAttention, *_REPLACEMENTS)) and not parts_of(layer).keys() >= _BLOCK:
            continue
        kinds[name] = type(layer).__name__
        if id(layer) not in decided:
            decided[id(layer)] = _decide(
                model, name, layer, pattern, is_causal=is_causal, separate_keys=separate_keys, impl=impl
            )
        decision = decided[id(layer)]
        if isinstance(decision, str):
            left.append(LeftLayer(name=name, kind=kinds[name], reason=decision))
        else:
            replacements[name] = decision
    if not replacements:
        raise ValueError(
            "nothing was replaced: looked for nn.MultiheadAttention and for blocks with the submodules qkv and proj "
            f"and the attribute num_heads in the model ({type(model).__name__}), and found "
            + ("only\n" + "\n".join(f"  {layer}" for layer in left) if left else "none")
            + ("" if left else "; for a model of transformers call set_pattern(model, pattern)")
        )
    for name, replacement in replacements.items():
        model.set_submodule(name, replacement)
    return ReplacementReport(
        replaced=tuple(
            ReplacedLayer(name=name, kind=kinds[name], pattern=replacement.pattern)
            for name, replacement in replacements.items()
        ),
        left=tuple(left),
        nested_tensors_off=_turn_nested_tensors_off(model),
    )


def _decide(
    model: nn.Module,
    name: str,
    layer: nn.Module,
    pattern: Pattern | PatternChoice,
    *,
    is_causal: bool,
    separate_keys: bool,
    impl: Impl,
) -> MultiheadReplacement | QkvReplacement | str:
    """The replacement of a layer, or the reason for leaving it unchanged."""
    if isinstance(layer, _REPLACEMENTS):
        return "it attends under a pattern already"
    parent, _, own_name = name.rpartition(".")
    if not name:
        kind = "MultiheadReplacement" if isinstance(layer, nn.MultiheadAttention) else "QkvReplacement"
        return f"it cannot be replaced in place: write {kind}(model, pattern)"
    if own_name == "multihead_attn" and isinstance(model.get_submodule(parent), nn.TransformerDecoderLayer):
        return "it is the cross-attention of an nn.TransformerDecoderLayer"
    chosen = pattern if isinstance(pattern, Pattern) else pattern(name, layer)
    if chosen is None:
        return "pattern(name, module) returned None for it"
    if not isinstance(chosen, Pattern):
        raise TypeError(
            f"pattern(name, module) must return a pattern or None, got {chosen!r} of type {type(chosen).__name__} for "
            f"{name}"
        )
    try:
        if isinstance(layer, nn.MultiheadAttention):
            return MultiheadReplacement(layer, chosen, is_causal=is_causal, separate_keys=separate_keys, impl=impl)
        return QkvReplacement(layer, chosen, is_causal=is_causal, impl=impl)
    except NotReplaceable as reason:
        return str(reason)


def _turn_nested_tensors_off(model: nn.Module) -> tuple[str, ...]:
    """Disable nested tensors, which ``nn.TransformerEncoder`` makes of padded rows for its fast path only."""
    names = []
    for name, encoder in model.named_modules():
        if not isinstance(encoder, nn.TransformerEncoder) or not encoder.use_nested_tensor:
            continue
        if any(isinstance(module, MultiheadReplacement) for module in encoder.modules()):
            encoder.use_nested_tensor = False
            names.append(name)
    return tuple(names)
