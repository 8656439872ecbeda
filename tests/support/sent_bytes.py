"""Bytes that a process sends in a step: those of this package, and those of torch.distributed's collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilated_attention_pytorch import parallel


@dataclass(slots=True)
class SentBytes:
    """Bytes that one process sent."""

    rows: int = 0
    """Bytes sent by this package, by its own count: keys, values and gradients of rows."""
    by_name: dict[str, Fraction] = field(default_factory=dict)
    """Bytes of torch.distributed's collectives by operator, computed from the operands for ring algorithms. A ring of
    three sends two thirds of an operand, which may not be an integer."""

    @property
    def collectives(self) -> int:
        """Bytes of all collectives."""
        return int(sum(self.by_name.values()))


class _Collectives(TorchDispatchMode):
    """Adds up the bytes that collectives send while it is active."""

    def __init__(self, sent: SentBytes) -> None:
        super().__init__()
        self._sent = sent

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See :class:`TorchDispatchMode`."""
        result = func(*args, **(kwargs or {}))
        name = func._opname
        if func.namespace == "c10d" and name in _SENT:
            size = _size_of(func, args)
            place, times = _SENT[name]
            nbytes = sum(leaf.nbytes for leaf in tree_leaves(args[place]) if isinstance(leaf, Tensor))
            by_name = self._sent.by_name
            by_name[name] = by_name.get(name, Fraction(0)) + nbytes * times(size)
        return result


_SENT: dict[str, tuple[int, Callable[[int], Fraction]]] = {
    "allreduce_": (0, lambda size: Fraction(2 * (size - 1), size)),
    "_allgather_base_": (1, lambda size: Fraction(size - 1)),
    "_reduce_scatter_base_": (1, lambda size: Fraction(size - 1, size)),
}
"""Index of the operand among the arguments, and how many times a process of a ring sends it."""


def _size_of(func: Any, args: tuple[Any, ...]) -> int:
    """Number of processes of a collective."""
    place = [argument.name for argument in func._schema.arguments].index("process_group")
    return dist.ProcessGroup.unbox(args[place]).size()


@contextlib.contextmanager
def count_sent_bytes() -> Iterator[SentBytes]:
    """Count the bytes that this process sends while the block runs."""
    sent = SentBytes()
    with parallel.count_traffic() as traffic, _Collectives(sent):
        yield sent
    sent.rows = traffic.sent
