"""Kernels that a wheel brings compiled: a library per PyTorch release and instruction set.

The kernels use parts of PyTorch without a stable ABI: ``at::native::cpublas::brgemm`` (oneDNN's small matrix products),
``at::vec``, ``at::parallel_for``, ``at::TensorBase`` and ``torch::Library``. A library is used with the commit of
PyTorch that it was compiled against, and with no other; builds of a commit for CPUs and for CUDA have the same headers.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = Path(__file__).parents[1] / "csrc"
LIBRARY = "kernels.so"
_FOLDER = Path(__file__).with_name("compiled")
_V3 = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions that kernels are compiled for."""

    name: str
    capability: str
    """What PyTorch calls the processor's instructions (``torch.backends.cpu.get_cpu_capability``)."""
    architecture: tuple[str, ...]
    """The compiler's arguments."""
    features: Set[str]
    """The processor's flags that the compiled code needs, by their names in ``/proc/cpuinfo``."""


LEVELS = (
    # bfloat16 is multiplied by instructions of its own where the processor has them (csrc/vectors.h).
    Level("avx512-bf16", "AVX512", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
    Level("avx512", "AVX512", ("-march=x86-64-v4",), _V4),
    Level("avx2", "AVX2", ("-march=x86-64-v3",), _V3),
)


def library_built_in() -> Path | None:
    """The library of the package that fits this processor, PyTorch and the sources exactly; None if there is none."""
    if not _FOLDER.is_dir() or sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    capability, features = torch.backends.cpu.get_cpu_capability(), _features()
    level = next((x for x in LEVELS if x.capability == capability and x.features <= features), None)
    if level is None:
        return None
    library = _FOLDER / folder_name(level) / LIBRARY
    return library if library.is_file() else None


def folder_name(level: Level) -> str:
    """Name of the folder of a level's library: PyTorch's release, the level, and a digest of all that determines it."""
    identity = hashlib.blake2b(digest_size=8)
    for part in (str(torch.version.git_version), *level.architecture):
        identity.update(part.encode() + b"\0")
    add_sources(identity)
    return f"native-torch-{torch.__version__.partition('+')[0]}-{level.name}-{identity.hexdigest()}"


def add_sources(identity: hashlib.blake2b) -> None:
    """Add the names and contents of the kernels' sources to a digest."""
    for source in sorted(SOURCES.iterdir()):
        identity.update(source.name.encode() + source.read_bytes() + b"\0")


def _features() -> Set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
