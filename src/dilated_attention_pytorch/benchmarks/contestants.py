"""The compared implementations: a flat list with conditions for taking part in a case."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch.kernels import fused
from dilated_attention_pytorch.kernels.select import Impl, is_interpreted, refusal
from dilated_attention_pytorch.ops import attend

from .published import published_attention
from .shapes import Case, Computes

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps query, key and value to the output, all ``[B, N, heads, D]``."""

_FLEX_ON_CPU_ROWS = 1024
FLEX = "FlexAttention"
"""Name of the contestant that is compiled per shape."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """An implementation of a case."""

    name: str
    computes: Computes
    """What it computes and is checked against: the pattern, or dense attention."""
    refusal: Callable[[Case, torch.device], str | None]
    """Why it does not take part in a case; None if it does."""
    prepare: Callable[[Case, tuple[Tensor, Tensor, Tensor]], Attention]
    """One-time preparation per shape, timed separately: masks, caches."""
    needs_gpu: bool = False


def _ours_refuses(case: Case, device: torch.device, *, impl: Impl) -> str | None:
    if impl == "triton" and is_interpreted():
        return "TRITON_INTERPRET is set: the interpreter checks the kernels, its time says nothing about them"
    return refusal(impl, device, case.torch_dtype, case.head_dim)


def _prepare_ours(case: Case, operands: tuple[Tensor, Tensor, Tensor], *, impl: Impl) -> Attention:
    return functools.partial(
        attend, pattern=case.pattern, is_causal=case.causal, query_offset=case.query_offset, impl=impl
    )


def _cache_refuses(case: Case, device: torch.device) -> str | None:
    if case.mode != "decode":
        return "the cache of the models is for decoding"
    if case.block_density is not None:
        return "the cache of the models is for dilation groups"
    if not case.causal:
        return "the cache of the models holds what a causal query sees"
    return None


def _prepare_cache(case: Case, operands: tuple[Tensor, Tensor, Tensor]) -> Attention:
    """A cache filled with all rows except the last; every call adds one row and attends to the cached rows."""
    from dilated_attention_pytorch.models import LongNetCache, LongNetConfig

    config = LongNetConfig(
        embed_dim=case.heads * case.head_dim,
        num_layers=1,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        segment_lengths=case.segment_lengths,
        dilation_rates=case.dilation_rates,
        offset_rule=case.offset_rule,
    )
    cache, (query, key, value) = LongNetCache(config), operands
    with torch.no_grad():
        for start in range(0, case.rows - 1, 8192):
            rows = slice(start, min(start + 8192, case.rows - 1))
            # The prefill's outputs are not needed, only its stored keys and values.
            step = cache.step(case.batch, rows.stop - start, None, query.device)
            step.attend(0, query.expand(-1, rows.stop - start, -1, -1), key[:, rows], value[:, rows], 0.0)

    def decode(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cache.step(case.batch, 1, None, query.device).attend(0, query, key[:, -1:], value[:, -1:], 0.0)

    return decode


def _published_refuses(case: Case, device: torch.device) -> str | None:
    if case.mode == "decode":
        return "the published code has no decoding"
    if case.block_density is not None:
        return "the published code has dilation groups alone"
    probe = torch.empty(1, 1, 1, case.head_dim, dtype=case.torch_dtype, device=device)
    if not fused.is_fused(probe, has_bias=False):
        return f"no flash kernel of PyTorch takes {case.dtype} heads of {case.head_dim} on this device"
    return None


def _prepare_published(case: Case, operands: tuple[Tensor, Tensor, Tensor]) -> Attention:
    return functools.partial(published_attention, pattern=case.pattern, is_causal=case.causal)


def _flex_refuses(case: Case, device: torch.device) -> str | None:
    if case.mode == "decode":
        return "a decoding step sees other rows every time, and FlexAttention wants a block mask for each"
    if case.dtype == "float64":
        return "FlexAttention does not compute in float64"
    if case.block_density is not None and case.block_size != 128:
        return "FlexAttention takes blocks of 128 positions here"
    if device.type == "cpu":
        if case.mode != "forward":
            return "FlexAttention has no backward on the CPU"
        if case.rows > _FLEX_ON_CPU_ROWS:
            return f"on the CPU it evaluates the mask element by element: up to {_FLEX_ON_CPU_ROWS} rows show it"
        if not any(shutil.which(name) for name in ("g++", "clang++")):
            return "FlexAttention is compiled on the CPU, and there is no g++ or clang++ here; install one"
    return None


def _prepare_flex(case: Case, operands: tuple[Tensor, Tensor, Tensor]) -> Attention:
    from .flex import FlexCase

    return FlexCase(case, operands[0].device).attend


def _dense_refuses(case: Case, device: torch.device) -> str | None:
    if _is_half_on_cuda(case, device):
        return "PyTorch would choose one of the two kernels that are timed by name"
    return None


def _pinned_refuses(case: Case, device: torch.device, *, backend: SDPBackend) -> str | None:
    if not _is_half_on_cuda(case, device):
        return "PyTorch's flash and cuDNN attention compute in float16 and bfloat16 on CUDA devices"
    if backend == SDPBackend.CUDNN_ATTENTION and (case.head_dim % 8 or case.head_dim > 128):
        return f"PyTorch's cuDNN attention computes heads of 8, 16, ... 128 numbers, and this case has {case.head_dim}"
    return None


def _is_half_on_cuda(case: Case, device: torch.device) -> bool:
    return device.type == "cuda" and case.dtype in ("float16", "bfloat16")


def _prepare_dense(
    case: Case, operands: tuple[Tensor, Tensor, Tensor], *, backend: SDPBackend | None = None
) -> Attention:
    is_grouped = case.heads != case.kv_heads

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        # The single query of a decoding step is the last row, which sees all keys.
        is_causal = case.causal and case.mode != "decode"
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=is_grouped).transpose(1, 2)

    if backend is None:
        return dense

    def pinned(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return dense(query, key, value)

    return pinned


def _ours(impl: Impl) -> Contestant:
    return Contestant(
        f"ours, {impl}",
        "pattern",
        functools.partial(_ours_refuses, impl=impl),
        functools.partial(_prepare_ours, impl=impl),
        needs_gpu=impl == "triton",
    )


def _pinned(name: str, backend: SDPBackend) -> Contestant:
    return Contestant(
        name,
        "dense",
        functools.partial(_pinned_refuses, backend=backend),
        functools.partial(_prepare_dense, backend=backend),
        needs_gpu=True,
    )


CONTESTANTS: tuple[Contestant, ...] = (
    _ours("triton"),
    _ours("native"),
    _ours("aten"),
    Contestant("ours, model cache", "pattern", _cache_refuses, _prepare_cache),
    Contestant("published route", "pattern", _published_refuses, _prepare_published),
    Contestant(FLEX, "pattern", _flex_refuses, _prepare_flex),
    Contestant("dense SDPA", "dense", _dense_refuses, _prepare_dense),
    _pinned("dense SDPA, flash", SDPBackend.FLASH_ATTENTION),
    _pinned("dense SDPA, cuDNN", SDPBackend.CUDNN_ATTENTION),
)
"""All contestants, in table order."""


def find_contestants(names: tuple[str, ...], device: torch.device) -> tuple[Contestant, ...]:
    """Contestants by name, or by part of a name if no exact one exists; all for the device if ``names`` is empty."""
    if not names:
        return tuple(entry for entry in CONTESTANTS if device.type == "cuda" or not entry.needs_gpu)
    everyone = {entry.name for entry in CONTESTANTS}

    def is_meant(entry: Contestant) -> bool:
        return any(name == entry.name or (name not in everyone and name in entry.name) for name in names)

    return tuple(filter(is_meant, CONTESTANTS))
