"""The computation dtype of each precision setting."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.bfloat16}


def computing_dtype(precision: str) -> torch.dtype:
    """Dtype of matrix products and attention: float32 for every precision without autocast.

    >>> computing_dtype("float16"), computing_dtype("tf32")
    (torch.float16, torch.float32)
    """
    return _DTYPES.get(precision, torch.float32)


def autocast(precision: str, device: str) -> torch.autocast:
    """The autocast context for ``precision`` on a device type, "cpu" or "cuda".

    Weights are cast at every use. autocast's cache would keep the copies of all weights until the forward pass ends,
    also those of recomputed blocks and of weights that several processes split.
    """
    dtype = computing_dtype(precision)
    is_on = dtype != torch.float32
    return torch.autocast(device, dtype if is_on else None, enabled=is_on, cache_enabled=False)


def multiplies_bfloat16(device: str) -> bool:
    """Whether a device type, "cpu" or "cuda", multiplies matrices of bfloat16 in hardware.

    Emulated products of bfloat16 are several times as slow as those of float32.
    """
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # torch.cpu.get_capabilities is newer than the oldest supported torch.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
