"""Timeouts of process groups, and interrupting their waits."""

from __future__ import annotations

import contextlib
import re
from datetime import timedelta

import torch
import torch.distributed as dist

BREAKING_TAG = (1 << 30) + 2
"""Tag of a message that is never sent: call numbers are below, agreement tags right below."""
_AT_ONCE = timedelta(milliseconds=1)
_TIMED = ("gloo", "nccl")
"""Backends with a configurable timeout."""


def all_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process."""
    return list(dist.distributed_c10d._world.pg_map)


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """Timeout of ``group``; ``dist.group.WORLD`` is the default group."""
    assert group is not None
    backends = [group._get_backend(device) for device in group._device_types]
    timeouts = [backend.options._timeout for backend in backends if backend.name() in _TIMED]
    return min(timeouts, default=dist.distributed_c10d.default_pg_timeout)


def wait_at_most(seconds: float) -> None:
    """Limit the timeout of all process groups from now on.

    For programs that do not call ``init_process_group`` themselves: transformers ignores its timeout option on CPUs.
    """
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)


def as_long_as_all(group: dist.ProcessGroup) -> timedelta:
    """Limit the timeout of ``group`` to that of the default process group.

    torch creates the groups of a mesh's axes with its own default of half an hour, whatever timeout
    ``init_process_group`` was given.

    Returns:
        the timeout.
    """
    timeout = min(timeout_of(group), timeout_of(dist.group.WORLD))
    if timeout < timeout_of(group):
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    return timeout


def break_off() -> None:
    """Make every wait of this process on a gloo group raise, in any thread.

    gloo has no API for this, but fails all messages of a group after one of them timed out.
    """
    cpu = torch.device("cpu")
    for group in all_groups():
        if group.size() > 1 and cpu in group._device_types and group._get_backend(cpu).name() == "gloo":
            source = (group.rank() + 1) % group.size()
            with contextlib.suppress(RuntimeError, ValueError):  # that error, or the group is being destroyed
                work = dist.irecv(torch.empty(1), group=group, group_src=source, tag=BREAKING_TAG)
                assert work is not None
                work.wait(_AT_ONCE)


def is_of_transport(error: RuntimeError) -> bool:
    """Whether ``error`` comes from a collective rather than from a computation."""
    # gloo raises plain RuntimeErrors with its source location or one of these phrases.
    is_gloos = re.search("gloo/|Application timeout caused pair closure|Connection closed by peer", str(error))
    return isinstance(error, dist.DistError) or is_gloos is not None
