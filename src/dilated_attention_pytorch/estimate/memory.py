"""Memory of a process at the peak of a training step, from a run's settings, and the check of it before a run."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.torch_version import TorchVersion

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.memory import check_memory, free_memory, in_bytes, return_freed_blocks
from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.token_loss import logits_at_once
from dilated_attention_pytorch.training.autocast import computing_dtype, multiplies_bfloat16
from dilated_attention_pytorch.training.run_settings import Precision
from dilated_attention_pytorch.training.settings import Optimizer, TrainSettings

from .attention import kernel_bytes
from .batch import attention_of, heads_of, rows_of_batch, with_length
from .flops import block_matrices
from .live_bytes import PARTS, Moment
from .step import moments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from dilated_attention_pytorch.training.extension_settings import ExtensionSettings

_FLOAT32 = 4
_MOST_TEXTS = 1024
"""Maximum number of sequences per batch that are traced as they are."""
_KEPT_BY_MALLOC = 5
"""Bound on resident memory over the memory in use, with malloc's defaults."""
LEAST_MOMENTS: dict[Optimizer, int] = {"muon": 4, "adamw": 8, "adamw-bf16": 4, "adamw-8bit": 2}
"""Optimizer bytes per matrix weight: one moment with Muon, two with AdamW."""
_MOST_MOMENTS = LEAST_MOMENTS | {"muon": 8, "adamw-8bit": 3}
"""Upper bound over all weights: Muon uses AdamW for weights that are not matrices, and 8-bit moments have scales."""
_ROUNDED_BYTES = 22
"""Bytes per weight of the largest matrix while ``adamw-bf16`` rounds a moment: both in float32, and random numbers."""
_HIGHEST_ERROR = 10
"""Bound in percent on how far an estimate is above the peak, see :func:`check_training_memory`."""
_KEEPS_COPIES = TorchVersion(torch.__version__) >= TorchVersion("2.13")
"""Whether PyTorch keeps the memory into which it has copied a checkpoint."""
_GATHERED_BYTES = 12
"""Bytes per weight of a matrix that Muon gathers: weight, gradient and moment."""


def checkpoint_bytes(optimizer: Optimizer, num_parameters: int) -> int:
    """Upper bound of a checkpoint's size: weights and optimizer state, in bytes."""
    return (_FLOAT32 + _MOST_MOMENTS[optimizer]) * num_parameters


def largest_file(optimizer: Optimizer, num_parameters: int) -> int:
    """Upper bound of the largest file of a checkpoint, the weights or the optimizer state, in bytes."""
    return max(_FLOAT32, _MOST_MOMENTS[optimizer]) * num_parameters


def _copied_bytes(optimizer: Optimizer, num_parameters: int) -> int:
    """Lower bound of the bytes of weights and optimizer state."""
    return (_FLOAT32 + LEAST_MOMENTS[optimizer]) * num_parameters


@dataclass(frozen=True, slots=True)
class Footprint:
    """Live bytes of one process at the peak of a step, by category."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    """Optimizer state."""
    activations: int = 0
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

    def describe(self) -> str:
        """The categories, for a message."""
        copy = f"{in_bytes(self.checkpoint)} copy for a checkpoint, " if self.checkpoint else ""
        return f"({in_bytes(self.states)} weights with optimizer, {copy}{in_bytes(self.of_batch)} activations)"


def optimizer_bytes(settings: TrainSettings, *, is_split: bool = False) -> tuple[int, int]:
    """Bytes of the optimizer state of a whole model, and the most that a step of the optimizer allocates and frees.

    The optimizers step one weight after the other. AdamW allocates nothing, ``adamw-bf16`` both moments in float32 and
    the random numbers of their rounding. For a matrix of m x M weights, Muon has the update in float32 and in its
    Newton-Schulz iteration two matrices of that size and two of m x m, in bfloat16 where the processor multiplies it.

    Args:
        settings: settings of the run.
        is_split: whether processes split the weights, which Muon then gathers one matrix at a time.
    """
    model, optimizer = settings.model, settings.optimizer
    matrices = block_matrices(model)
    inside = model.num_matrix_weights - model.vocab_size * model.embed_dim if optimizer == "muon" else 0
    outside = _MOST_MOMENTS[optimizer] if optimizer == "muon" else LEAST_MOMENTS[optimizer]
    states = LEAST_MOMENTS[optimizer] * inside + outside * (model.num_parameters - inside)
    if optimizer == "adamw-bf16":
        return states, _ROUNDED_BYTES * max(*(m * n for m, n in matrices), model.vocab_size * model.embed_dim)
    if optimizer != "muon":
        return states, 0
    factor = 2 if multiplies_bfloat16("cpu") else _FLOAT32
    of_weight = _FLOAT32 + 2 * factor + (_GATHERED_BYTES if is_split else 0)
    return states, max(of_weight * m * n + 2 * factor * min(m, n) ** 2 for m, n in matrices)


def _own_rows(settings: TrainSettings) -> TrainSettings:
    """The settings with batches of this process's rows only."""
    if settings.max_tokens or settings.batch_size > _MOST_TEXTS:
        # Documents are packed into one row. More texts would need lengths of thousands of loss blocks.
        settings = with_length(settings, rows_of_batch(settings), batch_size=1)
    length = max(8, -(-settings.context_length // settings.context_parallel))
    return with_length(settings, length, parallel="manual", context_parallel=1, heads_parallel=1)


def _attention_bytes(settings: TrainSettings) -> dict[str, int]:
    """Temporary bytes of attention in the layer that takes most, by operator."""
    workload = attention_of(settings, settings.context_length, settings.batch_size)
    of_patterns = [
        kernel_bytes(pattern, workload, threads=max(1, settings.threads))
        for pattern in settings.model.different_patterns
    ]
    forward, backward = map(max, zip(*of_patterns, strict=True))
    return {"attend": forward, "attend_backward": backward}


def peak(of: Iterable[dict[str, int]]) -> Footprint:
    """The moment with the most memory."""
    return Footprint(**max(of, key=lambda parts: sum(parts.values())))


def parts_of(moment: Moment) -> dict[str, int]:
    """Bytes by category at a moment, with the temporary memory of attention that was recorded."""
    return {**dict(zip(PARTS, moment.counts, strict=True)), "attention": moment.own}


def footprint(settings: TrainSettings, num_processes: int) -> Footprint:
    """Live memory of each of ``num_processes`` processes at the peak of a step.

    Traced on the passes of a batch as they run on a CPU, with fake tensors (:mod:`.step`) and the run's own model and
    loss. States, temporary memory of the optimizer and of attention, and the buffers of distributed engines are
    computed. In a step of several batches, all gradients are alive from the second one on. Not counted: memory of
    libraries (about 0.1 GB more after the first step than before) and freed pages that the allocator retains.
    """
    tensor = settings.tensor_parallel
    is_sharded = settings.data_parallel == "fsdp" and num_processes > 1
    ranks = num_processes if is_sharded else tensor
    states, stepping = optimizer_bytes(settings, is_split=ranks > 1)
    gathered = _gathered_bytes(settings.model) // tensor if is_sharded else 0
    weights = _FLOAT32 * settings.model.num_parameters
    in_optimizer = {
        "weights": weights // ranks,
        "gradients": weights // ranks,
        "optimizer": states // ranks,
        "temporaries": stepping if settings.optimizer == "muon" else stepping // ranks,
    }
    in_passes = (
        _split(
            parts | {"optimizer": states // ranks, "attention": parts["attention"] // tensor},
            settings.model,
            gathered,
            tensor=tensor,
            ranks=ranks,
        )
        for parts in _parts_of_passes(settings, is_training=True)
    )
    highest = peak([in_optimizer, *in_passes])
    if settings.data_parallel == "ddp":
        # DDP has a copy of all gradients in its buckets.
        is_spread = num_processes > tensor
        return dataclasses.replace(highest, exchange=highest.exchange + is_spread * highest.weights)
    return highest if settings.data_parallel == "fsdp" else _with_zero(highest, settings, num_processes)


def _split(parts: dict[str, int], model: LongNetConfig, gathered: int, *, tensor: int, ranks: int) -> dict[str, int]:
    """Bytes of one of ``ranks`` processes that split the weights, ``tensor`` of which split matrices and heads.

    ``gathered`` bytes of weights and of gradients are not split. Under tensor parallelism neither are the LayerNorms
    between the modules that are split, and about half of the activations, those between these modules.
    """
    norms = _FLOAT32 * (4 * model.num_layers + 2) * model.embed_dim if tensor > 1 else 0
    unsplit = min(parts["gradients"], gathered)
    return parts | {
        "weights": parts["weights"] // ranks + gathered + norms,
        "gradients": (parts["gradients"] - unsplit) // ranks + unsplit,
        "activations": (parts["activations"] + parts["activations"] // tensor) // 2,
        "temporaries": (parts["temporaries"] + parts["temporaries"] // tensor) // 2,
    }


def _gathered_bytes(model: LongNetConfig) -> int:
    """Bytes of weights, and of gradients, that are not split while a block is computed under FSDP.

    Embedding, last LayerNorm and output matrix stay gathered through both passes. The gradients of a block are
    split when they are scattered.
    """
    one, two = (dataclasses.replace(model, num_layers=number).num_parameters for number in (1, 2))
    outside, block = 2 * one - two, two - one
    return _FLOAT32 * (outside + block)


def evaluation_footprint(settings: TrainSettings, num_processes: int) -> Footprint:
    """Live memory of each of ``num_processes`` processes at the peak of a forward pass with loss, without gradients.

    Counted like :func:`footprint`, for an evaluation during training, without the training state.

    Raises:
        RunError: weights are sharded, whose gathering is only counted for steps.
    """
    is_sharded = settings.data_parallel == "fsdp" and num_processes > 1
    if is_sharded or settings.tensor_parallel > 1 or settings.data_parallel.startswith("zero"):
        raise RunError(
            "a forward pass is planned for processes that have all weights: leave --data-parallel "
            f"{settings.data_parallel} and --tensor-parallel {settings.tensor_parallel} out"
        )
    return peak(_parts_of_passes(settings, is_training=False))


def _parts_of_passes(settings: TrainSettings, *, is_training: bool) -> Iterator[dict[str, int]]:
    """Bytes by category at all moments of the passes of this process's rows, with whole weights and no optimizer."""
    own, exchanged = _own_rows(settings), _exchanged_bytes(settings)
    attention = _attention_bytes(own)
    for moment in moments(own, is_training=is_training):
        parts = parts_of(moment)
        if moment.attention is not None:
            parts |= {"attention": attention.get(moment.attention, 0), "exchange": exchanged}
        yield parts


def _exchanged_bytes(settings: TrainSettings) -> int:
    """Largest number of bytes of other processes' keys, values and their gradients held at once."""
    if settings.context_parallel == 1:
        return 0
    rows = rows_of_batch(settings, settings.context_parallel)
    of_row = 2 * math.prod(heads_of(settings.model)) * _element(settings.precision)
    # Ring: the rows in use, those being received, and those being sent.
    return 3 * rows * of_row


def _with_zero(memory: Footprint, settings: TrainSettings, num_processes: int) -> Footprint:
    """Footprint on the device with DeepSpeed's sharding and offloading."""
    parameters = settings.model.num_parameters
    stage = settings.data_parallel
    # ZeRO keeps a copy of the weight and two moments.
    stepped = 0 if settings.offload != "none" else 12 * parameters // num_processes
    share = 0 if settings.offload in ("parameters", "nvme") else 4 * parameters // num_processes
    weights = share if stage == "zero3" else 4 * parameters
    gradients = 4 * parameters if stage == "zero1" else 4 * parameters // num_processes
    return dataclasses.replace(memory, weights=weights, gradients=gradients, optimizer=stepped)


def extension_footprint(settings: ExtensionSettings, config: PreTrainedConfig, num_parameters: int) -> Footprint:
    """Lower bound for a step of a pretrained model of any architecture.

    Counts weights, optimizer state, and what all kinds of layers save for the backward pass: the layer's input, both
    norms, queries, and attention's output. The backward pass frees it while it makes the gradients, so of the gradients
    of a single batch only those count that are larger than that.
    """
    text = config.get_text_config()
    windows = max(1, settings.batch_tokens // settings.context_length)
    tokens = max(windows * settings.context_length, settings.context_length)
    layers = text.num_hidden_layers
    per_layer = (12 + 2 * _element(settings.precision)) * text.hidden_size
    saved = tokens * (
        4 * layers * text.hidden_size + per_layer if settings.gradient_checkpointing else layers * per_layer
    )
    logits = logits_at_once(tokens, text.vocab_size) * 4
    weights = _FLOAT32 * num_parameters
    freed = saved + logits if settings.gradient_accumulation == 1 else 0
    return Footprint(
        weights=weights,
        gradients=max(0, weights - freed),
        optimizer=LEAST_MOMENTS[settings.optimizer] * num_parameters,
        activations=saved,
        loss=logits,
    )


def _element(precision: Precision) -> int:
    return 2 if precision == "auto" else computing_dtype(precision).itemsize


def check_training_memory(settings: TrainSettings, device: str, num_processes: int) -> None:
    """Raise :class:`RunError` if a run certainly needs more memory than the device has free.

    Nine tenths of the estimate (:func:`footprint`) are taken as certain: it was at most 3 % above the measured peak in
    100 steps (``docs/planner.md``), none of them under tensor parallelism, of which the split of the activations is
    estimated less closely. So a run whose estimate is above the free memory by less than that may start. Processes
    share a CPU's memory. There, the copy from which checkpoints are written counts where it is certain: PyTorch keeps
    it from version 2.13 on, unless processes split the weights and gather them for every checkpoint.

    With ``--parallel auto`` the check runs after the choice. If a CPU's memory suffices, but not for what malloc could
    keep of freed blocks, these are returned to the system from now on (:func:`.memory.return_freed_blocks`).
    """
    if settings.parallel == "auto":
        return
    is_split = settings.data_parallel != "ddp" or settings.tensor_parallel > 1
    estimate = footprint(settings, num_processes)
    if settings.async_checkpoints and device == "cpu" and _KEEPS_COPIES and not is_split:
        copy = _copied_bytes(settings.optimizer, settings.model.num_parameters)
        estimate = dataclasses.replace(estimate, checkpoint=copy)
    _check(
        estimate,
        device,
        error=_HIGHEST_ERROR,
        batch="take a smaller --batch-size, --max-tokens or --context-length, or add --model.gradient-checkpointing",
        model="take a smaller --model.embed-dim, --model.ffn-dim or --model.num-layers",
    )


def check_extension_memory(
    settings: ExtensionSettings, config: PreTrainedConfig, num_parameters: int, device: str
) -> None:
    """:func:`check_training_memory` for a context extension run, by the lower bound of its memory."""
    least = extension_footprint(settings, config, num_parameters)
    if settings.async_checkpoints and device == "cpu" and _KEEPS_COPIES:
        least = dataclasses.replace(least, checkpoint=_copied_bytes(settings.optimizer, num_parameters))
    _check(
        least,
        device,
        batch="take smaller --batch-tokens or a smaller --context-length, or add --gradient-checkpointing",
        model="take a smaller model, or call extend_context and train with your own trainer on several devices",
    )


def device_of_process(device: str) -> tuple[str, int]:
    """The device of this process, which has not selected it yet, and the number of processes that share its memory."""
    if device == "cpu":
        return device, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return f"{device}:{os.environ.get('LOCAL_RANK', '0')}", 1


def _check(estimate: Footprint, device: str, *, batch: str, model: str, error: int = 0) -> None:
    """Refuse a run whose estimate less ``error`` percent is above the free memory; 0 is for a lower bound."""
    where, sharing = device_of_process(device)
    total, parts = in_bytes(estimate.total + estimate.checkpoint), estimate.describe()
    # There is one copy, whatever the number of processes that share the memory.
    check_memory(
        (100 - error) * estimate.total // 100 + estimate.checkpoint // sharing,
        where,
        what=f"the run, whose estimate of {total} {parts} is at most {error} % too high,"
        if error
        else f"the run {parts}",
        remedy=batch if estimate.of_batch > estimate.states else model,
        sharing=sharing,
    )
    if device == "cpu" and sys.platform == "linux" and _KEPT_BY_MALLOC * sharing * estimate.total > free_memory("cpu"):
        return_freed_blocks()
