"""Drawn workloads and machines for the selection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from dilated_attention_pytorch.estimate.attention import peak_bytes
from dilated_attention_pytorch.selection import Hardware, SegmentSelectionConfig, Workload
from dilated_attention_pytorch.selection.cost import features, nominal_rates, weighted
from dilated_attention_pytorch.selection.selector import candidates

GIB = 1 << 30
ARCHITECTURES = ("H200", "H100", "A100", "V100", "RTX", "AMD MI", "other GPU", "CPU")


def workload(**values: Any) -> Workload:
    """A workload of 4,096 positions, but for what is given."""
    sizes = {
        "sequence_length": 4096,
        "batch_size": 1,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 64,
        "dtype": torch.float32,
        "is_training": True,
    }
    return Workload(**(sizes | values))


@st.composite
def workloads(draw: st.DrawFn, *, longest: int = 1 << 21) -> Workload:
    """Any shape: short, long, prime, with grouped heads, shifts, both rules and tails."""
    kv_heads = draw(st.integers(1, 12))
    lengths = (1, 2, 7, 127, 511, 512, 513, 7919, 65537)
    return Workload(
        sequence_length=draw(st.one_of(st.integers(1, longest), st.sampled_from([n for n in lengths if n <= longest]))),
        batch_size=draw(st.integers(1, 9)),
        num_heads=kv_heads * draw(st.sampled_from([1, 1, 2, 3])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 5, 32, 64, 128])),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])),
        is_causal=draw(st.booleans()),
        is_training=draw(st.booleans()),
        is_padded=draw(st.booleans()),
        has_dropout=draw(st.booleans()),
        offset_rule=draw(st.sampled_from(["modulo", "block"])),
        tail=draw(st.sampled_from(["ragged", "ragged", "zero_padded"])),
        segment_shift=draw(st.sampled_from([0, 0, 3, (0, 700), (5, 1, 64)])),
    )


@st.composite
def configs(draw: st.DrawFn) -> SegmentSelectionConfig:
    """Any policy within its checks."""
    least = draw(st.integers(1, 3000))
    return SegmentSelectionConfig(
        min_segment_size=least,
        max_segment_size=least + draw(st.integers(0, 70000)),
        max_num_segments=draw(st.integers(1, 6)),
        geometric_ratios=draw(st.sampled_from([(1.5, 2.0, 2.5, 3.0), (1.7,), ()])),
        memory_safety_factor=draw(st.sampled_from([0.1, 0.8, 1.0])),
        min_free_memory_gb=draw(st.sampled_from([0, 0.5, 2.0])),
        time_budget_ms=draw(st.one_of(st.none(), st.floats(0.01, 1e5))),
        objective=draw(st.sampled_from(["score", "speed"])),
        coverage_floor=draw(st.sampled_from([0.1, 0.9, 1.0])),
    )


@st.composite
def budgets(draw: st.DrawFn, *, longest: int = 1 << 21) -> tuple[Workload, SegmentSelectionConfig, Hardware]:
    """A workload, a policy, and any machine, with budgets around what the cheapest candidates need."""
    workload = draw(workloads(longest=longest))
    config = replace(draw(configs()), is_training=workload.is_training)
    hardware = Hardware.of_architecture(draw(st.sampled_from(ARCHITECTURES)), free_bytes=0)
    patterns = candidates(config, workload, hardware.tile_rows)
    threads = hardware.processors if hardware.kind == "cpu" else None
    bytes_of = sorted(peak_bytes(pattern, workload, threads=threads).total for pattern in patterns)
    rates = nominal_rates(workload, hardware)
    seconds = sorted(weighted(rates, features(pattern, workload)) for pattern in patterns)
    place = draw(st.integers(0, len(patterns) - 1))
    if draw(st.integers(0, 2)):
        # As much as some candidate needs, to the byte; a little less; more.
        budget = bytes_of[place] + draw(st.sampled_from([0, 0, -1, 1 << 20, -(1 << 20)]))
        free = max(budget / config.memory_safety_factor, budget + config.min_free_memory_gb * GIB)
        hardware = replace(hardware, free_bytes=round(free) + draw(st.integers(-1, 1)))
    else:
        hardware = replace(hardware, free_bytes=draw(st.integers(0, 400 * GIB)))
    if config.time_budget_ms is not None:
        config = replace(
            config, time_budget_ms=seconds[place] * 1e3 * draw(st.sampled_from([1.0, 1.0, 0.99, 1.01, 5.0]))
        )
    return workload, config, hardware
