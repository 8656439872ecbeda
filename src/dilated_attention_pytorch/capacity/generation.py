"""Peak memory of generation: weights, the bounded cache, and the tensors of a call."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training.autocast import computing_dtype
from dilated_attention_pytorch.training.footprint import Footprint
from dilated_attention_pytorch.training.settings import TrainSettings
from dilated_attention_pytorch.training.step_bytes import highest

from .storage import Mark, Walk, walk
from .traced_call import fewer_layers, traced_call


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

    @property
    def tokens(self) -> int:
        """Number of tokens that the cache has seen at the end."""
        return self.prompt + self.new_tokens - 1

    def walk(self, settings: TrainSettings) -> Walk:
        """Slots of the cache through the generation."""
        model = settings.model
        assert model.num_kv_heads is not None
        patterns = tuple(dict.fromkeys(model.different_patterns))
        return walk(patterns, model.num_kv_heads, self.prompt, self.new_tokens, self.chunk_size)


def cache_bytes(settings: TrainSettings, generation: Generation) -> int:
    """Value of ``LongNetCache.num_bytes`` at the end of a generation; an upper bound for thousands of calls.

    Args:
        settings: settings of which model, batch size and precision are used.
        generation: lengths.
    """
    return _cache_bytes(settings, generation.walk(settings))


def _cache_bytes(settings: TrainSettings, of: Walk | Mark, first_layer: int = 0) -> int:
    model = settings.model
    assert model.num_kv_heads is not None
    slots = of.slots if isinstance(of, Walk) else of.after
    of_slot = model.num_kv_heads * (model.embed_dim // model.num_heads) * computing_dtype(settings.precision).itemsize
    layers = range(first_layer, model.num_layers)
    return 2 * settings.batch_size * of_slot * sum(slots[model.pattern(layer)] for layer in layers)


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
    >>> found = generation_footprint(settings, lengths)
    >>> found.cache < cache_bytes(settings, lengths)  # the peak is while the prompt is read
    True
    """
    if settings.context_parallel > 1 or settings.tensor_parallel > 1:
        raise RunError(
            "generation is planned for one process that holds all weights and the whole cache: leave "
            f"--context-parallel {settings.context_parallel} and --tensor-parallel {settings.tensor_parallel} out"
        )
    model, dtype = settings.model, computing_dtype(settings.precision)
    traced = fewer_layers(model)
    weights = (model.num_parameters - traced.num_parameters) * dtype.itemsize
    found = []
    for mark in generation.walk(settings).marks:
        moments = traced_call(traced, mark, settings.batch_size, dtype)
        parts, attention = highest(iter(moments), {})
        parts["weights"] += weights
        parts["cache"] += _cache_bytes(settings, mark, traced.num_layers)
        found.append(Footprint(**parts, attention=attention))
    return max(found, key=lambda one: one.total)
