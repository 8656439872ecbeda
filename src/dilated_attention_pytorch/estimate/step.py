"""Live memory in the forward and backward pass of a training step, from traces on fake tensors.

Live memory after an operation is linear in the number of layers and in the number of loss blocks. So passes with few
layers and few loss blocks are traced, and one with more of each; the rest follows exactly by linear extrapolation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dilated_attention_pytorch.models.config import LongNetConfig
from dilated_attention_pytorch.models.token_loss import rows_at_once
from dilated_attention_pytorch.training.autocast import autocast
from dilated_attention_pytorch.training.settings import TrainSettings

from .batch import period_of_positions, rows_of_batch, with_length, with_num_layers
from .live_bytes import LiveBytes, Moment, Phase

if TYPE_CHECKING:
    from dilated_attention_pytorch.models.causal_lm import LongNetForCausalLM

_LOSS_BLOCKS = 5
"""Minimum number of loss blocks in a traced sequence."""
_LOSS_BLOCKS_AT_EITHER_END = 2


def trace_step(settings: TrainSettings, *, is_fake: bool = True, is_training: bool = True) -> dict[Phase, list[Moment]]:
    """Live memory of one process in the passes of a batch, by phase, as computed on a CPU.

    In a step of several batches, all gradients are there from the beginning, as they are from the second batch on.

    Args:
        settings: settings of the run; this process's rows are ``batch_size`` times ``context_length``.
        is_fake: use fake tensors; otherwise the passes are really computed.
        is_training: trace forward and backward pass; otherwise only the forward pass, as in an evaluation.
    """
    from dilated_attention_pytorch.models.causal_lm import LongNetForCausalLM  # transformers, which takes seconds

    live = LiveBytes()
    fake = FakeTensorMode() if is_fake else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), _without_collection(), fake, live:
        with live.made_as("weights"):
            model = LongNetForCausalLM.from_longnet_config(settings.model).train(is_training)
        _hook(model, live)
        with live.made_as("temporaries"):
            ids = torch.zeros(settings.batch_size, settings.context_length, dtype=torch.int64)
        if settings.gradient_accumulation > 1 and is_training:
            with live.made_as("gradients"):
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
        live.phase, live.is_recording = ("begin", 0), True
        with torch.set_grad_enabled(is_training), autocast(settings.precision, ids.device.type):
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=ids.numel(), skip_logits=True).loss
        if is_training:
            live.phase = ("loss backward", 0)
            loss.backward()
        live.is_recording = False
    return live.series


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Disable garbage collection, whose timing is not deterministic and would affect the counts."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _hook(model: LongNetForCausalLM, live: LiveBytes) -> None:
    """Report the phases and the gradients to ``live`` through hooks."""
    longnet = model.model

    def enter(layer: int, *_: Any) -> None:
        live.phase = ("forward" if live.phase[0] in ("begin", "forward") else "backward", layer)

    def leave(layer: int, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if live.phase[0] == "forward" and output.requires_grad:
            output.register_hook(functools.partial(enter_backward, layer))

    def enter_backward(layer: int, gradient: Tensor) -> None:
        live.phase = ("backward", layer)

    for layer, block in enumerate(longnet.blocks):
        block.register_forward_pre_hook(functools.partial(enter, layer))
        block.register_forward_hook(functools.partial(leave, layer))

    def enter_loss(*_: Any) -> None:
        name, number = live.phase
        if name in ("loss", "loss backward"):
            live.phase = (name, number + 1)

    longnet.head.register_forward_pre_hook(enter_loss)
    longnet.layernorm.register_forward_pre_hook(lambda *_: setattr(live, "phase", ("loss", 0)))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: live.mark([own.grad], "gradients"))


@dataclass(frozen=True, slots=True)
class _Passes:
    """The settings that a trace reads except layers and length, compared by their text: settings have no hash."""

    text: str
    settings: TrainSettings = field(compare=False)

    @classmethod
    def of(cls, settings: TrainSettings) -> _Passes:
        """The settings, with the same text for any number of layers and any length."""
        read = (
            dataclasses.replace(settings.model, num_layers=1),
            settings.batch_size,
            settings.precision,
            settings.gradient_accumulation > 1,
        )
        return cls(repr(read), settings)


def moments(settings: TrainSettings, *, is_training: bool = True) -> Iterator[Moment]:
    """All operations of the passes of a batch, or of its forward pass alone, at which memory may peak."""
    model = settings.model
    period = _period(model)
    # The first and last blocks differ from those in between.
    num_layers = 2 * period + 2
    num_layers += (model.num_layers - num_layers) % period
    layers = max(0, (model.num_layers - num_layers) // period)
    if layers <= 1:
        num_layers, layers = model.num_layers, 0
    of_block = rows_at_once(model.vocab_size)
    # Lengths that differ by this have a whole number of blocks more or less.
    step = of_block // math.gcd(of_block, settings.batch_size)
    lengths = (rows_of_batch(settings) // of_block - _LOSS_BLOCKS) // (settings.batch_size * step // of_block)
    lengths = lengths if lengths > 1 else 0
    length = settings.context_length - lengths * step
    traced = functools.partial(_traced, _Passes.of(settings), is_training)
    base = traced(num_layers, length)
    deeper = traced(num_layers + period, length) if layers else base
    longer = traced(num_layers, length + step) if lengths else base
    both = traced(num_layers + period, length + step) if layers and lengths else deeper if layers else longer
    for key, series in base.items():
        four = (series, deeper[key], longer[key], both[key])
        assert len(set(map(len, four))) == 1, f"phase {key} is not the same in all traces"
        for first, *others in zip(*four, strict=True):
            counts = tuple(
                a + layers * (b - a) + lengths * (c - a) + layers * lengths * (d - b - c + a)
                for a, b, c, d in zip(first.counts, *(other.counts for other in others), strict=True)
            )
            yield first._replace(counts=counts)


@functools.lru_cache(maxsize=32)
def _traced(passes: _Passes, is_training: bool, num_layers: int, length: int) -> dict[tuple[str, int], list[Moment]]:
    """The phases of a trace by their index from the start (0, 1, ...) or from the end (-1, -2, ...).

    Those in the middle, which never peak, are left out.
    """
    # A trace reads no pattern.
    model = with_num_layers(passes.settings.model, num_layers)
    settings = with_length(passes.settings, length, model=model, random_local_windows=())
    num_blocks = -(-rows_of_batch(settings) // rows_at_once(model.vocab_size))
    near_layers = _period(model) + 1
    near_phases = {}
    for (name, number), series in trace_step(settings, is_training=is_training).items():
        # Blocks repeat with this period, except the first and the last.
        is_loss = name.startswith("loss")
        near = _LOSS_BLOCKS_AT_EITHER_END if is_loss else near_layers
        last = num_blocks if is_loss else num_layers - 1
        if number < near:
            near_phases[name, number] = series
        elif number > last - near:
            near_phases[name, number - last - 1] = series
    return near_phases


def _period(model: LongNetConfig) -> int:
    """Period in layers of the recomputation and of the positions."""
    recomputation = model.checkpoint_every if model.gradient_checkpointing else 1
    return math.lcm(recomputation, period_of_positions(model))
