"""Joint decisions and errors of a run's processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from dilated_attention_pytorch.errors import RunError

_Value = TypeVar("_Value")


def process_rank() -> int:
    """This process's rank, from torchrun's environment."""
    return _number("RANK", 0)


def is_first_process() -> bool:
    """Whether this is the process that writes and prints."""
    return process_rank() == 0


def num_processes() -> int:
    """Number of processes, from torchrun's environment; 1 without it."""
    return _number("WORLD_SIZE", 1)


def _number(name: str, without: int) -> int:
    text = os.environ.get(name) or str(without)
    try:
        return int(text)
    except ValueError as error:
        raise RunError(
            f"the environment says {name}={text!r}, which is no number; start processes with torchrun, or unset it for "
            "one process"
        ) from error


def from_first(decide: Callable[[], _Value]) -> _Value:
    """The result of ``decide`` in the first process, broadcast to all; the others do not call it.

    Raises:
        RunError: raised by the first process, and then by all.
    """
    import torch.distributed as dist

    if num_processes() == 1:
        return decide()
    said: list[Any] = [None, None]
    if is_first_process():
        try:
            said[0] = decide()
        except RunError as error:
            said[1] = str(error)
    dist.broadcast_object_list(said)
    if said[1] is not None:
        raise RunError(said[1])
    value: _Value = said[0]
    return value


def in_first(take: Callable[[], _Value]) -> _Value | None:
    """The result of ``take`` in the first process; None in the others.

    Raises:
        RunError: raised by the first process, and then by all.
    """
    taken: list[_Value] = []
    from_first(lambda: taken.append(take()))
    return taken[0] if taken else None


def from_all(value: _Value) -> list[_Value]:
    """The ``value`` of every process, in every process."""
    import torch.distributed as dist

    if num_processes() == 1:
        return [value]
    values: list[Any] = [None] * num_processes()
    dist.all_gather_object(values, value)
    return values


def all_or_none(check: Callable[[], None]) -> None:
    """Call ``check`` in every process.

    Raises:
        RunError: one of them raises it; then all do, with the message of the first.
    """
    words = ""
    try:
        check()
    except RunError as error:
        words = str(error)
    for rank, found in enumerate(from_all(words)):
        if found:
            raise RunError(found if num_processes() == 1 else f"rank {rank}: {found}")
