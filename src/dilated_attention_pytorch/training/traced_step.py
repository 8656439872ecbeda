"""Trace of a training step's live memory, on fake tensors."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dilated_attention_pytorch.models.causal_lm import LongNetForCausalLM
from dilated_attention_pytorch.models.token_loss import rows_at_once

from .autocast import autocast
from .batch_rows import TRACED_BATCHES, rows_of_batch
from .distribution import Distribution
from .live_bytes import LiveBytes, Phase, Series
from .optimizer import build_optimizer
from .settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Trace:
    """Live bytes after every operation of a step with one batch, or of the last batch of several, by phase."""

    series: dict[Phase, Series]
    num_layers: int
    num_loss_blocks: int


def trace_step(
    settings: TrainSettings,
    distribution: Distribution | None = None,
    *,
    is_fake: bool = True,
    is_training: bool = True,
) -> Trace:
    """Live memory of one process in a step after its first, as computed on a CPU.

    Of a step of several batches, two are taken, and the second is traced. It begins with all gradients, as all later
    ones do, and has as much memory as the first at every operation, or more.

    Args:
        settings: settings of the run; this process's rows are ``batch_size`` times ``context_length``.
        distribution: shards the weights.
        is_fake: use fake tensors; otherwise the step is really computed.
        is_training: trace a training step; otherwise only the forward pass, as in an evaluation.
    """
    live = LiveBytes(follows_resizing=distribution is not None)
    fake = FakeTensorMode() if is_fake else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), _without_collection(), fake, live:
        with live.made_as("weights"):
            model = LongNetForCausalLM.from_longnet_config(settings.model).train(is_training)
            if distribution is not None:
                distribution.apply(model)
                # The full weights before sharding are in reference cycles.
                gc.collect()
        _hook(model, live)
        with live.made_as("temporaries"):
            ids = torch.zeros(settings.batch_size, settings.context_length, dtype=torch.int64)
        if is_training:
            optimizer = build_optimizer(model, settings)
            _make_states(model, optimizer, settings, live)
            losses = []
            for left in reversed(range(min(TRACED_BATCHES, settings.gradient_accumulation))):
                live.is_recording = left == 0
                losses.append(_gradients(model, ids, settings, live))
                if left:
                    # What reference cycles of this batch hold would count in the next one.
                    gc.collect()
            _step(model, optimizer, settings, live)
        else:
            live.is_recording = True
            with torch.no_grad():
                _loss(model, ids, settings)
        live.is_recording = False
    num_loss_blocks = -(-rows_of_batch(settings) // rows_at_once(settings.model.vocab_size))
    return Trace(live.series, settings.model.num_layers, num_loss_blocks)


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


def _make_states(model: nn.Module, optimizer: torch.optim.Optimizer, settings: TrainSettings, live: LiveBytes) -> None:
    """Create the optimizer state with a step on zero gradients."""
    with live.made_as("optimizer"):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


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
        parameter.register_post_accumulate_grad_hook(lambda own: live.mark([_gradient(own)], "gradients"))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _gradients(model: nn.Module, ids: Tensor, settings: TrainSettings, live: LiveBytes) -> Tensor:
    """Forward and backward pass of a batch, as in transformers' trainer; returns the loss, which it keeps."""
    live.phase = ("begin", 0)
    loss = _loss(model, ids, settings)
    live.phase = ("loss backward", 0)
    loss.backward()
    return loss.detach()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, settings: TrainSettings, live: LiveBytes) -> None:
    """Clipping and the optimizer's step, as in transformers' trainer."""
    live.phase = ("optimizer", 0)
    is_split = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    # Clipping makes norms alone, of 4 bytes each. DTensor finds their sharding with fake tensors of the whole shape,
    # which would count as if they had memory.
    with live.unseen() if is_split else contextlib.nullcontext():
        _clip(model, settings)
    with live.made_as("temporaries"):
        optimizer.step()


def _clip(model: nn.Module, settings: TrainSettings) -> None:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    clip_grads_with_norm_(list(model.parameters()), settings.max_grad_norm, get_total_norm(gradients))


def _loss(model: nn.Module, ids: Tensor, settings: TrainSettings) -> Tensor:
    with autocast(settings.precision, ids.device.type):
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=ids.numel(), skip_logits=True).loss
    assert isinstance(loss, Tensor)
    return loss
