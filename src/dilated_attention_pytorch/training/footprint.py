"""Memory estimates from a run's settings, to reject runs that would run out of memory."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import check_memory, free_memory, in_bytes, return_freed_blocks
from dilated_attention_pytorch.models.token_loss import logits_at_once

from .attention_bytes import attention_bytes
from .autocast import computing_dtype
from .batch_rows import TRACED_BATCHES, rows_of_batch, with_length
from .live_bytes import PARTS
from .run_settings import Precision
from .settings import Optimizer, TrainSettings
from .split_step import split_parts
from .step_bytes import Moment, highest, moments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .extension_settings import ExtensionSettings


_FLOAT32 = 4
_MOST_TEXTS = 1024
"""Maximum number of sequences per batch that are traced as they are."""
_KEPT_BY_MALLOC = 5
"""Bound on resident memory over the memory in use, with malloc's defaults."""
_LEAST_MOMENTS: dict[Optimizer, int] = {"muon": 4, "adamw": 8, "adamw-bf16": 4, "adamw-8bit": 2}
"""Optimizer bytes per matrix weight: one moment with Muon, two with AdamW."""
_MOST_MOMENTS = _LEAST_MOMENTS | {"muon": 8, "adamw-8bit": 3}
"""Upper bound over all weights: Muon uses AdamW for weights that are not matrices, and 8-bit moments have scales."""


def checkpoint_bytes(optimizer: Optimizer, num_parameters: int) -> int:
    """Upper bound of a checkpoint's size: weights and optimizer state, in bytes."""
    return (_FLOAT32 + _MOST_MOMENTS[optimizer]) * num_parameters


def largest_file(optimizer: Optimizer, num_parameters: int) -> int:
    """Upper bound of the largest file of a checkpoint, the weights or the optimizer state, in bytes."""
    return max(_FLOAT32, _MOST_MOMENTS[optimizer]) * num_parameters


def moments_of(optimizer: Optimizer) -> int:
    """Optimizer bytes per matrix weight."""
    return _LEAST_MOMENTS[optimizer]


def _copied_bytes(optimizer: Optimizer, num_parameters: int) -> int:
    """Lower bound of the bytes of weights and optimizer state."""
    return (_FLOAT32 + _LEAST_MOMENTS[optimizer]) * num_parameters


@dataclass(frozen=True, slots=True)
class Footprint:
    """Live bytes of one process at the peak of a step, by category."""

    weights: int
    gradients: int
    optimizer: int
    """Optimizer state."""
    activations: int
    """Activations saved for the backward pass, or recomputed in it."""
    loss: int = 0
    """Blocks of logits, their gradients, and the gradient of the hidden states."""
    temporaries: int = 0
    """Gradients of activations, and copies."""
    attention: int = 0
    """Temporary memory of attention."""
    exchange: int = 0
    """Communication buffers."""
    cache: int = 0
    """Key/value cache of generation."""
    checkpoint: int = 0
    """Copy from which a checkpoint is written asynchronously, in the first process; not part of the total."""

    @property
    def states(self) -> int:
        """Memory that persists between steps, plus gradients."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Total on the device at the peak."""
        return self.states + self.of_batch

    @property
    def of_batch(self) -> int:
        """Memory that grows with the batch."""
        return self.activations + self.loss + self.temporaries + self.attention + self.exchange + self.cache

    def in_words(self) -> str:
        """The categories, for a message."""
        copy = f"{in_bytes(self.checkpoint)} copy for a checkpoint, " if self.checkpoint else ""
        return f"({in_bytes(self.states)} weights with optimizer, {copy}{in_bytes(self.of_batch)} activations)"


def _own_rows(settings: TrainSettings) -> TrainSettings:
    """The settings with batches of this process's rows only."""
    if settings.max_tokens or settings.batch_size > _MOST_TEXTS:
        # Documents are packed into one row. More texts would need lengths of thousands of loss blocks.
        settings = with_length(settings, rows_of_batch(settings), batch_size=1)
    return with_length(
        settings,
        max(8, -(-settings.context_length // settings.context_parallel)),
        parallel="told",
        context_parallel=1,
        heads_parallel=1,
        gradient_accumulation=min(TRACED_BATCHES, settings.gradient_accumulation),
    )


def _as_text(settings: TrainSettings) -> str:
    return json.dumps({**settings.to_dict(), "data": [], "weights": []}, default=str, sort_keys=True)


@functools.lru_cache(maxsize=64)
def _whole(settings_text: str, of_others: int = 0) -> Footprint:
    """Footprint of a process with all weights, for rows as in the settings."""
    settings = TrainSettings.from_dict(json.loads(settings_text))
    return _peak(*highest(moments(settings), _with_rows(attention_bytes(settings), of_others)), of_others)


@functools.lru_cache(maxsize=64)
def _split(settings_text: str, num_processes: int, of_others: int) -> Footprint:
    """Footprint of a process with sharded weights, for rows as in the settings."""
    settings = TrainSettings.from_dict(json.loads(settings_text))
    return _peak(*split_parts(settings, num_processes, of_others), of_others)


def _with_rows(attention: dict[str, int], of_others: int) -> dict[str, int]:
    """Bytes of attention plus keys and values of other processes, which are held only while attention is computed."""
    return {name: size + of_others for name, size in attention.items()}


def _peak(parts: dict[str, int], own: int, of_others: int) -> Footprint:
    exchange = min(own, of_others)
    return Footprint(**parts, attention=own - exchange, exchange=exchange)


@functools.lru_cache(maxsize=64)
def _divided(settings_text: str, of_others: int, splitting: int, tensor: int) -> Footprint:
    """Footprint of a process if ``splitting`` processes split the states and ``tensor`` processes the matrices."""
    settings = TrainSettings.from_dict(json.loads(settings_text))

    def divided(moment: Moment) -> Moment:
        parts = dict(zip(PARTS, moment.counts, strict=True))
        # Moments without activations are those of the optimizer step: temporaries belong to this process's weights.
        steps = parts["activations"] == 0
        for name in PARTS:
            if name in ("weights", "gradients", "optimizer") or (name == "temporaries" and steps):
                parts[name] //= splitting
            elif name in ("activations", "temporaries"):
                parts[name] //= tensor
        return moment._replace(counts=tuple(parts.values()))

    own = {name: size // tensor for name, size in attention_bytes(settings).items()}
    return _peak(*highest(map(divided, moments(settings)), _with_rows(own, of_others)), of_others)


def is_split(settings: TrainSettings, num_processes: int) -> bool:
    """Whether torch shards the weights, in which case a subprocess counts the memory."""
    return settings.tensor_parallel > 1 or (settings.data_parallel == "fsdp" and num_processes > 1)


def least_footprint(settings: TrainSettings, num_processes: int) -> Footprint:
    """A cheap lower bound of :func:`footprint`: without the gathered blocks of sharded weights."""
    if not is_split(settings, num_processes):
        return footprint(settings, num_processes)
    own = dataclasses.replace(_own_rows(settings), data_parallel="ddp", tensor_parallel=1)
    tensor = settings.tensor_parallel
    splitting = num_processes if settings.data_parallel == "fsdp" else tensor
    return _divided(_as_text(own), _rows_of_others(settings), splitting, tensor)


def footprint(settings: TrainSettings, num_processes: int) -> Footprint:
    """Live memory of each of ``num_processes`` processes at the peak of a step.

    Measured on the step itself as it runs on a CPU, with fake tensors (:mod:`.traced_step`) and the run's own model,
    loss and optimizer. In a step of several batches, all gradients are alive from the second one on. Temporary memory
    of attention and the buffers of distributed engines are added. Not counted: memory of libraries (about 0.1 GB more
    after the first step than before) and freed pages that the allocator retains.

    Raises:
        RunError: the subprocess that traces sharded weights failed.
    """
    own, of_others = _own_rows(settings), _rows_of_others(settings)
    if is_split(settings, num_processes):
        split = own if settings.tensor_parallel == 1 else dataclasses.replace(own, data_parallel="ddp")
        found = _split(_as_text(split), num_processes, of_others)
    else:
        found = _whole(
            _as_text(dataclasses.replace(own, data_parallel="ddp", offload="none", offload_folder=None)), of_others
        )
    if settings.data_parallel == "ddp":
        # DDP has a copy of all gradients in its buckets.
        is_spread = num_processes > settings.tensor_parallel
        return dataclasses.replace(found, exchange=found.exchange + is_spread * found.weights)
    if settings.data_parallel == "fsdp":
        others = num_processes // settings.tensor_parallel if settings.tensor_parallel > 1 else 1
        return dataclasses.replace(
            found,
            weights=found.weights // others,
            gradients=found.gradients // others,
            optimizer=found.optimizer // others,
        )
    return _with_zero(found, settings, num_processes)


@functools.lru_cache(maxsize=64)
def _evaluated(settings_text: str, of_others: int) -> Footprint:
    settings = TrainSettings.from_dict(json.loads(settings_text))
    own = _with_rows(attention_bytes(settings), of_others)
    return _peak(*highest(moments(settings, is_training=False), own), of_others)


def evaluation_footprint(settings: TrainSettings, num_processes: int) -> Footprint:
    """Live memory of each of ``num_processes`` processes at the peak of a forward pass with loss, without gradients.

    Counted like :func:`footprint`, for an evaluation during training, without the training state.

    Raises:
        RunError: weights are sharded, whose gathering is only counted for steps.
    """
    if is_split(settings, num_processes) or settings.data_parallel.startswith("zero"):
        raise RunError(
            "a forward pass is planned for processes that have all weights: leave --data-parallel "
            f"{settings.data_parallel} and --tensor-parallel {settings.tensor_parallel} out"
        )
    own = dataclasses.replace(_own_rows(settings), data_parallel="ddp", offload="none", offload_folder=None)
    return _evaluated(_as_text(own), _rows_of_others(settings))


def _rows_of_others(settings: TrainSettings) -> int:
    """Largest number of bytes of other processes' keys, values and their gradients held at once."""
    if settings.context_parallel == 1:
        return 0
    model = settings.model
    assert model.num_kv_heads is not None
    rows = rows_of_batch(settings, settings.context_parallel)
    of_row = 2 * model.embed_dim // model.num_heads * model.num_kv_heads * _element(settings.precision)
    # Ring: the rows in use, those being received, and those being sent.
    return 3 * rows * of_row


def _with_zero(found: Footprint, settings: TrainSettings, num_processes: int) -> Footprint:
    """Footprint on the device with DeepSpeed's sharding and offloading."""
    parameters = settings.model.num_parameters
    stage = settings.data_parallel
    # ZeRO keeps a copy of the weight and two moments.
    stepped = 0 if settings.offload != "none" else 12 * parameters // num_processes
    share = 0 if settings.offload in ("parameters", "nvme") else 4 * parameters // num_processes
    weights = share if stage == "zero3" else 4 * parameters
    gradients = 4 * parameters if stage == "zero1" else 4 * parameters // num_processes
    return dataclasses.replace(found, weights=weights, gradients=gradients, optimizer=stepped)


def extension_footprint(settings: ExtensionSettings, config: PreTrainedConfig, num_parameters: int) -> Footprint:
    """Lower bound for a step of a pretrained model of any architecture.

    Counts what all kinds of layers keep: the layer's input, both norms, queries, and attention's output.
    """
    text = config.get_text_config()
    windows = max(1, settings.batch_tokens // settings.length)
    tokens = max(windows * settings.length, settings.length)
    layers = text.num_hidden_layers
    per_layer = (12 + 2 * _element(settings.precision)) * text.hidden_size
    kept = 4 * layers * text.hidden_size + per_layer if settings.gradient_checkpointing else layers * per_layer
    logits = logits_at_once(tokens, text.vocab_size) * 4
    states = (_FLOAT32 + _LEAST_MOMENTS[settings.optimizer]) * num_parameters
    return Footprint(
        _FLOAT32 * num_parameters, _FLOAT32 * num_parameters, states - _FLOAT32 * num_parameters, tokens * kept, logits
    )


def _element(precision: Precision) -> int:
    return 2 if precision == "auto" else computing_dtype(precision).itemsize


def check_training_memory(settings: TrainSettings, device: str, num_processes: int) -> None:
    """Raise :class:`RunError` if a run needs more memory than the device has free (processes share the CPU's memory).

    With ``--parallel auto`` the check runs after the choice. If a CPU's memory suffices, but not for what malloc could
    keep of freed blocks, these are returned to the system from now on (:func:`.memory.return_freed_blocks`).
    """
    if settings.parallel == "auto":
        return
    least = least_footprint(settings, num_processes)
    if settings.async_checkpoints and device == "cpu":
        copy = _copied_bytes(settings.optimizer, settings.model.num_parameters)
        least = dataclasses.replace(least, checkpoint=copy)
    _check(
        least,
        device,
        batch="take a smaller --batch-size, --max-tokens or --context-length, or add --model.gradient-checkpointing",
        model="take a smaller --model.embed-dim, --model.ffn-dim or --model.num-layers",
    )


def check_extension_memory(
    settings: ExtensionSettings, config: PreTrainedConfig, num_parameters: int, device: str
) -> None:
    """:func:`check_training_memory` for a context extension run."""
    least = extension_footprint(settings, config, num_parameters)
    if settings.async_checkpoints and device == "cpu":
        least = dataclasses.replace(least, checkpoint=_copied_bytes(settings.optimizer, num_parameters))
    _check(
        least,
        device,
        batch="take smaller --batch-tokens or a smaller --length, or add --gradient-checkpointing",
        model="take a smaller model, or call extend_context and train with your own trainer on several devices",
    )


def _check(least: Footprint, device: str, *, batch: str, model: str) -> None:
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device == "cpu" else 1
    remedy = batch if least.of_batch > least.states else model
    # No process has selected its device yet.
    where = device if device == "cpu" else f"{device}:{os.environ.get('LOCAL_RANK', '0')}"
    # There is one copy, whatever the number of processes that share the memory.
    check_memory(
        least.total + least.checkpoint // sharing,
        where,
        what=f"the run {least.in_words()}",
        remedy=remedy,
        sharing=sharing,
    )
    if device == "cpu" and sys.platform == "linux" and _KEPT_BY_MALLOC * sharing * least.total > free_memory("cpu"):
        return_freed_blocks()
