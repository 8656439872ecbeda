"""Seconds of a step: bytes that are sent, a bound by data sheets, and what measurements of this machine predict."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import parallel
from dilated_attention_pytorch.data_sheets import link_of, sheet_of
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate import Device, changes_that_help, measure, measure_here, plan_run, solve
from dilated_attention_pytorch.estimate.exchange import exchanges
from dilated_attention_pytorch.estimate.flops import step_work
from dilated_attention_pytorch.estimate.measure import Measurements, attention_seconds
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.selection.hardware import read_hardware
from dilated_attention_pytorch.training import PRESETS, TrainSettings


def _settings(model: dict[str, Any], **changes: Any) -> TrainSettings:
    sizes = {"embed_dim": 12, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "layer_segment_shifts": (0, 5)}
    groups = {"segment_lengths": (16, 64), "dilation_rates": (1, 4)}
    config = LongNetConfig(**{**sizes, **groups, **model})
    given = {"context_length": 211, "batch_size": 2, "precision": "float32", "optimizer": "adamw", **changes}
    return dataclasses.replace(PRESETS["tiny"](), model=config, **given)


def test_gradients_are_sent_as_a_ring_sums_them_and_split_weights_of_blocks_once_more() -> None:
    weights = 4 * _settings({}).model.num_parameters
    (whole,) = exchanges(_settings({}), 3)
    (split,) = exchanges(_settings({}, data_parallel="fsdp"), 3)
    assert (whole.name, whole.bytes) == ("weights and gradients", 2 * weights * 2 // 3)
    # Blocks three times; what is outside of them twice, as it stays gathered (see test_exchange.py); parts are padded.
    outside = 4 * (256 + 2) * 12
    least = 3 * (weights - outside) + 2 * outside
    assert least * 2 / 3 <= split.bytes < 1.1 * least * 2 / 3
    assert exchanges(_settings({}), 1) == ()


@pytest.mark.parametrize("strategy", ["ring", "gather", "heads"])
def test_rows_are_sent_as_plan_parallel_counts_them(strategy: Any) -> None:
    settings = _settings({"gradient_checkpointing": True, "checkpoint_every": 2}, context_parallel=2, strategy=strategy)
    expected = 0
    for layer in range(3):
        plan = parallel.plan_parallel(
            settings.model.pattern(layer), (2, 211, 6, 2), 2, num_kv_heads=2, dtype=torch.float32, is_causal=True
        )
        one = next(estimate for estimate in plan.estimates if estimate.strategy == strategy)
        forward = 1 if layer == 1 else 2
        both = zip(one.forward_bytes, one.backward_bytes, strict=True)
        expected += max(forward * there + back for there, back in both)
    rows = exchanges(settings, 2)[-1]
    assert (rows.name, rows.bytes) == ("rows", expected)


def test_a_bound_has_operations_states_and_bytes_over_their_nominal_rates() -> None:
    settings = _settings({})
    sheet, link = sheet_of("A100 40 GB"), link_of("Ethernet 10")
    plan = plan_run(settings, 2, Device(sheet=sheet, link=link, price_per_hour=3.0))
    work, found = step_work(settings), plan.footprint
    seconds = plan.seconds
    assert seconds.products == work.products / 19.5e12
    assert seconds.attention == work.attention / 19.5e12
    assert seconds.optimizer == (2 * found.weights + found.gradients + 2 * found.optimizer) / 1.555e12
    assert seconds.exchange == plan.exchanges[0].bytes / 1.25e9
    assert seconds.overlapped == min(seconds.exchange, seconds.products + seconds.attention)
    assert seconds.is_bound
    assert plan.bounded_by == "exchange"
    rates = plan.rates
    assert rates.tokens_per_second == pytest.approx(2 * 2 * 211 / seconds.total)
    assert rates.utilisation == pytest.approx(plan.model_flops / seconds.total / 2 / 19.5e12)
    assert rates.joules_per_token == pytest.approx(2 * 400 * seconds.total / 844)
    assert rates.price_per_million_tokens == pytest.approx(2 * 3.0 / 3600 * seconds.total / 844 * 1e6)


def _stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, attention and copies that take exactly as long as their sizes say, on a made-up machine."""

    def step(settings: TrainSettings, device: str) -> list[float]:
        layers, rows = settings.model.num_layers, settings.batch_size * settings.context_length
        gradients = 1e-3 + 2e-3 * layers + (1e-5 + 3e-5 * layers) * rows
        attention = attention_seconds(settings, ((1e-6, 1e-9),) * 2, ((5e-7, 5e-10),) * 2)
        return [attention + gradients, 4e-4 * (1 + layers)]

    def call_of(workload: Any, device: Any) -> Any:
        def call(pattern: Any) -> float:
            heads, rows = workload.num_kv_heads, workload.sequence_length
            pairs = pattern.num_pairs(rows, num_kv_heads=heads, is_causal=True)
            return (1e-6 * rows + 1e-9 * pairs) * (1 if workload.is_training else 0.5)

        return call

    monkeypatch.setattr(measure, "step_seconds", step)
    monkeypatch.setattr(measure, "call_of", call_of)
    monkeypatch.setattr(measure, "matrix_product_rate", lambda device, dtype: 1e10)


@pytest.mark.slow
def test_a_machine_whose_seconds_grow_with_layers_rows_and_pairs_is_predicted_exactly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _stands_still(monkeypatch)
    settings = _settings({"num_layers": 9, "gradient_checkpointing": True}, context_length=50_021, batch_size=1)
    found = measure_here(settings, "cpu", is_quiet=True, folder=tmp_path)
    plan = plan_run(settings, 1, Device(sheet=found.sheet, here=found))
    told = dataclasses.replace(settings, batch_size=1)
    attention = attention_seconds(told, ((1e-6, 1e-9),) * 2, ((5e-7, 5e-10),) * 2)
    expected = attention + 1e-3 + 2e-3 * 9 + (1e-5 + 3e-5 * 9) * 50_021 + 4e-4 * 10
    assert plan.seconds.total == pytest.approx(expected, rel=1e-3)
    assert plan.seconds.attention == pytest.approx(attention, rel=1e-3)
    assert not plan.seconds.is_bound
    of_three = dataclasses.replace(settings, gradient_accumulation=3)
    three = plan_run(of_three, 1, Device(sheet=found.sheet, here=found))
    assert three.seconds.optimizer == pytest.approx(plan.seconds.optimizer, rel=1e-12)
    assert three.seconds.total - plan.seconds.total == pytest.approx(2 * (plan.seconds.total - plan.seconds.optimizer))


def test_a_step_with_drawn_windows_is_predicted_from_measured_steps_with_the_models_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _stands_still(monkeypatch)
    windows = {"segment_lengths": (), "dilation_rates": (), "layer_segment_shifts": (0,), "num_layers": 2}
    own = _settings(windows | {"layer_patterns": ("local_window(150)",)}, steps=20)
    drawn = dataclasses.replace(own, random_local_windows=(10, 60))
    measured = [
        measure_here(one, "cpu", is_quiet=True, folder=tmp_path / str(place)) for place, one in enumerate((own, drawn))
    ]
    assert measured[0] == dataclasses.replace(measured[1], sheet=measured[0].sheet)
    # In 18 of 20 steps one of two sizes is drawn.
    pairs = {before: sum(min(row, before) + 1 for row in range(211)) for before in (10, 60, 150)}
    mean = (9 * (pairs[10] + pairs[60]) + 2 * pairs[150]) / 20
    found = measured[1].seconds(drawn).attention
    assert found == pytest.approx(2 * (2 * 211 * 1e-6 + 2 * 2 * mean * 1e-9), rel=1e-3)


def test_a_machine_is_measured_for_lists_of_any_length_and_predicts_steps_with_other_patterns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _stands_still(monkeypatch)
    windows = {"segment_lengths": (), "dilation_rates": (), "layer_segment_shifts": (0,), "num_layers": 4}
    windows |= {"layer_patterns": ("local_window(40)",), "layer_rope_thetas": (1e4, 1e4, 0.0)}
    settings = _settings(windows)
    found = measure_here(settings, "cpu", is_quiet=True, folder=tmp_path)
    for before in (40, 90):
        model = dataclasses.replace(settings.model, layer_patterns=(f"local_window({before})",))
        pairs = 2 * 2 * sum(min(row, before) + 1 for row in range(211))
        attention = found.seconds(dataclasses.replace(settings, model=model)).attention
        assert attention == pytest.approx(4 * (2 * 211 * 1e-6 + pairs * 1e-9), rel=1e-3)
    model = dataclasses.replace(settings.model, layer_patterns=("local_window(40)", "local_window(9)"))
    with pytest.raises(RunError, match="of another shape"):
        found.seconds(dataclasses.replace(settings, model=model))
    # Another pattern is measured anew where it is the model's.
    names = set(json.loads(next(tmp_path.iterdir()).read_text())["values"])
    model = dataclasses.replace(settings.model, layer_patterns=("local_window(41)",))
    measure_here(dataclasses.replace(settings, model=model), "cpu", is_quiet=True, folder=tmp_path)
    assert names < set(json.loads(next(tmp_path.iterdir()).read_text())["values"])


def test_a_step_is_predicted_from_the_nearest_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where seconds do not grow with rows in a line, the longest step is still met."""
    _stands_still(monkeypatch)

    def step(settings: TrainSettings, device: str) -> list[float]:
        return [1.0 if settings.batch_size * settings.context_length > 300 else 0.2, 0.0]

    monkeypatch.setattr(measure, "step_seconds", step)
    settings = _settings({"num_layers": 2}, context_length=200)
    found = measure_here(settings, "cpu", is_quiet=True, folder=tmp_path)
    assert found.seconds(settings).total == pytest.approx(1.0, rel=1e-6)
    with pytest.raises(RunError, match="of another shape, precision or optimizer; measure it for these"):
        found.seconds(_settings({"num_layers": 2, "num_kv_heads": 6}))
    with pytest.raises(RunError, match="measured for one process, got 2"):
        plan_run(settings, 2, Device(sheet=found.sheet, here=found))


def test_changes_are_measured_for_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _stands_still(monkeypatch)
    measured = functools.partial(measure_here, is_quiet=True, folder=tmp_path)
    monkeypatch.setattr(solve, "measure_here", measured)
    settings = _settings({"gradient_checkpointing": True})
    here = measured(settings, "cpu")
    device = Device(sheet=here.sheet, here=here)
    helping = changes_that_help(settings, 1, device, plan_run(settings, 1, device))
    assert "without --model.gradient-checkpointing" in [change.words for change in helping]
    assert {change.processes for change in helping} == {1}
    assert not any(change.plan.seconds.is_bound for change in helping)


def test_what_was_measured_is_kept_and_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _stands_still(monkeypatch)
    settings = _settings({})
    first = measure_here(settings, "cpu", is_quiet=True, folder=tmp_path)

    def forbidden(*given: Any) -> Any:
        raise AssertionError("it was measured again")

    for name in ("step_seconds", "call_of"):
        monkeypatch.setattr(measure, name, forbidden)
    monkeypatch.setattr(measure, "matrix_product_rate", lambda device, dtype: 1e9)  # while other programs compute
    second = measure_here(settings, "cpu", is_quiet=True, folder=tmp_path)
    assert second.sheet.flops == first.sheet.flops
    assert [point.optimizer for point in second.points] == [point.optimizer for point in first.points]
    monkeypatch.setattr(measure, "matrix_product_rate", lambda device, dtype: 3e10)
    assert measure_here(settings, "cpu", is_quiet=True, folder=tmp_path).sheet.flops == {"float32": 3e10}


@pytest.mark.parametrize("rate", [1e8, 1e10])
def test_no_step_is_planned_above_the_highest_rate_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rate: float
) -> None:
    """Products measured while other programs compute are slower than a step's own; and steps that take as long for all
    lengths would have no end of rates."""
    _stands_still(monkeypatch)
    monkeypatch.setattr(measure, "matrix_product_rate", lambda device, dtype: rate)
    monkeypatch.setattr(measure, "step_seconds", lambda settings, device: [0.01, 0.0])
    settings = _settings({"num_layers": 4}, context_length=200)
    here = measure_here(settings, "cpu", is_quiet=True, folder=tmp_path)
    assert here.seconds(settings).total == pytest.approx(0.01, rel=1e-6)
    longer = dataclasses.replace(settings, context_length=50_021)
    for one in (settings, longer):
        assert plan_run(one, 1, Device(sheet=here.sheet, here=here)).rates.utilisation < 1


def test_a_damaged_file_of_measurements_is_refused(tmp_path: Path) -> None:
    hardware = read_hardware("cpu")
    measured = Measurements.of(hardware, tmp_path)
    assert measured.get("one", lambda: [1.0]) == [1.0]
    assert Measurements.of(hardware, tmp_path).get("one", lambda: [2.0]) == [1.0]
    text = measured.file.read_text()
    for damaged in ("{", text.replace("[\n   1.0\n  ]", "[-1.0]"), json.dumps({"format": "other"})):
        assert damaged != text
        measured.file.write_text(damaged)
        with pytest.raises(RunError, match=r"holds no measurements .*; delete it"):
            Measurements.of(hardware, tmp_path)


def test_what_there_is_no_time_for_is_not_begun(tmp_path: Path) -> None:
    hardware = read_hardware("cpu")
    assert Measurements.of(hardware, tmp_path, seconds=60.0).get("one", lambda: [1.0]) == [1.0]
    late = Measurements.of(hardware, tmp_path, seconds=-1.0)
    assert late.get("one", lambda: [2.0]) == [1.0]
    with pytest.raises(RunError, match="could not be measured in time"):
        late.get("two", lambda: [2.0])


def test_a_small_step_of_this_machine_is_measured_for_real(tmp_path: Path) -> None:
    found = measure_here(_settings({}, context_length=128), "cpu", is_quiet=True, folder=tmp_path)
    assert [(point.layers, point.rows) for point in found.points] == [(2, 128), (2, 256), (4, 128), (4, 256)]
    assert found.sheet.flops["float32"] > 1e8
    assert found.sheet.bytes_per_second > 1e7
