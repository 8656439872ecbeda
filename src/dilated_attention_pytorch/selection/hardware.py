"""The machine as the selection sees it: kind, architecture, sizes, nominal rates, and the memory that is free now."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from dilated_attention_pytorch.machine import processor
from dilated_attention_pytorch.memory import free_memory, unknown_memory

Architecture = Literal["H200", "H100", "A100", "V100", "RTX", "AMD MI", "other GPU", "CPU"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One device. A selection depends on nothing else of the machine, so a record can be written down or made up.

    >>> Hardware.of_architecture("H100", free_bytes=60 << 30).tile_rows
    128
    """

    kind: str
    """As ``torch.device.type`` has it: "cpu" or "cuda" (AMD's GPUs too)."""
    name: str
    """What the device calls itself."""
    architecture: Architecture
    """Which family's numbers the nominal rates are."""
    processors: int
    """Threads that PyTorch uses, or multiprocessors of a GPU."""
    tile_rows: int
    """Rows that the kernels take at once: segment lengths are multiples of it where the limits leave one."""
    cache_bytes: int
    """Cache that holds the keys and values of a segment while its queries pass: of a core, or of the whole GPU."""
    free_bytes: int
    """Memory that was free when the record was made."""
    flops_32: float
    """Nominal floating-point operations a second of matrix products in float32."""
    flops_16: float
    """The same in float16 and bfloat16."""
    bytes_per_second: float
    """Nominal rate of memory."""

    @classmethod
    def of_architecture(
        cls, architecture: Architecture, *, free_bytes: int, name: str = "", processors: int | None = None
    ) -> Hardware:
        """The record of a device that need not be here, with its family's nominal numbers.

        Args:
            architecture: the family.
            free_bytes: memory to plan with.
            name: of the device, the family's without it.
            processors: threads or multiprocessors, the family's without it.

        Raises:
            ValueError: there is no such family.
        """
        if architecture not in _FAMILIES:
            raise ValueError(f"architecture must be one of {', '.join(_FAMILIES)}, got {architecture!r}")
        family = _FAMILIES[architecture]
        processors = family.processors if processors is None else processors
        # A processor's rate grows with its threads; a GPU's data sheet has the rate of the whole.
        scale = processors if architecture in ("CPU", "other GPU") else 1
        return cls(
            kind="cpu" if architecture == "CPU" else "cuda", name=name or architecture, architecture=architecture,
            processors=processors, tile_rows=family.tile_rows, cache_bytes=family.cache_bytes, free_bytes=free_bytes,
            flops_32=family.flops_32 * scale, flops_16=family.flops_16 * scale,
            bytes_per_second=family.bytes_per_second * scale,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Family:
    tile_rows: int
    cache_bytes: int
    processors: int
    flops_32: float
    flops_16: float
    bytes_per_second: float


# From the manufacturers' data sheets, dense matrix products; float32 without TF32. RTX stands between its generations.
# The last two rows are those of one multiprocessor and of one thread with 512-bit vectors.
_FAMILIES: dict[str, _Family] = {
    "H200": _Family(128, 50 << 20, 132, 67e12, 989e12, 4.8e12),
    "H100": _Family(128, 50 << 20, 132, 67e12, 989e12, 3.35e12),
    "A100": _Family(128, 40 << 20, 108, 19.5e12, 312e12, 2.0e12),
    "V100": _Family(64, 6 << 20, 80, 15.7e12, 125e12, 0.9e12),
    "RTX": _Family(64, 6 << 20, 82, 35e12, 70e12, 0.9e12),
    "AMD MI": _Family(64, 8 << 20, 110, 45e12, 180e12, 1.6e12),
    "other GPU": _Family(64, 4 << 20, 32, 0.2e12, 0.4e12, 10e9),
    "CPU": _Family(32, 1 << 20, 1, 100e9, 100e9, 8e9),
}


def architecture_of(name: str, kind: str) -> Architecture:
    """The family of a device, by the name that it has for itself.

    >>> architecture_of("NVIDIA H100 80GB HBM3", "cuda"), architecture_of("AMD Instinct MI300X", "cuda")
    ('H100', 'AMD MI')
    """
    if kind == "cpu":
        return "CPU"
    families: tuple[tuple[tuple[str, ...], Architecture], ...] = (
        (("H200", "GH200"), "H200"), (("H100", "H800"), "H100"), (("A100", "A800"), "A100"),
        (("V100",), "V100"), (("RTX", "TITAN"), "RTX"), (("INSTINCT", "MI100", "MI200", "MI210", "MI250", "MI300",
                                                          "MI325", "MI350", "MI355"), "AMD MI"),
    )  # fmt: skip
    for words, family in families:
        if any(word in name.upper() for word in words):
            return family
    return "other GPU"


def read_hardware(device: torch.device | str) -> Hardware:
    """The record of a device of this machine, with the memory that is free now.

    Raises:
        NotImplementedError: a kind of device whose free memory this package cannot read.
    """
    device = torch.device(device)
    if device.type == "cpu":
        free = free_memory(device)
        threads = torch.get_num_threads()
        nominal = Hardware.of_architecture("CPU", free_bytes=free, name=processor(), processors=threads)
        # The nominal rate is that of 512-bit vectors with two units for products and sums.
        narrower = {"AVX512": 1.0, "AVX2": 0.5}.get(torch.backends.cpu.get_cpu_capability(), 0.25)
        return replace(
            nominal, cache_bytes=_core_cache() or nominal.cache_bytes, flops_32=nominal.flops_32 * narrower,
            flops_16=nominal.flops_16 * narrower,
        )  # fmt: skip
    if device.type == "cuda":
        free = free_memory(device)
        properties = torch.cuda.get_device_properties(device)
        family = architecture_of(properties.name, "cuda")
        nominal = Hardware.of_architecture(
            family, free_bytes=free, name=properties.name, processors=properties.multi_processor_count
        )
        return replace(nominal, cache_bytes=properties.L2_cache_size or nominal.cache_bytes)
    raise NotImplementedError(unknown_memory(device))


def _core_cache() -> int | None:
    """The second-level cache of the first core, where Linux tells it."""
    file = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    text = file.read_text().strip() if file.is_file() else ""
    return int(text[:-1]) << 10 if text.endswith("K") else None
