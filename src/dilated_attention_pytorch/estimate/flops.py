"""Operations of a model: matrix products per token and attention per pair, forward, in a step, and in a run."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models.token_loss import rows_at_once
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.patterns.flops import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, pair_flops

from .batch import heads_of, recomputed_layers, rows_of_batch, texts_of_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dilated_attention_pytorch.models.config import LongNetConfig
    from dilated_attention_pytorch.training.settings import TrainSettings
    from dilated_attention_pytorch.training.stages import Stages

FORWARD_AND_BACKWARD = 3
"""Forward passes equivalent to a step: the backward pass has two products for each one of the forward pass.
Recomputation (of blocks, and of scores in the backward pass) is not counted as work of the model."""
COUNTED_TOKENS = 16
"""Sequence length for counting the operations of a pretrained model."""


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """Operations of a forward pass; multiplications and additions each count as one."""

    per_token: int
    """Operations of the matrices: 2 per weight."""
    per_pair: int
    """Operations of attention: 4 D per query-key pair, times the query heads per key/value head."""
    patterns: tuple[Pattern, ...]
    """Patterns of the layers."""
    num_kv_heads: int
    """Key/value heads per layer."""

    def of_text(self, length: int) -> int:
        """Operations for one sequence of ``length`` tokens, including the logits of every token."""
        return _text_flops(self, length)


@functools.lru_cache(maxsize=64)
def _text_flops(flops: ForwardFlops, length: int) -> int:
    pairs = sum(
        pattern.num_pairs(length, num_kv_heads=flops.num_kv_heads, is_causal=True) for pattern in flops.patterns
    )
    return flops.per_token * length + flops.per_pair * pairs


def training_flops(flops: ForwardFlops, stages: Stages, step: int) -> int:
    """Operations of the first ``step`` optimizer steps, forward and backward, one window of the longest each."""
    patterns = stages.patterns or (flops.patterns,) * len(stages.lengths)
    counts = zip(stages.windows_after(step), stages.lengths, patterns, strict=True)
    return FORWARD_AND_BACKWARD * sum(
        count * replace(flops, patterns=of_stage).of_text(length) for count, length, of_stage in counts
    )


def documents_flops(flops: ForwardFlops, lengths: Sequence[int]) -> int:
    """Operations for packed documents of these lengths, forward and backward."""
    return FORWARD_AND_BACKWARD * sum(map(flops.of_text, lengths))


def longnet_flops(config: LongNetConfig) -> ForwardFlops:
    """Operation counts of a LongNet, from its configuration."""
    kv_heads, head_dim = heads_of(config)
    per_pair = pair_flops(config.num_heads // kv_heads, head_dim)
    patterns = tuple(config.pattern(layer) for layer in range(config.num_layers))
    return ForwardFlops(2 * config.num_matrix_weights, per_pair, patterns, kv_heads)


def pretrained_flops(model: PreTrainedModel, pattern: Pattern, num_kv_heads: int) -> ForwardFlops:
    """Operation counts of a transformers model whose layers attend under ``pattern``, whatever its layers are.

    Raises:
        RunError: its attention does not follow the pattern.
    """
    others, of_pairs = counted_flops(model, pattern, num_kv_heads)
    return ForwardFlops(others // COUNTED_TOKENS, of_pairs, (pattern,), num_kv_heads)


def counted_flops(
    model: PreTrainedModel, pattern: Pattern, num_kv_heads: int, *, is_step: bool = False
) -> tuple[int, int]:
    """Operations of a pass over a sequence of :data:`COUNTED_TOKENS`, as PyTorch counts them.

    Args:
        model: the model; its gradients are dropped.
        pattern: pattern under which its layers attend.
        num_kv_heads: key/value heads per layer.
        is_step: forward and backward pass with the loss of all tokens, in training mode; otherwise a forward pass.

    Returns:
        Operations of all tokens without attention, and of attention for a pair of the pattern.

    Raises:
        RunError: its attention does not follow the pattern.
    """
    device = next(model.parameters()).device
    tokens = torch.arange(COUNTED_TOKENS, device=device)[None] % model.config.get_text_config().vocab_size
    was_training = model.training
    model.train(is_step)
    with torch.set_grad_enabled(is_step), FlopCounterMode(display=False) as counter:
        out = model(tokens, labels=tokens if is_step else None, use_cache=False)
        if is_step:
            out.loss.backward()
            model.zero_grad()
    model.train(was_training)
    operators = (torch.ops.dilated_attention_pytorch.attend, torch.ops.dilated_attention_pytorch.attend_backward)
    counts = counter.get_flop_counts()["Global"]
    attention = sum(counts.get(operator, 0) for operator in operators)
    pairs = pattern.num_pairs(COUNTED_TOKENS, num_kv_heads=num_kv_heads, is_causal=True)
    of_pairs, rest = divmod(attention, pairs)
    if not of_pairs or rest:
        raise RunError(
            f"the operations of {type(model).__name__} were to be counted by the {pairs} pairs of its pattern, and its "
            f"attention computed {attention}; report this model"
        )
    return sum(counts.values()) - attention, of_pairs


class StepWork(NamedTuple):
    """Operations of matrix products, including recomputation."""

    products: float
    """Matrix products except those of attention."""
    attention: float

    @property
    def total(self) -> float:
        """Sum of both."""
        return self.products + self.attention

    def over(self, processes: int) -> StepWork:
        """Work of one of ``processes`` that share it."""
        return StepWork(self.products / processes, self.attention / processes)


def step_work(settings: TrainSettings) -> StepWork:
    """Operations of a step on all its batches, as ``FlopCounterMode`` counts them.

    A batch takes three products for each of the forward pass, and for attention those of its backward pass too.
    Recomputed blocks add their forward pass, and the logits are computed again where the loss takes several blocks.
    """
    model = settings.model
    flops = longnet_flops(model)
    rows, batches = rows_of_batch(settings), settings.gradient_accumulation
    head = 2 * model.vocab_size * model.embed_dim * rows
    matrices = flops.per_token * rows - head
    of_layer = pairs_of(settings)
    recomputed = recomputed_layers(model)
    attention = sum(of_layer[pattern] for pattern in flops.patterns) * flops.per_pair
    attention += attention * BACKWARD_PRODUCTS // FORWARD_PRODUCTS
    attention += sum(of_layer[flops.patterns[layer]] for layer in recomputed) * flops.per_pair
    # Recomputation stops when nothing more is needed: before the last product, unless dropout follows it.
    assert model.ffn_dim is not None
    last = 0 if model.dropout else 2 * model.ffn_dim * model.embed_dim * rows
    products = 3 * matrices + (matrices // model.num_layers - last) * len(recomputed)
    products += head * (4 if rows > rows_at_once(model.vocab_size) else 3)
    return StepWork(batches * products, batches * attention)


def pairs_of(settings: TrainSettings) -> dict[Pattern, int]:
    """Pairs of a batch under each pattern, over key/value heads."""
    model = settings.model
    kv_heads, _ = heads_of(model)
    return {
        pattern: sum(
            count * pattern.num_pairs(length, num_kv_heads=kv_heads, is_causal=True)
            for length, count in texts_of_batch(settings).items()
        )
        for pattern in dict.fromkeys(model.different_patterns)
    }


def forward_work(settings: TrainSettings) -> StepWork:
    """Operations of a forward pass alone, on one batch."""
    flops, of_layer = longnet_flops(settings.model), pairs_of(settings)
    return StepWork(
        flops.per_token * rows_of_batch(settings), sum(of_layer[pattern] for pattern in flops.patterns) * flops.per_pair
    )


def block_matrices(model: LongNetConfig) -> list[tuple[int, int]]:
    """Input and output widths of the matrices of a block; query, key and value count as one."""
    assert model.ffn_dim is not None
    width, inner = model.embed_dim, model.ffn_dim
    key_width = math.prod(heads_of(model))
    first = 2 * inner if model.activation == "swiglu" else inner
    return [(width, width + 2 * key_width), (width, width), (width, first), (inner, width)]
