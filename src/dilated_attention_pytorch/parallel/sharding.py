"""Sharding: which rows a rank holds, and conversion between whole tensors and shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from dilated_attention_pytorch.ops.validation import check_size, documents_of
from dilated_attention_pytorch.plan.layout import Layout, Run, shard_runs

from .communicator import Communicator, communicator_of
from .first_derivative import first_derivative, refuse_other_derivatives

LAYOUTS: tuple[str, ...] = get_args(Layout)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that share a sequence: one axis for rows, and optionally a second axis for heads."""

    rows: Communicator
    """The row axis (the only axis of a 1-D mesh)."""
    heads: Communicator | None
    """The head axis of a 2-D mesh."""

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return self.rows.size * (self.heads.size if self.heads else 1)

    def runs(self, num_rows: int, layout: Layout, coordinates: tuple[int, int]) -> tuple[Run, ...]:
        """The runs of the rank at ``coordinates`` (indices along both axes)."""
        parts = self.heads.size if self.heads else 1
        return shard_runs(num_rows, self.rows.size, coordinates[0], layout, part=(coordinates[1], parts))

    def agree(self, call: Mapping[str, object]) -> tuple[int, int]:
        """See :meth:`Communicator.agree`: message tags along the row axis and the head axis."""
        number = self.rows.agree(call)
        return number, self.heads.agree(call) if self.heads else number

    @property
    def coordinates(self) -> tuple[int, int]:
        """This rank's indices along both axes."""
        return self.rows.rank, self.heads.rank if self.heads else 0

    def all_runs(self, num_rows: int, layout: Layout) -> list[tuple[Run, ...]]:
        """The runs of every rank, the second axis varying fastest."""
        parts = self.heads.size if self.heads else 1
        return [self.runs(num_rows, layout, (row, part)) for row in range(self.rows.size) for part in range(parts)]

    def all_gather(self, tensor: Tensor, numbers: tuple[int, int]) -> Tensor:
        """``[ranks, *shape]`` of all ranks' equally shaped tensors, in the order of :meth:`all_runs`."""
        of_heads = tensor if self.heads is None else self.heads.all_gather(tensor, tag=2 * numbers[1])
        gathered = self.rows.all_gather(of_heads, tag=2 * numbers[0])
        return gathered if self.heads is None else gathered.flatten(0, 1)

    def reduce_scatter(self, tensor: Tensor, numbers: tuple[int, int]) -> Tensor:
        """The reverse of :meth:`all_gather`: the sum of all ranks' ``tensor[this rank]``. Modifies ``tensor``."""
        if self.heads is None:
            return self.rows.reduce_scatter(tensor, range(self.size), tag=2 * numbers[0] + 1)
        by_axes = tensor.unflatten(0, (self.rows.size, self.heads.size))
        of_rows = self.rows.reduce_scatter(by_axes, range(self.rows.size), tag=2 * numbers[0] + 1)
        return self.heads.reduce_scatter(of_rows, range(self.heads.size), tag=2 * numbers[1] + 1)


def ranks_of(mesh: DeviceMesh) -> Ranks:
    """The axes of a 1-D or 2-D mesh.

    Raises:
        TypeError: ``mesh`` is not a ``DeviceMesh``.
        ValueError: it has more than two dimensions.
    """
    rows = communicator_of(mesh)
    if mesh.ndim > 2:
        raise ValueError(
            "mesh must have one dimension, or two (the first for rows, the second for heads): got "
            f"{mesh.ndim} dimensions {mesh.mesh_dim_names}; pass the sub-mesh of the ranks that share a sequence, "
            'such as mesh["context"]'
        )
    return Ranks(rows, communicator_of(mesh, 1) if mesh.ndim == 2 else None)


def check_layout(layout: Layout) -> Layout:
    """Return ``layout`` after checking it.

    Raises:
        ValueError: it is unknown.
    """
    if layout not in LAYOUTS:
        raise ValueError(
            f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}; plan_parallel(...).layout says "
            "which is the better one"
        )
    return layout


def shard(tensor: Tensor, mesh: DeviceMesh, *, layout: Layout = "contiguous", dim: int = 1) -> Tensor:
    """This rank's rows of a whole tensor that every rank has. No communication; differentiable.

    Args:
        tensor: any tensor with the sequence along ``dim``: tokens, labels (already shifted), hidden states, heads.
        mesh: the ranks that share the sequence, see :func:`attend`.
        layout: ``"contiguous"``: rank i of p has the i-th of p chunks of rows. ``"zigzag"``: of 2p chunks the i-th and
            the i-th from the end, concatenated, which balances the work under a causal mask. On a 2-D mesh the layout
            applies to the first axis, and its rows are split evenly along the second.
        dim: the sequence dimension. Lengths that do not divide by the number of ranks are split as evenly as possible;
            the first ranks get one row more.

    Returns:
        the rows, contiguous.

    Raises:
        TypeError, ValueError: invalid mesh, unknown layout, or a dimension that the tensor does not have.
    """
    ranks = ranks_of(mesh)
    _check_dim(tensor, dim)
    runs = ranks.runs(tensor.shape[dim], check_layout(layout), ranks.coordinates)
    return _rows_of(tensor, runs, dim)


def positions(
    sequence_length: int,
    mesh: DeviceMesh,
    *,
    layout: Layout = "contiguous",
    cu_seqlens: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The positions of this rank's rows, int64 ``[rows]``, e.g. for rotary embeddings.

    Args:
        sequence_length: number of rows of the whole sequence.
        mesh, layout: as in :func:`shard`.
        cu_seqlens: boundaries of packed documents in the whole sequence; positions restart in each of them.
        device: device of the result.

    Raises:
        TypeError, ValueError: see :func:`shard`; or boundaries that do not run from 0 to ``sequence_length``.
    """
    ranks = ranks_of(mesh)
    check_size("sequence_length", sequence_length, least=0)
    documents = documents_of(cu_seqlens, sequence_length)
    rows = torch.arange(sequence_length, device=device) if documents else None
    if rows is not None and documents is not None:
        starts = torch.tensor(documents, device=device)
        rows -= starts[torch.searchsorted(starts, rows, right=True) - 1]
    runs = ranks.runs(sequence_length, check_layout(layout), ranks.coordinates)
    parts = [torch.arange(start, stop, device=device) if rows is None else rows[start:stop] for start, stop in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def shard_labels(
    labels: Tensor,
    mesh: DeviceMesh,
    *,
    layout: Layout = "contiguous",
    cu_seqlens: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """This rank's rows of the next-token labels: labels are shifted before they are sharded.

    Args:
        labels: integer ``[B, N]``, the tokens of the whole sequence, unshifted.
        mesh, layout: as in :func:`shard`.
        cu_seqlens: boundaries of packed documents; the last token of each document has no label.
        ignore_index: label of positions without a next token.

    Returns:
        integer ``[B, rows]``, for a cross-entropy without an internal shift.

    Raises:
        TypeError, ValueError: see :func:`positions`; or labels of the wrong dtype or shape.
    """
    if labels.dim() != 2 or labels.is_floating_point():
        raise ValueError(f"labels must be integers [batch, sequence], got {labels.dtype} of {tuple(labels.shape)}")
    following = functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
    documents = documents_of(cu_seqlens, labels.shape[1])
    if documents is not None:
        following[:, [end - 1 for end in documents if end > 0]] = ignore_index
    return shard(following, mesh, layout=layout)


@torch.compiler.disable
def unshard(
    tensor: Tensor,
    mesh: DeviceMesh,
    *,
    layout: Layout = "contiguous",
    dim: int = 1,
    sequence_length: int | None = None,
) -> Tensor:
    """The whole tensor on every rank from the shards: the inverse of :func:`shard`.

    Differentiable if all ranks compute the same function of the whole: each rank's rows get their slice of its
    gradient.

    Args:
        tensor: this rank's rows.
        mesh, layout, dim: as they were for :func:`shard`.
        sequence_length: number of rows of the whole; None = this rank's rows times the number of ranks.

    Raises:
        TypeError, ValueError: see :func:`shard`; or this rank's rows are not its part of ``sequence_length``.
        NotImplementedError: derivatives other than the gradient are requested.
    """
    ranks = ranks_of(mesh)
    with ranks.rows.announced():
        layout = check_layout(layout)
        _check_dim(tensor, dim)
        refuse_other_derivatives(tensor)
        held = tensor.shape[dim]
        total = num_rows_of(held, sequence_length, ranks, layout, f"tensor (dimension {dim})")
    shape = [total if coordinates == dim % tensor.dim() else size for coordinates, size in enumerate(tensor.shape)]
    numbers = ranks.agree({"call": "unshard", "shape": shape, "dim": dim, "layout": layout, "dtype": tensor.dtype})
    return _Unshard.apply(tensor, ranks, layout, dim, total, numbers)


class _Unshard(torch.autograd.Function):
    """See :func:`unshard`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, ranks: Ranks, layout: Layout, dim: int, total: int, numbers: tuple[int, int]
    ) -> Tensor:
        """All-gather of the shards, padded to the longest, then reordered."""
        all_runs = ranks.all_runs(total, layout)
        ctx.runs, ctx.dim = ranks.runs(total, layout, ranks.coordinates), dim
        rows = tensor.movedim(dim, 0).contiguous()
        largest = max(sum(stop - start for start, stop in runs) for runs in all_runs)
        padded = rows.new_zeros(largest, *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        full = rows.new_empty(total, *rows.shape[1:])
        for part, runs in zip(ranks.all_gather(padded, numbers), all_runs, strict=True):
            row = 0
            for start, stop in runs:
                full[start:stop] = part[row : row + stop - start]
                row += stop - start
        return full.movedim(0, dim)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """This rank's rows of the gradient. A second derivative would need all ranks' rows again."""
        return _rows_of(grad, ctx.runs, ctx.dim), None, None, None, None, None


def _rows_of(tensor: Tensor, runs: tuple[Run, ...], dim: int) -> Tensor:
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in runs] or [tensor.narrow(dim, 0, 0)]
    return torch.cat(parts, dim=dim)


def _check_dim(tensor: Tensor, dim: int) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a tensor, got {type(tensor).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim must be a dimension of the tensor, -{tensor.dim()} to {tensor.dim() - 1}, got {dim!r}")


def num_rows_of(held: int, sequence_length: int | None, ranks: Ranks, layout: Layout, name: str) -> int:
    """Number of rows of the whole sequence.

    Raises:
        ValueError: the number of this rank's rows does not match.
    """
    if sequence_length is None:
        return held * ranks.size
    check_size("sequence_length" if name != "key" else "key_sequence_length", sequence_length, least=0)
    expected = sum(stop - start for start, stop in ranks.runs(sequence_length, layout, ranks.coordinates))
    if held != expected:
        raise ValueError(
            f"{name} must have this rank's {expected} of the {sequence_length} rows (rank {ranks.coordinates[0]} of "
            f"{ranks.size}, layout {layout!r}), got {held}; parallel.shard gives every rank its rows, and "
            "sequence_length and key_sequence_length say how many there are in all"
        )
    return sequence_length
