"""The implementation chosen for a call, cached where the answer is constant."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.select import Impl, is_interpreted, select
from dilated_attention_pytorch.patterns import Pattern

_TRITON_COMPUTES: set[tuple[object, ...]] = set()
"""Arguments for which :func:`select` answered "triton", constant per process. Other answers may change with a build."""


def implementation_of(impl: Impl, query: Tensor, pattern: Pattern) -> str:
    """The name of the implementation that computes a call.

    Raises:
        ValueError, NotImplementedError: as :func:`select`.
    """
    device, dtype, head_dim = query.device, query.dtype, query.shape[3]
    is_segmented = any(group.boundaries is not None for group in pattern.groups)
    if torch.compiler.is_compiling():
        return select(impl, device, dtype, head_dim, is_segmented=is_segmented)
    asked = (impl, device, dtype, head_dim, is_segmented, is_interpreted())
    if asked in _TRITON_COMPUTES:
        return "triton"
    chosen = select(impl, device, dtype, head_dim, is_segmented=is_segmented)
    if chosen == "triton":
        _TRITON_COMPUTES.add(asked)
    return chosen
