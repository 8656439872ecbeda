"""One function on several processes of one gloo group, each with one thread."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(*args)`` in ``world`` new processes; results by rank. An error in any of them is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_run, (world, folder, function, args), nprocs=world, start_method="spawn")
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(world)]


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}"


def _run(rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    _result(folder, rank).write_bytes(pickle.dumps(function(*args)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.parallel --help")
