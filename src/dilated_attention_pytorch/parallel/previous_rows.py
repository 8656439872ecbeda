"""The rows before each row of a sequence sharded over ranks, as a causal convolution reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.ops.validation import check_size
from dilated_attention_pytorch.plan.layout import Layout, Run, with_rows
from dilated_attention_pytorch.precision import accumulation_dtype

from .first_derivative import first_derivative, refuse_other_derivatives
from .sharding import Ranks, check_layout, num_rows_of, ranks_of


@torch.compiler.disable
def previous_rows(
    rows: Tensor,
    count: int,
    *,
    mesh: DeviceMesh,
    layout: Layout = "contiguous",
    sequence_length: int | None = None,
) -> tuple[Tensor, ...]:
    """The 1st to ``count``-th row before each row, in the whole sequence: what a causal convolution adds up.

    Only the last ``count`` rows of each run of consecutive rows are sent. The gradient is exact: a row's is summed over
    all ranks that read it, in float32 or float64.

    Args:
        rows: this rank's rows, ``[B, rows, ...]``.
        count: number of rows before each row, at least 1.
        mesh, layout, sequence_length: see :func:`attend`.

    Returns:
        ``count`` tensors of the shape and dtype of ``rows``. The j-th, counted from 1, holds for the row at position t
        the row at position t - j, and 0 where t < j. Packed documents are not known here: multiply by
        ``positions >= j``.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, shape, dtype or range.
        NotImplementedError: derivatives other than the gradient are requested.
        RankFailure: the ranks' calls differ, or a rank died or does not respond.

    >>> from dilated_attention_pytorch import parallel
    >>> def on_every_rank(mesh):  # a convolution of width 3 over keys [B, rows, G, D]
    ...     key = parallel.shard(torch.randn(1, 1000, 2, 64), mesh)
    ...     first, second = parallel.previous_rows(key, 2, mesh=mesh, sequence_length=1000)
    ...     return 0.5 * key + 0.3 * first + 0.2 * second
    """
    ranks = ranks_of(mesh)
    with ranks.rows.announced():
        if not isinstance(rows, Tensor) or not rows.is_floating_point():
            kind = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(f"rows must be a floating-point tensor [batch, rows, ...], got {kind}")
        if rows.dim() < 2:
            raise ValueError(f"rows must have the dimensions [batch, rows, ...], got the shape {tuple(rows.shape)}")
        check_size("count", count)
        refuse_other_derivatives(rows)
        total = num_rows_of(rows.shape[1], sequence_length, ranks, check_layout(layout), "rows")
    numbers = ranks.agree(
        {
            "call": "previous_rows",
            "shape": [rows.shape[0], total, *rows.shape[2:]],
            "count": count,
            "layout": layout,
            "dtype": rows.dtype,
            "gradient": torch.is_grad_enabled() and rows.requires_grad,
        }
    )
    tails = _Tails(count, ranks.runs(total, layout, ranks.coordinates), ranks.all_runs(total, layout))
    return _PreviousRows.apply(rows, ranks, tails, numbers)


class _Tails:
    """The last ``count`` rows of every run: all that other ranks read.

    A row at most ``count`` before the start of a run is at most ``count`` before the end of its own run.
    """

    def __init__(self, count: int, own_runs: tuple[Run, ...], all_runs: list[tuple[Run, ...]]) -> None:
        self.count = count
        self.width = max(sum(min(count, stop - start) for start, stop in runs) for runs in all_runs)
        """Number of rows of each rank's message."""
        tails = []
        for rank, runs in enumerate(all_runs):
            place = rank * self.width
            for start, stop in runs:
                first = max(start, stop - count)
                tails.append((first, stop, place))
                place += stop - first
        self.sent: list[tuple[slice, slice]] = []
        """Of each own tail: its rows in the shard and in the message."""
        self.runs: list[tuple[int, int, list[tuple[slice, slice]]]] = []
        """Of each own run: its rows in the shard; and of the ``count`` positions before it, from 0 on, the rows in
        the gathered messages."""
        place = 0
        for (start, stop), row in with_rows(own_runs):
            end, size = row + stop - start, min(count, stop - start)
            self.sent.append((slice(end - size, end), slice(place, place + size)))
            place += size
            least, before = start - count, []
            for first, last, at in tails:
                a, b = max(first, least), min(last, start)
                if a < b:
                    before.append((slice(a - least, b - least), slice(at + a - first, at + b - first)))
            self.runs.append((row, end, before))


class _PreviousRows(torch.autograd.Function):
    """See :func:`previous_rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks, tails: _Tails, numbers: tuple[int, int]) -> tuple[Tensor, ...]:
        """All-gather of the tails; then each run is shifted behind the rows before it."""
        ctx.ranks, ctx.tails, ctx.numbers = ranks, tails, numbers
        count, (batch, _, *rest) = tails.count, rows.shape
        message = rows.new_zeros(tails.width, batch, *rest)
        for own, place in tails.sent:
            message[place] = rows[:, own].transpose(0, 1)
        gathered = ranks.all_gather(message, numbers).flatten(0, 1).transpose(0, 1)  # [B, ranks * width, ...]
        previous = tuple(rows.new_empty(rows.shape) for _ in range(count))
        for start, stop, before in tails.runs:
            size = stop - start
            run = rows.new_zeros(batch, count + size, *rest)
            run[:, count:] = rows[:, start:stop]
            for to, place in before:
                run[:, to] = gathered[:, place]
            for j, shifted in enumerate(previous, 1):
                shifted[:, start:stop] = run[:, count - j : count - j + size]
        return previous

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The reverse, with sums for copies. A collective: all ranks take part, whether or not their rows are read."""
        ranks, tails = ctx.ranks, ctx.tails
        count, (batch, _, *rest) = tails.count, grads[0].shape
        dtype = accumulation_dtype(grads[0].dtype)
        grad_rows = grads[0].new_empty(grads[0].shape, dtype=dtype)
        messages = grads[0].new_zeros(ranks.size, tails.width, batch, *rest, dtype=dtype)
        gathered = messages.flatten(0, 1).transpose(0, 1)  # a view
        for start, stop, before in tails.runs:
            size = stop - start
            run = messages.new_zeros(batch, count + size, *rest)
            for j, grad in enumerate(grads, 1):
                run[:, count - j : count - j + size] += grad[:, start:stop]
            grad_rows[:, start:stop] = run[:, count:]
            for to, place in before:
                gathered[:, place] += run[:, to]
        message = ranks.reduce_scatter(messages, ctx.numbers)
        for own, place in tails.sent:
            grad_rows[:, own] += message[place].transpose(0, 1)
        return grad_rows.to(grads[0].dtype), None, None, None
