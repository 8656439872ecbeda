"""The table of groups that the planning kernels read: one for a pattern and a number of heads, kept on the device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dilated_attention_pytorch.patterns import DilationGroup

COVERING_LENGTH = 2**30
"""Stands for every segment that holds all positions, so that one table serves calls of any length."""
_LAST_POSITION = 2**31 - 1


# Never dropped: a captured CUDA graph reads the table whenever it is replayed. There is one for a pattern, not for
# every length.
@functools.cache
def group_table(numbers: tuple[tuple[tuple[int, ...], ...], ...], device: torch.device) -> Tensor:
    """int32 ``[groups, key/value heads, 5]``: length, rate, offset, shift, whether the tail is zero-padded."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=1024)
def group_numbers(
    groups: tuple[DilationGroup, ...], num_kv_heads: int, last_position: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The integers of :func:`group_table`.

    Raises:
        NotImplementedError: positions and segments together do not fit 32 bits.
    """
    table = []
    for group in groups:
        lines = []
        for head in range(num_kv_heads):
            length, shift = group.segment_length, group.shift(head)
            if last_position + shift <= length and last_position <= COVERING_LENGTH:
                # One segment holds every position: any length and shift that keep the residues will do.
                length, shift = COVERING_LENGTH, shift % group.dilation_rate
            if length + last_position > _LAST_POSITION:
                raise NotImplementedError(
                    "the Triton kernels count positions in 32 bits: the last position plus the longest segment must "
                    f'stay below 2**31, got {last_position} and {length}; impl="aten" has no such limit'
                )
            offset = group.offset(head, num_kv_heads)
            rate = min(group.dilation_rate, _LAST_POSITION - length)
            lines.append((length, rate, offset, shift, int(group.tail == "zero_padded")))
        table.append(tuple(lines))
    return tuple(table)
