"""The named shapes are what they say, and the formulas count what the definition counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dilated_attention_pytorch.benchmarks.presets import PRESETS, planned_cases
from dilated_attention_pytorch.benchmarks.settings import BenchSettings
from dilated_attention_pytorch.benchmarks.shapes import ROWS, SHAPES
from support.benchmark_cases import counts_of, small_case


def test_every_shape_has_numbers_of_rows() -> None:
    assert ROWS.keys() == SHAPES.keys()
    assert (min(ROWS["slide"]), max(ROWS["slide"])) == (1000, 30000)


def test_operations_of_known_calls_follow_from_the_formulas() -> None:
    # "12 heads of 64, fp16: 0.43 TFLOP at 32,768 tokens; at one million 13.7 TFLOP"
    near, far = (replace(SHAPES["paper"], rows=rows, dtype="float16") for rows in (32768, 1048576))
    assert near.flops("pattern") == pytest.approx(0.43e12, rel=0.01)
    assert far.flops("pattern") == pytest.approx(13.7e12, rel=0.01)


@pytest.mark.parametrize("offset_rule", ["modulo", "block"])
@pytest.mark.parametrize("mode", ["forward", "decode"])
@pytest.mark.parametrize("causal", [False, True])
def test_pairs_are_the_sum_of_the_counts(offset_rule: str, mode: str, causal: bool) -> None:
    case = small_case(mode=mode, causal=causal, offset_rule=offset_rule, heads=6, kv_heads=3, batch=2)
    counts, _ = counts_of(case)
    assert case.num_pairs("pattern") == 2 * int(counts.sum())
    positions = range(case.query_offset, case.rows)
    assert case.num_pairs("dense") == 12 * sum(p + 1 if causal else case.rows for p in positions)


def test_gradients_cost_two_and_a_half_times_the_forward() -> None:
    forward, both = (small_case(mode=mode) for mode in ("forward", "forward_backward"))
    assert both.flops("pattern") == 3.5 * forward.flops("pattern")


def test_equal_names_are_equal_cases() -> None:
    cases = [case for preset in PRESETS.values() for case in planned_cases(BenchSettings(), preset)]
    assert len({case.name for case in cases}) == len(set(cases))


@pytest.mark.parametrize("name", PRESETS)
def test_a_dry_run_has_every_case_of_its_preset_at_a_few_rows(name: str) -> None:
    cases = list(planned_cases(BenchSettings(dry_run=True), PRESETS[name]))
    assert len({case.name for case in cases}) == len(planned_cases(BenchSettings(), PRESETS[name]))
    assert all(case.rows < 200 for case in cases)
