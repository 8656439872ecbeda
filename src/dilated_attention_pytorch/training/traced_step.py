"""A training step on tensors that hold nothing: what is alive after every operation of the step that a run takes."""

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
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dilated_attention_pytorch.models.causal_lm import LongNetForCausalLM
from dilated_attention_pytorch.models.token_loss import rows_at_once

from .autocast import autocast
from .distribution import Distribution
from .live_bytes import LiveBytes, Phase, Series
from .optimizer import build_optimizer
from .settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Trace:
    """Bytes alive after every operation of a step, by phase."""

    series: dict[Phase, Series]
    num_layers: int
    num_loss_blocks: int


def trace_step(settings: TrainSettings, distribution: Distribution | None = None, *, is_fake: bool = True) -> Trace:
    """What one process has alive in a step after its first, as it is computed on a CPU.

    Args:
        settings: of the run; this process's rows are ``batch_size`` times ``context_length``.
        distribution: splits the weights.
        is_fake: whether tensors hold nothing; else the step is computed.
    """
    live = LiveBytes(follows_resizing=distribution is not None)
    fake = FakeTensorMode() if is_fake else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), _without_collection(), fake, live:
        with live.made_as("weights"):
            model = LongNetForCausalLM.from_longnet_config(settings.model).train()
            if distribution is not None:
                distribution.apply(model)
                # Whole weights that are split now are in cycles.
                gc.collect()
        optimizer = build_optimizer(model, settings)
        _make_states(model, optimizer, live)
        _hook(model, live)
        with live.made_as("temporaries"):
            ids = torch.zeros(settings.batch_size, settings.context_length, dtype=torch.int64)
        live.is_recording = True
        _step(model, optimizer, ids, settings, live)
        live.is_recording = False
    rows = settings.batch_size * settings.context_length
    return Trace(live.series, settings.model.num_layers, -(-rows // rows_at_once(settings.model.vocab_size)))


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Have Python collect no cycles within: when it does is chance, and what cycles hold would come and go with it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _make_states(model: nn.Module, optimizer: torch.optim.Optimizer, live: LiveBytes) -> None:
    """Have the optimizer make what it keeps, by a step with gradients of zero."""
    with live.made_as("optimizer"):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def _hook(model: LongNetForCausalLM, live: LiveBytes) -> None:
    """Have ``live`` know the phases, and what becomes a gradient."""
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

    longnet.out_proj.register_forward_pre_hook(enter_loss)
    longnet.layernorm.register_forward_pre_hook(lambda *_: setattr(live, "phase", ("loss", 0)))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: live.mark([_gradient(own)], "gradients"))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, settings: TrainSettings, live: LiveBytes
) -> None:
    """What transformers' trainer does in a step with one batch."""
    with autocast(settings.precision, ids.device.type):
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=ids.numel(), skip_logits=True).loss
    live.phase = ("loss backward", 0)
    loss.backward()
    live.phase = ("optimizer", 0)
    with live.made_as("temporaries"):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        clip_grads_with_norm_(list(model.parameters()), settings.max_grad_norm, get_total_norm(gradients))
        optimizer.step()
