"""The language modelling loss in blocks of rows, without materialising all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""Target that the loss ignores."""
LOGITS_AT_ONCE = 1 << 22
"""Most float32 logits held at once."""
LEAST_ROWS = 256
"""Fewest rows per block: each block reads the output matrix and accumulates a full gradient of it."""


def next_tokens(tokens: Tensor) -> Tensor:
    """The next token of each position of ``tokens [B, N]``; -100 (ignored) after the last."""
    return functional.pad(tokens, (0, 1), value=IGNORED)[:, 1:]


def rows_at_once(vocab_size: int) -> int:
    """Rows per block."""
    return max(LEAST_ROWS, LOGITS_AT_ONCE // vocab_size)


def logits_at_once(rows: int, vocab_size: int) -> int:
    """Number of logits held at once for the loss of ``rows`` rows."""
    return min(rows, rows_at_once(vocab_size)) * vocab_size


def token_loss(logits: Tensor, targets: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Mean cross-entropy in float32 (float64 for float64 logits). Targets of -100 are ignored.

    Low-precision logits are converted to float32 one block of positions at a time.

    Args:
        logits: ``[B, N, V]``.
        targets: integer ``[B, N]``, the target token of each row of logits.
        num_items: divisor of the summed loss; None = the number of targets that are not ignored.

    Returns:
        a scalar; NaN if all targets are ignored and ``num_items`` is not given, as in PyTorch.
    """
    return _mean(_summed_by_blocks(logits, targets, logits.shape[-1], _summed), targets, num_items)


def token_loss_of_hidden(
    hidden: Tensor,
    to_logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    targets: Tensor,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """:func:`token_loss` of ``to_logits(hidden)`` with the logits of one block of rows at a time, forward and backward.

    Above :data:`LOGITS_AT_ONCE` logits, the backward pass recomputes those of each block: a fourth product with the
    output matrix in addition to the usual three, and every block reads that matrix and accumulates its gradient.

    Args:
        hidden: ``[B, N, E]``.
        to_logits: maps ``[rows, E]`` to ``[rows, V]`` row by row.
        vocab_size: V.
        targets: integer ``[B, N]``.
        num_items: divisor of the summed loss; None = the number of targets that are not ignored.
    """

    device = hidden.device.type

    def summed(rows: Tensor, block: Tensor) -> Tensor:
        # Autocast's cached copy of the output matrix would be shared by all blocks, and their gradients would
        # accumulate in its low precision.
        with torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), False):
            return _summed(to_logits(rows), block)

    return _mean(_summed_by_blocks(hidden, targets, vocab_size, summed), targets, num_items)


def _summed_by_blocks(
    rows: Tensor, targets: Tensor, vocab_size: int, summed: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    flat, targets = rows.flatten(0, 1), targets.flatten()
    length = rows_at_once(vocab_size)
    if flat.shape[0] <= length:
        return summed(flat, targets)
    blocks = zip(flat.split(length), targets.split(length), strict=True)
    return torch.stack([checkpoint(summed, *block, use_reentrant=False) for block in blocks]).sum()


def _mean(total: Tensor, targets: Tensor, num_items: Tensor | int | None) -> Tensor:
    count = (targets != IGNORED).sum() if num_items is None else num_items
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(dtype), targets, ignore_index=IGNORED, reduction="sum")
