"""The objects of a model: counted on a CPU as measured, and not on a GPU."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dilated_attention_pytorch.capacity import Device, plan_run
from dilated_attention_pytorch.capacity.objects import OF_BLOCK, Sharing
from dilated_attention_pytorch.data_sheets import link_of, sheet_of, thread_sheet
from dilated_attention_pytorch.training import PRESETS
from dilated_attention_pytorch.training.footprint import footprint
from support.pages import DOCS, ROOT

MEASURED: dict[str, Any] = json.loads((ROOT / "benchmarks/results/object_bytes.json").read_text())["kinds"]


def test_the_bytes_of_a_block_are_those_measured() -> None:
    assert {kind: round(found["median"], -4) for kind, found in MEASURED.items()} == OF_BLOCK
    page = " ".join((DOCS / "planner.md").read_text().split())
    words = ("MB in one process", "MB under DDP", "MB under FSDP", "MB with tensor")
    assert all(f"{size / 1e6:.2f} {where}" in page for size, where in zip(OF_BLOCK.values(), words, strict=True))


@pytest.mark.parametrize(
    ("sharing", "processes", "changes"),
    [
        ("one process", 1, {}),
        ("ddp", 2, {}),
        ("ddp", 2, {"context_parallel": 2}),
        ("fsdp", 2, {"data_parallel": "fsdp"}),
        ("tensor", 2, {"tensor_parallel": 2}),
    ],
)
def test_a_step_on_a_cpu_has_the_objects_of_every_block(
    sharing: Sharing, processes: int, changes: dict[str, Any]
) -> None:
    settings = dataclasses.replace(PRESETS["tiny"](), precision="float32", context_length=256, **changes)
    traced = footprint(settings, processes)
    cpu = Device(sheet=thread_sheet(512), link=link_of("Ethernet 100"))
    on_cpu = plan_run(settings, processes, cpu).footprint
    assert on_cpu == dataclasses.replace(traced, objects=settings.model.num_layers * OF_BLOCK[sharing])
    assert on_cpu.total == traced.total + on_cpu.objects
    assert plan_run(settings, processes, sheet_of("RTX 4090")).footprint == traced
