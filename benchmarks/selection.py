"""Segment selection on this machine: fitted rates, memory and its budget, time and the fastest candidate.

    python -m benchmarks.selection [--only rates memory speed]

``rates`` runs `dilated-attention tune`, whose profile ``speed`` uses. ``memory`` is measured in 50 processes.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from dilated_attention_pytorch import DilatedPattern, attend
from dilated_attention_pytorch.memory import begin_peak, resident
from dilated_attention_pytorch.selection import (
    DynamicSegmentSelector,
    Profile,
    SegmentSelectionConfig,
    Workload,
    read_hardware,
)
from dilated_attention_pytorch.selection.profile import load_profile
from dilated_attention_pytorch.selection.tuning import call_of

from .study import Study, in_new_process, run

CPU = torch.device("cpu")
Part = Literal["rates", "memory", "speed"]


@dataclass(frozen=True, kw_only=True)
class Selection(Study):
    """Settings."""

    only: tuple[Part, ...] = ("rates", "memory", "speed")
    """What to measure."""


def rates(given: Selection) -> dict[str, Any]:
    """What `dilated-attention tune` finds on this machine."""
    name, words = ("dry-run.json", ["--dry-run"]) if given.tiny else ("tune.json", [])
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "tune"
        command = [sys.executable, "-m", "dilated_attention_pytorch", "tune", "--output", str(output), *words]
        subprocess.run(command, check=True)
        found: dict[str, Any] = json.loads((output / name).read_text(encoding="utf-8"))
    return found


def drawn_workload(
    generator: random.Random, *, shortest: int, longest: int, dtypes: tuple[torch.dtype, ...]
) -> Workload:
    kv_heads = generator.choice((1, 2, 3, 4, 8))
    return Workload(
        sequence_length=round(shortest * (longest / shortest) ** generator.random()),
        batch_size=generator.choice((1, 1, 2, 3)),
        num_heads=kv_heads * generator.choice((1, 1, 2)),
        num_kv_heads=kv_heads,
        head_dim=generator.choice((32, 64, 64, 128)),
        dtype=generator.choice(dtypes),
        is_causal=generator.random() < 0.5,
        is_training=generator.random() < 0.5,
    )


def peaks(workload: Workload, pattern: DilatedPattern) -> list[int]:
    """In a new process: peak bytes of the first and of the second call, above the level before its operands."""
    found = []
    for _ in range(2):
        if not begin_peak():
            raise SystemExit("memory is read from Linux's /proc, which is not here; leave it out with --only")
        before = resident("VmRSS")
        _call(workload, pattern)
        found.append(resident("VmHWM") - before)
    return found


def _call(workload: Workload, pattern: DilatedPattern) -> None:
    rows = (workload.batch_size, workload.sequence_length)
    q, k, v = (
        torch.randn(*rows, heads, workload.head_dim, dtype=workload.dtype, requires_grad=workload.is_training)
        for heads in (workload.num_heads, workload.num_kv_heads, workload.num_kv_heads)
    )
    mask = None
    if workload.is_padded:
        mask = torch.zeros(rows, dtype=torch.bool)
        mask[:, workload.sequence_length // 2 :] = True
    dropout = 0.1 if workload.has_dropout else 0.0
    out = attend(q, k, v, pattern, is_causal=workload.is_causal, key_padding_mask=mask, dropout_p=dropout)
    if workload.is_training:
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


def memory(given: Selection) -> dict[str, Any]:
    """Peak memory of 50 random shapes compared with random budgets, each in a separate process."""
    generator, hardware = random.Random(1), read_hardware(CPU)
    rows: list[dict[str, Any]] = []
    refused = 0
    while len(rows) < (1 if given.tiny else 50):
        dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16, torch.float64)
        workload = drawn_workload(generator, shortest=1000, longest=1500 if given.tiny else 80000, dtypes=dtypes)
        extra = generator.random()
        workload = replace(workload, is_padded=extra < 0.2, has_dropout=0.15 < extra < 0.3)
        free = int(generator.choice((256, 512, 1024, 4096)) * 2**20 * (0.75 + generator.random() / 2))
        config = SegmentSelectionConfig(
            min_segment_size=generator.choice((128, 512)),
            min_free_memory_gb=0.0,
            is_training=workload.is_training,
            memory_safety_factor=generator.choice((0.5, 0.8, 1.0)),
        )
        selector = DynamicSegmentSelector(config, hardware=replace(hardware, free_bytes=free))
        try:
            choice = selector.choose(workload, CPU)
        except ValueError:
            refused += 1
            continue
        if choice.best.flops > 3e11 or (workload.has_dropout and choice.best.flops > 5e10):
            continue
        pattern = choice.best.pattern
        values = {**asdict(workload), "dtype": workload.dtype_name, **_lengths(pattern)}
        first, second = in_new_process(peaks, workload, pattern)
        bound = choice.best.bytes.total
        row = {
            **values,
            "budget_bytes": choice.memory_budget,
            "counted_bytes": bound,
            "library_bytes": choice.best.bytes.library,
            "measured_bytes": [first, second],
        }
        rows.append(row)
        print(
            f"{len(rows):2} {workload}: measured {first / 2**20:7.1f} and {second / 2**20:7.1f} MiB, counted "
            f"{bound / 2**20:7.1f}, budget {choice.memory_budget / 2**20:7.1f}",
            flush=True,
        )
    over = sum(max(row["measured_bytes"]) > row["budget_bytes"] for row in rows)
    above = sum(max(row["measured_bytes"]) > row["counted_bytes"] for row in rows)
    ratios = [
        (row["counted_bytes"] - row["library_bytes"]) / row["measured_bytes"][1]
        for row in rows
        if row["measured_bytes"][1] > (0 if given.tiny else 64 << 20)
    ]
    print(
        f"over budget: {over} of {len(rows)}; above what was counted: {above}; counted without the library over "
        f"measured, second calls of more than 64 MiB: {min(ratios):.2f} to {max(ratios):.2f}, median "
        f"{statistics.median(ratios):.2f}; {refused} shapes were refused for their budgets"
    )
    counts = {"over_budget": over, "above_count": above, "refused": refused}
    return counts | {"counted_over_measured": ratios, "rows": rows}


def _lengths(pattern: DilatedPattern) -> dict[str, list[int]]:
    return {"segment_lengths": list(pattern.segment_lengths), "dilation_rates": list(pattern.dilation_rates)}


def speed(given: Selection) -> dict[str, Any]:
    """The choice of ``objective="speed"`` and the best of all candidates with enough coverage, for 20 random shapes."""
    generator = random.Random(2)
    config = SegmentSelectionConfig(min_segment_size=256, max_num_segments=4, objective="speed")
    rows: list[dict[str, Any]] = []
    if load_profile(read_hardware(CPU)) is None and not given.tiny:
        raise SystemExit("there is no profile of this machine: run `dilated-attention tune`")
    for _ in range(1 if given.tiny else 20):
        workload = drawn_workload(
            generator, shortest=1000, longest=1200 if given.tiny else 9000, dtypes=(torch.float32, torch.bfloat16)
        )
        selector = DynamicSegmentSelector(replace(config, is_training=workload.is_training))
        formula = DynamicSegmentSelector(selector.config, profile=Profile(()))
        choice, nominal = selector.choose(workload, CPU), formula.choose(workload, CPU)
        floor = config.coverage_floor * max(one.coverage for one in choice.fitting)
        eligible = [one.pattern for one in choice.fitting if one.coverage >= floor]
        times = _times(workload, eligible)
        best = min(times, key=lambda pattern: times[pattern])
        ratio, by_formula = (times[one.best.pattern] / times[best] for one in (choice, nominal))
        rows.append(
            {
                **asdict(workload),
                "dtype": workload.dtype_name,
                "candidates": len(eligible),
                "chosen": _lengths(choice.best.pattern),
                "best": _lengths(best),
                "chosen_seconds": times[choice.best.pattern],
                "best_seconds": times[best],
                "predicted_seconds": choice.best.seconds,
                "predicted_by": "rates" if choice.is_measured else "formula",
                "ratio": ratio,
                "ratio_of_the_formula": by_formula,
            }
        )
        print(
            f"{workload}: {len(eligible)} candidates, chosen / best {ratio:.3f}, by the formula {by_formula:.3f}",
            flush=True,
        )
    ratios, formula_ratios = ([row[name] for row in rows] for name in ("ratio", "ratio_of_the_formula"))
    print(
        f"chosen / best: at most {max(ratios):.3f}, mean {statistics.mean(ratios):.3f}; by the formula at most "
        f"{max(formula_ratios):.3f}, mean {statistics.mean(formula_ratios):.3f}"
    )
    return {"config": asdict(config), "worst": max(ratios), "worst_of_the_formula": max(formula_ratios), "rows": rows}


def _times(workload: Workload, patterns: list[DilatedPattern]) -> dict[DilatedPattern, float]:
    """Minimum time of every pattern: three rounds of all, then seven of those within 1.3 times the best."""
    call = call_of(workload, CPU)
    call(patterns[0])
    times = dict.fromkeys(patterns, float("inf"))
    for rounds, within in ((3, float("inf")), (7, 1.3)):
        least = min(times.values())
        for _ in range(rounds):
            for pattern in [pattern for pattern, seconds in times.items() if seconds <= least * within]:
                times[pattern] = min(times[pattern], call(pattern))
    return times


def measure(given: Selection) -> dict[str, Any]:
    """The chosen parts."""
    parts = {"rates": rates, "memory": memory, "speed": speed}
    return {name: parts[name](given) for name in given.only}


if __name__ == "__main__":
    run(Selection, measure, text=__doc__, name="selection", group="selection", tiny={})
