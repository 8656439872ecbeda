"""The all-to-all between sharded rows and sharded heads (DeepSpeed-Ulysses, arXiv 2309.14509)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .communicator import Communicator
from .first_derivative import first_derivative

RowRanges = tuple[tuple[int, int, int], ...]
"""Row ranges of one rank: (first row in the whole, first row on the rank, number of rows)."""


@dataclass(frozen=True, slots=True)
class Route:
    """The sharding of one tensor on both sides of the all-to-all."""

    communicator: Communicator
    heads: tuple[tuple[int, ...], ...]
    """Heads per rank. A head on several ranks is copied on the way there; on the way back the copies are summed."""
    row_ranges: tuple[RowRanges, ...]
    """Row ranges per rank."""
    num_heads: int
    tag: int

    def num_rows(self) -> int:
        """Number of rows on all ranks."""
        return sum(count for row_ranges in self.row_ranges for _, _, count in row_ranges)

    def num_rows_of(self, rank: int) -> int:
        """Number of rows on one rank."""
        return sum(count for _, _, count in self.row_ranges[rank])


class ToHeads(torch.autograd.Function):
    """Tensors ``[B, rows of this rank, all heads(, D)]`` to ``[B, all rows, heads of this rank(, D)]``.

    One function for all of a call, so that every rank exchanges all gradients, whichever of them it needs.
    """

    @staticmethod
    def forward(ctx: Any, routes: tuple[Route, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        """See :func:`to_heads`; one route per tensor."""
        ctx.routes = routes
        return tuple(to_heads(tensor, route) for tensor, route in zip(tensors, routes, strict=True))

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The reverse exchange."""
        return (None, *(to_rows(grad, route) for grad, route in zip(grads, ctx.routes, strict=True)))


class ToRows(torch.autograd.Function):
    """Output and log-sum-exp from all rows of this rank's heads to this rank's rows of all heads."""

    @staticmethod
    def forward(ctx: Any, route: Route, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See :func:`to_rows`."""
        ctx.route = route
        return tuple(to_rows(tensor, route) for tensor in tensors)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The reverse exchange."""
        return (None, *(to_heads(grad, ctx.route) for grad in grads))


def to_heads(tensor: Tensor, route: Route) -> Tensor:
    """Send every rank its heads of this rank's rows; returns all rows of this rank's heads."""
    communicator = route.communicator
    mine = route.heads[communicator.rank]
    sends = {
        peer: _heads(tensor, route.heads[peer]).contiguous()
        for peer in range(communicator.size)
        if peer != communicator.rank
    }
    receives = {
        peer: tensor.new_empty(tensor.shape[0], route.num_rows_of(peer), len(mine), *tensor.shape[3:])
        for peer in range(communicator.size)
        if peer != communicator.rank
    }
    pending = communicator.exchange(_not_empty(sends), _not_empty(receives), route.tag, "exchanging rows for heads")
    full = tensor.new_empty(tensor.shape[0], route.num_rows(), len(mine), *tensor.shape[3:])
    _put_rows(_heads(tensor, mine), route.row_ranges[communicator.rank], full)
    pending.wait()
    for peer, rows in receives.items():
        _put_rows(rows, route.row_ranges[peer], full)
    return full


def to_rows(tensor: Tensor, route: Route) -> Tensor:
    """Send every rank its rows of this rank's heads; returns this rank's rows of all heads, copies summed."""
    communicator = route.communicator
    held = route.num_rows_of(communicator.rank)
    sends = {
        peer: _rows(tensor, route.row_ranges[peer]) for peer in range(communicator.size) if peer != communicator.rank
    }
    receives = {
        peer: tensor.new_empty(tensor.shape[0], held, len(route.heads[peer]), *tensor.shape[3:])
        for peer in range(communicator.size)
        if peer != communicator.rank
    }
    pending = communicator.exchange(_not_empty(sends), _not_empty(receives), route.tag + 1, "exchanging heads for rows")
    # Heads are unique unless key/value heads were copied; the gradients of copies are summed.
    is_disjoint = sum(map(len, route.heads)) == route.num_heads
    dtype = tensor.dtype if is_disjoint else torch.promote_types(tensor.dtype, torch.float32)
    full = torch.zeros(tensor.shape[0], held, route.num_heads, *tensor.shape[3:], dtype=dtype, device=tensor.device)
    _add_heads(_rows(tensor, route.row_ranges[communicator.rank]), route.heads[communicator.rank], full)
    pending.wait()
    for peer, rows in receives.items():
        _add_heads(rows, route.heads[peer], full)
    return full.to(tensor.dtype)


def _not_empty(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    return {peer: tensor for peer, tensor in tensors.items() if tensor.numel()}


def _heads(tensor: Tensor, heads: Sequence[int]) -> Tensor:
    """Consecutive heads as a view."""
    return tensor[:, :, heads[0] : heads[-1] + 1]


def _rows(full: Tensor, row_ranges: RowRanges) -> Tensor:
    """A rank's rows of the whole, in the rank's order."""
    return torch.cat([full[:, start : start + count] for start, _, count in row_ranges] or [full[:, :0]], dim=1)


def _put_rows(rows: Tensor, row_ranges: RowRanges, full: Tensor) -> None:
    for start, first, count in row_ranges:
        full[:, start : start + count] = rows[:, first : first + count]


def _add_heads(rows: Tensor, heads: Sequence[int], full: Tensor) -> None:
    full[:, :, heads[0] : heads[-1] + 1] += rows
