"""Joint decisions and errors of a run's processes."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeVar

from dilated_attention_pytorch.errors import RunError

if TYPE_CHECKING:
    from rich.console import Console
    from torch.distributed import Store

_Value = TypeVar("_Value")
_KEYS = "dilated_attention_pytorch"
_POLL_SECONDS = 0.1
_LISTENING_SECONDS = 3.0
"""Ranks that cannot connect report it within this time; one that does not was killed or stopped."""
_MOST_DIFFERENCES = 8


def process_rank() -> int:
    """This process's rank, from torchrun's environment."""
    return _number("RANK", 0)


def is_first_process() -> bool:
    """Whether this is the process that writes and prints."""
    return process_rank() == 0


def num_processes() -> int:
    """Number of processes, from torchrun's environment; 1 without it."""
    return _number("WORLD_SIZE", 1)


def master_port() -> int:
    """Port of the store at which the ranks meet, from torchrun's environment; without it, accelerate's default."""
    return _number("MASTER_PORT", 29500)


def _number(name: str, without: int) -> int:
    text = os.environ.get(name) or str(without)
    try:
        return int(text)
    except ValueError as error:
        raise RunError(
            f"the environment says {name}={text!r}, which is not a number; start processes with torchrun, or unset it "
            "for one process"
        ) from error


@contextmanager
def joined(backend: str, seconds: float) -> Iterator[None]:
    """Context in which the processes can communicate, and in which the rank that all others wait for is named.

    Left to itself, transformers initialises the process group, on a CPU with PyTorch's timeout of 30 minutes.

    Args:
        backend: backend of the default process group.
        seconds: longest wait for another process.

    Raises:
        RunError: a process does not come, or does not answer later.
    """
    from dilated_attention_pytorch import parallel

    _join(backend, seconds)
    try:
        with parallel.naming_ranks("starting"):
            yield
    except parallel.RankFailure as error:
        raise RunError(str(error)) from error


def _join(backend: str, seconds: float) -> None:
    import torch.distributed as dist

    from dilated_attention_pytorch.parallel.monitor import no_answer

    if num_processes() == 1 or dist.is_initialized():
        return
    rank, size, timeout = process_rank(), num_processes(), timedelta(seconds=seconds)
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = master_port()
    os.environ["MASTER_PORT"] = str(port)

    def arrive() -> tuple[Store, list[int]]:
        deadline = time.monotonic() + seconds
        meeting = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            is_master=rank == 0 and not is_agents,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        return _meet(meeting, rank, size, deadline)

    def connect() -> tuple[RuntimeError | None, list[int]]:
        cause, group_store = None, dist.PrefixStore("default_pg", store)
        try:
            dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=timeout)
        except RuntimeError as error:
            cause = error
        # Those that cannot connect say so, too.
        deadline = time.monotonic() + (_LISTENING_SECONDS if cause else 0.0)
        return cause, _absent(store, "connected", rank, size, deadline)

    cause = None
    try:
        store, absent = _within(seconds + _LISTENING_SECONDS, arrive)
        if not absent:
            cause, absent = _within(seconds + 2 * _LISTENING_SECONDS, connect)
            if cause is None:
                return
    except (dist.DistNetworkError, TimeoutError) as error:
        holder = "torchrun's agent on the first host" if is_agents else "rank 0"
        raise RunError(
            f"starting: {holder}, which holds the store at which the ranks meet, does not answer or has ended "
            f"(--timeout {seconds:g}): look at what it printed last. {shorten(str(error), 200)}"
        ) from error
    if not absent:
        raise RunError(f"starting: the ranks cannot connect to each other ({cause})") from cause
    raise RunError(f"starting: {no_answer(absent)} (--timeout {seconds:g}, while the ranks met)") from cause


def _within(seconds: float, call: Callable[[], _Value]) -> _Value:
    """The result of ``call`` in a thread: the client of a store whose holder is stopped waits without end.

    Raises:
        TimeoutError: there is none after ``seconds``.
    """
    result: Future[_Value] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)

    threading.Thread(target=run, name="dilated-attention-start", daemon=True).start()
    if not wait([result], seconds).done:
        raise TimeoutError(f"no answer for {seconds:g} s")
    return result.result()


def _meet(store: Store, rank: int, size: int, deadline: float) -> tuple[Store, list[int]]:
    """A part of ``store`` for this start of the ranks, and the ranks that are not there by ``deadline``.

    An agent's store keeps the keys of the ranks that it started before, and torchrun's count of restarts differs from
    host to host. So every rank asks under a new number, and rank 0 answers with the name of the part.
    """
    import torch.distributed as dist

    asking, name = [f"{_KEYS}/asking/{other}" for other in range(1, size)], secrets.token_hex(8)
    if rank > 0:
        store.set(asking[rank - 1], name)
        while not store.check([f"{_KEYS}/answer/{name}"]):
            if time.monotonic() > deadline:
                return store, [0]
            time.sleep(_POLL_SECONDS)
        name = store.get(f"{_KEYS}/answer/{name}").decode()

    def answer() -> None:
        for key in asking if rank == 0 else ():
            if store.check([key]):
                store.set(f"{_KEYS}/answer/{store.get(key).decode()}", name)

    part = dist.PrefixStore(f"{_KEYS}/{name}", store)
    return part, _absent(part, "here", rank, size, deadline, answer)


def _absent(
    store: Store, stage: str, rank: int, size: int, deadline: float, meanwhile: Callable[[], None] = lambda: None
) -> list[int]:
    """Say in the store that this rank is at ``stage``; the ranks that are not there by ``deadline``."""
    keys = [f"{stage}/{other}" for other in range(size)]
    store.set(keys[rank], "")
    while not store.check(keys):
        if time.monotonic() > deadline:
            return [other for other, key in enumerate(keys) if not store.check([key])]
        meanwhile()
        time.sleep(_POLL_SECONDS)
    return []


def say_once(console: Console, line: str) -> None:
    """Print a line verbatim, in the first process only."""
    if is_first_process():
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def from_first(decide: Callable[[], _Value]) -> _Value:
    """The result of ``decide`` in the first process, broadcast to all; the others do not call it.

    Raises:
        RunError: raised by the first process, and then by all.
    """
    import torch.distributed as dist

    if num_processes() == 1:
        return decide()
    result: list[Any] = [None, None]
    if is_first_process():
        try:
            result[0] = decide()
        except RunError as error:
            result[1] = str(error)
    dist.broadcast_object_list(result)
    if result[1] is not None:
        raise RunError(result[1])
    value: _Value = result[0]
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
    reason = ""
    try:
        check()
    except RunError as error:
        reason = str(error)
    for rank, message in enumerate(from_all(reason)):
        if message:
            raise RunError(message if num_processes() == 1 else f"rank {rank}: {message}")


def check_alike(values: Mapping[str, Any]) -> None:
    """Compare the ``values``, by name, of all processes. A collective.

    Raises:
        RunError: a process has another value; the message names rank, value and name, in every process.
    """
    first, *others = from_all(dict(_flat(values)))
    differences = [
        f"rank {rank} has {name} {other.get(name)!r}, rank 0 has {first.get(name)!r}"
        for rank, other in enumerate(others, start=1)
        for name in first | other
        if other.get(name) != first.get(name)
    ]
    if differences:
        more = len(differences) - _MOST_DIFFERENCES
        words = "; ".join(differences[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
        raise RunError(
            f"the ranks were not started alike: {words}. Start every rank with the same command line, text and versions"
        )


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
