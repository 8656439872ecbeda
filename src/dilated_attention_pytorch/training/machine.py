"""What a run ran on, for its records."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy")


def package_version(name: str) -> str | None:
    """The installed version of a distribution; None if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name for itself, where the system tells it."""
    description = Path("/proc/cpuinfo")
    if description.exists():
        for line in description.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def devices() -> list[str]:
    """The CUDA devices that PyTorch sees, by name and memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [f"{entry.name}, {entry.total_memory / 2**30:.0f} GiB" for entry in properties]


def machine() -> dict[str, Any]:
    """Versions and hardware, as values that JSON holds."""
    return {
        "versions": {"python": platform.python_version(), **{name: package_version(name) for name in _PACKAGES}},
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "cuda_devices": devices(),
    }
