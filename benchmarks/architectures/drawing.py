"""Numbers and tokens by chance, the same in every run."""

from __future__ import annotations

import torch
from torch import Tensor

from .sizes import FIRST_TOKEN, LAST_TOKEN


def draw_tokens(*shape: int, seed: int = 0) -> Tensor:
    """Ordinary tokens."""
    return torch.randint(FIRST_TOKEN, LAST_TOKEN, shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
