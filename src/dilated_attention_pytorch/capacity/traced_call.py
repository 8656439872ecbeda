"""One call of a model with a cache, on fake tensors: live bytes after every operation."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from dilated_attention_pytorch.models import LongNetCache, LongNetConfig, LongNetLM
from dilated_attention_pytorch.models.cache_index import CacheIndex, CacheIndexStep
from dilated_attention_pytorch.models.generation import sample
from dilated_attention_pytorch.training.live_bytes import LiveBytes
from dilated_attention_pytorch.training.step_bytes import Moment

from .kernel_bytes import own_bytes
from .storage import Mark


class _RealCacheIndex(CacheIndex):
    """A cache index that computes on real integers while other tensors are fake."""

    def advance(self, num_new: int) -> CacheIndexStep:
        with unset_fake_temporarily(), _disable_current_modes():
            return super().advance(num_new)


class BegunCache(LongNetCache):
    """A cache in the state before a call, without the calls that lead to it."""

    def begin(self, mark: Mark, batch_size: int, like: Tensor) -> None:
        """Fill every layer's storage with zeros, with as many slots as it has before the call.

        Args:
            mark: the call.
            batch_size: number of texts.
            like: ``[0, D]``, with the dtype and device of keys and values.
        """
        with unset_fake_temporarily(), _disable_current_modes():
            row_group = self._new_row_group(batch_size, like.device)
            row_group.cache_indices = {
                pattern: _RealCacheIndex(pattern, self.num_kv_heads, like.device) for pattern in self.patterns
            }
            if mark.call.seen:
                for cache_index in row_group.cache_indices.values():
                    cache_index.advance(mark.call.seen)
        row_group.seen = self._num_columns = mark.call.seen
        self._row_groups = [row_group]
        for layer, pattern in enumerate(self.patterns):
            slots = mark.before[pattern]
            if slots:
                shape = (batch_size, slots, self.num_kv_heads, like.shape[-1])
                row_group.storage[layer] = (like.new_zeros(shape), like.new_zeros(shape))

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer."""
        return self._row_groups[0].storage[layer]


def traced_call(
    config: LongNetConfig, mark: Mark, batch_size: int, dtype: torch.dtype, *, is_fake: bool = True
) -> list[Moment]:
    """Live bytes after every operation of a call, and of sampling a token from its logits.

    Args:
        config: configuration of the model, all of whose layers run.
        mark: the call, and the slots before it.
        batch_size: number of texts.
        dtype: dtype of weights and activations.
        is_fake: whether to use fake tensors; otherwise the call is computed.
    """
    live = LiveBytes(own_bytes=own_bytes)
    fake = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else contextlib.nullcontext()
    with torch.no_grad(), fake, live:
        with live.made_as("weights"):
            model = LongNetLM(config, dtype=dtype).eval()
        cache, head_dim = BegunCache(config), config.embed_dim // config.num_heads
        with live.made_as("cache"):
            cache.begin(mark, batch_size, model.embedding.weight.new_empty(0, head_dim))
        with live.made_as("temporaries"):
            ids = torch.zeros(batch_size, mark.call.num_new, dtype=torch.int64)
        for layer, block in enumerate(model.blocks):
            block.register_forward_hook(_marking(cache, layer, live))
        live.phase, live.is_recording = ("forward", 0), True
        hidden = model.hidden_states(ids, cache=cache)[:, -1].clone()
        live.phase = ("loss", 0)
        sample(model.logits(hidden))
    return [
        Moment(counts, series.attention.get(index), series.own.get(index, 0))
        for series in live.series.values()
        for index, counts in enumerate(series.counts)
    ]


def _marking(cache: BegunCache, layer: int, live: LiveBytes) -> Any:
    def after(*_: Any) -> None:
        live.mark(cache.stored(layer), "cache")

    return after


def fewer_layers(config: LongNetConfig) -> LongNetConfig:
    """The same model with only as many layers as are needed to show what every layer takes."""
    num_layers = min(config.num_layers, max(2, len(config.different_patterns)))
    return dataclasses.replace(config, num_layers=num_layers)
