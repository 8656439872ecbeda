"""The table of groups that the planning kernels read: one per pattern and number of heads, kept on the device."""

from __future__ import annotations

import bisect
import functools

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns.dilated import DilationGroup

COVERING_LENGTH = 2**30
"""Replaces the length of a segment that contains all positions, so that one table serves calls of any length."""
_LAST_POSITION = 2**31 - 1
Numbers = tuple[tuple[tuple[int, ...], ...], ...]


def group_table(
    groups: tuple[DilationGroup, ...], num_kv_heads: int, last_position: int, device: torch.device
) -> Tensor:
    """The integers of :func:`group_numbers` on a device: int32 ``[groups, key/value heads, 5]``.

    Without groups, a line that no kernel reads.

    Raises:
        NotImplementedError: positions and segments together do not fit 32 bits.
    """
    ends, longest = _tables(groups, num_kv_heads)
    index = bisect.bisect_left(ends, last_position)
    if longest[index] + last_position > _LAST_POSITION:
        raise NotImplementedError(
            "the Triton kernels count positions in 32 bits: the last position plus the longest segment must "
            f'stay below 2**31, got {last_position} and {longest[index]}; impl="aten" has no such limit'
        )
    return _table(groups, num_kv_heads, ends[index], device)


@functools.lru_cache(maxsize=64)
def _tables(groups: tuple[DilationGroup, ...], num_kv_heads: int) -> tuple[list[float], list[int]]:
    """Last positions, ascending, up to which tables are equal, and the longest segment of each table."""
    whole = {(_whole_up_to(group, head), group.segment_length) for group in groups for head in range(num_kv_heads)}
    ends = [*sorted({float(end) for end, _ in whole}), float("inf")]
    of_end = ((COVERING_LENGTH if end <= up_to else length for up_to, length in whole) for end in ends)
    return ends, [max(lengths, default=0) for lengths in of_end]


@functools.lru_cache(maxsize=256)
def _table(groups: tuple[DilationGroup, ...], num_kv_heads: int, last_position: float, device: torch.device) -> Tensor:
    return _on_device(group_numbers(groups, num_kv_heads, last_position) or (((0,),),), device)


# Never dropped: a captured CUDA graph reads the table on every replay. There is one per pattern, not one for every
# length.
@functools.cache
def _on_device(numbers: Numbers, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _whole_up_to(group: DilationGroup, head: int) -> int:
    """Last position up to which one segment of a group contains all positions."""
    return min(group.segment_length - group.shift(head), COVERING_LENGTH)


def group_numbers(groups: tuple[DilationGroup, ...], num_kv_heads: int, last_position: float) -> Numbers:
    """For every group and key/value head: length, rate, offset, shift, and whether the tail is zero-padded."""
    table = []
    for group in groups:
        lines = []
        for head in range(num_kv_heads):
            length, shift = group.segment_length, group.shift(head)
            if last_position <= _whole_up_to(group, head):
                # One segment holds every position: any length and shift that keep the residues will do.
                length, shift = COVERING_LENGTH, shift % group.dilation_rate
            offset = group.offset(head, num_kv_heads)
            rate = min(group.dilation_rate, _LAST_POSITION - length)
            lines.append((length, rate, offset, shift, int(group.tail == "zero_padded")))
        table.append(tuple(lines))
    return tuple(table)
