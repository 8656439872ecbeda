"""Operations of a step on all its batches: matrix products, and attention."""

from __future__ import annotations

from typing import NamedTuple

from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.token_loss import rows_at_once
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.training.batch_rows import rows_of_batch, texts_of_batch
from dilated_attention_pytorch.training.flops import longnet_flops
from dilated_attention_pytorch.training.settings import TrainSettings


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

    A batch takes three products for each of the forward pass, and seven for the two of attention. Recomputed blocks
    add their forward pass, and the logits are computed again where the loss takes several blocks of them.
    """
    model = settings.model
    flops = longnet_flops(model)
    rows, batches = rows_of_batch(settings), settings.gradient_accumulation
    head = 2 * model.vocab_size * model.embed_dim * rows
    matrices = flops.per_token * rows - head
    of_layer = pairs_of(settings)
    again = model.gradient_checkpointing
    recomputed = [layer for layer in range(model.num_layers) if again and model.is_recomputed(layer)]
    attention = sum(of_layer[pattern] for pattern in flops.patterns) * flops.per_pair * 14 // 4
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
    assert model.num_kv_heads is not None
    return {
        pattern: sum(
            count * pattern.num_pairs(length, num_kv_heads=model.num_kv_heads, is_causal=True)
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


def shapes_of(model: LongNetConfig) -> list[tuple[int, int]]:
    """Input and output widths of a block's matrices, and of the output matrix."""
    assert model.num_kv_heads is not None
    assert model.ffn_dim is not None
    width, inner = model.embed_dim, model.ffn_dim
    key_width = width // model.num_heads * model.num_kv_heads
    first = 2 * inner if model.activation == "swiglu" else inner
    return [(width, width + 2 * key_width), (width, width), (width, first), (inner, width), (width, model.vocab_size)]
