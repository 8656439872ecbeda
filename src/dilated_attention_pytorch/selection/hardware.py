"""The hardware record: kind, architecture, sizes, nominal rates and free memory of a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch

from dilated_attention_pytorch.data_sheets import (
    DataSheet,
    sheet_of,
    sheet_of_product,
    thread_sheet,
    unknown_gpu_sheet,
)
from dilated_attention_pytorch.machine import processor
from dilated_attention_pytorch.memory import free_memory, unknown_memory

Architecture = Literal["B200", "H200", "H100", "A100", "V100", "RTX", "AMD MI", "other GPU", "CPU"]


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
    architecture: Architecture
    """Family whose nominal rates apply."""
    processors: int
    """Number of PyTorch's threads, or of a GPU's multiprocessors."""
    tile_rows: int
    """Rows per kernel tile: segment lengths are multiples of it where the limits allow."""
    cache_bytes: int
    """Cache in bytes that holds a segment's keys and values: of one CPU core, or of the whole GPU."""
    free_bytes: int
    """Free memory in bytes when the record was made."""
    flops_32: float
    """Nominal float32 matrix throughput in FLOP/s."""
    flops_16: float
    """Nominal float16 and bfloat16 matrix throughput in FLOP/s."""
    bytes_per_second: float
    """Nominal memory bandwidth in bytes per second."""

    @classmethod
    def of_architecture(
        cls, architecture: Architecture, *, free_bytes: int, name: str = "", processors: int | None = None
    ) -> Hardware:
        """The record of any device, with its family's nominal rates.

        Args:
            architecture: device family.
            free_bytes: memory to plan with, in bytes.
            name: product name; None = the family's.
            processors: number of threads or multiprocessors; None = the family's.

        Raises:
            ValueError: the family is unknown.
        """
        if architecture not in _TILE_ROWS:
            raise ValueError(f"architecture must be one of {', '.join(_TILE_ROWS)}, got {architecture!r}")
        return cls._of_sheet(_sheet_of_family(architecture), free_bytes, name, processors)

    @classmethod
    def _of_sheet(cls, sheet: DataSheet, free_bytes: int, name: str, processors: int | None) -> Hardware:
        processors = sheet.processors if processors is None else processors
        is_cpu = sheet.family == "CPU"
        # CPU rates scale with the number of threads; a GPU's data sheet gives the whole device's rate.
        scale = processors if is_cpu or sheet.name == "other GPU" else 1
        return cls(
            kind="cpu" if is_cpu else "cuda",
            name=name or sheet.family,
            architecture=cast(Architecture, sheet.family),
            processors=processors,
            tile_rows=_TILE_ROWS[sheet.family],
            cache_bytes=sheet.cache_bytes,
            free_bytes=free_bytes,
            flops_32=sheet.flops["float32"] * scale,
            flops_16=sheet.flops["float16"] * scale,
            bytes_per_second=sheet.bytes_per_second * scale,
        )


_TILE_ROWS: dict[str, int] = {
    "B200": 128,
    "H200": 128,
    "H100": 128,
    "A100": 128,
    "V100": 64,
    "RTX": 64,
    "AMD MI": 64,
    "other GPU": 64,
    "CPU": 32,
}
"""Rows per kernel tile, by family."""
_SHEET_OF_FAMILY = {"H100": "H100 SXM", "A100": "A100 80 GB", "RTX": "RTX 3090", "AMD MI": "MI250X"}
"""Representative data sheet of families with several."""
_VECTOR_BITS = {"AVX512": 512, "AVX2": 256}
"""Vector width in bits by PyTorch's name of the CPU capability; 128 for others."""


def _sheet_of_family(family: str) -> DataSheet:
    if family == "CPU":
        return thread_sheet(512)
    return unknown_gpu_sheet() if family == "other GPU" else sheet_of(_SHEET_OF_FAMILY.get(family, family))


def architecture_of(name: str, kind: str) -> Architecture:
    """The family of a device, from its product name.

    >>> architecture_of("NVIDIA H100 80GB HBM3", "cuda"), architecture_of("AMD Instinct MI300X", "cuda")
    ('H100', 'AMD MI')
    """
    if kind == "cpu":
        return "CPU"
    sheet = sheet_of_product(name)
    if sheet is not None:
        return cast(Architecture, sheet.family)
    families: tuple[tuple[tuple[str, ...], Architecture], ...] = (
        (("B200",), "B200"),
        (("H200", "GH200"), "H200"),
        (("H100", "H800"), "H100"),
        (("A100", "A800"), "A100"),
        (("V100",), "V100"),
        (("RTX", "TITAN"), "RTX"),
        (("INSTINCT", "MI100", "MI200", "MI210", "MI250", "MI300", "MI325", "MI350", "MI355"), "AMD MI"),
    )
    for words, family in families:
        if any(word in name.upper() for word in words):
            return family
    return "other GPU"


def read_hardware(device: torch.device | str) -> Hardware:
    """The record of a device of this machine, with its current free memory.

    Raises:
        NotImplementedError: the free memory of this kind of device cannot be read.
    """
    device = torch.device(device)
    if device.type == "cpu":
        free = free_memory(device)
        threads = torch.get_num_threads()
        sheet = thread_sheet(_VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability(), 128))
        nominal = Hardware._of_sheet(sheet, free, processor(), threads)
        return replace(nominal, cache_bytes=_core_cache() or nominal.cache_bytes)
    if device.type == "cuda":
        free = free_memory(device)
        properties = torch.cuda.get_device_properties(device)
        sheet = sheet_of_product(properties.name) or _sheet_of_family(architecture_of(properties.name, "cuda"))
        nominal = Hardware._of_sheet(sheet, free, properties.name, properties.multi_processor_count)
        return replace(nominal, cache_bytes=properties.L2_cache_size or nominal.cache_bytes)
    raise NotImplementedError(unknown_memory(device))


def _core_cache() -> int | None:
    """L2 cache of the first core in bytes, where Linux reports it."""
    file = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    text = file.read_text().strip() if file.is_file() else ""
    return int(text[:-1]) << 10 if text.endswith("K") else None
