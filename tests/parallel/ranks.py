"""Tests over several processes: start them, run one function on all of them, bring their results or errors back."""

from __future__ import annotations

import functools
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Processes are forked from one that has imported these and computed nothing.
_FORKED = mp.get_context("forkserver")
_FORKED.set_forkserver_preload(
    ["dilated_attention_pytorch.parallel", "torch.distributed.device_mesh", "hypothesis", "transformers.modeling_utils"]
)
HANG_SECONDS = 600.0
"""A guard against hanging alone: on a machine that does other things too, processes start minutes after each other."""


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


@functools.cache
def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """Of all ranks. Those of one host are neighbours on the last axis."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("rows", "heads")[: len(sizes)])


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = HANG_SECONDS) -> list[Any]:
    """``function(*args)`` on ``world`` processes of one gloo group; the results by rank.

    ``function`` is one of a module's own names and returns what can be pickled. ``timeout`` is the group's; all have to
    start within it.
    """
    results = _FORKED.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            _FORKED.Process(target=_run, args=(rank, world, store, timeout, dict(os.environ), results, function, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        found: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(found) < world and not errors:
            # A process that ends without a word would be waited for in vain.
            gone = [rank for rank, process in enumerate(processes) if process.exitcode is not None]
            if not results.empty():
                rank, is_error, value = results.get()
                (errors if is_error else found)[rank] = value
            elif lost := [rank for rank in gone if rank not in found]:
                errors |= {rank: f"ended with exit code {processes[rank].exitcode} and no result" for rank in lost}
            else:
                time.sleep(0.01)
        for process in processes:
            process.join(0 if errors else 30)
            if process.is_alive():
                process.kill()
                process.join()
    if errors:
        raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
    return [found[rank] for rank in range(world)]


def _run(
    rank: int,
    world: int,
    store: str,
    timeout: float,
    environment: dict[str, str],
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
        )
        value = function(*args)
        results.put((rank, False, value))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, True, traceback.format_exc()))
        raise
