"""Muon for the matrices, AdamW for the rest, as one optimizer; and AdamW with moments of 8 or 16 bits."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

from .run_settings import AdamW, RunSettings
from .settings import TrainSettings


class ShardedMuon(torch.optim.Muon):
    """:class:`torch.optim.Muon` for matrices of which every process has a part: each is whole while it is stepped.

    Newton-Schulz on the parts would add up products that are rounded to bfloat16; this takes the very steps of one
    process for the same gradients. One matrix at a time is whole, so memory does not grow with the model.
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
                whole = nn.Parameter(parameter.full_tensor())
                whole.grad = parameter.grad.full_tensor()
                muon = torch.optim.Muon([whole], **options)
                muon.state[whole]["momentum_buffer"] = buffer.full_tensor()
                muon.step()
                _take_part(parameter, whole)
                _take_part(buffer, muon.state[whole]["momentum_buffer"])
        return loss


def _evaluated(closure: Callable[[], float] | None) -> float | None:
    """What a closure of :meth:`torch.optim.Optimizer.step` returns, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _take_part(sharded: DTensor, whole: Tensor) -> None:
    """Set ``sharded`` to ``whole``, which every process has."""
    sharded.copy_(distribute_tensor(whole.detach(), sharded.device_mesh, sharded.placements, src_data_rank=None))


class MuonWithAdamW(torch.optim.Optimizer):
    """:class:`torch.optim.Muon` and :class:`torch.optim.AdamW` behind one step, one schedule and one state dict.

    The two have no parameter groups and no states of their own: :meth:`parts` gives them those that are here at that
    moment. So whatever puts new ones here (loading, torch's tools for sharded states, copying), a schedule that sets
    "lr" here sets what they step with.

    Args:
        muon: the optimizer of the matrices.
        adamw: the optimizer of everything else, and of groups that are added later.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.defaults = dict(adamw.defaults)
        self._parts = (muon, adamw)

    def parts(self) -> tuple[torch.optim.Muon, torch.optim.AdamW]:
        """The two, with the groups and states of this optimizer."""
        muon, adamw = self._parts
        matrices = len(muon.param_groups)
        muon.param_groups, adamw.param_groups = self.param_groups[:matrices], self.param_groups[matrices:]
        muon.state = adamw.state = self.state
        return muon, adamw

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both; ``closure`` is evaluated once before."""
        loss = _evaluated(closure)
        for part in self.parts():
            part.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        # torch's own names groups and states alone; a copy needs the two as well.
        return {**super().__getstate__(), "_parts": self.parts()}


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW whose two moments are kept in bfloat16: 4 bytes a parameter instead of 8.

    A step is torch's own, in float32. What it leaves is rounded up or down at random, by the distance to both, so that
    the mean of many steps is right: the second moment changes by less than half a unit of bfloat16 in a step, and
    rounded to the nearest it would stand still. The draws depend on the seed, the step and the parameter alone, so
    that processes that hold the same parameter stay alike and a run that goes on draws as it would have drawn.

    Args:
        groups: parameters, as torch's optimizers take them.
        lr, betas, weight_decay: see :class:`torch.optim.AdamW`.
        seed: of the draws.
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
        # torch's own names groups and states alone; a copy draws as the original would.
        return {**super().__getstate__(), "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`torch.optim.Optimizer.load_state_dict`, which would give moments the dtype of their parameter."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in _MOMENTS:
                state[name] = state[name].to(torch.bfloat16)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; ``closure`` is evaluated once before."""
        loss = _evaluated(closure)
        places = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        for place, (group, parameter) in enumerate(places):
            if parameter.grad is not None:
                self._step(group, parameter, parameter.grad, place)
        return loss

    def _step(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, place: int) -> None:
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
            [weight], [grad], [moments[0]], [moments[1]], [], [steps], foreach=False, capturable=False,
            differentiable=False, fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        state["step"] += 1
        drawn = random.Random(f"{self.seed}:{int(state['step'])}:{place}").getrandbits(63)
        generator = torch.Generator(weight.device).manual_seed(drawn)
        for name, moment in zip(_MOMENTS, moments, strict=True):
            _local(state[name]).copy_(round_at_random(moment, generator))


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def round_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """float32 to bfloat16, up or down with the probability that makes the mean the value itself."""
    noise = torch.randint(1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    # A bfloat16 is the upper half of a float32.
    rounded = ((values.contiguous().view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def build_adamw(
    kind: AdamW, groups: list[dict[str, Any]], settings: RunSettings, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """AdamW of one kind over parameter groups that each say their weight decay."""
    options: dict[str, Any] = {"lr": settings.learning_rate, "betas": betas, "weight_decay": 0.0}
    if kind == "adamw":
        return torch.optim.AdamW(groups, fused=True, **options)
    if kind == "adamw-bf16":
        return BFloat16AdamW(groups, seed=settings.seed, **options)
    # It looks for kernels of 4-bit products, of which none are used here, and warns that there are none.
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
            matrices, lr=settings.muon_learning_rate, weight_decay=settings.weight_decay,
            momentum=settings.muon_momentum,
        ),
        rest,
    )  # fmt: skip
