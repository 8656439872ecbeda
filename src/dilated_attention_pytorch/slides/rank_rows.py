"""A rank's rows of slides that several ranks share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch import parallel
from dilated_attention_pytorch.parallel.communicator import communicator_of
from dilated_attention_pytorch.parallel.sums import sum_over_ranks
from dilated_attention_pytorch.patterns import Pattern
from dilated_attention_pytorch.plan.layout import shard_runs

from .rows import BatchRows


class RankRows(BatchRows):
    """This rank's consecutive rows of each of ``num_slides`` slides; rank 0 holds the class tokens.

    Raises:
        TypeError, ValueError: ``mesh`` is not a 1-D DeviceMesh.
    """

    def __init__(self, num_slides: int, length: int, mesh: DeviceMesh) -> None:
        super().__init__(num_slides, length)
        self.communicator = communicator_of(mesh)
        if mesh.ndim != 1:
            raise ValueError(
                f'mesh must have one dimension, the ranks that share a slide, got {mesh.ndim}; pass mesh["name"]'
            )
        self.mesh = mesh
        runs = shard_runs(length, self.communicator.size, self.communicator.rank, "contiguous")
        start, stop = runs[0] if runs else (length, length)
        self.num_tokens = int(start == 0)
        """Number of class tokens per slide on this rank."""
        self.tiles = slice(max(start - 1, 0), stop - 1)
        """This rank's tiles of a slide."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> Tensor:
        """See the base class."""
        return parallel.attend(
            query, key, value, pattern, mesh=self.mesh, sequence_length=self.length, heads_first=False
        )

    def class_tokens(self, x: Tensor) -> Tensor:
        """The class tokens on rank 0, else 0."""
        return x[:, : self.num_tokens].sum(dim=1)

    def means(self, x: Tensor) -> Tensor:
        """This rank's summand of the means."""
        return x[:, self.num_tokens :].sum(dim=1) / (self.length - 1)

    def completed(self, pooled: list[Tensor]) -> list[Tensor]:
        """See the base class."""
        return list(sum_over_ranks(torch.stack(pooled), self.communicator).unbind())

    def kept(self, x: Tensor, probability: float) -> Tensor:
        """Rank 0's draws."""
        return self.communicator.broadcast(super().kept(x, probability), 0)
