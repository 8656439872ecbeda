"""What is counted without a plan is what the plan has."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import DilatedPattern, attend
from dilated_attention_pytorch.estimate.attention import peak_bytes, tile_elements
from dilated_attention_pytorch.ops.call import Call
from dilated_attention_pytorch.ops.implementations import IMPLEMENTATIONS
from dilated_attention_pytorch.ops.tiles import tiles_of
from dilated_attention_pytorch.plan.planner import CallShape, plan
from dilated_attention_pytorch.selection import Hardware, SegmentSelectionConfig, Workload
from dilated_attention_pytorch.selection.cost import FEATURES, features, nominal_rates
from dilated_attention_pytorch.selection.selector import candidates, coverage, diversity
from selection.cases import GIB, workload, workloads
from support.drawn import examples

LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=4)


def call_of(pattern: DilatedPattern, workload: Workload) -> CallShape:
    return CallShape(
        pattern,
        workload.batch_size,
        workload.sequence_length,
        workload.sequence_length,
        workload.num_heads,
        workload.num_kv_heads,
        0,
        0,
        workload.is_causal,
    )


def pattern_of(workload: Workload, lengths: list[int], rates: list[int]) -> DilatedPattern:
    return DilatedPattern(
        lengths,
        rates[: len(lengths)],
        offset_rule=workload.offset_rule,
        tail=workload.tail,
        segment_shift=workload.segment_shift,
    )


@examples(120)
@given(workloads(longest=6000), LENGTHS, st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_pairs_rows_and_classes_are_exactly_those_of_the_plan(
    workload: Workload, lengths: list[int], rates: list[int]
) -> None:
    pattern = pattern_of(workload, lengths, rates)
    counted = dict(zip(FEATURES, features(pattern, workload), strict=True))
    made = plan(call_of(pattern, workload), 1 << 62)
    assert counted["pairs"] == made.num_pairs
    passes = 3 if workload.is_training else 1
    assert counted["kernel calls"] == (1 + workload.is_training) * len(pattern.groups)
    classes = rows = 0
    for group in pattern.groups:
        for head in range(workload.num_kv_heads):
            positions = torch.arange(workload.sequence_length)
            segment, is_selected = group.locate(positions, head, workload.num_kv_heads)
            classes += len(segment[is_selected].unique())
            rows += int(is_selected.sum())
    times = workload.ratio * workload.batch_size
    assert counted["classes"] == classes * times
    assert counted["bytes"] == 4 * passes * rows * times * workload.head_dim * workload.itemsize


@examples(60)
@given(workloads(longest=4000), LENGTHS, st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_no_tile_is_larger_than_the_largest_that_is_counted(
    workload: Workload, lengths: list[int], rates: list[int]
) -> None:
    workload = dataclasses.replace(workload, head_dim=min(workload.head_dim * 64, 4096))
    pattern = pattern_of(workload, lengths, rates)
    query, key = (
        torch.empty(
            workload.batch_size, workload.sequence_length, heads, workload.head_dim, device="meta", dtype=workload.dtype
        )
        for heads in (workload.num_heads, workload.num_kv_heads)
    )
    tiles, batch_step = tiles_of(
        Call(query, key, key, pattern=pattern, is_causal=workload.is_causal, impl=IMPLEMENTATIONS["aten"])
    )
    most = tile_elements(pattern, workload)
    for tile in tiles:
        rows, heads = tile.query_rows[1] - tile.query_rows[0], tile.kv_heads[1] - tile.kv_heads[0]
        assert rows * heads * workload.ratio * batch_step * workload.head_dim <= most


def test_flops_are_those_that_pytorch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    shape = workload(sequence_length=301, batch_size=2, num_heads=6, num_kv_heads=3, head_dim=8, is_causal=True)
    pattern = DilatedPattern([64, 100], [1, 3])
    q, k = (torch.randn(2, 301, heads, 8, requires_grad=True) for heads in (6, 3))
    with FlopCounterMode(display=False) as counter:
        attend(q, k, k, pattern, is_causal=True).sum().backward()
    assert counter.get_total_flops() == features(pattern, shape)[FEATURES.index("operations")]


def test_the_formula_is_operations_and_bytes_at_the_data_sheet_s_rates() -> None:
    hardware = Hardware.of_architecture("H100", free_bytes=GIB)
    of_bfloat16 = nominal_rates(workload(dtype=torch.bfloat16), hardware)
    assert of_bfloat16 == (10e-6, 0.0, 1 / 989e12, 0.0, 1 / 3.35e12)
    of_float64 = nominal_rates(workload(dtype=torch.float64), hardware)
    assert of_float64[2] == 2 / hardware.flops_32


def test_counted_bytes_hold_operands_and_results_and_grow_with_what_is_asked_for() -> None:
    shape = workload(num_kv_heads=2, is_training=False, dtype=torch.bfloat16)
    pattern = DilatedPattern([512, 4096], [1, 8])
    query, key = 4096 * 8 * 64 * 2, 4096 * 2 * 64 * 2
    forward = peak_bytes(pattern, shape, threads=8)
    assert forward.operands == query + 2 * key
    assert forward.results == query + 4096 * 8 * 4
    totals = [forward.total]
    for more in ({"is_training": True}, {"is_padded": True}, {"has_dropout": True}, {"batch_size": 2}):
        shape = dataclasses.replace(shape, **more)
        totals.append(peak_bytes(pattern, shape, threads=8).total)
    assert totals == sorted(set(totals))


@pytest.mark.parametrize(
    ("lengths", "rates", "expected"),
    [([512], [1], 1 / 8), ([4096], [1], 1.0), ([4096], [8], 1.0), ([4096], [16], 0.5), ([512, 3000], [1, 2], None)],
)
def test_coverage_is_the_share_of_the_sequence_that_the_longest_segments_span(
    lengths: list[int], rates: list[int], expected: float | None
) -> None:
    if expected is None:
        expected = (3000**2 + 1096**2) / 4096**2
    assert coverage(DilatedPattern(lengths, rates), workload()) == pytest.approx(expected)


def test_diversity_is_the_share_of_the_octaves() -> None:
    config = SegmentSelectionConfig()
    assert diversity(DilatedPattern([512, 1024, 2048, 4096], [1, 1, 1, 1]), workload(), config) == 1.0
    assert diversity(DilatedPattern([512, 520], [1, 1]), workload(), config) == 0.25
    assert diversity(DilatedPattern([512], [1]), workload(sequence_length=100), config) == 1.0


def test_candidates_are_of_every_family() -> None:
    found = {
        tuple(p.segment_lengths) for p in candidates(SegmentSelectionConfig(), workload(sequence_length=9000), 128)
    }
    for lengths in (
        (512, 1024, 2048, 4096, 8192, 9088),  # powers of two, or ratio 2
        (512, 768, 1152, 1792, 2560, 3840, 5888, 8704),  # ratio 1.5
        (512, 1280, 3200, 7936, 9088),  # ratio 2.5
        (1024, 3072, 9088),  # ratio 3 from the second base
        (2048, 4096, 6144, 8192, 9088),  # uniform
    ):
        assert lengths in found
