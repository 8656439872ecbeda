"""Process groups of ``torch.distributed``: how long their ranks wait for each other, and breaking that off."""

from __future__ import annotations

import contextlib
import re
from datetime import timedelta

import torch
import torch.distributed as dist

BREAKING_TAG = (1 << 30) + 2
"""Of a message that is never sent: numbers of calls are below, those of agreements right below."""
_AT_ONCE = timedelta(milliseconds=1)
_TIMED = ("gloo", "nccl")
"""Transports that can be told how long to wait."""


def all_groups() -> list[dist.ProcessGroup]:
    """Those of this process."""
    return list(dist.distributed_c10d._world.pg_map)


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """How long the ranks of ``group`` wait for each other, those of all ranks for ``dist.group.WORLD``."""
    assert group is not None
    backends = [group._get_backend(device) for device in group._device_types]
    timeouts = [backend.options._timeout for backend in backends if backend.name() in _TIMED]
    return min(timeouts, default=dist.distributed_c10d.default_pg_timeout)


def wait_at_most(seconds: float) -> None:
    """Have all ranks wait for each other no longer, from now on.

    A program that does not call ``init_process_group`` itself cannot tell it: transformers drops its timeout on CPUs.
    """
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)


def as_long_as_all(group: dist.ProcessGroup) -> timedelta:
    """Have the ranks of ``group`` wait for each other no longer than those of the whole process group do.

    torch makes the groups of a mesh's axes with its own default of half an hour, whatever ``init_process_group`` was
    told.

    Returns:
        how long that is.
    """
    timeout = min(timeout_of(group), timeout_of(dist.group.WORLD))
    if timeout < timeout_of(group):
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    return timeout


def break_off() -> None:
    """Make every wait of this process in a group of gloo raise, in whichever thread.

    gloo has no call for that. It gives up all messages of a group, though, when one of them was waited for in vain.
    """
    cpu = torch.device("cpu")
    for group in all_groups():
        if group.size() > 1 and cpu in group._device_types and group._get_backend(cpu).name() == "gloo":
            source = (group.rank() + 1) % group.size()
            with contextlib.suppress(RuntimeError, ValueError):  # that, or the program takes the group down just now
                work = dist.irecv(torch.empty(1), group=group, group_src=source, tag=BREAKING_TAG)
                assert work is not None
                work.wait(_AT_ONCE)


def is_of_transport(error: RuntimeError) -> bool:
    """Whether ``error`` is of a collective, and not of a computation."""
    # gloo raises plain errors, with the place in its source or these words.
    is_gloos = re.search("gloo/|Application timeout caused pair closure|Connection closed by peer", str(error))
    return isinstance(error, dist.DistError) or is_gloos is not None
