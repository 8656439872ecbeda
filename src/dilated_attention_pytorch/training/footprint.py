"""How much memory a run takes, from its settings alone: what would be killed is refused before it begins."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilated_attention_pytorch.memory import check_memory, in_bytes
from dilated_attention_pytorch.models.token_loss import logits_at_once

from .attention_bytes import attention_bytes
from .autocast import computing_dtype
from .run_settings import Precision
from .settings import Optimizer, TrainSettings
from .split_step import split_parts
from .stages import StageSettings
from .step_bytes import highest, moments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .extension_settings import ExtensionSettings


_FLOAT32 = 4
_MOST_TEXTS = 1024
"""Texts of a batch that are traced as they are."""
_LEAST_MOMENTS: dict[Optimizer, int] = {"muon": 4, "adamw": 8, "adamw-bf16": 4, "adamw-8bit": 2}
"""Bytes that an optimizer keeps of a weight: one moment of a matrix under Muon, two under AdamW."""
_MOST_MOMENTS = _LEAST_MOMENTS | {"muon": 8, "adamw-8bit": 3}
"""The same where it keeps most: Muon leaves what is no matrix to AdamW, and 8 bits come with their scales."""


def checkpoint_bytes(optimizer: Optimizer, num_parameters: int) -> int:
    """Bytes of the weights and of what the optimizer keeps of them in a checkpoint, at most."""
    return (_FLOAT32 + _MOST_MOMENTS[optimizer]) * num_parameters


def _copied_bytes(optimizer: Optimizer, num_parameters: int) -> int:
    """Bytes of the weights and of what the optimizer keeps of them, at least."""
    return (_FLOAT32 + _LEAST_MOMENTS[optimizer]) * num_parameters


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that one process of a run has alive at the peak of a step, by part."""

    weights: int
    gradients: int
    optimizer: int
    """What the optimizer keeps."""
    activations: int
    """What the forward pass keeps for the backward pass, and what it computes again."""
    loss: int = 0
    """Blocks of logits, their gradients, and the gradient of what they are made of."""
    temporaries: int = 0
    """Gradients of activations, and copies."""
    attention: int = 0
    """What attention takes by itself."""
    exchange: int = 0
    """Buffers of what is sent to other processes and comes from them."""
    checkpoint: int = 0
    """The copy that a checkpoint is written from beside the steps, in the first process; no part of the total."""

    @property
    def states(self) -> int:
        """What stays from step to step, and gradients."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """What is on the device at once."""
        return self.states + self.of_batch

    @property
    def of_batch(self) -> int:
        """What grows with the batch."""
        return self.activations + self.loss + self.temporaries + self.attention + self.exchange

    def in_words(self) -> str:
        """The parts, for a sentence."""
        copy = f"{in_bytes(self.checkpoint)} copy for a checkpoint, " if self.checkpoint else ""
        return f"({in_bytes(self.states)} weights with optimizer, {copy}{in_bytes(self.of_batch)} activations)"


def _own_rows(settings: TrainSettings) -> TrainSettings:
    """A run whose batch is this process's rows of a batch."""
    if settings.batch_size > _MOST_TEXTS:
        # Of so many texts every length more would be thousands of blocks of the loss: one text of as many rows.
        rows = settings.batch_size * settings.context_length
        settings = dataclasses.replace(settings, batch_size=1, context_length=rows, stages=StageSettings())
    return dataclasses.replace(
        settings, parallel="told", batch_size=1 if settings.max_tokens else settings.batch_size, max_tokens=0,
        max_batch_size=0,
        context_length=max(8, settings.max_tokens, -(-settings.context_length // settings.context_parallel)),
        context_parallel=1, heads_parallel=1, stages=StageSettings(),
    )  # fmt: skip


def _as_text(settings: TrainSettings) -> str:
    return json.dumps({**settings.to_dict(), "data": [], "weights": []}, default=str, sort_keys=True)


@functools.lru_cache(maxsize=64)
def _whole(settings_text: str) -> Footprint:
    """Of a process with all weights, and rows as the settings say."""
    settings = TrainSettings.from_dict(json.loads(settings_text))
    parts, attention = highest(moments(settings), attention_bytes(settings))
    return Footprint(**parts, attention=attention)


@functools.lru_cache(maxsize=64)
def _split(settings_text: str, num_processes: int) -> Footprint:
    """Of a process whose weights others share, and rows as the settings say."""
    parts, attention = split_parts(TrainSettings.from_dict(json.loads(settings_text)), num_processes)
    return Footprint(**parts, attention=attention)


def _is_split(settings: TrainSettings, num_processes: int) -> bool:
    return settings.tensor_parallel > 1 or (settings.data_parallel == "fsdp" and num_processes > 1)


def least_footprint(settings: TrainSettings, num_processes: int) -> Footprint:
    """At most :func:`footprint`, at once where that asks another program: without what is gathered of split weights."""
    if not _is_split(settings, num_processes):
        return footprint(settings, num_processes)
    found = _whole(_as_text(dataclasses.replace(_own_rows(settings), data_parallel="ddp", tensor_parallel=1)))
    tensor = settings.tensor_parallel
    splitting = num_processes if settings.data_parallel == "fsdp" else tensor
    parts = dataclasses.asdict(found)
    for name in ("weights", "gradients", "optimizer"):
        parts[name] //= splitting
    for name in ("activations", "temporaries", "attention"):
        parts[name] //= tensor
    return Footprint(**parts)


def footprint(settings: TrainSettings, num_processes: int) -> Footprint:
    """What each of ``num_processes`` has alive at the peak of a step.

    The step itself tells, as it is computed on a CPU: it is taken with tensors that hold nothing (:mod:`.traced_step`),
    with the run's own model, loss and optimizer. Beside that come what attention takes by itself, and what engines of
    distribution keep. What the libraries of a process take (about 0.1 GB more after the first step than before it) and
    pages that an allocator keeps after they were freed are not counted.

    Raises:
        RunError: the program that counts what processes have that split weights fails.
    """
    own = _own_rows(settings)
    if _is_split(settings, num_processes):
        split = own if settings.tensor_parallel == 1 else dataclasses.replace(own, data_parallel="ddp")
        found = _split(_as_text(split), num_processes)
    else:
        found = _whole(_as_text(dataclasses.replace(own, data_parallel="ddp", offload="none")))
    found = dataclasses.replace(found, exchange=_rows_of_others(settings))
    if settings.data_parallel == "ddp":
        # DDP has a copy of all gradients in the buckets that it averages.
        is_spread = num_processes > settings.tensor_parallel
        return dataclasses.replace(found, exchange=found.exchange + is_spread * found.weights)
    if settings.data_parallel == "fsdp":
        others = num_processes // settings.tensor_parallel if settings.tensor_parallel > 1 else 1
        return dataclasses.replace(
            found, weights=found.weights // others, gradients=found.gradients // others,
            optimizer=found.optimizer // others,
        )  # fmt: skip
    return _with_zero(found, settings, num_processes)


def _rows_of_others(settings: TrainSettings) -> int:
    """Most bytes of keys and values of other processes that one has at once, and of their gradients."""
    if settings.context_parallel == 1:
        return 0
    model = settings.model
    assert model.num_kv_heads is not None
    rows = settings.batch_size * -(-settings.context_length // settings.context_parallel)
    of_row = 2 * model.embed_dim // model.num_heads * model.num_kv_heads * _element(settings.precision)
    # The rows of one step of the ring are computed with while those of the next come and this one's go.
    return 3 * rows * of_row


def _with_zero(found: Footprint, settings: TrainSettings, num_processes: int) -> Footprint:
    """What DeepSpeed splits over processes, and what it offloads: in the memory of the device."""
    parameters = settings.model.num_parameters
    stage = settings.data_parallel
    # What ZeRO steps: a copy of the weight and two moments.
    stepped = 0 if settings.offload != "none" else 12 * parameters // num_processes
    share = 0 if settings.offload == "parameters" else 4 * parameters // num_processes
    weights = share if stage == "zero3" else 4 * parameters
    gradients = 4 * parameters if stage == "zero1" else 4 * parameters // num_processes
    return dataclasses.replace(found, weights=weights, gradients=gradients, optimizer=stepped)


def extension_footprint(settings: ExtensionSettings, config: PreTrainedConfig, num_parameters: int) -> Footprint:
    """What the step of a pretrained model takes at least: of any architecture, so of a layer what all of them keep.

    That is the input of the layer, both norms, queries and the attention's output.
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
    """Raise :class:`RunError` if a run takes more than the device has left (the CPU's memory processes share).

    A run whose spreading is still to be chosen is checked when it is.
    """
    if settings.parallel == "auto":
        return
    least = least_footprint(settings, num_processes)
    if settings.async_checkpoints and device == "cpu":
        copy = _copied_bytes(settings.optimizer, settings.model.num_parameters)
        least = dataclasses.replace(least, checkpoint=copy)
    _check(
        least, device,
        batch="take a smaller --batch-size, --max-tokens or --context-length, or add --model.gradient-checkpointing",
        model="take a smaller --model.embed-dim, --model.ffn-dim or --model.num-layers",
    )  # fmt: skip


def check_extension_memory(
    settings: ExtensionSettings, config: PreTrainedConfig, num_parameters: int, device: str
) -> None:
    """The same for the extension of a pretrained model."""
    least = extension_footprint(settings, config, num_parameters)
    if settings.async_checkpoints and device == "cpu":
        least = dataclasses.replace(least, checkpoint=_copied_bytes(settings.optimizer, num_parameters))
    _check(
        least, device,
        batch="take smaller --batch-tokens or a smaller --length, or add --gradient-checkpointing",
        model="take a smaller model, or call extend_context and train with your own trainer on several devices",
    )  # fmt: skip


def _check(least: Footprint, device: str, *, batch: str, model: str) -> None:
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device == "cpu" else 1
    remedy = batch if least.of_batch > least.states else model
    # No process has chosen its device yet.
    where = device if device == "cpu" else f"{device}:{os.environ.get('LOCAL_RANK', '0')}"
    # The copy is there once, whatever the number of processes that share the memory.
    check_memory(
        least.total + least.checkpoint // sharing,
        where,
        what=f"the run {least.in_words()}",
        remedy=remedy,
        sharing=sharing,
    )
