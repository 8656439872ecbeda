"""Communication between the processes of a run in a step: bytes by purpose."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch

from dilated_attention_pytorch.models import LongNetLM
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.plan.layout import shard_runs
from dilated_attention_pytorch.training.autocast import computing_dtype
from dilated_attention_pytorch.training.settings import TrainSettings

from .batch import heads_of, mean_of_steps, recomputed_layers, rows_of_batch, sharing_of, way_of

_FLOAT32 = 4
_TIMES_SENT = {"ddp": (0, 2), "zero1": (1, 1), "zero2": (1, 1), "fsdp": (3, 0), "zero3": (3, 0)}
"""Times that a process sends (p - 1) / p of all weights: with every batch of a step, and once a step. A sum over
processes is a reduce-scatter and an all-gather. With ddp it follows the last batch; the others reduce the gradients of
every batch. Split weights are gathered in each pass. For fsdp see :func:`_split_weights`."""


class SentBytes(NamedTuple):
    """Traffic of one kind in a step, of the process that sends most."""

    name: str
    """"weights and gradients", "rows" or "activations"."""
    bytes: int


def exchanges(settings: TrainSettings, num_processes: int, *, is_training: bool = True) -> tuple[SentBytes, ...]:
    """Traffic of a step: gradients of weights that several processes hold, rows of a sequence, parts of matrices.

    In a forward pass (``is_training`` false) processes that have all weights send rows alone.

    Rows are counted exactly, from the pattern, by :func:`parallel.plan_parallel`. Sums over p processes are counted as
    ring all-reduces, which send 2 (p - 1) / p of the operand; split weights as they are gathered and scattered. Under
    ddp, fsdp and context parallelism this is the traffic of a step to the byte, except for a few bytes that compare
    calls.
    """
    kinds = []
    sharing_weights = num_processes // settings.tensor_parallel if is_training else 1
    if sharing_weights > 1:
        of_weights = _FLOAT32 * settings.model.num_parameters // settings.tensor_parallel
        of_batch, of_step = _TIMES_SENT[settings.data_parallel]
        times = of_batch * settings.gradient_accumulation + of_step
        sent = times * of_weights * (sharing_weights - 1) // sharing_weights
        if settings.data_parallel == "fsdp" and settings.tensor_parallel == 1:
            sent = settings.gradient_accumulation * _split_weights(settings.model, sharing_weights)
        kinds.append(SentBytes("weights and gradients", sent))
    if settings.context_parallel > 1:
        kinds.append(_rows(settings, is_training=is_training))
    if settings.tensor_parallel > 1:
        kinds.append(_activations(settings))
    return tuple(kinds)


def _split_weights(model: LongNetConfig, p: int) -> int:
    """Bytes that a process sends with a batch under fsdp, with each weight split by rows and padded to p equal parts.

    A block is gathered in each pass and its gradients are scattered; embedding, last LayerNorm and output matrix stay
    gathered between the passes.
    """
    with torch.device("meta"):
        shallow = LongNetLM(dataclasses.replace(model, num_layers=1))
    block = rest = 0
    for name, weight in shallow.named_parameters():
        part = _FLOAT32 * -(-weight.shape[0] // p) * (weight.numel() // weight.shape[0])
        if name.startswith("blocks."):
            block += part
        else:
            rest += part
    return (p - 1) * (3 * model.num_layers * block + 2 * rest)


def _rows(settings: TrainSettings, *, is_training: bool) -> SentBytes:
    model, sent = settings.model, 0
    again = recomputed_layers(model) if is_training else []
    way = way_of(settings)
    settings = dataclasses.replace(settings, strategy=way.strategy, layout=way.layout)
    of_layer: dict[tuple[Pattern, int], int] = {}
    for layer in range(model.num_layers):
        pattern, forward = model.pattern(layer), 2 if layer in again else 1
        if (pattern, forward) not in of_layer:
            of_layer[pattern, forward] = _rows_of_layer(settings, pattern, forward, is_training=is_training)
        sent += of_layer[pattern, forward]
    batches = settings.gradient_accumulation if is_training else 1
    return SentBytes("rows", batches * sent)


def _rows_of_layer(settings: TrainSettings, pattern: Pattern, forward: int, *, is_training: bool) -> int:
    """Bytes of ``forward`` forward passes of a layer, and of its backward pass: the mean over the steps of the run."""

    def sent(one: Pattern) -> int:
        estimate = sharing_of(settings, one)
        both = zip(estimate.forward_bytes, estimate.backward_bytes, strict=True)
        return max(forward * there + is_training * back for there, back in both)

    element = computing_dtype(settings.precision).itemsize
    of_keys = (forward * element + is_training * max(element, _FLOAT32)) * _previous_keys(settings)
    return of_keys + mean_of_steps(settings, pattern, sent)


def _previous_keys(settings: TrainSettings) -> int:
    """Numbers that a process sends for keys that are made of several rows: the last rows of its runs, to all others."""
    assert settings.layout != "auto"
    model, ring, heads = settings.model, settings.context_parallel // settings.heads_parallel, settings.heads_parallel
    if not model.num_previous_keys:
        return 0
    shards = (
        shard_runs(settings.context_length, ring, rank, settings.layout, part=(part, heads))
        for rank in range(ring)
        for part in range(heads)
    )
    width = max(sum(min(model.num_previous_keys, stop - start) for start, stop in runs) for runs in shards)
    key_width = math.prod(heads_of(model)) // settings.tensor_parallel
    return (settings.context_parallel - 1) * width * settings.batch_size * key_width


def _activations(settings: TrainSettings) -> SentBytes:
    """Sums over the tensor-parallel processes: two of the model's width per block and pass, and the logits."""
    model, p = settings.model, settings.tensor_parallel
    rows, batches = rows_of_batch(settings, settings.context_parallel), settings.gradient_accumulation
    element = computing_dtype(settings.precision).itemsize
    sums = 4 * model.num_layers + 2 * len(recomputed_layers(model)) + 1
    of_sum = 2 * rows * model.embed_dim * element * (p - 1) // p
    logits = rows * model.vocab_size * element * (p - 1) // p
    return SentBytes("activations", batches * (sums * of_sum + logits))
