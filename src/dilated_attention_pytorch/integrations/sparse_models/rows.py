"""Rows that a mask chooses per batch row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ChosenRows(NamedTuple):
    """The rows of each batch row that a mask chooses, in order and padded to one number m."""

    positions: Tensor
    """Their positions, int64 ``[B, m]``; any other position where there are fewer."""
    are_padding: Tensor
    """bool ``[B, m]``, True where a batch row has fewer."""

    def take(self, states: Tensor) -> Tensor:
        """The chosen rows ``[B, m, ...]`` of ``[B, N, ...]``."""
        batch = torch.arange(len(states), device=states.device)[:, None]
        return states[batch, self.positions]

    def put(self, states: Tensor, rows: Tensor) -> Tensor:
        """``[B, N, ...]`` with the chosen rows replaced by ``[B, m, ...]``."""
        batch, place = (~self.are_padding).nonzero(as_tuple=True)
        return states.index_put((batch, self.positions[batch, place]), rows[batch, place])


def choose_rows(chosen: Tensor) -> ChosenRows:
    """The rows that a bool mask ``[B, N]`` chooses."""
    numbers = chosen.sum(dim=1)
    most = int(numbers.max())
    positions = torch.argsort((~chosen).byte(), dim=1, stable=True)[:, :most]
    return ChosenRows(positions, torch.arange(most, device=chosen.device) >= numbers[:, None])
