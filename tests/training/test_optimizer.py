"""Muon and AdamW as one optimizer."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

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
    muon = {parameter for group in optimizer.parts()[0].param_groups for parameter in group["params"]}
    expected = {p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks.")}
    assert muon == expected


def _loaded(model: LongNetLM, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer


def _loaded_by_torch(model: LongNetLM, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    options = StateDictOptions(full_state_dict=True)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    set_optimizer_state_dict(model, optimizer, state, options=options)
    return optimizer


def _prepared(model: LongNetLM, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return AcceleratedOptimizer(optimizer)


def _regrouped(model: LongNetLM, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    return optimizer


@pytest.mark.parametrize("change", [_loaded, _loaded_by_torch, _prepared, _regrouped])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_every_weight_steps_with_the_rate_that_the_schedule_says_whatever_came_before(
    change: Callable[[LongNetLM, torch.optim.Optimizer], torch.optim.Optimizer], kind: Literal["muon", "adamw"]
) -> None:
    Accelerator(cpu=True)
    settings = dataclasses.replace(PRESETS["tiny"](), optimizer=kind)
    model = LongNetLM(settings.model)
    optimizer = build_optimizer(model, settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, (1.0, 0.0, 0.5).__getitem__)
    _step(model, optimizer, 1)
    optimizer = change(model, optimizer)
    schedule.step()
    before = copy.deepcopy(model)
    _step(model, optimizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    schedule.step()
    _step(model, optimizer, 3)
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    rates = {settings.learning_rate * 0.5, *([settings.muon_learning_rate * 0.5] if kind == "muon" else [])}
    assert {group["lr"] for group in optimizer.param_groups} == rates == set(schedule.get_last_lr())


def test_a_copy_steps_its_own_weights_with_its_own_rates() -> None:
    settings = PRESETS["tiny"]()
    model = LongNetLM(settings.model)
    optimizer = build_optimizer(model, settings)
    _step(model, optimizer, 1)
    before = copy.deepcopy(model)
    copies = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    for twin, other in copies:
        for group in other.param_groups:
            group["lr"] *= 0.5
        _step(twin, other, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert [group["lr"] for group in optimizer.param_groups] == [settings.muon_learning_rate, settings.learning_rate]
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    _step(model, optimizer, 2)
    for twin, _ in copies:
        assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))


def test_a_group_that_is_added_is_stepped_by_adamw() -> None:
    settings = PRESETS["tiny"]()
    optimizer = build_optimizer(LongNetLM(settings.model), settings)
    added, alone = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer.add_param_group({"params": [added], "lr": 0.1})
    for weight in (added, alone):
        weight.grad = torch.tensor([1.0, -2.0, 3.0])
    optimizer.step()
    betas = (settings.adam_beta1, settings.adam_beta2)
    torch.optim.AdamW([alone], lr=0.1, betas=betas, weight_decay=0.0, fused=True).step()
    assert torch.equal(added, alone)


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
