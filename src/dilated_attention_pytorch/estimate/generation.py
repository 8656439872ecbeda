"""Peak memory of generation: weights, the bounded cache through all calls, and the tensors of a call."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models import LongNetCache, LongNetConfig, LongNetLM
from dilated_attention_pytorch.models.cache import grown_slots
from dilated_attention_pytorch.models.cache_index import CacheIndex, CacheIndexStep
from dilated_attention_pytorch.models.generation import sample
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.training.autocast import computing_dtype
from dilated_attention_pytorch.training.settings import TrainSettings

from .attention import operator_bytes
from .batch import heads_of, period_of_positions
from .live_bytes import LiveBytes, Moment
from .memory import Footprint, parts_of, peak

MOST_CALLS = 4096
"""Number of calls simulated one by one; for longer generations, only the last ones, with a full storage."""


class CacheCall(NamedTuple):
    """One call of the model with a cache."""

    seen: int
    """Tokens before the call."""
    num_new: int


def calls_of(prompt: int, num_new: int, chunk: int) -> Iterator[CacheCall]:
    """The calls of a generation: the prompt in chunks, then every new token but the last, which nothing reads.

    >>> [call.num_new for call in calls_of(10, 3, 4)]
    [4, 4, 2, 1, 1]
    """
    for start in range(0, prompt, chunk):
        yield CacheCall(start, min(chunk, prompt - start))
    for token in range(num_new - 1):
        yield CacheCall(prompt + token, 1)


class CacheMoment(NamedTuple):
    """A call that may need the most memory, with a layer's slots under every pattern before and after it."""

    call: CacheCall
    before: Mapping[Pattern, int]
    after: Mapping[Pattern, int]


class CacheWalk(NamedTuple):
    """Allocated slots of a cache through a generation."""

    slots: Mapping[Pattern, int]
    """Slots of a layer under each pattern, allocated at the end; an upper bound of thousands of calls."""
    marks: tuple[CacheMoment, ...]
    """Calls that may need the most memory."""


def walk(patterns: Sequence[Pattern], num_kv_heads: int, prompt: int, num_new: int, chunk: int) -> CacheWalk:
    """Simulate the cache of a generation with integers alone.

    Of the calls of every kind, the one with the largest storage is marked, and among those the one with the most rows
    in it.

    Args:
        patterns: different patterns of the layers.
        num_kv_heads: key/value heads of a layer.
        prompt, num_new, chunk: tokens of the prompt, new tokens, and tokens of the prompt that are read at a time.
    """
    cache_indices = {pattern: CacheIndex(pattern, num_kv_heads, torch.device("cpu")) for pattern in patterns}
    slots = dict.fromkeys(patterns, 0)
    if -(-prompt // chunk) + num_new > MOST_CALLS:
        return _bound(cache_indices, prompt, num_new, chunk)
    marks: dict[str, tuple[tuple[int, int], CacheMoment]] = {}

    def note(kind: str, rank: tuple[int, int], mark: CacheMoment) -> None:
        if kind not in marks or rank >= marks[kind][0]:
            marks[kind] = (rank, mark)

    for call in calls_of(prompt, num_new, chunk):
        before, stored = dict(slots), sum(max(cache_index.rows_per_head) for cache_index in cache_indices.values())
        kept = 0
        for pattern, cache_index in cache_indices.items():
            step = cache_index.advance(call.num_new)
            kept += 0 if step.keep is None else step.keep.numel()
            slots[pattern] = grown_slots(slots[pattern], step.num_slots, cache_index.max_slots())
        is_grown = slots != before
        kind = "token" if call.num_new == 1 else "chunk" if call.num_new == min(chunk, prompt) else "rest"
        rank, mark = (sum(slots.values()), stored), CacheMoment(call, before, dict(slots))
        note(kind, rank, mark)
        if is_grown:
            note(f"{kind} that grows", rank, mark)
        if kept:
            note(f"{kind} that drops rows and moves the others", (rank[0], kept), mark)
    return CacheWalk(slots, tuple({mark.call: mark for _, mark in marks.values()}.values()))


def _bound(cache_indices: Mapping[Pattern, CacheIndex], prompt: int, num_new: int, chunk: int) -> CacheWalk:
    """Upper bound for a long text: storages are full, or hold 1.5 times as many rows as there are tokens."""
    tokens = prompt + num_new - 1
    most = {
        pattern: min(cache_index.max_slots(), tokens + tokens // 2) for pattern, cache_index in cache_indices.items()
    }
    marks = [CacheMoment(CacheCall(max(0, prompt - chunk), min(chunk, prompt)), most, most)]
    if num_new > 1:
        marks.append(CacheMoment(CacheCall(tokens - 1, 1), most, most))
    return CacheWalk(most, tuple(marks))


class _RealCacheIndex(CacheIndex):
    """A cache index that computes on real integers while other tensors are fake."""

    def advance(self, num_new: int) -> CacheIndexStep:
        with unset_fake_temporarily(), _disable_current_modes():
            return super().advance(num_new)


class BegunCache(LongNetCache):
    """A cache in the state before a call, without the calls that lead to it."""

    def begin(self, mark: CacheMoment, batch_size: int, like: Tensor) -> None:
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
        keys, values = self._row_groups[0].storage[layer]
        return keys, values


def traced_call(
    config: LongNetConfig, mark: CacheMoment, batch_size: int, dtype: torch.dtype, *, is_fake: bool = True
) -> list[Moment]:
    """Live bytes after every operation of a call, and of sampling a token from its logits.

    Args:
        config: configuration of the model, all of whose layers run.
        mark: the call, and the slots before it.
        batch_size: number of texts.
        dtype: dtype of weights and activations.
        is_fake: whether to use fake tensors; otherwise the call is computed.
    """
    live = LiveBytes(own_bytes=operator_bytes)
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
    return live.moments


def _marking(cache: BegunCache, layer: int, live: LiveBytes) -> Any:
    def after(*_: Any) -> None:
        live.mark(cache.stored(layer), "cache")

    return after


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Lengths of a generation.

    Raises:
        RunError: a number is below 1.
    """

    prompt: int
    """Tokens of every prompt."""
    new_tokens: int = 500
    """Tokens to generate."""
    chunk_size: int = 4096
    """Tokens of the prompt that are read at a time, see :func:`models.generate`."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise RunError(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    def walk(self, settings: TrainSettings) -> CacheWalk:
        """Slots of the cache through the generation."""
        kv_heads, _ = heads_of(settings.model)
        patterns = tuple(dict.fromkeys(settings.model.different_patterns))
        return walk(patterns, kv_heads, self.prompt, self.new_tokens, self.chunk_size)


def cache_bytes(settings: TrainSettings, generation: Generation) -> int:
    """Value of ``LongNetCache.num_bytes`` at the end of a generation; an upper bound for thousands of calls.

    Args:
        settings: settings of which model, batch size and precision are used.
        generation: lengths.
    """
    return _cache_bytes(settings, generation.walk(settings).slots)


def _cache_bytes(settings: TrainSettings, slots: Mapping[Pattern, int], first_layer: int = 0) -> int:
    model = settings.model
    of_row = settings.batch_size * math.prod(heads_of(model)) * computing_dtype(settings.precision).itemsize
    layers = range(first_layer, model.num_layers)
    # A row of a key and a value per slot, and the last keys of a convolution.
    return of_row * sum(2 * slots[model.pattern(layer)] + model.num_previous_keys for layer in layers)


def generation_footprint(settings: TrainSettings, generation: Generation) -> Footprint:
    """Peak memory of one process that generates, by part.

    The calls of the model that may need the most memory are found with the cache's own index, on integers alone. Each
    is then run on fake tensors, with the code of the model and of the cache. Weights, cache and activations have the
    precision of the settings, without autocast; a token is sampled at a temperature.

    Args:
        settings: settings of which model, batch size and precision are used.
        generation: lengths.

    Raises:
        RunError: several processes share the text or the weights, which cannot be planned.

    >>> import dataclasses
    >>> from dilated_attention_pytorch.training import PRESETS
    >>> settings = dataclasses.replace(PRESETS["tiny"](), precision="float32")
    >>> lengths = Generation(prompt=1000, new_tokens=20, chunk_size=256)
    >>> memory = generation_footprint(settings, lengths)
    >>> memory.cache < cache_bytes(settings, lengths)  # the peak is while the prompt is read
    True
    """
    if settings.context_parallel > 1 or settings.tensor_parallel > 1:
        raise RunError(
            "generation is planned for one process that holds all weights and the cache of all texts: leave "
            f"--context-parallel {settings.context_parallel} and --tensor-parallel {settings.tensor_parallel} out"
        )
    model, dtype = settings.model, computing_dtype(settings.precision)
    # As many layers as show what every layer takes.
    period = math.lcm(len(model.different_patterns), period_of_positions(model))
    traced = dataclasses.replace(model, num_layers=min(model.num_layers, max(2, period)))
    weights = (model.num_parameters - traced.num_parameters) * dtype.itemsize
    peaks = []
    for mark in generation.walk(settings).marks:
        of_few = peak(map(parts_of, traced_call(traced, mark, settings.batch_size, dtype)))
        cache = of_few.cache + _cache_bytes(settings, mark.after, traced.num_layers)
        peaks.append(dataclasses.replace(of_few, weights=of_few.weights + weights, cache=cache))
    return max(peaks, key=lambda peak: peak.total)
