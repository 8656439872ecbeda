"""Every exported module built on meta, sharded by FSDP2, and loaded: what the ranks compute."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from models.wrapping import CASES, empty


def sharded_from_meta() -> dict[str, float]:
    """The largest difference to the whole module, by case."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for name, case in CASES.items():
        torch.manual_seed(0)

        whole = case.drawn()
        module = case.make("meta").eval()
        for part in module.modules():
            if isinstance(part, nn.ModuleList):
                for block in part:
                    fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        empty(module)
        set_model_state_dict(module, whole.state_dict(), options=StateDictOptions(full_state_dict=True))
        with torch.no_grad():
            found[name] = float((case.call(module) - case.call(whole)).abs().max())
    return found
