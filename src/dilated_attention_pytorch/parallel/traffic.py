"""Bytes and messages that this rank sends and receives, counted while a block runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """Bytes of tensors that this rank sent and received within :func:`count_traffic`."""

    sent: int = 0
    received: int = 0
    messages: int = 0
    """Messages sent; a collective of the transport counts as the equivalent messages from rank to rank."""
    sent_to: dict[int, int] = field(default_factory=dict)
    """Bytes sent, by the receiver's global rank."""


COUNTERS: list[Traffic] = []
"""The active counts."""


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this process sends and receives through this package while the block runs.

    >>> from dilated_attention_pytorch import parallel
    >>> with parallel.count_traffic() as traffic:
    ...     pass  # parallel.attend(...)
    >>> traffic.sent
    0
    """
    traffic = Traffic()
    COUNTERS.append(traffic)
    try:
        yield traffic
    finally:
        COUNTERS.remove(traffic)
