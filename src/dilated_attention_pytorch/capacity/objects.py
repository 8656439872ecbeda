"""Memory of a model's objects in training: modules, parameters, hooks and records of Python and C++ without tensors."""

from __future__ import annotations

import dataclasses
from typing import Literal

from dilated_attention_pytorch.data_sheets import DataSheet
from dilated_attention_pytorch.training.footprint import Footprint
from dilated_attention_pytorch.training.settings import TrainSettings

Sharing = Literal["one process", "ddp", "fsdp", "tensor"]

OF_BLOCK: dict[Sharing, int] = {"one process": 130_000, "ddp": 200_000, "fsdp": 340_000, "tensor": 270_000}
"""Bytes of one block's objects, by the way in which processes share the weights. They do not depend on the block's
sizes. Measured with Python 3.11 and PyTorch 2.13 (``benchmarks/object_bytes.py``)."""


def sharing_of(settings: TrainSettings, num_processes: int) -> Sharing:
    """How the processes of a run share the weights. For DeepSpeed's ZeRO, which was not measured: not at all."""
    if settings.tensor_parallel > 1:
        return "tensor"
    if num_processes == 1 or settings.data_parallel not in ("ddp", "fsdp"):
        return "one process"
    return "fsdp" if settings.data_parallel == "fsdp" else "ddp"


def with_objects(found: Footprint, settings: TrainSettings, num_processes: int, sheet: DataSheet) -> Footprint:
    """A training step's footprint with the objects of all blocks, on a CPU; on a GPU, they are in the host's memory."""
    if sheet.family != "CPU":
        return found
    of_block = OF_BLOCK[sharing_of(settings, num_processes)]
    return dataclasses.replace(found, objects=settings.model.num_layers * of_block)
