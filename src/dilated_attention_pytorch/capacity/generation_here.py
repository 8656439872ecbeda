"""Predicted time of generation on this machine, from a few measured calls of models with few layers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from dilated_attention_pytorch.data_sheets import DataSheet
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import in_bytes
from dilated_attention_pytorch.models import LongNetConfig, LongNetLM, generate
from dilated_attention_pytorch.models.generation import read_prompt
from dilated_attention_pytorch.selection.fit import fit_seconds
from dilated_attention_pytorch.selection.hardware import Hardware
from dilated_attention_pytorch.training.autocast import computing_dtype
from dilated_attention_pytorch.training.batch_rows import with_length
from dilated_attention_pytorch.training.measures import matrix_product_rate
from dilated_attention_pytorch.training.settings import TrainSettings

from .generation import Generation, generation_footprint
from .measurements import MOST_SECONDS, Measurements, copied_bytes, measuring, seconds_of, sheet_here
from .seconds import StepSeconds
from .storage import Call, mark_of
from .traced_call import BegunCache
from .work import forward_work

_SECONDS_OF_A_CALL = 1.5
"""Time limit of the largest measured call, estimated from its operations, as far as fewer texts make it shorter."""
_STATES = 4
"""Maximum number of cache states at which each kind of call is measured."""
_TOKENS = 8
"""Single tokens generated at each state."""
_CALLS, _ENOUGH_SECONDS = 3, 0.5
_BEYOND_CACHES = 256 << 20
"""Bytes of weights and cache, far more than any processor's caches hold."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class CallSeconds(NamedTuple):
    """Seconds of one kind of call for two numbers of layers, each the mean over states of the cache."""

    layers: tuple[int, int]
    seconds: tuple[float, float]

    def of(self, num_layers: int) -> float:
        """Seconds with ``num_layers`` layers, on a line through both points with non-negative coefficients."""
        once, layer = fit_seconds([[1.0, float(count)] for count in self.layers], self.seconds)
        return once + layer * num_layers


@dataclass(frozen=True, slots=True)
class GenerationHere:
    """Measurements of this machine for one kind of generation."""

    sheet: DataSheet
    """Name, free memory, and measured rates of matrix products and memory."""
    calls: str
    """Digest of what the measurements are for: model shape except layers, precision, number of texts, lengths."""
    chunk: CallSeconds
    """Reading a whole chunk."""
    last: CallSeconds | None
    """Reading the last chunk, if it is shorter."""
    token: CallSeconds
    """A single token, with its logits and the sampling of the next one."""

    def token_seconds(self, settings: TrainSettings) -> float:
        """Predicted seconds of a token after the first."""
        return self.token.of(settings.model.num_layers)

    def seconds(self, settings: TrainSettings, generation: Generation) -> StepSeconds:
        """Predicted seconds of a generation: all calls that read its prompt, and its tokens after the first.

        Raises:
            RunError: the measurements are for other calls.
        """
        if _shape(settings, generation) != self.calls:
            raise RunError(
                "this machine was measured for generations of another shape, precision, number of texts or of other "
                "lengths; measure it"
            )
        layers = settings.model.num_layers
        chunks = max(1, generation.prompt // generation.chunk_size)
        prompt = chunks * self.chunk.of(layers) + (0.0 if self.last is None else self.last.of(layers))
        return StepSeconds(
            products=0.0,
            attention=0.0,
            optimizer=0.0,
            exchange=0.0,
            overlapped=0.0,
            prompt=prompt,
            tokens=(generation.new_tokens - 1) * self.token.of(layers),
            is_bound=False,
        )


def measure_generation_here(
    settings: TrainSettings,
    generation: Generation,
    device: str,
    *,
    is_quiet: bool = False,
    folder: Path | None = None,
    seconds: float = MOST_SECONDS,
) -> GenerationHere:
    """Measure generation with a model of this shape here, in two minutes at most; known measurements are reused.

    Chunks of the prompt and single tokens are measured, each with two numbers of layers, and with a cache of zeros of
    the size that it has at a few lengths of the generation.

    Args:
        settings: settings of which model, batch size and precision are used.
        generation: lengths.
        device: "cpu" or "cuda".
        is_quiet: show no progress bar.
        folder: folder of stored measurements; None is the cache folder.
        seconds: time after which no further measurement is begun.

    Raises:
        RunError: a few layers of the model do not fit here, or the time is over.
    """
    with measuring(device, None, is_quiet=is_quiet, folder=folder, seconds=seconds) as known:
        return _Probe(settings, generation, torch.device(device), *known).all()


@dataclass(slots=True)
class _Probe:
    settings: TrainSettings
    generation: Generation
    device: torch.device
    hardware: Hardware
    measured: Measurements
    done: Callable[[], None]
    models: dict[int, LongNetLM] = field(default_factory=dict)

    def all(self) -> GenerationHere:
        dtype = computing_dtype(self.settings.precision)
        rate = self.measured.get(f"product rate {dtype}", lambda: [matrix_product_rate(self.device, dtype)])[0]
        copied = self.measured.get("bytes copied a second", lambda: [copied_bytes(self.device)])[0]
        prompt, chunk = self.generation.prompt, min(self.generation.chunk_size, self.generation.prompt)
        period = len(self.settings.model.different_patterns)
        few, many = (period, 2 * period), (period, self._layers_of_tokens(period))
        self._check_size(many[1])
        starts = _spread([number * chunk for number in range(prompt // chunk)])
        rest = prompt % chunk
        return GenerationHere(
            sheet=sheet_here(self.measured, self.hardware, self.settings.precision, rate, copied),
            calls=_shape(self.settings, self.generation),
            chunk=self._chunks(few, [Call(seen, chunk) for seen in starts], rate),
            last=self._chunks(few, [Call(prompt - rest, rest)], rate) if rest else None,
            token=self._tokens(many),
        )

    def _layers_of_tokens(self, period: int) -> int:
        """Number of layers with which weights and cache far exceed the processor's caches, as in the whole model."""
        one, two = (self._bytes(count * period) for count in (1, 2))
        periods = max(2, -(-_BEYOND_CACHES // (two - one)))
        return max(2 * period, min(periods * period, self.settings.model.num_layers))

    def _bytes(self, num_layers: int) -> int:
        return generation_footprint(self._with(num_layers), self.generation).total

    def _with(self, num_layers: int) -> TrainSettings:
        model = dataclasses.replace(self.settings.model, num_layers=num_layers)
        return dataclasses.replace(self.settings, model=model)

    def _check_size(self, num_layers: int) -> None:
        needed = self._bytes(num_layers)
        if needed > self.hardware.free_bytes // 2:
            raise RunError(
                f"--hardware here generates with {num_layers} layers of the model, for which {in_bytes(needed)} of "
                f"memory are needed, and {in_bytes(self.hardware.free_bytes)} are free; name a device with --hardware"
            )

    def _model(self, num_layers: int) -> LongNetLM:
        if num_layers not in self.models:
            self.models.clear()
            dtype = computing_dtype(self.settings.precision)
            model = LongNetLM(self._with(num_layers).model, dtype=dtype, device=self.device)
            self.models[num_layers] = model.eval()
        return self.models[num_layers]

    def _get(self, words: str, num_layers: int, batch_size: int, measure: Callable[[], list[float]]) -> float:
        told = json.dumps([_shape_of_model(self._with(num_layers)), batch_size])
        digest = hashlib.blake2b(told.encode(), digest_size=6).hexdigest()
        found = self.measured.get(f"{words} with {num_layers} layers of {digest}", measure)
        self.done()
        return found[0]

    def _chunks(self, layers: tuple[int, int], calls: Sequence[Call], rate: float) -> CallSeconds:
        texts = self._texts(layers[1], calls[0].num_new, rate)

        def mean(count: int) -> float:
            seconds = [
                self._get(
                    f"{call.num_new} tokens after {call.seen}",
                    count,
                    texts,
                    lambda call=call: [self._chunk(count, call, texts)],  # type: ignore[misc]
                )
                for call in calls
            ]
            return statistics.mean(seconds) * self.settings.batch_size / texts

        return CallSeconds(layers, (mean(layers[0]), mean(layers[1])))

    def _texts(self, num_layers: int, num_new: int, rate: float) -> int:
        """Number of texts that a call processes within the time limit, at most the batch size."""
        one = with_length(self._with(num_layers), max(8, num_new), batch_size=1)
        return max(1, min(self.settings.batch_size, int(rate * _SECONDS_OF_A_CALL / forward_work(one).total)))

    def _chunk(self, num_layers: int, call: Call, texts: int) -> float:
        model = self._model(num_layers)
        ids = torch.zeros(texts, call.num_new, dtype=torch.int64, device=self.device)

        def read() -> float:
            cache = self._begun(model, call, texts)
            return seconds_of(lambda: read_prompt(model, ids, cache, call.num_new), self.device)

        read()  # the first call compiles products for their shapes
        seconds, start = [read()], time.monotonic()
        while len(seconds) < _CALLS and time.monotonic() - start < _ENOUGH_SECONDS:
            seconds.append(read())
        return statistics.median(seconds)

    def _tokens(self, layers: tuple[int, int]) -> CallSeconds:
        lengths = _spread(range(self.generation.prompt, self.generation.tokens + 1))

        def mean(count: int) -> float:
            return statistics.mean(
                self._get(
                    f"1 token after {seen}",
                    count,
                    self.settings.batch_size,
                    lambda seen=seen: [self._token(count, seen)],  # type: ignore[misc]
                )
                for seen in lengths
            )

        return CallSeconds(layers, (mean(layers[0]), mean(layers[1])))

    def _token(self, num_layers: int, seen: int) -> float:
        model, texts = self._model(num_layers), self.settings.batch_size
        cache = self._begun(model, Call(seen, 1), texts)
        ids = torch.zeros(texts, 1, dtype=torch.int64, device=self.device)
        tokens = generate(model, ids, 1 + _TOKENS, cache=cache)
        next(tokens)
        return statistics.median(seconds_of(lambda: next(tokens), self.device) for _ in range(_TOKENS))

    def _begun(self, model: LongNetLM, call: Call, texts: int) -> BegunCache:
        config: LongNetConfig = model.config
        assert config.num_kv_heads is not None
        cache = BegunCache(config)
        mark = mark_of(tuple(dict.fromkeys(config.different_patterns)), config.num_kv_heads, call)
        cache.begin(mark, texts, model.embedding.weight.new_empty(0, config.embed_dim // config.num_heads))
        return cache


def _spread(lengths: Sequence[int]) -> list[int]:
    """Choose a few of many lengths, one from each of equal parts, at a different relative position in each.

    >>> _spread(range(3)), _spread(range(100))
    ([0, 1, 2], [12, 27, 68, 83])
    """
    if len(lengths) <= _STATES:
        return list(lengths)
    part = len(lengths) / _STATES
    return [lengths[int((number + (0.5 + number * _GOLDEN) % 1) * part)] for number in range(_STATES)]


def _shape_of_model(settings: TrainSettings) -> str:
    """Configuration and precision of a model, except its number of layers."""
    return json.dumps([{**settings.model.to_dict(), "num_layers": 0}, settings.precision], sort_keys=True)


def _shape(settings: TrainSettings, generation: Generation) -> str:
    """Digest of all that determines the calls of a generation, except the number of layers."""
    told = json.dumps([_shape_of_model(settings), settings.batch_size, dataclasses.astuple(generation)])
    return hashlib.blake2b(told.encode(), digest_size=6).hexdigest()
