"""The machine's versions and hardware, for result files and logs."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .errors import RunError
from .installation import importing, install_command

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "safetensors", "numpy")
_SOURCES = (".py", ".cpp", ".h", ".toml")

MOST_THREADS = 1024
"""Upper limit: with tens of thousands of threads the OpenMP runtime overruns its stack and the process is killed."""


def package_version(name: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_installed(purpose: str, packages: Sequence[str], extra: str) -> None:
    """Raise :class:`RunError` unless all ``packages``, which ``extra`` installs, are present; import none."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise RunError(f"{purpose} needs {', '.join(missing)}, not installed here: {install_command(extra)}")


def require(purpose: str, packages: Sequence[str], extra: str) -> None:
    """Raise :class:`RunError` unless all ``packages``, which ``extra`` installs, are present and can be imported."""
    check_installed(purpose, packages, extra)
    try:
        with importing(purpose, extra):
            for name in packages:
                # transformers imports its parts on demand; every model needs this one.
                importlib.import_module("transformers.modeling_utils" if name == "transformers" else name)
    except ImportError as error:
        raise RunError(str(error)) from error


def choose_device(device: str) -> str:
    """The device type, "cpu" or "cuda"; "auto" takes a CUDA device if there is one, else the CPU, also on a Mac.

    Raises:
        RunError: the requested device is not available.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise RunError(
            "--device cuda: PyTorch finds no CUDA device here; use --device cpu, or install a PyTorch built for CUDA "
            "and its driver (`dilated-attention info` shows what is there)"
        )
    return "cuda" if available and device != "cpu" else "cpu"


def set_threads(threads: int) -> int:
    """Set the number of CPU threads (0: PyTorch's default) and return the resulting number.

    Raises:
        RunError: more threads than the OpenMP runtime can start.
    """
    if threads > MOST_THREADS:
        raise RunError(
            f"--threads must be at most {MOST_THREADS:,}, got {threads}; this machine has {os.cpu_count()} cores, and "
            "0 leaves the number to PyTorch"
        )
    if threads:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def processor() -> str:
    """The processor's model name, where the operating system reports it."""
    description = Path("/proc/cpuinfo")
    if description.exists():
        fields = [line.partition(":") for line in description.read_text().splitlines()]
        names = [value.strip() for key, _, value in fields if key.strip() == "model name"]
        families = [value.strip() for key, _, value in fields if key.strip() == "cpu family"]
        if names:
            # Virtual machines shorten the name; the family number still identifies the generation.
            return f"{names[0]} (family {families[0]})" if families else names[0]
    return platform.processor() or platform.machine()


def kinds_of_devices() -> list[str]:
    """Types of the devices that PyTorch finds here: "cpu", and "cuda", "mps" or "xpu" for GPUs."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.mps.is_available(), "xpu": torch.xpu.is_available()}
    return ["cpu", *(kind for kind, is_there in found.items() if is_there)]


def devices() -> list[str]:
    """Names and memory of the CUDA devices that PyTorch sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [f"{entry.name}, {entry.total_memory / 2**30:.0f} GiB" for entry in properties]


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that results depend on."""
    return {"python": platform.python_version(), **{name: package_version(name) for name in _PACKAGES}}


def package_digest() -> str:
    """SHA-256 of this package's source files, shortened: its version number is the same for many of its commits."""
    digest, package = hashlib.sha256(), Path(__file__).parent
    for path in sorted(path for path in package.rglob("*") if path.suffix in _SOURCES):
        with contextlib.suppress(FileNotFoundError):  # a temporary file of an editor
            digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def machine() -> dict[str, Any]:
    """Versions and hardware as JSON-serialisable values."""
    return {
        "versions": versions(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "cuda_devices": devices(),
    }
