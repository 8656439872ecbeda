"""Detection of values that are not finite, agreed between all processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_NAMED = 3
"""Maximum number of names to list."""


def is_finite_everywhere(*values: Tensor) -> bool:
    """Whether all values of all processes are finite. A collective: all processes call it and get the same answer."""
    broken = torch.stack([~torch.isfinite(value.detach()).all() for value in values]).any()
    if _is_alone():
        return not bool(broken)
    flag = broken.to(torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return not bool(flag)


def what_is_not_finite(tensors: Mapping[str, Iterable[tuple[str, Tensor]]]) -> str | None:
    """Description of the tensors with non-finite values, and in which processes; None if all are finite.

    Args:
        tensors: by kind ("weights"): names and this process's tensors, or its shards of them.

    A collective: all processes call it and get the same answer.
    """
    counts: dict[str, int] = {}
    mine: dict[str, dict[int, str]] = {}
    for kind, named in tensors.items():
        # One at a time, so that gathered tensors are not all in memory.
        checked = [(name, _is_finite(tensor)) for name, tensor in named]
        counts[kind] = len(checked)
        mine[kind] = {number: name for number, (name, is_finite) in enumerate(checked) if not is_finite}
    by_rank: list[dict[str, dict[int, str]]] = [mine]
    if not _is_alone():
        by_rank = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, mine)
    sentences = []
    for kind, count in counts.items():
        ranks = [rank for rank, names in enumerate(by_rank) if names[kind]]
        broken = {number: name for names in reversed(by_rank) for number, name in names[kind].items()}
        if broken:
            names = [broken[number] for number in sorted(broken)]
            sentences.append(f"{len(names)} of {count} {kind} ({_listed(names)}){_on(ranks)}")
    return " and ".join(sentences) or None


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _is_finite(tensor: Tensor) -> bool:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if not local.numel() or not local.is_floating_point():
        return True  # integers, such as the moments of an 8-bit optimizer
    # The largest magnitude is NaN or infinite if any value is, and needs no mask of the tensor's size.
    return bool(torch.isfinite(torch.linalg.vector_norm(local, ord=torch.inf)))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")


def _on(ranks: list[int]) -> str:
    if _is_alone():
        return ""
    if len(ranks) == dist.get_world_size():
        return " on every rank"
    return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
