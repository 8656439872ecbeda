"""Who is compared: a flat list, each with the sentence that keeps it out of a case where it does not belong."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch.kernels import fused
from dilated_attention_pytorch.kernels.select import Impl, is_interpreted, refusal
from dilated_attention_pytorch.ops import attend

from .published import published_attention
from .shapes import Case, Computes

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From query, key and value to the output, all ``[B, N, heads, D]``."""

_DENSE_SCORES_BYTES = 1 << 28
_FLEX_ON_CPU_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to compute a case."""

    name: str
    computes: Computes
    """What it is held against: the pattern, or attention of all to all."""
    refusal: Callable[[Case, torch.device], str | None]
    """Why it takes no part in a case; None if it does."""
    prepare: Callable[[Case, tuple[Tensor, Tensor, Tensor]], Attention]
    """What is done once for a shape, timed on its own: masks, caches."""


def _ours_refuses(case: Case, device: torch.device, *, impl: Impl) -> str | None:
    if impl == "triton" and is_interpreted():
        return "TRITON_INTERPRET is set: the interpreter checks the kernels, its time says nothing about them"
    # Counts, scores, probabilities and their gradients.
    scores = 16 * case.batch * case.heads * case.num_queries * case.rows
    if impl == "reference" and scores > _DENSE_SCORES_BYTES:
        return f"it holds all N * M scores and their like: timed up to {_DENSE_SCORES_BYTES >> 20} MiB of them"
    return refusal(impl, device, case.torch_dtype, case.head_dim)


def _prepare_ours(case: Case, operands: tuple[Tensor, Tensor, Tensor], *, impl: Impl) -> Attention:
    return functools.partial(
        attend, pattern=case.pattern, is_causal=case.causal, query_offset=case.query_offset, impl=impl
    )


def _cache_refuses(case: Case, device: torch.device) -> str | None:
    if case.mode != "decode":
        return "the cache of the models is for decoding"
    if not case.causal:
        return "the cache of the models holds what a causal query sees"
    return None


def _prepare_cache(case: Case, operands: tuple[Tensor, Tensor, Tensor]) -> Attention:
    """A cache filled with all rows but the last; every call adds one row and attends to what is held."""
    from dilated_attention_pytorch.models import LongNetCache, LongNetConfig

    config = LongNetConfig(
        embed_dim=case.heads * case.head_dim, num_layers=1, num_heads=case.heads, num_kv_heads=case.kv_heads,
        segment_lengths=case.segment_lengths, dilation_rates=case.dilation_rates, offset_rule=case.offset_rule,
    )  # fmt: skip
    cache, (query, key, value) = LongNetCache(config), operands
    with torch.no_grad():
        for start in range(0, case.rows - 1, 8192):
            rows = slice(start, min(start + 8192, case.rows - 1))
            # What these queries see is of no interest: their keys and values are to be stored.
            step = cache.step(case.batch, rows.stop - start, None, query.device)
            step.attend(0, query.expand(-1, rows.stop - start, -1, -1), key[:, rows], value[:, rows], 0.0)

    def decode(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return cache.step(case.batch, 1, None, query.device).attend(0, query, key[:, -1:], value[:, -1:], 0.0)

    return decode


def _published_refuses(case: Case, device: torch.device) -> str | None:
    if case.mode == "decode":
        return "the published code has no decoding"
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
    if device.type == "cpu":
        if case.mode != "forward":
            return "FlexAttention has no backward on the CPU"
        if case.rows > _FLEX_ON_CPU_ROWS:
            return f"on the CPU it evaluates the mask element by element: up to {_FLEX_ON_CPU_ROWS} rows show it"
        if not any(shutil.which(name) for name in ("g++", "clang++")):
            return "FlexAttention is compiled on the CPU, and there is no g++ or clang++ here; install one"
    return None


def _prepare_flex(case: Case, operands: tuple[Tensor, Tensor, Tensor]) -> Attention:
    from .flex import FlexPattern

    return FlexPattern(case, operands[0].device).attend


def _prepare_dense(case: Case, operands: tuple[Tensor, Tensor, Tensor]) -> Attention:
    is_grouped = case.heads != case.kv_heads

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        # The one query of a decoding step is the last row: it sees all.
        is_causal = case.causal and case.mode != "decode"
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=is_grouped).transpose(1, 2)

    return dense


def _flash_attn_refuses(case: Case, device: torch.device) -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash_attn is not installed"
    if device.type != "cuda" or case.dtype not in ("float16", "bfloat16"):
        return "flash_attn computes in float16 and bfloat16 on CUDA devices"
    return None


def _prepare_flash_attn(case: Case, operands: tuple[Tensor, Tensor, Tensor]) -> Attention:
    flash_attn = importlib.import_module("flash_attn")
    # It aligns the causal mask at the last row, so a decoding step needs no other call.
    return functools.partial(flash_attn.flash_attn_func, causal=case.causal)


def _ours(impl: Impl) -> Contestant:
    return Contestant(
        f"ours, {impl}", "pattern", functools.partial(_ours_refuses, impl=impl),
        functools.partial(_prepare_ours, impl=impl),
    )  # fmt: skip


CONTESTANTS: tuple[Contestant, ...] = (
    *(_ours(impl) for impl in get_args(Impl) if impl != "auto"),
    Contestant("ours, model cache", "pattern", _cache_refuses, _prepare_cache),
    Contestant("published route", "pattern", _published_refuses, _prepare_published),
    Contestant("FlexAttention", "pattern", _flex_refuses, _prepare_flex),
    Contestant("dense SDPA", "dense", lambda case, device: None, _prepare_dense),
    Contestant("dense flash_attn", "dense", _flash_attn_refuses, _prepare_flash_attn),
)
"""Everyone, in the order of the tables."""


def find_contestants(names: tuple[str, ...]) -> tuple[Contestant, ...]:
    """The contestants whose name contains one of ``names``; all without names."""
    if not names:
        return CONTESTANTS
    return tuple(entry for entry in CONTESTANTS if any(name in entry.name for name in names))
