"""Muon for the matrices, AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .settings import TrainSettings


class ShardedMuon(torch.optim.Muon):
    """:class:`torch.optim.Muon` for matrices of which every process has a part: each is whole while it is stepped.

    Newton-Schulz on the parts would add up products that are rounded to bfloat16; this takes the very steps of one
    process for the same gradients. One matrix at a time is whole, so memory does not grow with the model.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; ``closure`` is evaluated once before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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


def _take_part(sharded: DTensor, whole: torch.Tensor) -> None:
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts():
            part.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        # torch's own names groups and states alone; a copy needs the two as well.
        return {**super().__getstate__(), "_parts": self.parts()}


def build_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    """The optimizer of a run: weight decay on matrices, none on embeddings, biases and norms."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    heads = {name for name, _ in model.named_parameters() if name.split(".")[-2:] == ["head", "weight"]}
    outer = embeddings | {parameter for name, parameter in model.named_parameters() if name in heads}
    matrices = [parameter for parameter in trained if parameter.dim() == 2 and parameter not in outer]
    inside = set(matrices)
    others = [parameter for parameter in trained if parameter not in inside]
    rate, betas = settings.learning_rate, (settings.adam_beta1, settings.adam_beta2)
    if settings.optimizer == "adamw":
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)
    muon = ShardedMuon if any(isinstance(matrix, DTensor) for matrix in matrices) else torch.optim.Muon
    return MuonWithAdamW(
        muon(
            matrices, lr=settings.muon_learning_rate, weight_decay=settings.weight_decay,
            momentum=settings.muon_momentum,
        ),
        torch.optim.AdamW(others, lr=rate, betas=betas, weight_decay=0.0, fused=True),
    )  # fmt: skip
