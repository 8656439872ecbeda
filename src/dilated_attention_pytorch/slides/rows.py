"""The rows that a call of the slide encoder computes: slides of equal length, or packed slides."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from dilated_attention_pytorch.ops import attend
from dilated_attention_pytorch.patterns import Pattern


class BatchRows:
    """All rows of ``num_slides`` slides of equal length: ``x [S, length, E]``, the class token first."""

    def __init__(self, num_slides: int, length: int) -> None:
        self.num_slides = num_slides
        self.length = length
        """Rows of the longest slide, with its class token."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
        """Attention within each slide, ``[S, rows, H, D]``."""
        return attend(query, key, value, pattern, heads_first=False)

    def class_tokens(self, x: Tensor) -> Tensor:
        """``[S, E]``."""
        return x[:, 0]

    def means(self, x: Tensor) -> Tensor:
        """The mean over the tiles of each slide, ``[S, E]``."""
        return x[:, 1:].mean(dim=1)

    def completed(self, pooled: list[Tensor]) -> list[Tensor]:
        """Pooled states of whole slides from those of these rows."""
        return pooled

    def kept(self, x: Tensor, probability: float) -> Tensor:
        """For every slide ``1 / probability`` with this probability, else 0; multiplies ``x``."""
        factors = torch.empty(self.num_slides, device=x.device).bernoulli_(probability).div_(probability)
        return factors.to(x.dtype)[:, None, None]


class PackedSlides(BatchRows):
    """All rows of packed slides: ``x [1, sum of the lengths, E]``, slide s from ``ends[s]`` to ``ends[s + 1]``."""

    def __init__(self, ends: tuple[int, ...]) -> None:
        self.lengths = [stop - start for start, stop in pairwise(ends)]
        super().__init__(len(self.lengths), max(self.lengths))
        self.ends = ends

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
        """See the base class."""
        cu_seqlens = torch.tensor(self.ends, dtype=torch.int32)
        return attend(query, key, value, pattern, cu_seqlens=cu_seqlens, heads_first=False)

    def class_tokens(self, x: Tensor) -> Tensor:
        """See the base class."""
        return x[0, list(self.ends[:-1])]

    def means(self, x: Tensor) -> Tensor:
        """See the base class."""
        return torch.stack([x[0, start + 1 : stop].mean(dim=0) for start, stop in pairwise(self.ends)])

    def kept(self, x: Tensor, probability: float) -> Tensor:
        """See the base class."""
        lengths = torch.tensor(self.lengths, device=x.device)
        return super().kept(x, probability).flatten().repeat_interleave(lengths)[None, :, None]
