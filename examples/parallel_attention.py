"""One sequence over several processes, and its gradients, beside the same call in one process.

torchrun --nproc-per-node 4 examples/parallel_attention.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch import DilatedPattern, attend, parallel


def main() -> None:
    """Every rank makes the same whole tensors and keeps its rows; a real run would only ever have its rows."""
    if not dist.is_torchelastic_launched():
        raise SystemExit("start it with torchrun --nproc-per-node 4 examples/parallel_attention.py")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    rows, pattern = 10_001, DilatedPattern([512, 2048, 16384], [1, 2, 8])
    query, key, value = (torch.randn(1, rows, heads, 64) for heads in (8, 2, 2))
    plan = parallel.plan_parallel(pattern, query.shape, mesh, num_kv_heads=2, dtype=torch.float32, is_causal=True)
    if dist.get_rank() == 0:
        print(plan, flush=True)

    layout = plan.layout
    mine = [parallel.shard(tensor, mesh, layout=layout).requires_grad_() for tensor in (query, key, value)]
    with parallel.count_traffic() as traffic:
        out = parallel.attend(
            *mine, pattern, mesh=mesh, strategy=plan.strategy, layout=layout, sequence_length=rows, is_causal=True
        )
        out.square().sum().backward()
    whole = [tensor.requires_grad_() for tensor in (query, key, value)]
    expected = attend(*whole, pattern, is_causal=True)
    expected.square().sum().backward()

    pairs = [(out.detach(), expected.detach()), *((a.grad, b.grad) for a, b in zip(mine, whole, strict=True))]
    errors = [float((found - parallel.shard(all_rows, mesh, layout=layout)).abs().max()) for found, all_rows in pairs]
    print(
        f"rank {dist.get_rank()}: {out.shape[1]} rows, {traffic.sent:,} bytes sent, largest difference from "
        f"one process: output {errors[0]:.1e}, gradients {max(errors[1:]):.1e}",
        flush=True,
    )
    dist.barrier()  # gloo may abort a process that leaves before the others are done
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
