"""How much memory a run takes at least, from its settings alone: what would be killed is refused before it begins."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilated_attention_pytorch.memory import check_memory, in_bytes
from dilated_attention_pytorch.models.token_loss import logits_at_once

from .autocast import computing_dtype
from .run_settings import Precision
from .settings import Optimizer, TrainSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .extension_settings import ExtensionSettings


_FLOAT32 = 4
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


def _state_bytes(optimizer: Optimizer, num_parameters: int) -> int:
    """Bytes of weights, their gradients and what the optimizer keeps of them, at least."""
    return (2 * _FLOAT32 + _LEAST_MOMENTS[optimizer]) * num_parameters


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that one process of a run takes at least."""

    weights: int
    """Weights, gradients and what the optimizer keeps."""
    activations: int
    """What the backward pass of one batch reads again, and the logits."""
    checkpoint: int = 0
    """The copy that a checkpoint is written from beside the steps, in the first process."""

    @property
    def total(self) -> int:
        """Weights and activations, which are on the device at once."""
        return self.weights + self.activations

    def in_words(self) -> str:
        """The parts, for a sentence."""
        copy = f"{in_bytes(self.checkpoint)} copy for a checkpoint, " if self.checkpoint else ""
        return f"({in_bytes(self.weights)} weights with optimizer, {copy}{in_bytes(self.activations)} activations)"


def footprint(settings: TrainSettings, num_processes: int) -> Footprint:
    """What every one of ``num_processes`` takes at least.

    Per token and layer, with i bytes an element of what is computed in the precision of the run: in the width E the
    float32 input and output of both norms, and queries, the attention's output before and after its norm, keys and
    values; in the width F gate and up, their activation and product, and what the norm makes of it. Of a
    recomputed block one number of the width E is kept, and all of it for one of them at a time. What else there is at
    the peak is not counted (copies for norms in lower precision, partial results of segments, gradients of activations,
    freed pages): of ten settings from 30 thousand to 20 million weights the real peaks, less 0.1 GB of libraries, were
    1.1 to 2.1 times as large.
    """
    model = settings.model
    assert model.num_kv_heads is not None
    assert model.ffn_dim is not None
    weights = int(_bytes_in_process(settings, num_processes))
    rows = -(-settings.context_length // settings.context_parallel)
    tokens, element = max(settings.batch_size * rows, settings.max_tokens), _element(settings.precision)
    key_share = 2 * model.num_kv_heads / model.num_heads
    of_width = 16 + int((3 + key_share) * element)
    of_inner = 5 * element
    per_layer = (of_width * model.embed_dim + of_inner * model.ffn_dim) // settings.tensor_parallel
    kept = model.num_layers * per_layer
    if model.gradient_checkpointing:
        recomputed = sum(map(model.is_recomputed, range(model.num_layers)))
        kept = 4 * recomputed * model.embed_dim + (model.num_layers - recomputed + 1) * per_layer
    logits = logits_at_once(tokens, model.vocab_size) * 4
    return Footprint(weights, tokens * kept + logits)


def _bytes_in_process(settings: TrainSettings, num_processes: int) -> float:
    """Of weights, gradients and moments: what is split over processes in part, what is offloaded not at all."""
    parameters = settings.model.num_parameters
    if settings.data_parallel in ("ddp", "fsdp"):
        split = settings.tensor_parallel * (num_processes if settings.data_parallel == "fsdp" else 1)
        return _state_bytes(settings.optimizer, parameters) // split
    # The weight, its gradient, and what ZeRO steps: a copy of the weight and two moments.
    stepped = 0.0 if settings.offload != "none" else 12 / num_processes
    weight = (
        4.0 if settings.data_parallel != "zero3" else 0.0 if settings.offload == "parameters" else 4 / num_processes
    )
    gradient = 4.0 if settings.data_parallel == "zero1" else 4 / num_processes
    return (weight + gradient + stepped) * parameters


def extension_footprint(settings: ExtensionSettings, config: PreTrainedConfig, num_parameters: int) -> Footprint:
    """The same for a pretrained model: of any architecture, so of every layer only what all of them keep.

    That is the input of the layer, both norms, queries and the attention's output.
    """
    text = config.get_text_config()
    windows = max(1, settings.batch_tokens // settings.length)
    tokens = max(windows * settings.length, settings.length)
    layers = text.num_hidden_layers
    per_layer = (12 + 2 * _element(settings.precision)) * text.hidden_size
    kept = 4 * layers * text.hidden_size + per_layer if settings.gradient_checkpointing else layers * per_layer
    logits = logits_at_once(tokens, text.vocab_size) * 4
    return Footprint(_state_bytes(settings.optimizer, num_parameters), tokens * kept + logits)


def _element(precision: Precision) -> int:
    return 2 if precision == "auto" else computing_dtype(precision).itemsize


def check_training_memory(settings: TrainSettings, device: str, num_processes: int) -> None:
    """Raise :class:`RunError` if a run takes more than the device has left (the CPU's memory processes share).

    A run whose spreading is still to be chosen is checked when it is.
    """
    if settings.parallel == "auto":
        return
    least = footprint(settings, num_processes)
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
    remedy = batch if least.activations > least.weights else model
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
