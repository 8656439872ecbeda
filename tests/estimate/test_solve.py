"""Plans solved backwards are plans: what is found fits, and one more does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dilated_attention_pytorch.data_sheets import sheet_of
from dilated_attention_pytorch.estimate import (
    Device,
    changes_that_help,
    fewest_processes,
    largest_model,
    meshes,
    plan_run,
)
from dilated_attention_pytorch.estimate.solve import with_layers
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import PRESETS, TrainSettings


def _settings(**changes: Any) -> TrainSettings:
    model = LongNetConfig(
        embed_dim=64, num_layers=4, num_heads=4, num_kv_heads=2, segment_lengths=(16, 64), dilation_rates=(1, 4)
    )
    given = {"context_length": 1024, "batch_size": 1, "precision": "float32", "optimizer": "adamw", **changes}
    return dataclasses.replace(PRESETS["tiny"](), model=model, **given)


def _device(memory: int) -> Device:
    return Device(sheet=dataclasses.replace(sheet_of("H200"), memory_bytes=memory))


def test_meshes_have_all_processes_and_the_first_is_the_fastest_that_fits() -> None:
    settings = _settings()
    found = meshes(settings, 4, _device(10**9))
    assert {mesh.data * mesh.context * mesh.tensor for mesh in found} == {4}
    assert {(mesh.data, mesh.context, mesh.tensor) for mesh in found} >= {(4, 1, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2)}
    # Two key/value heads are not split over four processes.
    assert all(mesh.tensor <= 2 for mesh in found)
    fitting = [mesh.plan.rates.tokens_per_second for mesh in found if mesh.plan.fits]
    assert fitting == sorted(fitting, reverse=True)
    assert [mesh.plan.fits for mesh in found] == sorted((mesh.plan.fits for mesh in found), reverse=True)


def test_a_mesh_names_what_is_split() -> None:
    (alone,), two = meshes(_settings(), 1, _device(10**9)), meshes(_settings(), 2, _device(10**9))
    assert alone.describe().startswith("1 (no flags): ")
    assert any(mesh.describe().startswith("2 = 2 context (--context-parallel 2") for mesh in two)


def test_the_fewest_devices_fit_and_one_less_does_not() -> None:
    settings = _settings()
    alone = plan_run(settings, 1, _device(10**9)).footprint.total
    device = _device(int(alone / 2.5))
    found = fewest_processes(settings, device)
    assert found is not None
    number = found.data * found.context * found.tensor
    assert number == 3
    assert found.plan.fits
    assert not any(mesh.plan.fits for mesh in meshes(settings, number - 1, device))
    assert fewest_processes(settings, _device(alone)) is not None


def test_the_largest_model_fits_and_one_layer_more_does_not() -> None:
    settings = _settings()
    device = _device(10**8)
    found = largest_model(settings, 1, device)
    assert found is not None
    assert found.plan.fits
    more = dataclasses.replace(settings, model=with_layers(settings.model, found.model.num_layers + 1))
    assert not plan_run(more, 1, device).fits
    # The shape is the same: layers, width, heads and feed-forward grow alike.
    assert found.model.embed_dim / found.model.num_layers == pytest.approx(64 / 4, rel=0.2)
    assert largest_model(settings, 1, _device(10**5)) is None


def test_the_largest_hybrid_keeps_its_far_layer() -> None:
    hybrid = {
        "segment_lengths": (),
        "dilation_rates": (),
        "layer_patterns": ["local_window(3)"] * 2 + ["DilatedPattern([64], [1])"],
    }
    settings = _settings()
    settings = dataclasses.replace(settings, model=dataclasses.replace(settings.model, **hybrid))
    three = dataclasses.replace(settings, model=with_layers(settings.model, 3))
    needed = plan_run(three, 1, _device(10**8)).footprint.total
    found = [largest_model(settings, 1, _device(room)) for room in (needed // 2, needed * 5 // 4)]
    assert [one and one.model.num_layers for one in found] == [None, 3]


@pytest.mark.parametrize(
    "shared",
    [
        {"tensor_parallel": 2},
        {"context_parallel": 4, "strategy": "heads"},
        {"context_parallel": 8, "heads_parallel": 4},
    ],
    ids=["tensor", "heads", "heads and rows"],
)
def test_the_largest_model_has_a_head_for_every_process_that_splits_them(shared: dict[str, Any]) -> None:
    settings = _settings(**shared)
    processes = settings.context_parallel * settings.tensor_parallel
    found = largest_model(settings, processes, _device(10**7))
    assert found is not None
    assert found.plan.fits
    smallest = with_layers(settings.model, 1, tensor=6, sharing=3)
    assert (smallest.num_kv_heads, smallest.num_heads, smallest.ffn_dim) == (12, 24, 1152)


def test_changes_of_a_run_on_documents_are_plans() -> None:
    settings, device = _settings(packing="documents", max_tokens=4096), _device(10**9)
    assert changes_that_help(settings, 1, device, plan_run(settings, 1, device))


@pytest.mark.parametrize("spread", [{}, {"data_parallel": "fsdp"}], ids=["whole weights", "split weights"])
def test_changes_are_plans_and_help(spread: dict[str, Any]) -> None:
    settings, processes = _settings(context_length=8192, **spread), 2 if spread else 1
    now = plan_run(settings, processes, _device(10**9))
    for memory in (now.footprint.total - 1, 10**9):
        device = _device(memory)
        found = changes_that_help(settings, processes, device, plan_run(settings, processes, device))
        assert 0 < len(found) <= 3
        for change in found:
            assert change.bytes == change.plan.footprint.total - now.footprint.total
            assert change.speed == change.plan.rates.tokens_per_second / now.rates.tokens_per_second
            assert change.plan.fits
            assert change.bytes < 0 or change.speed > 1


def test_recomputing_blocks_is_among_what_helps_a_run_that_does_not_fit() -> None:
    settings = _settings(context_length=8192)
    recomputed = dataclasses.replace(settings, model=dataclasses.replace(settings.model, gradient_checkpointing=True))
    device = _device(plan_run(recomputed, 1, _device(10**9)).footprint.total + 1)
    now = plan_run(settings, 1, device)
    assert now.bounded_by == "memory"
    found = changes_that_help(settings, 1, device, now)
    fits = [change.plan.fits for change in found]
    assert fits[0]
    assert fits == sorted(fits, reverse=True)  # those that make it fit come first
    assert all(change.bytes < 0 for change in found)
    speed = plan_run(recomputed, 1, device).rates.tokens_per_second / now.rates.tokens_per_second
    is_named = any(change.words == "--model.gradient-checkpointing" for change in found)
    assert is_named or all(change.plan.fits and change.speed >= speed for change in found)
