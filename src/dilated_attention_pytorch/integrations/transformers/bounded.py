"""A bounded cache for transformers models under a pattern."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.models import LongNetCache
from dilated_attention_pytorch.models.cache import CacheStep, ForwardOnlyCache
from dilated_attention_pytorch.models.padding import real_runs
from dilated_attention_pytorch.ops import Scores
from dilated_attention_pytorch.patterns import Pattern

from .config import layer_pattern, num_layers, text_config, window_of_layer

_ATTRIBUTE = "_stored_rows"


class _PatternCache(LongNetCache):
    """LongNet's cache for given patterns."""

    __slots__ = ()

    def __init__(self, patterns: tuple[Pattern, ...], num_kv_heads: int) -> None:
        self._begin(patterns, num_kv_heads, None)


class BoundedCache(ForwardOnlyCache):
    """Keys and values that later tokens can still attend to: ``past_key_values`` of a decoder with a pattern.

    A key/value head holds at most ``sum_i ceil(min(w_i, t) / r_i)`` rows after t tokens, with a window of w tokens at
    most w: memory is bounded in the sequence length. Logits equal those with the model's own cache. No gradients.
    Dropped rows cannot be restored, so assisted generation, prompt lookup and contrastive search raise.

    Args:
        config: the model's configuration, with its pattern (call :func:`set_pattern` first).

    Raises:
        TypeError, ValueError: the configuration has no pattern for a layer.
        NotImplementedError: an encoder-decoder, or layers with another state or with shared keys and values.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from dilated_attention_pytorch import DilatedPattern
    >>> from dilated_attention_pytorch.integrations import BoundedCache, register, set_pattern
    >>> register()
    >>> config = LlamaConfig(
    ...     vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...     attn_implementation="dilated",
    ... )
    >>> model = set_pattern(LlamaForCausalLM(config).eval(), DilatedPattern([16, 64], [1, 4]))
    >>> cache = BoundedCache(model.config)
    >>> text = model.generate(torch.randint(97, (1, 200)), past_key_values=cache, max_new_tokens=5, do_sample=False)
    >>> text.shape, max(cache.rows_per_head(layer=0))  # of 204 rows
    (torch.Size([1, 205]), 12)
    """

    def __init__(self, config: Any) -> None:
        config = text_config(config)
        if config.is_encoder_decoder:
            raise NotImplementedError(
                "BoundedCache is for models with one stack of causal layers, and this is an encoder-decoder: use the "
                "model's own cache"
            )
        implementation = config._attn_implementation
        if implementation != "dilated":
            raise ValueError(
                'BoundedCache keeps what attn_implementation="dilated" reads, and the model has '
                f'"{implementation}": call model.set_attn_implementation("dilated") first, or name it when loading'
            )
        _check_layers(config)
        self._patterns = tuple(
            layer_pattern(config, layer, window_of_layer(config, layer), is_causal=True)
            for layer in range(num_layers(config))
        )
        self._rows: _PatternCache | None = None
        self._step: CacheStep | None = None
        self._served: set[int] = set()
        self._seen = [0] * config.num_hidden_layers
        self._attended = [0] * config.num_hidden_layers

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Register new rows ``[B, G, N, D]`` of a layer; they are stored when its attention is computed.

        Raises:
            RuntimeError: gradients are enabled, or the previous rows never reached the attention function.
        """
        if torch.is_grad_enabled():
            raise RuntimeError("BoundedCache has no gradient: call the model under torch.no_grad(), or without a cache")
        if self._rows is None:
            self._rows = _PatternCache(self._patterns, key_states.shape[1])
        if self._seen[layer_idx] != self._attended[layer_idx]:
            raise RuntimeError(
                f"BoundedCache saw {self._seen[layer_idx]} tokens in layer {layer_idx}, and its attention "
                f"{self._attended[layer_idx]}: this model changes keys between its cache and its attention, or "
                'does not attend by attn_implementation="dilated"; use the model\'s own cache'
            )
        self._seen[layer_idx] += key_states.shape[2]
        # The keys are the only object that models pass from the cache to the attention function.
        setattr(key_states, _ATTRIBUTE, (self, layer_idx))
        return key_states, value_states

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern,
        mask: Tensor | None,
        scaling: float | None,
        dropout: float,
        scores: Scores | None,
        *,
        is_causal: bool,
    ) -> Tensor:
        """Causal attention of new rows ``[B, N, H, D]`` to stored and new rows; then the new rows are stored.

        Raises:
            NotImplementedError: dropout, non-causal attention, or more than one call per update.
            ValueError: the pattern differs from the one that the cache was made with.
        """
        assert self._rows is not None
        if dropout or not is_causal:
            raise NotImplementedError(
                f"BoundedCache is for causal inference: got dropout {dropout} and is_causal={is_causal}; call "
                "model.eval(), or use no cache"
            )
        if pattern != self._patterns[layer]:
            raise ValueError(
                f"the pattern of layer {layer} is not that with which the BoundedCache was made: make a new one after "
                "set_pattern"
            )
        num_new = query.shape[1]
        if self._attended[layer] + num_new != self._seen[layer]:
            raise NotImplementedError(
                f"BoundedCache saw {self._seen[layer]} tokens in layer {layer}, and its attention reaches token "
                f"{self._attended[layer] + num_new}: what is stored is attended to once, and this model attends to the "
                "keys of a layer several times, as DiffLlama does and layers that share keys; use the model's own cache"
            )
        self._attended[layer] += num_new
        if self._step is None or layer in self._served:
            runs = None
            if mask is not None:
                real_runs(mask >= 0)  # raises for padding between real tokens
                runs = real_runs(mask[:, -num_new:] >= 0)
            self._step, self._served = self._rows.step(query.shape[0], num_new, runs, query.device), set()
        self._served.add(layer)
        if scaling is not None:
            # The stored rows are read with the scale 1 / sqrt(D).
            query = query * (scaling * math.sqrt(query.shape[-1]))
        return self._step.attend(layer, query, key, value, 0.0, scores)

    def rows_per_head(self, layer: int) -> list[int]:
        """Stored rows of a layer per key/value head, the maximum over the sequences."""
        if self._rows is None:
            return []
        return [max(rows) for rows in zip(*self._rows.rows_per_head(layer), strict=True)]

    @property
    def num_bytes(self) -> int:
        """Allocated bytes of keys and values."""
        return 0 if self._rows is None else self._rows.num_bytes

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns seen, padding included."""
        return self._seen[layer_idx]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The column of the next token."""
        return self._seen[layer_idx]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of columns of a mask, and its first column."""
        return self._seen[layer_idx] + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit."""
        return -1

    def reset(self) -> None:
        """Forget all tokens."""
        self._rows, self._step, self._served = None, None, set()
        self._seen, self._attended = [0] * len(self._seen), [0] * len(self._seen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch ``repeats`` times in a row."""
        if self._rows is not None:
            self._rows.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` of the batch; see :meth:`reorder_cache`."""
        self.reorder_cache(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch: row b becomes the former row ``beam_idx[b]``; rows may repeat or drop out."""
        if self._rows is not None:
            self._rows.reorder_cache(beam_idx)


def _check_layers(config: Any) -> None:
    """Raise if the model's own cache holds more than keys and values of every layer."""
    from transformers import DynamicCache

    kinds = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    others = [number for number, kind in enumerate(kinds) if kind not in ("DynamicLayer", "DynamicSlidingWindowLayer")]
    if others:
        raise NotImplementedError(
            "BoundedCache keeps keys and values of every layer, and what layer "
            f"{others[0]} of this model keeps is a {kinds[others[0]]} (convolutions, linear attention and recurrent "
            "layers have a state, and layers that share keys have none): use the model's own cache"
        )
    if len(kinds) != config.num_hidden_layers:
        raise NotImplementedError(
            f"BoundedCache keeps keys and values of every layer, and {config.num_hidden_layers - len(kinds)} layers of "
            f"this model's {config.num_hidden_layers} keep none of their own: use the model's own cache"
        )


def cache_of(key: Tensor) -> tuple[BoundedCache, int] | None:
    """The cache that registered these keys, and their layer; None for keys of another cache or of none."""
    registered: tuple[BoundedCache, int] | None = getattr(key, _ATTRIBUTE, None)
    return registered
