"""The selector: a pure function of shape, policy and machine that never leaves its budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.selection import (
    Choice,
    DynamicSegmentSelector,
    Hardware,
    Profile,
    Rates,
    SegmentSelectionConfig,
    Workload,
)
from dilated_attention_pytorch.selection import selector as selector_module
from dilated_attention_pytorch.selection.cost import FEATURES
from dilated_attention_pytorch.selection.profile import Accuracy
from selection.cases import ARCHITECTURES, GIB, budgets, configs, workload, workloads
from support.drawn import examples

NOMINAL = Profile(())


def choose(
    workload: Workload, config: SegmentSelectionConfig, hardware: Hardware, profile: Profile = NOMINAL
) -> Choice:
    return DynamicSegmentSelector(config, hardware=hardware, profile=profile).choose(workload, hardware.kind)


@examples(150, is_shrunk=False)
@given(budgets())
def test_a_choice_is_never_over_budget_and_within_the_limits(
    drawn: tuple[Workload, SegmentSelectionConfig, Hardware],
) -> None:
    workload, config, hardware = drawn
    try:
        choice = choose(workload, config, hardware)
    except ValueError as error:
        if "no segments fit the" not in str(error):
            raise
        return
    best, pattern = choice.best, choice.best.pattern
    free = hardware.free_bytes
    assert best.bytes.total <= config.memory_safety_factor * free
    assert best.bytes.total <= free - config.min_free_memory_gb * GIB
    assert config.time_budget_ms is None or best.seconds <= config.time_budget_ms / 1e3
    assert all(config.min_segment_size <= length <= config.max_segment_size for length in pattern.segment_lengths)
    assert 1 <= len(pattern.segment_lengths) <= config.max_num_segments
    assert list(pattern.segment_lengths) == sorted(set(pattern.segment_lengths))
    assert pattern.dilation_rates[0] == 1
    assert 0.0 <= best.coverage <= 1.0
    assert 0.0 < best.diversity <= 1.0
    assert 0.0 < choice.efficiency <= 1.0
    if config.objective == "speed":
        covering = max(one.coverage for one in choice.fitting) * config.coverage_floor
        assert best.coverage >= covering
        assert best.seconds == min(one.seconds for one in choice.fitting if one.coverage >= covering)


@examples(25)
@given(workloads(longest=20000), configs(), st.sampled_from(ARCHITECTURES))
def test_the_same_inputs_give_the_same_answer(
    workload: Workload, config: SegmentSelectionConfig, architecture: str
) -> None:
    hardware = Hardware.of_architecture(architecture, free_bytes=80 * GIB)
    found = []
    for _ in range(2):
        selector_module._choose.cache_clear()
        try:
            found.append(choose(workload, dataclasses.replace(config), dataclasses.replace(hardware)))
        except ValueError as error:
            found.append(str(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("length", [1, 2, 7, 511, 513, 7919, 65537, 1_000_003])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_length_gets_segments_on_any_machine(length: int, architecture: str) -> None:
    hardware = Hardware.of_architecture(architecture, free_bytes=200 * GIB)
    selector = DynamicSegmentSelector(hardware=hardware, profile=NOMINAL)
    pattern = selector.select(length, 1, 4, 64, torch.bfloat16, hardware.kind)
    assert isinstance(pattern, DilatedPattern)
    assert all(w % hardware.tile_rows == 0 for w in pattern.segment_lengths)
    assert selector.select(length + 1, 1, 4, 64, torch.bfloat16, hardware.kind).segment_lengths


def test_a_new_shape_is_a_new_decision_and_longer_sequences_get_longer_segments() -> None:
    hardware = Hardware.of_architecture("CPU", free_bytes=60 * GIB)
    selector = DynamicSegmentSelector(hardware=hardware, profile=NOMINAL)
    longest = [max(selector.select(n, 1, 8, 64, torch.float32, "cpu").segment_lengths) for n in (1024, 4096, 16384)]
    assert longest == [1024, 4096, 16384]


def test_the_options_of_the_pattern_are_those_of_the_call() -> None:
    selector = DynamicSegmentSelector(hardware=Hardware.of_architecture("CPU", free_bytes=8 * GIB), profile=NOMINAL)
    pattern = selector.select(
        3000, 1, 4, 32, torch.float32, "cpu", 2, offset_rule="block", tail="zero_padded", segment_shift=[0, 100]
    )
    assert (pattern.offset_rule, pattern.tail, pattern.segment_shift) == ("block", "zero_padded", (0, 100))


def test_less_memory_and_less_time_leave_fewer_candidates_and_faster_ones() -> None:
    hardware = Hardware.of_architecture("CPU", free_bytes=8 * GIB)
    shape = workload(sequence_length=30000)
    config = SegmentSelectionConfig()
    free = choose(shape, config, hardware)
    tight = choose(shape, dataclasses.replace(config, time_budget_ms=free.best.seconds * 600), hardware)
    assert len(tight.fitting) < len(free.fitting)
    assert tight.best.seconds < free.best.seconds
    assert free.fitting == choose(shape, config, dataclasses.replace(hardware, free_bytes=9 * GIB)).fitting


def test_measured_rates_decide_where_there_are_some() -> None:
    hardware = Hardware.of_architecture("CPU", free_bytes=60 * GIB)
    config = SegmentSelectionConfig(objective="speed")
    # A machine on which nothing costs time but the calls of kernels, and one on which only pairs do.
    calls, pairs = ([float(name.startswith(word)) for name in FEATURES] for word in ("kernel calls", "pairs"))
    by_calls, by_pairs = (
        choose(workload(), config, hardware, Profile((Rates("float32", True, tuple(seconds)),)))
        for seconds in (calls, pairs)
    )
    assert by_calls.is_measured
    assert by_calls.best.pattern != by_pairs.best.pattern
    assert len(by_calls.best.pattern.segment_lengths) == 1
    worse = Rates("float32", True, tuple(calls), 99, Accuracy(0.7, 0.1), Accuracy(0.8, 0.2))
    by_formula = choose(workload(), config, hardware, Profile((worse,)))
    assert not by_formula.is_measured
    assert by_formula == choose(workload(), config, hardware)
    other = choose(workload(dtype=torch.float64), config, hardware, Profile((Rates("float32", True, tuple(calls)),)))
    assert not other.is_measured


HARDWARE = Hardware.of_architecture("CPU", free_bytes=GIB)
WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: SegmentSelectionConfig(min_segment_size=0), ValueError, "min_segment_size must be at least 1, got 0"),
    (lambda: SegmentSelectionConfig(max_num_segments=2.0), TypeError, "max_num_segments must be an integer, got 2"),  # type: ignore[arg-type]
    (lambda: SegmentSelectionConfig(max_segment_size=100), ValueError, "at least min_segment_size 512, got 100"),
    (lambda: SegmentSelectionConfig(geometric_ratios=[2.0]), TypeError, "must be a tuple of numbers"),  # type: ignore[arg-type]
    (lambda: SegmentSelectionConfig(geometric_ratios=(1.0,)), ValueError, "above 1, got 1.0"),
    (lambda: SegmentSelectionConfig(memory_safety_factor=1.2), ValueError, "at most 1, got 1.2"),
    (lambda: SegmentSelectionConfig(memory_safety_factor="all"), TypeError, "must be a number, got 'all'"),  # type: ignore[arg-type]
    (lambda: SegmentSelectionConfig(min_free_memory_gb=-1), ValueError, "at least 0, got -1"),
    (lambda: SegmentSelectionConfig(time_budget_ms=0.0), ValueError, "above 0, or None for no limit, got 0.0"),
    (lambda: SegmentSelectionConfig(time_budget_ms=float("nan")), ValueError, "must be finite, got nan"),
    (lambda: SegmentSelectionConfig(objective="best"), ValueError, '"score" or "speed", got \'best\''),  # type: ignore[arg-type]
    (lambda: SegmentSelectionConfig(is_training=1), TypeError, "True or False, got 1"),  # type: ignore[arg-type]
    (lambda: SegmentSelectionConfig(coverage_weight=0, diversity_weight=0, efficiency_weight=0), ValueError, "got 0"),
    (lambda: DynamicSegmentSelector({"min_segment_size": 1}), TypeError, "a SegmentSelectionConfig or None, got dict"),  # type: ignore[arg-type]
    (lambda: DynamicSegmentSelector(hardware="H100"), TypeError, "hardware must be a Hardware or None, got str"),  # type: ignore[arg-type]
    (lambda: Hardware.of_architecture("B300", free_bytes=1), ValueError, "one of H200, H100, .*CPU, got 'B300'"),
    (lambda: select(sequence_length=0), ValueError, "sequence_length must be at least 1, got 0"),
    (lambda: select(batch_size=1.5), TypeError, "batch_size must be an integer, got 1.5"),
    (lambda: select(num_kv_heads=3), ValueError, "num_kv_heads must divide the 8 heads, got 3"),
    (lambda: select(dtype=torch.int8), TypeError, "bfloat16, float32 or float64 of torch, got torch.int8"),
    (lambda: select(device="cuda"), ValueError, "record of a 'cpu' device, got a call on 'cuda'"),
    (lambda: select(sequence_length=10**7), ValueError, "no segments fit the memory budget: .* takes up to .* GiB"),
    (lambda: select(SegmentSelectionConfig(time_budget_ms=1e-3)), ValueError, "no segments fit the time budget: .*"),
    (lambda: DynamicSegmentSelector().select(9, 1, 1, 8, torch.float32, "meta"), NotImplementedError, "pass hardware="),
]


def select(config: SegmentSelectionConfig | None = None, **values: object) -> DilatedPattern:
    call = {"sequence_length": 2048, "batch_size": 1, "num_heads": 8, "head_dim": 64, "dtype": torch.float32}
    selector = DynamicSegmentSelector(config, hardware=HARDWARE, profile=NOMINAL)
    return selector.select(**{"device": "cpu", **call, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", range(len(WRONG)), ids=lambda index: WRONG[index][2][:40])
def test_a_wrong_argument_is_named_with_what_came_and_what_to_do(wrong: int) -> None:
    call, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        call()
