"""Time and memory of one measured training step, and of the same step with other settings."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .autocast import autocast
from .optimizer import build_optimizer
from .run_settings import Precision
from .settings import TrainSettings

if TYPE_CHECKING:
    from dilated_attention_pytorch.models import LongNetForCausalLM

    from .windows import Window

_STEPS = 3
_MOST_OPERATORS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Cost of one step in one process."""

    forward: float
    """Seconds of the forward pass, including the loss."""
    backward: float
    """Seconds of the backward pass."""
    optimizer: float
    """Seconds of gradient clipping and the optimizer step."""
    weights: int
    """Bytes of the weights."""
    gradients: int
    """Bytes of the gradients."""
    moments: int
    """Bytes of the optimizer state."""
    saved: int
    """Bytes saved for the backward pass, excluding weights."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.backward + self.optimizer

    @property
    def bytes(self) -> int:
        """Total bytes at the end of a later step's forward pass."""
        return self.weights + self.gradients + self.moments + self.saved


def saved_bytes(compute: Callable[[], Tensor], weights: nn.Module) -> tuple[Tensor, int]:
    """The result of ``compute``, and the bytes it saves for the backward pass: each storage once, without weights."""
    own = {weight.untyped_storage().data_ptr() for weight in weights.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = compute()
    return result, sum(kept.values())


def measure_step(settings: TrainSettings, batch: Window, device: str) -> StepCost:
    """The median cost of a few steps of a new model on one batch, after a warm-up step.

    Args:
        settings: settings of the run; distribution is ignored.
        batch: a batch collated by :class:`RunData`.
        device: "cpu" or "cuda".
    """
    model, optimizer, inputs = _prepared(settings, batch, device)
    seconds: list[tuple[float, float, float]] = []
    saved = 0
    for number in range(_STEPS + 1):
        times = [_now(device)]
        loss, saved = saved_bytes(lambda: _loss(model, inputs, settings.precision, device), model)
        times.append(_now(device))
        loss.backward()
        times.append(_now(device))
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        times.append(_now(device))
        gradients = sum(_nbytes(weight.grad) for weight in model.parameters() if weight.grad is not None)
        optimizer.zero_grad()
        if number:
            seconds.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
    forward, backward, step = (statistics.median(column) for column in zip(*seconds, strict=True))
    moments = sum(
        _nbytes(value) for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    )
    weights = sum(map(_nbytes, model.parameters()))
    return StepCost(
        forward=forward,
        backward=backward,
        optimizer=step,
        weights=weights,
        gradients=gradients,
        moments=moments,
        saved=saved,
    )


def slowest_operators(settings: TrainSettings, batch: Window, device: str) -> list[tuple[str, float]]:
    """PyTorch operators by the fraction of a step's time spent in them (self time), largest first."""
    from torch.profiler import ProfilerActivity, profile

    model, optimizer, inputs = _prepared(settings, batch, device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]

    def step() -> None:
        _loss(model, inputs, settings.precision, device).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(_STEPS):
            step()
    name = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    times = {entry.key: float(getattr(entry, name)) for entry in profiler.key_averages()}
    whole = sum(times.values())
    ordered = sorted(times.items(), key=lambda item: -item[1])[:_MOST_OPERATORS]
    return [(key, spent / whole) for key, spent in ordered]


def alternatives(settings: TrainSettings) -> dict[str, TrainSettings]:
    """Alternative settings for the same step, by the flags that select them."""
    model = settings.model
    found: dict[str, TrainSettings] = {}

    def with_model(flag: str, **changes: Any) -> None:
        found[flag] = dataclasses.replace(settings, model=dataclasses.replace(model, **changes))

    if model.gradient_checkpointing:
        with_model("without --model.gradient-checkpointing", gradient_checkpointing=False, checkpoint_every=1)
    else:
        with_model("--model.gradient-checkpointing", gradient_checkpointing=True)
    other: Precision = "bfloat16" if settings.precision in ("float32", "tf32") else "float32"
    found[f"--precision {other}"] = dataclasses.replace(settings, precision=other)
    if settings.optimizer != "adamw-bf16":
        found["--optimizer adamw-bf16"] = dataclasses.replace(settings, optimizer="adamw-bf16")
    return found


def _prepared(
    settings: TrainSettings, batch: Window, device: str
) -> tuple[LongNetForCausalLM, torch.optim.Optimizer, dict[str, Tensor]]:
    from dilated_attention_pytorch.models import LongNetForCausalLM

    torch.manual_seed(settings.seed)
    model = LongNetForCausalLM.from_longnet_config(settings.model)
    torch.nn.Module.to(model, device).train()
    inputs = {name: value.to(device) for name, value in batch.items()}
    return model, build_optimizer(model, settings), inputs


def _loss(model: LongNetForCausalLM, inputs: dict[str, Tensor], precision: str, device: str) -> Tensor:
    with autocast(precision, device):
        loss = model(**inputs, skip_logits=True).loss
    assert isinstance(loss, Tensor)
    return loss


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
