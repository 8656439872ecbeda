"""The table of groups that the planning kernels read: one for a pattern and a number of heads, kept on the device."""

from __future__ import annotations

import bisect
import functools

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import DilationGroup

COVERING_LENGTH = 2**30
"""Stands for every segment that holds all positions, so that one table serves calls of any length."""
_LAST_POSITION = 2**31 - 1
Numbers = tuple[tuple[tuple[int, ...], ...], ...]


def group_table(
    groups: tuple[DilationGroup, ...], num_kv_heads: int, last_position: int, device: torch.device
) -> Tensor:
    """The integers of :func:`group_numbers` on a device; where there are none, a line that no kernel reads."""
    return _on_device(group_numbers(groups, num_kv_heads, last_position) or (((0,),),), device)


# Never dropped: a captured CUDA graph reads the table whenever it is replayed. There is one for a pattern, not for
# every length.
@functools.cache
def _on_device(numbers: Numbers, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def group_numbers(groups: tuple[DilationGroup, ...], num_kv_heads: int, last_position: int) -> Numbers:
    """``[groups, key/value heads, 5]``: length, rate, offset, shift, whether the tail is zero-padded.

    Raises:
        NotImplementedError: positions and segments together do not fit 32 bits.
    """
    ends = _ends(groups, num_kv_heads)
    numbers, longest = _numbers(groups, num_kv_heads, ends[bisect.bisect_left(ends, last_position)])
    if longest + last_position > _LAST_POSITION:
        raise NotImplementedError(
            "the Triton kernels count positions in 32 bits: the last position plus the longest segment must "
            f'stay below 2**31, got {last_position} and {longest}; impl="aten" has no such limit'
        )
    return numbers


def _whole_up_to(group: DilationGroup, head: int) -> int:
    """The last position up to which one segment of a group holds all positions."""
    return min(group.segment_length - group.shift(head), COVERING_LENGTH)


@functools.lru_cache(maxsize=64)
def _ends(groups: tuple[DilationGroup, ...], num_kv_heads: int) -> list[float]:
    """The last positions, in order, behind which a segment more is cut: tables of those between two are alike."""
    ends = {float(_whole_up_to(group, head)) for group in groups for head in range(num_kv_heads)}
    return [*sorted(ends), float("inf")]


@functools.lru_cache(maxsize=256)
def _numbers(groups: tuple[DilationGroup, ...], num_kv_heads: int, last_position: float) -> tuple[Numbers, int]:
    """The table, and the longest segment in it."""
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
    longest = max((line[0] for lines in table for line in lines), default=0)
    return tuple(table), longest
