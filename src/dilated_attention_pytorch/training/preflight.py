"""Checks before a run starts, so that it does not fail after hours or overwrite anything."""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import torch

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate.memory import (
    check_extension_memory,
    check_training_memory,
    checkpoint_bytes,
    largest_file,
)
from dilated_attention_pytorch.machine import choose_device, require, set_threads
from dilated_attention_pytorch.output import check_free_folder

from .autocast import multiplies_bfloat16
from .checkpoint import SETTINGS_NAME, WEIGHTS_NAME, checkpoints
from .eight_bit import check_float8
from .extension_settings import ExtensionSettings
from .lease import LEASE_FILES
from .pretrained import num_parameters
from .process_group import master_port, num_processes, process_rank
from .run_settings import PlainPrecision, Precision
from .settings import Optimizer, TrainSettings
from .trackers import check_trackers
from .zero import check_offload, check_zero, check_zero_here

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_Settings = TypeVar("_Settings", TrainSettings, ExtensionSettings)
_Precision = TypeVar("_Precision", PlainPrecision, Precision)
_TO_GENERATE = ("transformers", "safetensors")
_TO_TRAIN = (*_TO_GENERATE, "accelerate", "rich", "matplotlib", "tensorboard", "tomli_w", "typeguard")
_FLOAT32 = 4
_BYTES_BESIDE = 20 << 20


def check_packages(purpose: Literal["training", "generating"]) -> None:
    """Raise :class:`RunError` unless the packages of the extra ``train`` that ``purpose`` needs are installed."""
    names = _TO_TRAIN if purpose == "training" else _TO_GENERATE
    require(purpose, names, "train")


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise :class:`RunError` unless the packages of the optimizer are installed."""
    if optimizer == "adamw-8bit":
        require("--optimizer adamw-8bit", ("bitsandbytes",), "8bit")


def check_output(output: Path) -> None:
    """Raise :class:`RunError` unless ``output`` is free and can be created. Creates nothing.

    A folder with only a lease is left by a run that was killed before it wrote anything.
    """
    is_stopped = (output / SETTINGS_NAME).exists() and not (output / WEIGHTS_NAME).exists()
    going_on = f", or go on with that run: --resume {output}" if is_stopped else ""
    check_free_folder(output, going_on=going_on, beside=LEASE_FILES)


def check_launch() -> None:
    """Raise :class:`RunError` if there are several processes with an incomplete environment (rank, address)."""
    if not 0 <= process_rank() < num_processes():
        raise RunError(
            f"the environment says that this is process {process_rank()} (RANK) of {num_processes()} (WORLD_SIZE), "
            "counted from 0; start processes with torchrun, or unset both for one process"
        )
    if num_processes() > 1 and "MASTER_ADDR" not in os.environ:
        raise RunError(
            f"the environment says that there are {num_processes()} processes (WORLD_SIZE) and does not say where they "
            "meet (MASTER_ADDR); start them with torchrun, or unset WORLD_SIZE for one process"
        )
    if num_processes() > 1 and not 0 < master_port() < 2**16:
        raise RunError(f"the environment says MASTER_PORT={master_port()}, expected one from 1 to 65,535")


def check_alone(command: str, instead: str) -> None:
    """Raise :class:`RunError` for several processes in a ``command`` of one; ``instead`` is the remedy."""
    if num_processes() > 1:
        raise RunError(f"{command} runs in one process, and torchrun started {num_processes()}; {instead}")


_LAUNCH = "start it with torchrun --nproc-per-node {} -m dilated_attention_pytorch train ..."


def check_processes(settings: TrainSettings, processes: int, *, launch: str = _LAUNCH) -> None:
    """Raise :class:`RunError` unless ``settings`` are valid for the number of ``processes``.

    Args:
        settings, processes: the run.
        launch: the remedy for another number of processes, with a place for it.
    """
    check_zero(settings)
    context, tensor, model = settings.context_parallel, settings.tensor_parallel, settings.model
    together = context * tensor
    if processes % together:
        flags = {"--context-parallel": context, "--tensor-parallel": tensor}
        named = " and ".join(f"{flag} {size}" for flag, size in flags.items() if size > 1)
        least = -(-processes // together) * together
        raise RunError(
            f"for {named} the number of processes must be a multiple of {together}, got {processes}; "
            f"{launch.format(least)}"
        )
    if processes == 1 and settings.data_parallel == "fsdp":
        raise RunError(
            "--data-parallel fsdp splits the weights over several processes and this is the only one; "
            f"{launch.format(2)}, or leave it out"
        )
    if context == 1 and (settings.strategy, settings.layout) != ("auto", "auto"):
        named, value = ("strategy", settings.strategy) if settings.strategy != "auto" else ("layout", settings.layout)
        raise RunError(
            f"--{named} {value} says how processes share a sequence, and no other shares this one; "
            "add --context-parallel N, or leave it out"
        )
    assert model.num_kv_heads is not None
    assert model.ffn_dim is not None
    for name, size in (
        ("model.num-kv-heads", model.num_kv_heads),
        ("model.ffn-dim", model.ffn_dim),
        ("model.vocab-size", model.vocab_size),
    ):
        if size % tensor:
            raise RunError(
                f"--tensor-parallel {tensor} must divide the key/value heads, the feed-forward and the tokens of the "
                f"model, got --{name} {size}; choose a divisor of it"
            )
    splitting = heads_sharing(settings)
    local_heads = model.num_heads // tensor
    if splitting > local_heads:
        named = "--context-parallel" if settings.strategy == "heads" else "--heads-parallel"
        raise RunError(
            f"{named} {splitting} splits {local_heads} heads of each process over more processes than there are heads; "
            f"use at most {local_heads}, or --strategy ring"
        )
    shortest = min(settings.stages.lengths, default=settings.context_length)
    if shortest < context:
        named = "--stages.lengths" if settings.stages.lengths else "--context-length"
        raise RunError(
            f"{named} {shortest} has fewer rows than --context-parallel {context} has processes; use at most "
            f"--context-parallel {shortest}"
        )
    if tensor > 1 and model.attention_dropout:
        raise RunError(
            f"--model.attention-dropout {model.attention_dropout} with --tensor-parallel {tensor}: the heads of all "
            "processes would drop alike; leave one of them out"
        )
    if tensor > 1 and settings.data_parallel == "ddp" and processes > tensor:
        raise RunError(
            f"--tensor-parallel {tensor} with {processes // tensor} groups of processes that read other rows "
            "needs weights that know where they are; add --data-parallel fsdp"
        )
    if settings.optimizer == "adamw-8bit" and (tensor > 1 or settings.data_parallel == "fsdp"):
        raise RunError(
            "--optimizer adamw-8bit steps whole weights, and --tensor-parallel and --data-parallel fsdp split them; "
            "take adamw-bf16 with them"
        )
    if tensor > 1 and settings.precision == "float8":
        raise RunError(
            "--precision float8 scales whole matrices, and --tensor-parallel splits them; take --precision bfloat16"
        )
    if settings.compile and (together > 1 or settings.data_parallel == "fsdp"):
        raise RunError(
            "--compile is for a model whose weights and rows one process has; leave it out with --context-parallel, "
            "--tensor-parallel and --data-parallel fsdp"
        )


def heads_sharing(settings: TrainSettings) -> int:
    """Number of processes that split the heads of a text."""
    return settings.context_parallel if settings.strategy == "heads" else settings.heads_parallel


def choose_precision(precision: _Precision, device: str) -> _Precision:
    """The precision: as requested, else "bfloat16" with hardware support, else "float32".

    On Zen 5 (avx512_bf16) it makes the linear layers of the CPU preset 4 times as fast; emulated it would be slower.

    Raises:
        RunError: the device does not support the precision.
    """
    if precision == "tf32" and (device != "cuda" or torch.cuda.get_device_capability() < (8, 0)):
        raise RunError(
            "--precision tf32 is how CUDA GPUs from compute capability 8.0 (Ampere) on multiply matrices of float32, "
            "and this device does not; take --precision float32"
        )
    if precision == "float8":
        check_float8(device)
    if precision != "auto":
        return precision
    return "bfloat16" if multiplies_bfloat16(device) else "float32"


def checkpoint_space(optimizer: Optimizer, num_parameters: int) -> int:
    """Bytes that a run needs to write one more checkpoint."""
    return checkpoint_bytes(optimizer, num_parameters) + _BYTES_BESIDE


def file_limit() -> float:
    """Most bytes of a file that this process may write (``ulimit -f``)."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit


def check_space(output: Path, num_parameters: int, settings: TrainSettings | ExtensionSettings) -> None:
    """Raise :class:`RunError` unless the checkpoints that the run keeps fit on the disk of ``output``."""
    folder = next(path for path in (output.absolute(), *output.absolute().parents) if path.is_dir())
    # The oldest is removed only after the newest is complete; checkpoints of a resumed run are already on disk.
    missing = max(1, settings.keep_checkpoints + 1 - len(checkpoints(output)))
    trained = _FLOAT32 * num_parameters
    needed = missing * checkpoint_bytes(settings.optimizer, num_parameters) + trained + _BYTES_BESIDE
    largest = largest_file(settings.optimizer, num_parameters)
    if largest > file_limit():
        raise RunError(
            f"--output {output}: a file may have {file_limit() / 1e6:,.1f} MB here, and the largest of a checkpoint "
            f"{largest / 1e6:,.1f} MB; raise the limit (ulimit -f)"
        )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RunError(
            f"--output {output}: the run needs {needed / 1e6:,.0f} MB for its checkpoints and the disk has "
            f"{free / 1e6:,.0f} MB free; free some space, or name a folder on another disk"
        )


def choose_machine(settings: _Settings) -> tuple[_Settings, str]:
    """The settings with precision and number of CPU threads (which is set), and the device.

    Raises:
        RunError: this machine does not have what the settings ask for.
    """
    device = choose_device(settings.device)
    precision, threads = choose_precision(settings.precision, device), set_threads(settings.threads)
    return dataclasses.replace(settings, precision=precision, threads=threads), device


def check_train_command() -> None:
    """Checks of `train` before anything is read; each check raises :class:`RunError`, as all here do."""
    check_packages("training")
    check_launch()


def check_extend_command() -> None:
    """Checks of `extend` before anything is read."""
    check_packages("training")
    check_alone(
        "extend",
        "for several call extend_context and give the model to your own trainer (FSDP2, DeepSpeed): "
        "docs/long-context.md",
    )


def check_settings(settings: TrainSettings | ExtensionSettings) -> None:
    """Checks of the settings of a run, by each process alone, when it begins and when it is resumed."""
    check_optimizer(settings.optimizer)
    check_trackers(settings)


def check_current_processes(settings: TrainSettings) -> None:
    """Checks of the settings for the number of processes; a run may be resumed with another number."""
    check_zero_here(settings)
    check_processes(settings, num_processes())


def check_train_machine(settings: TrainSettings, folder: Path, device: str) -> None:
    """Checks of memory and disk for `train`, by all processes together; text is read after them."""
    check_training_memory(settings, device, num_processes())
    check_space(folder, settings.model.num_parameters, settings)
    check_offload(settings, device)


def check_extend_machine(settings: ExtensionSettings, folder: Path, device: str, config: PreTrainedConfig) -> None:
    """Checks of memory and disk for `extend`, with the configuration of its model; text is read after them."""
    number = num_parameters(f"--model {settings.model}", config)
    check_extension_memory(settings, config, number, device)
    check_space(folder, number, settings)
