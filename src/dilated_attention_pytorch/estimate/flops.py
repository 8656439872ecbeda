"""Operations of a model: matrix products per token and attention per pair, forward, in a step, and in a run."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models.token_loss import rows_at_once
from dilated_attention_pytorch.ops.call import Call
from dilated_attention_pytorch.ops.operators import call_of
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern
from dilated_attention_pytorch.patterns.flops import (
    BACKWARD_PRODUCTS,
    FORWARD_PRODUCTS,
    backward_flops,
    forward_flops,
)

from .attention import GRADIENTS
from .batch import heads_of, mean_of_steps, recomputed_layers, rows_of_batch, texts_of_batch

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


class AttentionCall(NamedTuple):
    """The attention of a layer, over a whole sequence."""

    pattern: Pattern
    is_causal: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a row of query and key."""
    value_dim: int

    @classmethod
    def of(cls, call: Call) -> AttentionCall:
        """The sizes of a call of :func:`dilated_attention_pytorch.attend`."""
        assert call.pattern is not None
        num_heads, head_dim = call.query.shape[2:]
        return cls(call.pattern, call.is_causal, num_heads, call.key.shape[2], head_dim, call.value.shape[3])

    def num_pairs(self, length: int) -> int:
        """Query-key pairs of all query heads in a sequence of ``length`` tokens."""
        pairs = self.pattern.num_pairs(length, num_kv_heads=self.num_kv_heads, is_causal=self.is_causal)
        return self.num_heads // self.num_kv_heads * pairs


@dataclass(frozen=True, slots=True)
class PassFlops:
    """Operations of a forward pass, or of a step; multiplications and additions each count as one."""

    per_token: int
    """Operations of the matrices: 2 per weight in a forward pass."""
    forward: tuple[AttentionCall, ...]
    """The forward passes of attention, one per layer, and those that recomputation adds."""
    backward: tuple[AttentionCall, ...] = ()
    """The backward passes of attention."""

    def attention(self, length: int) -> int:
        """Operations of attention for one sequence of ``length`` tokens."""
        return _attention_flops(self, length)

    def density(self, length: int) -> float:
        """Fraction of the pairs of dense attention, of all layers."""
        dense = [call._replace(pattern=DilatedPattern([length], [1])).num_pairs(length) for call in self.forward]
        return sum(call.num_pairs(length) for call in self.forward) / sum(dense)

    def of_text(self, length: int) -> int:
        """Operations for one sequence of ``length`` tokens, including the logits of every token."""
        return self.per_token * length + self.attention(length)

    def under(self, patterns: Sequence[Pattern]) -> PassFlops:
        """A forward pass of which the layers have other patterns; the same one if there are none."""
        if not patterns:
            return self
        pairs = zip(self.forward, patterns, strict=True)
        return replace(self, forward=tuple(call._replace(pattern=pattern) for call, pattern in pairs))


@functools.lru_cache(maxsize=64)
def _attention_flops(flops: PassFlops, length: int) -> int:
    with _real_tensors():
        return sum(
            number * of_pairs(call.num_pairs(length), call.head_dim, call.value_dim)
            for calls, of_pairs in ((flops.forward, forward_flops), (flops.backward, backward_flops))
            for call, number in Counter(calls).items()
        )


@contextmanager
def _real_tensors() -> Iterator[None]:
    """Context in which tensors are real where those of a model are not: pairs of rules are counted with tensors."""
    with unset_fake_temporarily(), _disable_current_modes():
        yield


def training_flops(flops: PassFlops, stages: Stages, step: int) -> int:
    """Operations of the first ``step`` optimizer steps, forward and backward, one window of the longest each."""
    texts = stages.texts_after(step)
    return FORWARD_AND_BACKWARD * sum(count * flops.under(own).of_text(length) for count, length, own in texts)


def documents_flops(flops: PassFlops, lengths: Sequence[int]) -> int:
    """Operations for packed documents of these lengths, forward and backward."""
    return FORWARD_AND_BACKWARD * sum(map(flops.of_text, lengths))


def longnet_flops(config: LongNetConfig) -> PassFlops:
    """Operation counts of a forward pass of a LongNet, from its configuration."""
    kv_heads, head_dim = heads_of(config)
    layers = map(config.pattern, range(config.num_layers))
    calls = (AttentionCall(pattern, True, config.num_heads, kv_heads, head_dim, head_dim) for pattern in layers)
    return PassFlops(2 * config.num_matrix_weights, tuple(calls))


def pretrained_flops(model: PreTrainedModel, *, is_step: bool = False) -> PassFlops:
    """Operation counts of a transformers model with a pattern, from the calls that its layers make.

    Layers may attend under different patterns, such as their own sliding windows, and with heads of different widths.
    PyTorch counts the operations on a sequence of :data:`COUNTED_TOKENS`.

    Args:
        model: the model; its gradients are dropped.
        is_step: forward and backward pass with the loss of all tokens, in training mode; otherwise a forward pass.

    Raises:
        RunError: its layers do not attend over the whole sequence by :func:`dilated_attention_pytorch.attend`.
    """
    ours, device = torch.ops.dilated_attention_pytorch, next(model.parameters()).device
    calls: dict[Any, list[AttentionCall]] = {ours.attend: [], ours.attend_backward: []}
    operands = {ours.attend: 0, ours.attend_backward: GRADIENTS}
    noting = {operator: _noting(calls[operator], flop_registry[operator], operands[operator]) for operator in calls}
    tokens = torch.arange(COUNTED_TOKENS, device=device)[None] % model.config.get_text_config().vocab_size
    was_training = model.training
    model.train(is_step)
    with torch.set_grad_enabled(is_step), FlopCounterMode(display=False, custom_mapping=noting) as counter:
        out = model(tokens, labels=tokens if is_step else None, use_cache=False)
        if is_step:
            out.loss.backward()
            model.zero_grad()
    model.train(was_training)
    counts = counter.get_flop_counts()["Global"]
    others = sum(counts.values()) - sum(counts.get(operator, 0) for operator in calls)
    flops = PassFlops(others // COUNTED_TOKENS, *map(tuple, calls.values()))
    expected = sum(counts.values()) - others
    if not expected or flops.attention(COUNTED_TOKENS) != expected:
        raise RunError(
            f"the operations of {type(model).__name__} were to be counted by the pairs of its patterns, "
            f"{flops.attention(COUNTED_TOKENS)} for {COUNTED_TOKENS} tokens, and its attention computed {expected}; "
            "report this model"
        )
    return flops


def _noting(calls: list[AttentionCall], formula: Callable[..., int], first: int) -> Callable[..., int]:
    """The formula of an operator whose operands from ``first`` on are those of a call, which is noted."""

    def of_operator(*arguments: Any, **options: Any) -> int:
        calls.append(AttentionCall.of(call_of(*arguments[first:])))
        with _real_tensors():
            return formula(*arguments, **options)

    of_operator._get_raw = True  # type: ignore[attr-defined]  # as register_flop_formula(get_raw=True) marks it
    return of_operator


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

    A batch takes three products for each of the forward pass, and for attention those of its backward pass too; with
    random_local_windows in the mean over the steps of the run. Recomputed blocks add their forward pass, and the logits
    are computed again where the loss takes several blocks.
    """
    model = settings.model
    flops = longnet_flops(model)
    rows, batches = rows_of_batch(settings), settings.gradient_accumulation
    head = 2 * model.vocab_size * model.embed_dim * rows
    matrices = flops.per_token * rows - head
    recomputed, of_layer = recomputed_layers(model), _attention_of_layers(settings, flops)
    attention = sum(of_layer) * (FORWARD_PRODUCTS + BACKWARD_PRODUCTS) // FORWARD_PRODUCTS
    attention += sum(of_layer[layer] for layer in recomputed)
    # Recomputation stops when nothing more is needed: before the last product, unless dropout follows it.
    assert model.ffn_dim is not None
    last = 0 if model.dropout else 2 * model.ffn_dim * model.embed_dim * rows
    products = 3 * matrices + (matrices // model.num_layers - last) * len(recomputed)
    products += head * (4 if rows > rows_at_once(model.vocab_size) else 3)
    return StepWork(batches * products, batches * attention)


def pairs_of(settings: TrainSettings) -> dict[Pattern, int]:
    """Pairs of a batch under each pattern of the model, over key/value heads: the mean over the steps of the run."""
    kv_heads, _ = heads_of(settings.model)

    def pairs(pattern: Pattern) -> int:
        return sum(
            count * pattern.num_pairs(length, num_kv_heads=kv_heads, is_causal=True)
            for length, count in texts_of_batch(settings).items()
        )

    return {
        pattern: mean_of_steps(settings, pattern, pairs) for pattern in dict.fromkeys(settings.model.different_patterns)
    }


def forward_work(settings: TrainSettings) -> StepWork:
    """Operations of a forward pass alone, on one batch."""
    flops = longnet_flops(settings.model)
    return StepWork(flops.per_token * rows_of_batch(settings), sum(_attention_of_layers(settings, flops)))


def _attention_of_layers(settings: TrainSettings, flops: PassFlops) -> list[int]:
    """Operations of attention of every layer in a forward pass on one batch."""
    pairs = pairs_of(settings)
    ratio = settings.model.num_heads // heads_of(settings.model)[0]
    return [forward_flops(ratio * pairs[call.pattern], call.head_dim, call.value_dim) for call in flops.forward]


def block_matrices(model: LongNetConfig) -> list[tuple[int, int]]:
    """Input and output widths of the matrices of a block; query, key and value count as one."""
    assert model.ffn_dim is not None
    width, inner = model.embed_dim, model.ffn_dim
    key_width = math.prod(heads_of(model))
    first = 2 * inner if model.activation == "swiglu" else inner
    gates = [(width, model.num_heads)] if model.head_gates else []
    return [(width, width + 2 * key_width), *gates, (width, width), (width, first), (inner, width)]
