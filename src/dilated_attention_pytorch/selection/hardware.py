"""The hardware record: kind, size, nominal rates and free memory of a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dilated_attention_pytorch.data_sheets import (
    DataSheet,
    family_sheet,
    sheet_of_product,
    thread_sheet,
    unknown_gpu_sheet,
)
from dilated_attention_pytorch.machine import processor
from dilated_attention_pytorch.memory import free_memory, unknown_memory

_VECTOR_BITS = {"AVX512": 512, "AVX2": 256}
"""Vector width in bits by PyTorch's name of the CPU capability; 128 for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One device. The record is all that a selection uses of the machine; it can be stored or constructed.

    >>> Hardware.of_architecture("H100", free_bytes=60 << 30).tile_rows
    128
    """

    kind: str
    """``torch.device.type``: "cpu" or "cuda" (also AMD GPUs)."""
    name: str
    """Product name."""
    architecture: str
    """Family in ``data_sheets.toml``, "other GPU", or "CPU"."""
    processors: int
    """Number of PyTorch's threads, or of a GPU's multiprocessors."""
    free_bytes: int
    """Free memory in bytes when the record was made."""
    flops_32: float
    """Nominal float32 matrix throughput in FLOP/s."""
    flops_16: float
    """Nominal float16 and bfloat16 matrix throughput in FLOP/s."""
    bytes_per_second: float
    """Nominal memory bandwidth in bytes per second."""

    @property
    def tile_rows(self) -> int:
        """Rows per kernel tile: segment lengths are multiples of it where the limits allow."""
        return 32 if self.kind == "cpu" else 128

    @classmethod
    def of_architecture(
        cls, architecture: str, *, free_bytes: int, name: str = "", processors: int | None = None
    ) -> Hardware:
        """The record of any device, with its family's nominal rates.

        Args:
            architecture: device family.
            free_bytes: memory to plan with, in bytes.
            name: product name; empty = the family's.
            processors: number of threads or multiprocessors; None = the family's.

        Raises:
            ValueError: the family is unknown.
        """
        return cls._of_sheet(family_sheet(architecture), free_bytes, name, processors)

    @classmethod
    def _of_sheet(cls, sheet: DataSheet, free_bytes: int, name: str, processors: int | None) -> Hardware:
        processors = sheet.processors if processors is None else processors
        is_cpu = sheet.family == "CPU"
        # The sheets of a thread and of an unknown GPU's multiprocessor are scaled, others are of the whole device.
        scale = processors if is_cpu or sheet.name == "other GPU" else 1
        return cls(
            kind="cpu" if is_cpu else "cuda",
            name=name or sheet.family,
            architecture=sheet.family,
            processors=processors,
            free_bytes=free_bytes,
            flops_32=sheet.flops["float32"] * scale,
            flops_16=sheet.flops["float16"] * scale,
            bytes_per_second=sheet.bytes_per_second * scale,
        )


def read_hardware(device: torch.device | str) -> Hardware:
    """The record of a device of this machine, with its current free memory.

    Raises:
        NotImplementedError: the free memory of this kind of device cannot be read.
    """
    device = torch.device(device)
    if device.type == "cpu":
        sheet = thread_sheet(_VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability(), 128))
        return Hardware._of_sheet(sheet, free_memory(device), processor(), torch.get_num_threads())
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        sheet = sheet_of_product(properties.name) or unknown_gpu_sheet()
        return Hardware._of_sheet(sheet, free_memory(device), properties.name, properties.multi_processor_count)
    raise NotImplementedError(unknown_memory(device))
