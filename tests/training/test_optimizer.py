"""Muon and AdamW as one optimizer."""

from __future__ import annotations

import copy

import torch

from dilated_attention_pytorch.models import LongNetLM
from dilated_attention_pytorch.training import PRESETS
from dilated_attention_pytorch.training.optimizer import MuonWithAdamW, build_optimizer


def _step(model: LongNetLM, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randint(256, (1, 37))).float().square().mean().backward()
    optimizer.step()


def test_every_parameter_is_in_one_group_and_only_matrices_of_blocks_go_to_muon() -> None:
    settings = PRESETS["tiny"]()
    model = LongNetLM(settings.model)
    optimizer = build_optimizer(model, settings)
    assert isinstance(optimizer, MuonWithAdamW)
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))
    muon = {parameter for group in optimizer.muon.param_groups for parameter in group["params"]}
    expected = {p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks.")}
    assert muon == expected


def test_a_schedule_reaches_both_optimizers_also_after_loading() -> None:
    settings = PRESETS["tiny"]()
    model = LongNetLM(settings.model)
    optimizer = build_optimizer(model, settings)
    assert isinstance(optimizer, MuonWithAdamW)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25)
    optimizer.step()
    schedule.step()
    assert optimizer.muon.param_groups[0]["lr"] == settings.muon_learning_rate * 0.25
    assert optimizer.adamw.param_groups[0]["lr"] == settings.learning_rate * 0.25


def test_a_loaded_optimizer_takes_the_same_steps() -> None:
    settings = PRESETS["tiny"]()
    model = LongNetLM(settings.model)
    optimizer = build_optimizer(model, settings)
    _step(model, optimizer, 1)
    twin = copy.deepcopy(model)
    other = build_optimizer(twin, settings)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (2, 3):
        _step(model, optimizer, seed)
        _step(twin, other, seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
