"""Receptive fields of patterns over several layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .pattern import Pattern

MOST_POSITIONS = 1 << 13
"""Longest sequence: above it, the N x N results and matrix products take gigabytes and minutes."""


@dataclass(frozen=True)
class Reach:
    """Receptive field layer by layer, as :meth:`Pattern.reach` returns it.

    Layers are numbered from 1. After 0 layers a position depends on itself alone.
    """

    first_layer: Tensor
    """int64 ``[N, N]``: the number of layers after which position p depends on the token at t; 0 for ``p == t``,
    -1 if it does not after all L layers."""
    num_layers: int
    """Number of layers L."""

    def mask(self, num_layers: int | None = None) -> Tensor:
        """Whether position p depends on the token at t after ``num_layers`` layers (None: all), bool ``[N, N]``.

        Raises:
            ValueError: ``num_layers`` is not in 0 to L.
        """
        return (self.first_layer >= 0) & (self.first_layer <= self._layers(num_layers))

    def by_distance(self, num_layers: int | None = None) -> Tensor:
        """Number of pairs at distance ``|p - t| = 0, 1, ...`` reached after ``num_layers`` layers, int64 ``[N]``.

        The total at distance d is ``2 (N - d)`` (causal: ``N - d``), and N at distance 0.

        Raises:
            ValueError: ``num_layers`` is not in 0 to L.
        """
        queries, keys = self.mask(num_layers).nonzero(as_tuple=True)
        return (queries - keys).abs().bincount(minlength=len(self.first_layer))

    def farthest(self, num_layers: int | None = None) -> int:
        """The largest distance of a pair reached after ``num_layers`` layers, in positions.

        Raises:
            ValueError: ``num_layers`` is not in 0 to L.
        """
        return int(self.by_distance(num_layers).nonzero().max())

    def _layers(self, num_layers: int | None) -> int:
        if num_layers is None:
            return self.num_layers
        if not 0 <= num_layers <= self.num_layers:
            raise ValueError(
                f"num_layers must be between 0 and the {self.num_layers} layers of this result, got {num_layers}"
            )
        return num_layers


def reach(pattern: Pattern, sequence_length: int, num_layers: int, *, num_kv_heads: int, is_causal: bool) -> Reach:
    """See :meth:`Pattern.reach`."""
    for rule in pattern.rules:
        rule.check(sequence_length, num_kv_heads)
    positions = torch.arange(sequence_length)
    seen = torch.eye(sequence_length, dtype=torch.bool)
    for head in range(num_kv_heads):  # one at a time bounds the memory
        of_head = pattern.for_heads([head], num_kv_heads).counts(positions, positions, 1, is_causal=is_causal)
        seen |= of_head[0] > 0
    step = seen.float()
    first_layer = torch.full(seen.shape, -1)
    first_layer.fill_diagonal_(0)
    reached = torch.eye(sequence_length)
    for layer in range(1, num_layers + 1):
        now = step @ reached  # float32 path counts: positive wherever a path exists
        first_layer.masked_fill_((now > 0) & (first_layer < 0), layer)
        reached = (now > 0).float()
    return Reach(first_layer, num_layers)
