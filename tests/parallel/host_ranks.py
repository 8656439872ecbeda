"""Run under torchrun, on several hosts: what ranks compute beside what one process does, then calls until one fails.

torchrun ... host_ranks.py FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, attend, parallel
from dilated_attention_pytorch.parallel.communicator import _connections, communicator_of
from dilated_attention_pytorch.parallel.groups import as_long_as_all, wait_at_most
from ranks import mesh_of

TIMEOUT_SECONDS = 6.0
"""Of the process group in the loop."""
HANG_SECONDS = 600.0
PATTERN = DilatedPattern([61, 257, 1031], [1, 3, 8])
COLLECTIVES = "gather of all by collectives"
"""As with NCCL, where messages have no tags."""
MESHES: dict[str, tuple[tuple[int, ...], str, str]] = {
    "ring across hosts, heads within": ((2, 2), "ring", "contiguous"),
    "gather across hosts, heads within": ((2, 2), "gather", "zigzag"),
    "ring of all": ((4,), "ring", "zigzag"),
    "gather of all": ((4,), "gather", "contiguous"),
    COLLECTIVES: ((4,), "gather", "zigzag"),
}


def largest_error(name: str) -> tuple[float, int, float]:
    """Of output and gradients against one process; bytes that this rank sent, and the seconds of both passes."""
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(1, 2003, heads, 16, dtype=torch.float64, generator=generator) for heads in (6, 2, 2, 6)]
    sizes, strategy, layout = MESHES[name]
    mesh = mesh_of(sizes)
    communicator_of(mesh).has_tags = name != COLLECTIVES

    def results(tensors: list[Tensor], **options: Any) -> list[Tensor]:
        query, key, value = (x.clone().requires_grad_() for x in tensors[:3])
        function: Any = parallel.attend if options else attend
        out = function(query, key, value, PATTERN, is_causal=True, **options)
        out.backward(tensors[3])
        return [out.detach(), *(leaf.grad for leaf in (query, key, value))]

    expected = results(whole)
    start = time.monotonic()
    with parallel.count_traffic() as traffic:
        rows = [parallel.shard(x, mesh, layout=layout) for x in whole]
        found = results(rows, mesh=mesh, strategy=strategy, layout=layout, sequence_length=2003)
    seconds = time.monotonic() - start
    differences = [
        float((mine - parallel.shard(theirs, mesh, layout=layout)).abs().max())
        for mine, theirs in zip(found, expected, strict=True)
    ]
    return max(differences), traffic.sent, seconds


def loop(file: Path) -> None:
    """Calls, until a rank fails; says when the first has been made and what the failure was."""
    mesh = mesh_of((4,))
    communicator = communicator_of(mesh)
    communicator.has_tags = True
    wait_at_most(TIMEOUT_SECONDS)
    communicator._timeout = as_long_as_all(mesh.get_group())
    _connections().monitor.wait_at_most(TIMEOUT_SECONDS)
    q, k, v = (torch.randn(1, 64, 4, 16) for _ in range(3))
    try:
        while True:
            parallel.attend(q, k, v, PATTERN, mesh=mesh, strategy="ring")
            if not file.exists():
                file.write_text("{}")
            time.sleep(0.01)
    except parallel.RankFailure as error:
        file.write_text(json.dumps({"message": str(error), "at": time.monotonic()}))
        raise


def main() -> None:
    """Both."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    # All have to start within it: on a busy machine that takes longer than the loop is to wait for a rank.
    dist.init_process_group("gloo", timeout=timedelta(seconds=HANG_SECONDS))
    found = {name: largest_error(name) for name in MESHES}
    (folder / f"compare-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    loop(folder / f"loop-{dist.get_rank()}.json")


if __name__ == "__main__":
    main()
