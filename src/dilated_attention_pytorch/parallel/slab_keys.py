"""Assembly of a slab's keys from received blocks, and distribution of their gradients to the blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from dilated_attention_pytorch.ops.remote import RemoteKeys
from dilated_attention_pytorch.plan.seen_rows import SlabPair
from dilated_attention_pytorch.plan.shards import Block


def keys_of_slab(
    pair: SlabPair, blocks: Sequence[Block], keys: Sequence[RemoteKeys], num_heads: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values ``[B, M, G, D]`` of the pair's rows, and their padding mask ``[B, M]``.

    Views if one block holds all rows; otherwise copies, zero where no block has a row of a head.
    """
    parts = list(_parts(pair, blocks, keys))
    within, heads, of_block = parts[0]
    if len(parts) == 1 and heads == slice(0, num_heads):
        return of_block.key, of_block.value, None if of_block.hidden is None else of_block.hidden[:, :, 0]
    shape = (of_block.key.shape[0], pair.keys[1] - pair.keys[0], num_heads)
    key, value = (x.new_zeros(*shape, x.shape[3]) for x in (of_block.key, of_block.value))
    hidden = None if of_block.hidden is None else of_block.hidden.new_zeros(shape[:2])
    for within, heads, part in parts:
        key[:, within, heads], value[:, within, heads] = part.key, part.value
        if hidden is not None and part.hidden is not None:
            hidden[:, within] = part.hidden[:, :, 0]
    return key, value, hidden


def add_to_blocks(
    pair: SlabPair, blocks: Sequence[Block], grads: Sequence[RemoteKeys], grad_key: Tensor, grad_value: Tensor
) -> None:
    """Add gradients ``[B, M, G, D]`` of the pair's rows to those of the blocks that hold them."""
    for within, heads, into in _parts(pair, blocks, grads):
        for total, part in ((into.key, grad_key), (into.value, grad_value)):
            total += part[:, within, heads]


def _parts(
    pair: SlabPair, blocks: Sequence[Block], keys: Sequence[RemoteKeys]
) -> Iterator[tuple[slice, slice, RemoteKeys]]:
    """Each block's contribution to the pair's rows: row range, head range, and views of them."""
    for number in pair.blocks:
        block, held = blocks[number], keys[number]
        start, stop = max(block.row, pair.keys[0]), min(block.row + block.count, pair.keys[1])
        rows = slice(start - block.row, stop - block.row)
        hidden = None if held.hidden is None else held.hidden[:, rows]
        yield (
            slice(start - pair.keys[0], stop - pair.keys[0]),
            slice(block.head, block.head + block.num_heads),
            RemoteKeys(held.key[:, rows], held.value[:, rows], hidden),
        )
