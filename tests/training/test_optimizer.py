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
from dilated_attention_pytorch.training.optimizer import MuonWithAdamW, build_adamw, build_optimizer, round_at_random


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


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    values = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum(value.numel() * value.element_size() for value in values)


@pytest.mark.parametrize(("kind", "most"), [("adamw-bf16", 4.01), ("adamw-8bit", 2.2)])
def test_small_moments_take_the_bytes_that_they_promise_and_steps_like_whole_ones(
    kind: Literal["adamw-bf16", "adamw-8bit"], most: float, figure: Callable[[str, str], None]
) -> None:
    """Regression to a matrix behind noise: 300 steps, loading on the way, end as near to it as AdamW's."""
    settings = dataclasses.replace(PRESETS["tiny"](), learning_rate=1e-2)
    torch.manual_seed(0)
    inputs, goal = torch.randn(512, 128), torch.randn(128, 128) / 12
    losses = {}
    for name in ("adamw", kind):
        torch.manual_seed(1)
        weight = torch.nn.Parameter(torch.randn(128, 128) / 12)
        groups = [{"params": [weight], "weight_decay": 0.0}]
        optimizer = build_adamw(name, groups, settings, (0.9, 0.999))
        for step in range(300):
            if step == 150 and name == kind:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = build_adamw(name, [{"params": [weight], "weight_decay": 0.0}], settings, (0.9, 0.999))
                optimizer.load_state_dict(saved)
            optimizer.zero_grad()
            draws = torch.Generator().manual_seed(step)
            rows, noise = torch.randint(512, (64,), generator=draws), torch.randn(64, 128, generator=draws)
            (inputs[rows] @ (weight - goal) + noise).square().mean().backward()
            optimizer.step()
        losses[name] = float((inputs @ (weight - goal)).detach().square().mean())
        per_weight = bytes_of_state(optimizer) / weight.numel()
    assert per_weight <= most
    figure(
        f"{kind}: bytes of state a weight, loss beside AdamW's",
        f"{per_weight:.2f}, {losses[kind]:.2e}, {losses['adamw']:.2e}",
    )
    assert losses[kind] < 1.05 * losses["adamw"]


def test_rounding_at_random_is_right_on_average_and_never_further_than_a_unit() -> None:
    values = torch.randn(1000).exp() * torch.tensor([1.0, -1.0]).repeat(500)
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([round_at_random(values, generator).float() for _ in range(4000)])
    unit = values.abs() * 2.0**-7
    assert bool(((draws - values).abs() <= unit).all())
    # The standard error of the mean of 4,000 draws is at most unit / 126.
    assert bool(((draws.mean(dim=0) - values).abs() < unit / 20).all())
    exact = values.bfloat16().float()
    assert torch.equal(round_at_random(exact, generator).float(), exact)


def test_what_is_not_finite_stays_so_and_a_copy_steps_like_the_original() -> None:
    nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
    rounded = round_at_random(nans, torch.Generator().manual_seed(0)).float()
    assert torch.equal(rounded.isnan(), nans.isnan())
    assert torch.equal(rounded[3:], nans[3:])
    weight = torch.nn.Parameter(torch.randn(64))
    optimizer = build_adamw("adamw-bf16", [{"params": [weight], "weight_decay": 0.0}], PRESETS["tiny"](), (0.9, 0.95))
    copied = copy.deepcopy(optimizer)
    (other,) = copied.param_groups[0]["params"]
    for parameter, each in ((weight, optimizer), (other, copied)):
        parameter.grad = torch.linspace(-1, 1, 64)
        each.step()
        each.step()
    assert torch.equal(weight, other)
    with pytest.raises(ValueError, match=r"weights in float32, got torch\.bfloat16"):
        build_adamw("adamw-bf16", [{"params": [weight.detach().bfloat16()]}], PRESETS["tiny"](), (0.9, 0.95))


def test_moments_in_bfloat16_do_not_stand_still() -> None:
    """Rounded to the nearest, a second moment that should fall by a thousandth a step would stay what it is."""
    settings = PRESETS["tiny"]()
    weight = torch.nn.Parameter(torch.zeros(256))
    optimizer = build_adamw("adamw-bf16", [{"params": [weight], "weight_decay": 0.0}], settings, (0.9, 0.999))
    for step in range(1000):
        weight.grad = torch.full_like(weight, 1.0 if step == 0 else 0.0)
        optimizer.step()
    expected = 0.001 * 0.999**999
    assert float(optimizer.state[weight]["exp_avg_sq"].float().mean()) == pytest.approx(expected, rel=0.02)


def _orthogonalized(gradient: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz's iteration of Muon in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient.double() / gradient.double().norm()
    x = x if x.size(0) <= x.size(1) else x.T
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if gradient.size(0) <= gradient.size(1) else x.T


@pytest.mark.parametrize(("in_hardware", "most"), [(True, 0.3), (False, 3e-5)])
def test_muon_computes_in_float32_where_bfloat16_is_emulated(
    in_hardware: bool, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: in_hardware)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    torch.manual_seed(0)
    settings = PRESETS["tiny"]()
    model = LongNetLM(settings.model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = build_optimizer(model, settings)
    _step(model, optimizer, 1)
    assert isinstance(optimizer, MuonWithAdamW)
    of_muon = {weight for group in optimizer.parts()[0].param_groups for weight in group["params"]}
    rate, decay = settings.muon_learning_rate, settings.weight_decay
    errors = []
    for name, weight in model.named_parameters():
        if weight not in of_muon:
            continue
        assert weight.grad is not None
        ratio = max(1.0, weight.size(0) / weight.size(1)) ** 0.5
        taken = (before[name].double() * (1 - rate * decay) - weight.double()) / (rate * ratio)
        errors.append((taken - _orthogonalized(weight.grad)).abs().max().item())
    assert max(errors) < most
    assert in_hardware == (max(errors) > 1e-3)
