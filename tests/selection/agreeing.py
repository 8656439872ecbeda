"""What ranks do in :mod:`test_agreement`; the processes find it here."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.parallel import RankFailure
from dilated_attention_pytorch.parallel.selection import agreed_selector
from dilated_attention_pytorch.selection import Hardware, Profile, Rates, SegmentSelectionConfig
from dilated_attention_pytorch.selection.cost import FEATURES
from selection.cases import GIB

CONFIG = SegmentSelectionConfig(min_free_memory_gb=0.0)


def of_rank(rank: int) -> tuple[Hardware, Profile]:
    """Ranks with less and less memory, another name, and other rates."""
    hardware = Hardware.of_architecture("CPU", free_bytes=(4 - rank) * GIB, name=f"node {rank}")
    # On rank 0 only kernel calls take time, on the others only pairs.
    word = "kernel calls" if rank == 0 else "pairs"
    seconds = tuple(1e-9 * name.startswith(word) for name in FEATURES)
    return hardware, Profile((Rates("float32", True, seconds),))


def choices(mesh: DeviceMesh | None = None) -> tuple[list[DilatedPattern], int, str]:
    """What this rank chooses for some shapes, the memory it plans with, and whose machine it thinks of."""
    hardware, profile = of_rank(dist.get_rank())
    selector = agreed_selector(CONFIG, mesh=mesh, hardware=hardware, profile=profile)
    agreed = selector.machine("cpu")[0]
    # Memory differs between calls of this function by chance, as it does between ranks: nothing is read any more.
    patterns = [selector.select(rows, 2, 8, 64, torch.float32, "cpu") for rows in (100, 3000, 20000)]
    return patterns, agreed.free_bytes, agreed.name


def refusal_of_other_policies() -> str:
    """What is said where the last rank has another policy."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    config = dataclasses.replace(CONFIG, memory_safety_factor=0.5) if is_last else CONFIG
    try:
        agreed_selector(config, hardware=of_rank(0)[0], profile=Profile(()))
    except RankFailure as failure:
        return str(failure)
    return ""


def everything() -> dict[str, Any]:
    """All of it, in one start of the processes; what fails comes last."""
    two_axes = init_device_mesh("cpu", (1, dist.get_world_size()))
    return {"one axis": choices(), "two axes": choices(two_axes), "refusal": refusal_of_other_policies()}
