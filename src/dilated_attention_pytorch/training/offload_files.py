"""ZeRO-3 states in files: what DeepSpeed's asynchronous file operator needs, checked before a run, and its settings."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dilated_attention_pytorch.errors import RunError

from .settings import TrainSettings

SUBGROUP = 50_000_000
"""Elements of a process's weights that are read, stepped and written together, 200 MB of each of four tensors."""
_BUFFERS = 8
"""Weights that a process reads from files at once. A module has its own weights alone, at most 3."""
_OPTIMIZER_BUFFERS = 4
"""Weight, gradient, and two moments."""


def check_folder(folder: Path) -> None:
    """Raise :class:`RunError` unless DeepSpeed can keep files in ``folder``."""
    if sys.platform != "linux":
        raise RunError(
            f"--offload nvme reads and writes with libaio of Linux, got {sys.platform}; take --offload parameters"
        )
    if not folder.is_dir():
        raise RunError(f"--offload-folder {folder} is not a folder; name one on a disk of this machine, or create it")
    try:
        descriptor, name = tempfile.mkstemp(dir=folder)
    except OSError as error:
        raise RunError(
            f"--offload-folder {folder}: no files can be written there ({error.strerror}); name a folder that you may "
            "write to"
        ) from error
    os.close(descriptor)
    try:
        os.close(os.open(name, os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        raise RunError(
            f"--offload-folder {folder} lies on a file system without direct access ({error.strerror}), with which "
            "DeepSpeed reads and writes; name a folder on a local disk"
        ) from error
    finally:
        os.unlink(name)


def load_operator() -> None:
    """Load DeepSpeed's operator ``async_io``; compile it if that was not done before on this machine.

    Raises:
        RunError: libaio, a compiler, ninja or CUDA's toolkit is missing, or the operator does not compile.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import CUDA_HOME

    builder = AsyncIOBuilder()
    # DeepSpeed installed with DS_BUILD_AIO=1 has it.
    is_installed = importlib.util.find_spec(builder.absolute_name()) is not None
    if not is_installed and torch.cuda.is_available() and CUDA_HOME is None:
        raise RunError(
            "--offload nvme: DeepSpeed compiles its operator async_io against CUDA's toolkit, which is not found here; "
            "install it, or set CUDA_HOME. Or take --offload parameters, which keeps states in memory"
        )
    if not is_installed and not builder.is_compatible(verbose=False):
        raise RunError(
            "--offload nvme needs libaio with its headers, and a C++ compiler; on Debian and Ubuntu: "
            "apt-get install libaio-dev g++. Or take --offload parameters, which keeps states in memory"
        )
    try:
        builder.load(verbose=False)
    # ImportError: what was compiled cannot be loaded. OSError: no compiler. RuntimeError: no ninja, or its errors.
    except (ImportError, OSError, RuntimeError) as error:
        raise RunError(
            f"--offload nvme: DeepSpeed's operator async_io cannot be compiled or loaded here: {error}. It needs ninja "
            "and a C++ compiler; or take --offload parameters, which keeps states in memory"
        ) from error


def own_folder(settings: TrainSettings) -> Path | None:
    """A new folder for this process's files in ``settings.offload_folder``; None without it."""
    if settings.offload_folder is None:
        return None
    return Path(tempfile.mkdtemp(dir=settings.offload_folder, prefix="dilated-attention-"))


def file_options(model: nn.Module, folder: Path) -> dict[str, Any]:
    """DeepSpeed's ZeRO options that keep weights and the optimizer's state of ``model`` in files in ``folder``."""
    largest = max(-(-weight.numel() // dist.get_world_size()) for weight in model.parameters())
    device = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "sub_group_size": SUBGROUP,
        "offload_optimizer": {**device, "buffer_count": _OPTIMIZER_BUFFERS},
        # Buffers are of a multiple of what the operator reads at once.
        "offload_param": {
            **device,
            "buffer_count": _BUFFERS,
            "buffer_size": -(-largest // 4096) * 4096,
            "max_in_cpu": 0,
        },
        # A weight keeps its buffer until it is released: at once, and none is gathered ahead.
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    }
