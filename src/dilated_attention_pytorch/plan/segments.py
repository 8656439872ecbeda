"""Segments shared between ranks, for all ranks at once as tensors of size linear in the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.dilated import DilationGroup
from dilated_attention_pytorch.patterns.rules import NO_END

from .layout import Shards
from .shards import ShardedCall


class Sharing(NamedTuple):
    """The segments of one group and one shift that several ranks have parts of.

    One entry per run with a part of a segment, sorted by segment, then by sequence order.
    """

    first_run: Tensor
    """First run of every segment, int64 ``[segments]``."""
    stop_run: Tensor
    """One past its last run."""
    segment: Tensor
    """Segment of every entry, int64 ``[entries]``."""
    run: Tensor
    """Run of every entry."""
    rows: Tensor
    """Selected rows of the segment in the run, per key/value head, int64 ``[entries, heads]``."""

    @property
    def first_entry(self) -> Tensor:
        """First entry of every segment."""
        counts = self.stop_run - self.first_run
        return counts.cumsum(0) - counts


def shared_segments(call: ShardedCall, shards: Shards) -> Iterator[Sharing]:
    """The segments that several ranks share, for every group and shift."""
    starts, stops = shards.bounds()
    for group in call.pattern.groups:
        offsets, shifts = heads_of(call, group)
        for shift in shifts.unique().tolist():
            origin, start, stop = _segments_beyond(call, group, shift, starts, stops)
            first_run = torch.searchsorted(stops, start, right=True)
            stop_run = torch.searchsorted(starts, stop)
            is_shared = stop_run - first_run > 1
            origin, start, stop, first_run, stop_run = (
                x[is_shared] for x in (origin, start, stop, first_run, stop_run)
            )
            counts = stop_run - first_run
            segment = torch.arange(len(counts)).repeat_interleave(counts)
            run = torch.arange(len(segment)) - (counts.cumsum(0) - counts - first_run)[segment]
            first = torch.maximum(starts[run], start[segment])[:, None]
            last = torch.minimum(stops[run], stop[segment])[:, None]
            rows = num_selected(group, origin[segment][:, None], offsets, first, last)
            # Heads with another shift have other segments.
            yield Sharing(first_run, stop_run, segment, run, rows.masked_fill_(shifts != shift, 0))


def _segments_beyond(
    call: ShardedCall, group: DilationGroup, shift: int, starts: Tensor, stops: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """True start, and start and stop within the document, of segments that a run holds partly but not entirely."""
    rows = torch.cat([starts, stops - 1])
    if call.documents is None:
        begin, end = torch.full_like(rows, -call.offset), torch.full_like(rows, NO_END)
    else:
        boundaries = torch.tensor(call.documents, dtype=torch.int64)
        index = torch.searchsorted(boundaries, rows, right=True)
        begin, end = boundaries[index - 1], boundaries[index]
    origin, beyond = bounds_of(group, rows - begin, shift, begin)
    start, stop = torch.maximum(origin, begin).clamp_(min=0), torch.minimum(beyond, end)
    is_part = (start < starts.repeat(2)) | (stop > stops.repeat(2))
    # Segments of one document are disjoint: the first row identifies a segment.
    first, index = start[is_part].unique(return_inverse=True)
    return (
        torch.empty_like(first).index_copy_(0, index, origin[is_part]),
        first,
        torch.empty_like(first).index_copy_(0, index, stop[is_part]),
    )


def bounds_of(group: DilationGroup, position: Any, shift: Any, begin: Tensor) -> tuple[Tensor, Tensor]:
    """:meth:`DilationGroup.segment_bounds` for tensors, in rows of the whole sequence."""
    start, stop = group.segment_bounds(position, shift)
    return begin + start, begin + stop


def num_selected(group: DilationGroup, segment_start: Any, offset: Any, start: Any, stop: Any) -> Tensor:
    """Number of rows from :meth:`DilationGroup.selected`, for tensors."""
    return torch.as_tensor(group.selected(segment_start, offset, start, stop)[1])


def heads_of(call: ShardedCall, group: DilationGroup) -> tuple[Tensor, Tensor]:
    """Offset and shift of every key/value head, ``[heads]``."""
    heads = range(call.num_kv_heads)
    return (
        torch.tensor([group.offset(head, call.num_kv_heads) for head in heads]),
        torch.tensor([group.shift(head) for head in heads]),
    )
