"""What is checked before a run begins, so that nothing fails after hours and nothing is overwritten."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import torch

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import require
from dilated_attention_pytorch.output import check_free_folder

from .checkpoint import SETTINGS_NAME, WEIGHTS_NAME, checkpoints
from .corpus import Corpus
from .lease import LEASE_NAME
from .settings import Device, Precision, TrainSettings

_TO_GENERATE = ("transformers", "safetensors")
_TO_TRAIN = (*_TO_GENERATE, "accelerate", "rich", "matplotlib", "tensorboard")
_WEIGHT_BYTES = 4
_CHECKPOINT_BYTES = 3 * _WEIGHT_BYTES
"""Of a parameter in a checkpoint: the weight and two moments in float32."""
_BYTES_BESIDE = 20 << 20


def check_packages(purpose: Literal["training", "generating"]) -> None:
    """Raise :class:`RunError` unless what ``purpose`` needs of the extra ``train`` is installed."""
    names = _TO_TRAIN if purpose == "training" else _TO_GENERATE
    require(purpose, names, "train")


def check_output(output: Path) -> None:
    """Raise :class:`RunError` unless ``output`` is free and can be made. Makes nothing.

    A lease alone is what a run leaves that was killed before it wrote anything.
    """
    is_stopped = (output / SETTINGS_NAME).exists() and not (output / WEIGHTS_NAME).exists()
    going_on = f", or go on with that run: --resume {output}" if is_stopped else ""
    check_free_folder(output, going_on=going_on, beside=LEASE_NAME)


def check_corpus(corpus: Corpus, settings: TrainSettings) -> None:
    """Raise :class:`RunError` unless there is text for one window to train on, and something to evaluate."""
    length = len(corpus.training)
    if length < settings.context_length:
        raise RunError(
            f"--data holds {length:,} bytes of training text, fewer than one window of --context-length "
            f"{settings.context_length}; give more text, or a --context-length of at most {length}"
        )
    if len(corpus.held_out) < 8:
        raise RunError(
            f"--data leaves {len(corpus.held_out)} bytes to evaluate on, and at least 8 are needed; give more text"
        )


def check_processes(settings: TrainSettings, num_processes: int) -> None:
    """Raise :class:`RunError` unless ``settings`` say what each of ``num_processes`` processes is to do."""
    context, tensor, model = settings.context_parallel, settings.tensor_parallel, settings.model
    together = context * tensor
    launch = "start it with torchrun --nproc-per-node {} -m dilated_attention_pytorch train ..."
    if num_processes % together:
        flags = {"--context-parallel": context, "--tensor-parallel": tensor}
        named = " and ".join(f"{flag} {size}" for flag, size in flags.items() if size > 1)
        least = -(-num_processes // together) * together
        raise RunError(
            f"for {named} the number of processes must be a multiple of {together}, got {num_processes}; "
            f"{launch.format(least)}"
        )
    if num_processes == 1 and settings.data_parallel == "fsdp":
        raise RunError(
            "--data-parallel fsdp splits the weights over several processes and this is the only one; "
            f"{launch.format(2)}, or leave it out"
        )
    if context == 1 and (settings.strategy, settings.layout) != ("auto", "auto"):
        named, value = (
            ("strategy", settings.strategy) if settings.strategy != "auto" else ("layout", settings.layout)
        )  # fmt: skip
        raise RunError(
            f"--{named} {value} says how processes share a sequence, and no other shares this one; "
            "add --context-parallel N, or leave it out"
        )
    assert model.num_kv_heads is not None
    assert model.ffn_dim is not None
    for name, size in (
        ("model.num-kv-heads", model.num_kv_heads), ("model.ffn-dim", model.ffn_dim),
        ("model.vocab-size", model.vocab_size),
    ):  # fmt: skip
        if size % tensor:
            raise RunError(
                f"--tensor-parallel {tensor} must divide the key/value heads, the feed-forward and the tokens of the "
                f"model, got --{name} {size}; choose a divisor of it"
            )
    splitting = context if settings.strategy == "heads" else settings.heads_parallel
    local_heads = model.num_heads // tensor
    if splitting > local_heads:
        named = "--context-parallel" if settings.strategy == "heads" else "--heads-parallel"
        raise RunError(
            f"{named} {splitting} splits {local_heads} heads of each process over more processes than there are heads; "
            f"use at most {local_heads}, or --strategy ring"
        )
    if settings.context_length < context:
        raise RunError(
            f"--context-length {settings.context_length} has fewer rows than --context-parallel {context} has "
            f"processes; use at most --context-parallel {settings.context_length}"
        )
    if tensor > 1 and model.attention_dropout:
        raise RunError(
            f"--model.attention-dropout {model.attention_dropout} with --tensor-parallel {tensor}: the heads of all "
            "processes would drop alike; leave one of them out"
        )
    if tensor > 1 and settings.data_parallel == "ddp" and num_processes > tensor:
        raise RunError(
            f"--tensor-parallel {tensor} beside {num_processes // tensor} groups of processes that read other rows "
            "needs weights that know where they are; add --data-parallel fsdp"
        )
    if settings.compile and (together > 1 or settings.data_parallel == "fsdp"):
        raise RunError(
            "--compile is for a model whose weights and rows one process has; leave it out beside --context-parallel, "
            "--tensor-parallel and --data-parallel fsdp"
        )


def choose_device(device: Device) -> str:
    """ "cpu" or "cuda".

    Raises:
        RunError: the device that was asked for is not there.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise RunError(
            "--device cuda: PyTorch finds no CUDA device here; use --device cpu, or install a PyTorch built for CUDA "
            "and its driver (`dilated-attention info` shows what is there)"
        )
    return "cuda" if available and device != "cpu" else "cpu"


def choose_precision(precision: Precision, device: str) -> Precision:
    """ "bfloat16" or "float32": what was asked for, else bfloat16 where it is computed in hardware.

    On Zen 5 (avx512_bf16) the linear layers of the CPU preset run 4 times as fast in it; emulated they would be slower.
    """
    if precision != "auto":
        return precision
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    # The public torch.cpu.get_capabilities came later than the oldest torch that the package accepts.
    in_hardware = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if in_hardware else "float32"


def checkpoint_space(num_parameters: int) -> int:
    """Bytes that a run needs to write one more checkpoint."""
    return _CHECKPOINT_BYTES * num_parameters + _BYTES_BESIDE


def check_space(output: Path, num_parameters: int, keep: int) -> None:
    """Raise :class:`RunError` unless the checkpoints of the run, ``keep`` at a time, fit on the disk of ``output``."""
    folder = next(path for path in (output.absolute(), *output.absolute().parents) if path.is_dir())
    # The oldest one goes only when the newest is there; those of a run that goes on are on the disk already.
    missing = max(1, keep + 1 - len(checkpoints(output)))
    needed = (missing * _CHECKPOINT_BYTES + _WEIGHT_BYTES) * num_parameters + _BYTES_BESIDE
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RunError(
            f"--output {output}: the run needs {needed / 1e6:,.0f} MB for its checkpoints and the disk has "
            f"{free / 1e6:,.0f} MB free; free some space, or name a folder on another disk"
        )
