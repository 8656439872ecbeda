"""The loss of a language model, a block of rows at a time: no float32 copy of all logits, and not all logits either."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""The target that no loss counts."""
LOGITS_AT_ONCE = 1 << 22
"""Logits that are there in float32 at once, where there are more."""
LEAST_ROWS = 256
"""Of a block whatever it holds: each reads the output matrix anew and adds a whole gradient of it."""


def next_tokens(tokens: Tensor) -> Tensor:
    """The token after each position of ``tokens [B, N]``; -100, which no loss counts, after the last."""
    return functional.pad(tokens, (0, 1), value=IGNORED)[:, 1:]


def rows_at_once(vocab_size: int) -> int:
    """Rows of a block."""
    return max(LEAST_ROWS, LOGITS_AT_ONCE // vocab_size)


def logits_at_once(rows: int, vocab_size: int) -> int:
    """Logits that are there at once for the loss of so many rows."""
    return min(rows, rows_at_once(vocab_size)) * vocab_size


def token_loss(logits: Tensor, targets: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Mean cross-entropy in float32 (float64 for float64 logits). Targets of -100 are ignored.

    Float32 copies of low-precision logits exist for a block of positions at a time.

    Args:
        logits: ``[B, N, V]``.
        targets: integer ``[B, N]``, what the logits are about.
        num_items: what the sum is divided by; the number of targets counted without it.

    Returns:
        a scalar; NaN where no target counts and ``num_items`` is not given, as in PyTorch.
    """
    return _mean(_summed_by_blocks(logits, targets, logits.shape[-1], _summed), targets, num_items)


def token_loss_of_hidden(
    hidden: Tensor,
    to_logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    targets: Tensor,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """:func:`token_loss` of ``to_logits(hidden)``, of which a block of rows exists at a time, in both directions.

    With more logits than :data:`LOGITS_AT_ONCE` those of a block are computed again in the backward pass: one product
    with the output matrix more than the three that training takes, and every block reads that matrix and adds to its
    gradient.

    Args:
        hidden: ``[B, N, E]``.
        to_logits: from ``[rows, E]`` to ``[rows, V]``, each row for itself.
        vocab_size: V.
        targets: integer ``[B, N]``.
        num_items: what the sum is divided by; the number of targets counted without it.
    """

    device = hidden.device.type

    def summed(rows: Tensor, block: Tensor) -> Tensor:
        # The copy that autocast makes of the output matrix and keeps would be one for all blocks, and their gradients
        # would add up in its low precision.
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
