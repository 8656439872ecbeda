"""What a run chooses for the machine it is on."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.training import PRESETS, RunError, preflight
from dilated_attention_pytorch.training.preflight import check_processes, check_space, choose_precision


@pytest.mark.parametrize(
    ("avx512_bf16", "amx", "expected"),
    [
        (True, False, "bfloat16"),
        (False, True, "bfloat16"),
        (False, False, "float32"),
    ],
)
def test_bfloat16_is_chosen_where_it_is_in_hardware(
    avx512_bf16: bool, amx: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert choose_precision("auto", "cpu") == expected
    assert choose_precision("float32", "cpu") == "float32"
    assert choose_precision("bfloat16", "cpu") == "bfloat16"
    assert choose_precision("float16", "cpu") == "float16"
    with pytest.raises(RunError, match=r"--precision float8 needs a CUDA GPU .* the run has no CUDA device; take"):
        choose_precision("float8", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(RunError, match=r"and the run has one of compute capability 8\.0; take --precision bfloat16"):
        choose_precision("float8", "cuda")


@pytest.mark.parametrize(("changes", "num_processes", "message"), [
    ({"context_parallel": 4}, 6, "got 6; start it with torchrun --nproc-per-node 8"),
    ({"context_parallel": 2, "tensor_parallel": 2}, 2, "--context-parallel 2 and --tensor-parallel 2 the number"),
    ({"layout": "zigzag"}, 1, "--layout zigzag says how processes share a sequence"),
])  # fmt: skip
def test_processes_that_do_not_fit_are_refused(changes: dict[str, Any], num_processes: int, message: str) -> None:
    with pytest.raises(RunError, match=message):
        check_processes(dataclasses.replace(PRESETS["tiny"](), **changes), num_processes)


@pytest.mark.parametrize(
    ("changes", "num_processes"),
    [
        ({}, 1),
        ({}, 3),
        ({"compile": True}, 2),
        ({"data_parallel": "fsdp"}, 3),
        ({"context_parallel": 4}, 8),
        ({"context_parallel": 4, "heads_parallel": 2, "strategy": "ring", "layout": "zigzag"}, 4),
        ({"context_parallel": 2, "tensor_parallel": 2, "data_parallel": "fsdp"}, 8),
        ({"tensor_parallel": 2}, 2),
    ],
)
def test_processes_that_fit_are_taken(changes: dict[str, Any], num_processes: int) -> None:
    check_processes(dataclasses.replace(PRESETS["tiny"](), **changes), num_processes)


@pytest.mark.parametrize(
    ("optimizer", "of_a_weight"),
    [
        ("muon", 12),
        ("adamw", 12),
        ("adamw-bf16", 8),
        ("adamw-8bit", 7),
    ],
)
def test_the_space_of_checkpoints_is_that_of_the_optimizer(
    optimizer: Any, of_a_weight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that are kept and the next one, the trained weights, and 20 MiB beside."""
    settings = dataclasses.replace(PRESETS["tiny"](), optimizer=optimizer)
    needed = (3 * of_a_weight + 4) * 1_000_000 + (20 << 20)
    for free in (needed, needed - 1):
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with (
            contextlib.nullcontext() if free == needed else pytest.raises(RunError, match=f"needs {needed / 1e6:,.0f}")
        ):
            check_space(tmp_path / "run", 1_000_000, settings)


@pytest.mark.parametrize("port", ["http", "0", "65536"])
def test_a_port_that_is_none_is_said_before_the_ranks_meet(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match="the environment says MASTER_PORT="):
        preflight.check_launch()
