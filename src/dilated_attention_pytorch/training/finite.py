"""What is not finite: found before it is stepped with or saved, by all processes alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_NAMED = 3
"""So many names stand in a sentence."""


@dataclass(frozen=True, slots=True)
class _Broken:
    """What a process found among its tensors of one kind."""

    kind: str
    names: list[str]
    total: int


def is_finite_everywhere(*values: Tensor) -> bool:
    """Whether every value of every process is finite: the same answer in all of them, which all must ask for."""
    broken = torch.stack([~torch.isfinite(value.detach()).all() for value in values]).any()
    if _is_alone():
        return not bool(broken)
    flag = broken.to(torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return not bool(flag)


def what_is_not_finite(tensors: Mapping[str, Iterable[tuple[str, Tensor]]]) -> str | None:
    """Which tensors hold a value that is not finite in which processes, in words; None where all are finite.

    Args:
        tensors: by their kind in words ("weights"), names and this process's tensors, or its parts of them.

    Every process must ask, and gets the same answer.
    """
    mine = [_broken(kind, list(named)) for kind, named in tensors.items()]
    found: list[list[_Broken]] = [mine]
    if not _is_alone():
        found = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, mine)
    sentences = []
    for number, kind in enumerate(tensors):
        ranks = {rank: kinds[number] for rank, kinds in enumerate(found) if kinds[number].names}
        if ranks:
            worst = max(ranks.values(), key=lambda broken: len(broken.names))
            sentences.append(f"{len(worst.names)} of {worst.total} {kind} ({_listed(worst.names)}){_on(list(ranks))}")
    return " and ".join(sentences) or None


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _broken(kind: str, named: list[tuple[str, Tensor]]) -> _Broken:
    return _Broken(kind, [name for name, tensor in named if not _is_finite(tensor)], len(named))


def _is_finite(tensor: Tensor) -> bool:
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if not local.numel():
        return True
    # The largest magnitude is NaN or infinite where any value is, and no mask as long as the tensor is made.
    return bool(torch.isfinite(torch.linalg.vector_norm(local, ord=torch.inf)))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")


def _on(ranks: list[int]) -> str:
    if _is_alone():
        return ""
    if len(ranks) == dist.get_world_size():
        return " on every rank"
    return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
