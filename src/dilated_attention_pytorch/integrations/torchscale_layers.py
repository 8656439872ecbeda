"""Recognition of torchscale's dilated attention layers and their settings."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dilated_attention_pytorch.ops.validation import check_dropout
from dilated_attention_pytorch.patterns import DilatedPattern
from dilated_attention_pytorch.patterns.dilated import Tail

from .parts import NotReplaceable, check_unwrapped
from .xpos import XPos

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
_NUMPY_INTEGER = re.compile(r"np\.u?int\d+\((-?\d+)\)")
_CHILDREN = {*_PROJECTIONS, "inner_attn_ln", "dropout_module", "xpos"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFacts:
    """Settings of a layer that its submodules do not determine."""

    embed_dim: int
    """Width E of query and output."""
    num_heads: int
    """Number of heads H of query, key and value."""
    pattern: DilatedPattern
    """The pattern, with the offset rule of the authors' code."""
    dropout: float
    """Attention dropout, for layers without a ``dropout_module``."""
    xpos: XPos | None
    """The constants of the layer's xPos."""


def find_layers(model: nn.Module, tail: Tail) -> list[tuple[nn.Module, LayerFacts]]:
    """Every torchscale dilated attention layer of a model, once, with its settings.

    Raises:
        ValueError: a layer's segments and rates are not a valid pattern, or ``tail`` is unknown.
        NotImplementedError: a layer has a feature that :class:`AdoptedDilatedAttention` does not support.
    """
    DilatedPattern([1], [1], tail=tail)
    layers = []
    for name, module in model.named_modules():
        if not set(_PROJECTIONS) <= module._modules.keys():
            continue
        args = module.__dict__.get("args")
        if _setting(args, "segment_length") is None or _setting(args, "dilated_ratio") is None:
            continue
        if _is_dense(type(module)):
            continue
        where = f"layer {name!r}" if name else "the layer"
        refusal = _refusal(module, args)
        if refusal is not None:
            raise NotImplementedError(f"{where} cannot be adopted, and nothing was replaced: {refusal}")
        layers.append((module, _facts(module, args, tail, where)))
    return layers


def _is_dense(kind: type[nn.Module]) -> bool:
    """Whether a class is torchscale's dense attention, which has the same submodules and shares the same args."""
    # torchscale is no dependency, and its classes are copied into other repositories: they are known by their methods.
    return hasattr(kind, "attention_ops") and not hasattr(kind, "gathering")


def _setting(args: object, name: str) -> object:
    """A setting of torchscale's configuration (an object, a namespace or a mapping); None if not set."""
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)


def _refusal(layer: nn.Module, args: object) -> str | None:
    """The reason why a layer is not supported; None if it is."""
    children = {name: child for name, child in layer._modules.items() if child is not None}
    if layer.__dict__.get("encoder_decoder_attention"):
        return (
            "encoder_decoder_attention attends to another sequence, which a dilated pattern does not; adopt the "
            "self-attention layers one by one: block.self_attn = adopt(block.self_attn)"
        )
    for name in _PROJECTIONS:
        projection = children.get(name)
        if projection is None:
            return f"{name} is None, but a module was expected"
        if {"A", "B"} <= projection._modules.keys():
            return (
                f"{name} is a multiway projection (args.multiway) with one set of weights for every kind of token, "
                "which is not supported; build the model without multiway"
            )
    if _setting(args, "seq_parallel"):
        return (
            "args.seq_parallel spreads the sequence over ranks inside the layer; set it to False, and see "
            "dilated_attention_pytorch.parallel for sequences over several ranks"
        )
    own = sorted(
        (children.keys() - _CHILDREN)
        | {name for name, parameter in layer._parameters.items() if parameter is not None}
        | {name for name, buffer in layer._buffers.items() if buffer is not None}
    )
    if own:
        return f"it has {', '.join(own)}, which torchscale's layer does not have, so its forward is unknown"
    try:
        check_unwrapped(layer)
    except NotReplaceable as reason:
        return str(reason)
    dropout = children.get("dropout_module")
    if dropout is not None and not isinstance(dropout, nn.Dropout):
        return f"dropout_module must be a torch.nn.Dropout, got {type(dropout).__name__}"
    return None


def _facts(layer: nn.Module, args: object, tail: Tail, where: str) -> LayerFacts:
    sizes = [layer.__dict__.get(name) for name in ("embed_dim", "num_heads")]
    embed_dim, num_heads = sizes
    if not isinstance(embed_dim, int) or not isinstance(num_heads, int):
        raise ValueError(f"{where} must have the integers embed_dim and num_heads, got {sizes[0]!r} and {sizes[1]!r}")
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(f"{where}: num_heads must divide embed_dim, got {num_heads} heads and embed_dim {embed_dim}")
    head_dim = embed_dim // num_heads
    scaling = layer.__dict__.get("scaling", head_dim**-0.5)
    if not isinstance(scaling, (int, float)) or not math.isclose(scaling, head_dim**-0.5, rel_tol=1e-6):
        raise NotImplementedError(
            f"{where} cannot be adopted, and nothing was replaced: its scaling is {scaling!r}, and torchscale's is "
            f"head_dim ** -0.5 = {head_dim**-0.5}"
        )
    numbers = [_setting(args, name) for name in ("segment_length", "dilated_ratio")]
    try:
        lengths, ratios = (_integers(setting) for setting in numbers)
        pattern = DilatedPattern(lengths, ratios, offset_rule="block", tail=tail)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: args.segment_length {numbers[0]!r} and args.dilated_ratio {numbers[1]!r} are not a valid "
            f"pattern: {error}"
        ) from error
    dropout = layer.__dict__.get("dropout", 0.0)
    check_dropout(f"{where}: dropout", dropout)
    xpos = layer._modules.get("xpos")
    return LayerFacts(
        embed_dim=embed_dim,
        num_heads=num_heads,
        pattern=pattern,
        dropout=float(dropout),
        xpos=None if xpos is None else _xpos(xpos, head_dim, where),
    )


def _integers(value: object) -> list[Any]:
    """A list, or the list in a string; also of NumPy integers, in NumPy 2's notation too."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(_NUMPY_INTEGER.sub(r"\1", value))
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{value!r} is not a list of integers") from error
    if not isinstance(value, Sequence):
        raise TypeError(f"a list of integers was expected, got {value!r}")
    return [number if isinstance(number, (bool, float, str)) else operator.index(number) for number in value]


def _xpos(module: nn.Module, head_dim: int, where: str) -> XPos:
    base, scale = module.__dict__.get("scale_base"), module._buffers.get("scale")
    if not isinstance(base, (int, float)) or not 0 < base < math.inf or scale is None:
        raise ValueError(
            f"{where}: xpos must have a positive number scale_base and a buffer scale, got scale_base {base!r} and "
            f"scale {scale!r}"
        )
    if head_dim % 2 or scale.shape != (head_dim // 2,):
        raise ValueError(
            f"{where}: xpos turns pairs of an even head_dim and has one scale for each pair, got head_dim {head_dim} "
            f"and scale of shape {tuple(scale.shape)}"
        )
    constants = XPos(head_dim, float(base))
    # The buffer is a constant. In a float16 model it is rounded, on the meta device it has no values.
    expected = constants.decays(scale.device)
    if not scale.is_meta and not torch.allclose(
        scale.float(), expected, rtol=2 * torch.finfo(scale.dtype).eps, atol=0.0
    ):
        raise NotImplementedError(
            f"{where} cannot be adopted, and nothing was replaced: the buffer xpos.scale is not "
            "(2j + 0.4 head_dim) / (1.4 head_dim) as in torchscale"
        )
    return constants
