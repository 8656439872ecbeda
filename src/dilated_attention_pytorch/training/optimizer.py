"""Optimizers: Muon for matrices with AdamW for the rest, and AdamW with 8-bit or 16-bit moments."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw
from torch.overrides import TorchFunctionMode

from .autocast import multiplies_bfloat16
from .run_settings import AdamW, RunSettings
from .settings import TrainSettings


class ShardedMuon(torch.optim.Muon):
    """:class:`torch.optim.Muon` for sharded matrices: each is gathered for its step.

    Newton-Schulz on shards would sum products rounded to bfloat16; this takes exactly the steps of a single
    process for the same gradients. One matrix is gathered at a time, so memory does not grow with the model.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; ``closure`` is evaluated once before."""
        loss = _evaluated(closure)
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name in self.defaults}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"]
                full = nn.Parameter(parameter.full_tensor())
                full.grad = parameter.grad.full_tensor()
                muon = torch.optim.Muon([full], **options)
                muon.state[full]["momentum_buffer"] = buffer.full_tensor()
                muon.step()
                _take_part(parameter, full)
                _take_part(buffer, muon.state[full]["momentum_buffer"])
        return loss


def _evaluated(closure: Callable[[], float] | None) -> float | None:
    """The value of a closure of :meth:`torch.optim.Optimizer.step`, evaluated with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _take_part(sharded: DTensor, full: Tensor) -> None:
    """Set the shard of this process from ``full``, which every process has."""
    sharded.copy_(distribute_tensor(full.detach(), sharded.device_mesh, sharded.placements, src_data_rank=None))


class _InFloat32(TorchFunctionMode):
    """Context in which :meth:`torch.Tensor.bfloat16` copies to float32 instead.

    :class:`torch.optim.Muon` casts to bfloat16 before its Newton-Schulz iteration, wherever it runs. On a processor
    that emulates those products the iteration would take three quarters of a training step.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)  # the iteration writes into it
        return func(*args, **(kwargs or {}))


class MuonWithAdamW(torch.optim.Optimizer):
    """:class:`torch.optim.Muon` and :class:`torch.optim.AdamW` with one step, one schedule and one state dict.

    The two have no parameter groups or states of their own: :meth:`parts` gives them this optimizer's current
    ones. Thus loading, torch's tools for sharded states, copying, and schedules that set "lr" act on both.

    Args:
        muon: optimizer of the matrices.
        adamw: optimizer of everything else, and of groups added later.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.defaults = dict(adamw.defaults)
        self._parts = (muon, adamw)

    def parts(self) -> tuple[torch.optim.Muon, torch.optim.AdamW]:
        """The two optimizers, with the current groups and states."""
        muon, adamw = self._parts
        matrices = len(muon.param_groups)
        muon.param_groups, adamw.param_groups = self.param_groups[:matrices], self.param_groups[matrices:]
        muon.state = adamw.state = self.state
        return muon, adamw

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both; ``closure`` is evaluated once before."""
        loss = _evaluated(closure)
        muon, adamw = self.parts()
        device = self.param_groups[0]["params"][0].device.type
        with nullcontext() if multiplies_bfloat16(device) else _InFloat32():
            muon.step()
        adamw.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        # torch's implementation keeps only groups and states; a copy also needs the two optimizers.
        return {**super().__getstate__(), "_parts": self.parts()}


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW with both moments in bfloat16: 4 bytes per parameter instead of 8.

    A step is computed by torch in float32. The moments are then rounded stochastically, so that they are correct in the
    mean over many steps: the second moment changes by less than half a bfloat16 unit per step, and with
    rounding to nearest it would not change at all. The random numbers depend only on seed, step and parameter, so
    processes with the same parameter stay in sync and a resumed run draws the same numbers.

    Args:
        groups: parameters, as for torch's optimizers.
        lr, betas, weight_decay: see :class:`torch.optim.AdamW`.
        seed: seed of the rounding.
    """

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float], weight_decay: float, seed: int) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": 1e-8})
        self.seed = seed
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"moments in bfloat16 are for weights in float32, got {parameter.dtype}; keep the weights in "
                    "float32 and compute under autocast"
                )

    def __getstate__(self) -> dict[str, Any]:
        # torch's implementation keeps only groups and states; a copy must round as the original does.
        return {**super().__getstate__(), "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`torch.optim.Optimizer.load_state_dict`, which would cast moments to their parameter's dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in _MOMENTS:
                state[name] = state[name].to(torch.bfloat16)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; ``closure`` is evaluated once before."""
        loss = _evaluated(closure)
        stepped = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        for number, (group, parameter) in enumerate(stepped):
            if parameter.grad is not None:
                self._step(group, parameter, parameter.grad, number)
        return loss

    def _step(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, number: int) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in _MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        weight, grad = _local(parameter), _local(gradient)
        steps = state["step"].clone().to(weight.device)
        moments = [_local(state[name]).to(torch.float32) for name in _MOMENTS]
        beta1, beta2 = group["betas"]
        adamw(
            [weight],
            [grad],
            [moments[0]],
            [moments[1]],
            [],
            [steps],
            foreach=False,
            capturable=False,
            differentiable=False,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        state["step"] += 1
        drawn = random.Random(f"{self.seed}:{int(state['step'])}:{number}").getrandbits(63)
        generator = torch.Generator(weight.device).manual_seed(drawn)
        for name, moment in zip(_MOMENTS, moments, strict=True):
            _local(state[name]).copy_(round_at_random(moment, generator))


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def round_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """Stochastic rounding from float32 to bfloat16: up or down, unbiased."""
    noise = torch.randint(1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    # A bfloat16 is the upper half of a float32.
    rounded = ((values.contiguous().view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def build_adamw(
    kind: AdamW, groups: list[dict[str, Any]], settings: RunSettings, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """AdamW of one kind over parameter groups with their own weight decay."""
    options: dict[str, Any] = {"lr": settings.learning_rate, "betas": betas, "weight_decay": 0.0}
    if kind == "adamw":
        return torch.optim.AdamW(groups, fused=True, **options)
    if kind == "adamw-bf16":
        return BFloat16AdamW(groups, seed=settings.seed, **options)
    # bitsandbytes warns about missing 4-bit kernels, which are not used here.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from bitsandbytes.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(groups, **options)
    return optimizer


def build_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """The optimizer of a run: weight decay on matrices, none on embeddings, biases and norms."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    heads = {name for name, _ in model.named_parameters() if name.split(".")[-2:] == ["head", "weight"]}
    outer = embeddings | {parameter for name, parameter in model.named_parameters() if name in heads}
    matrices = [parameter for parameter in trained if parameter.dim() == 2 and parameter not in outer]
    inside = set(matrices)
    decayed = {"params": matrices, "weight_decay": settings.weight_decay}
    others = {"params": [parameter for parameter in trained if parameter not in inside], "weight_decay": 0.0}
    betas = (settings.adam_beta1, settings.adam_beta2)
    if settings.optimizer != "muon":
        return build_adamw(settings.optimizer, [decayed, others], settings, betas)
    muon = ShardedMuon if any(isinstance(matrix, DTensor) for matrix in matrices) else torch.optim.Muon
    rest = build_adamw("adamw", [others], settings, betas)
    assert isinstance(rest, torch.optim.AdamW)
    return MuonWithAdamW(
        muon(
            matrices,
            lr=settings.muon_learning_rate,
            weight_decay=settings.weight_decay,
            momentum=settings.muon_momentum,
        ),
        rest,
    )
