"""Packing of key and value rows into flat messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from dilated_attention_pytorch.ops.remote import RemoteKeys, block_view
from dilated_attention_pytorch.plan.shards import Block


def num_rows(blocks: Sequence[Block]) -> int:
    """Number of rows, counted per head, in all blocks."""
    return sum(block.count * block.num_heads for block in blocks)


def message_length(blocks: Sequence[Block], key: Tensor, value: Tensor, *, is_padded: bool) -> int:
    """Number of elements of the message: key and value of every row, and its padding flag if there is a mask.

    ``key [B, rows, G, D]`` and ``value [B, rows, G, Dv]`` give batch size and widths.
    """
    return num_rows(blocks) * key.shape[0] * (key.shape[3] + value.shape[3] + is_padded)


def pack(blocks: Sequence[Block], key: Tensor, value: Tensor, is_ignored: Tensor | None) -> Tensor:
    """Pack the blocks' rows of key and value ``[B, rows, G, D]`` and mask ``[B, rows]``, in the dtype of key."""
    tensors = [key, value]
    if is_ignored is not None:
        tensors.append(is_ignored.unsqueeze(-1).expand(-1, -1, key.shape[2]))
    length = message_length(blocks, key, value, is_padded=is_ignored is not None)
    message = key.new_empty(length)
    offset = 0
    for tensor in tensors:
        for block in blocks:
            view = block_view(tensor, block).transpose(1, 2)
            message[offset : offset + view.numel()].view(view.shape).copy_(view)
            offset += view.numel()
    return message


def unpack(
    message: Tensor, blocks: Sequence[Block], key: Tensor, value: Tensor, *, is_padded: bool
) -> list[RemoteKeys]:
    """The rows of every block as views of a message that :func:`pack` made of such tensors; stored head-major."""
    batch_size = key.shape[0]
    offset = 0

    def take(block: Block, *more: int) -> Tensor:
        nonlocal offset
        shape = (batch_size, block.num_heads, block.count, *more)
        view = message[offset : offset + math.prod(shape)].view(shape)
        offset += view.numel()
        return view.transpose(1, 2)

    keys = [take(block, key.shape[3]) for block in blocks]
    values = [take(block, value.shape[3]) for block in blocks]
    masks = [take(block).bool() if is_padded else None for block in blocks]
    return [RemoteKeys(*rows) for rows in zip(keys, values, masks, strict=True)]


def add_gradients(message: Tensor, blocks: Sequence[Block], grad_key: Tensor, grad_value: Tensor) -> None:
    """Add a message of gradients in the layout of :func:`pack` to the ``[B, rows, G, D]`` gradients of its rows."""
    for block, keys in zip(blocks, unpack(message, blocks, grad_key, grad_value, is_padded=False), strict=True):
        for gradient, part in ((grad_key, keys.key), (grad_value, keys.value)):
            view = block_view(gradient, block)
            view += part
