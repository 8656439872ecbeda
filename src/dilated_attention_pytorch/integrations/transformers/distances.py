"""Biases of T5 and its relatives by distance, in place of their tensors for every pair of positions."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .config import NAME

_METHOD = "compute_bias"
_ARGUMENTS = ["self", "query_length", "key_length", "device", "past_seen_tokens"]


def take_biases_by_distance(layer: nn.Module) -> None:
    """Let a layer with T5's ``compute_bias`` hand its attention the bias by distance, in place."""
    method = getattr(type(layer), _METHOD, None)
    if method is not None and list(inspect.signature(method).parameters) == _ARGUMENTS:
        setattr(layer, _METHOD, functools.partial(bias_by_distance, layer))


def bias_by_distance(
    layer: Any,
    query_length: int,
    key_length: int,
    device: torch.device | None = None,
    past_seen_tokens: int | Tensor = 0,
) -> Tensor:
    """The bias of a layer of T5's kind at the distances ``t - p`` of -W to W, ``[H, 2 W + 1]``, with gradient.

    W is the layer's ``relative_attention_max_distance``, from which on all distances share a bias. With another
    attention implementation, the layer's own tensor ``[1, H, N, M]``.
    """
    compute = getattr(type(layer), _METHOD)
    if layer.config._attn_implementation != NAME:
        pairs: Tensor = compute(layer, query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
        return pairs
    most = layer.relative_attention_max_distance
    row: Tensor = compute(layer, 1, 2 * most + 1, device=device, past_seen_tokens=most)
    return row[0, :, 0]


def is_without_bias(layer: Any) -> bool:
    """Whether a layer of T5's kind has no bias, and passes zeros for every pair: cross-attention."""
    return hasattr(type(layer), _METHOD) and not layer.has_relative_attention_bias
