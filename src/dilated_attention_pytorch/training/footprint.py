"""How much memory a run takes at least, from its settings alone: what would be killed is refused before it begins."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dilated_attention_pytorch.memory import check_memory, in_bytes

from .settings import Precision, TrainSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .extension_settings import ExtensionSettings

_SMALLEST_LOGITS_BLOCK = 1 << 22
"""Logits that the loss has in float32 at once, where there are more."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that one process of a run takes at least."""

    weights: int
    """Weights, gradients and what the optimizer keeps."""
    activations: int
    """What the backward pass of one batch reads again, and the logits."""

    @property
    def total(self) -> int:
        """Both, which are there at once."""
        return self.weights + self.activations

    def in_words(self) -> str:
        """The parts, for a sentence."""
        return f"({in_bytes(self.weights)} weights with optimizer, {in_bytes(self.activations)} activations)"


def footprint(settings: TrainSettings, num_processes: int) -> Footprint:
    """What every one of ``num_processes`` takes at least.

    Per token and layer, with i bytes an element of what is computed in the precision of the run: in the width E the
    float32 input and output of both norms, and queries, the attention's output before and after its norm, keys and
    values; in the width F gate and up, their activation and product, and what the norm makes of it. With blocks
    recomputed, one number of the width E, and all of it for one layer. What else there is at the peak is not counted
    (copies for norms in lower precision, partial results of segments, gradients of activations, freed pages): of ten
    settings from 30 thousand to 20 million weights the real peaks, less 0.1 GB of libraries, were 1.1 to 2.1 times as
    large.
    """
    model = settings.model
    assert model.num_kv_heads is not None
    assert model.ffn_dim is not None
    split = settings.tensor_parallel * (num_processes if settings.data_parallel == "fsdp" else 1)
    # float32: weight, gradient, and of AdamW two moments, of Muon one.
    weights = (12 if settings.optimizer == "muon" else 16) * model.num_parameters // split
    rows = -(-settings.context_length // settings.context_parallel)
    tokens, element = settings.batch_size * rows, _element(settings.precision)
    key_share = 2 * model.num_kv_heads / model.num_heads
    of_width = 16 + int((3 + key_share) * element)
    of_inner = 5 * element
    per_layer = (of_width * model.embed_dim + of_inner * model.ffn_dim) // settings.tensor_parallel
    kept = model.num_layers * per_layer
    if model.gradient_checkpointing:
        kept = 4 * model.num_layers * model.embed_dim + per_layer
    logits = min(tokens * model.vocab_size, _SMALLEST_LOGITS_BLOCK) * 4
    return Footprint(weights, tokens * kept + logits)


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
    return Footprint(16 * num_parameters, tokens * (kept + 4 * text.vocab_size))


def _element(precision: Precision) -> int:
    return 4 if precision == "float32" else 2


def check_training_memory(settings: TrainSettings, device: str, num_processes: int) -> None:
    """Raise :class:`RunError` if a run takes more than the device has left (the CPU's memory processes share)."""
    _check(
        footprint(settings, num_processes), device,
        batch="take a smaller --batch-size or --context-length, or add --model.gradient-checkpointing",
        model="take a smaller --model.embed-dim, --model.ffn-dim or --model.num-layers",
    )  # fmt: skip


def check_extension_memory(
    settings: ExtensionSettings, config: PreTrainedConfig, num_parameters: int, device: str
) -> None:
    """The same for the extension of a pretrained model."""
    _check(
        extension_footprint(settings, config, num_parameters), device,
        batch="take smaller --batch-tokens or a smaller --length, or add --gradient-checkpointing",
        model="take a smaller model, or call extend_context and train with your own trainer on several devices",
    )  # fmt: skip


def _check(least: Footprint, device: str, *, batch: str, model: str) -> None:
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device == "cpu" else 1
    remedy = batch if least.activations > least.weights else model
    # No process has chosen its device yet.
    where = device if device == "cpu" else f"{device}:{os.environ.get('LOCAL_RANK', '0')}"
    check_memory(least.total, where, what=f"the run {least.in_words()}", remedy=remedy, sharing=sharing)
