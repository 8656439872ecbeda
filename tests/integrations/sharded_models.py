"""What one rank does: a model under a pattern whose weights are split over all ranks (FSDP2), beside the whole one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from dilated_attention_pytorch.integrations import extend_context, register, set_pattern
from integrations.tiny_models import PATTERN, draw, tiny


def split(model: Any) -> Any:
    """``model`` with every layer's weights, and the rest, split over all ranks."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_two_steps(name: str, recomputing: bool, extended: bool) -> dict[str, float]:
    """Largest differences of the split model from the whole one after two optimizer steps on other rows per rank."""
    register()

    def build() -> Any:
        if extended:
            model = extend_context(tiny(name, "sdpa", max_position_embeddings=20), 90, PATTERN)
        else:
            model = set_pattern(tiny(name), PATTERN)
        if recomputing:
            model.activation_checkpointing_enable()
        return model.train()

    one, parts = build(), split(build())
    rank, world = dist.get_rank(), dist.get_world_size()
    local = sum(parameter.to_local().numel() for parameter in parts.parameters())
    tokens = draw(world, 60)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    differences = {"kept": local / sum(parameter.numel() for parameter in one.parameters())}
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False) for model in (one, parts)]
    for step in range(2):
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = one(tokens, attention_mask=mask, position_ids=positions).logits
        mine = slice(rank, rank + 1)
        own = parts(tokens[mine], attention_mask=mask[mine], position_ids=positions[mine]).logits
        real = mask[rank].bool()
        differences[f"logits {step}"] = (own[0, real] - logits[rank, real]).abs().max().item()
        # The mean over ranks of a rank's loss, as FSDP takes the mean of gradients.
        sum(logits[row, mask[row].bool()].square().mean() for row in range(world)).div(world).backward()  # type: ignore[union-attr]
        own[0, real].square().mean().backward()
        for (_, expected), (_, found) in zip(one.named_parameters(), parts.named_parameters(), strict=True):
            assert expected.grad is not None
            assert found.grad is not None
            scale = expected.grad.abs().max().clamp(min=1e-30)
            difference = ((whole(found.grad) - expected.grad).abs().max() / scale).item()
            differences[f"gradients {step}"] = max(difference, differences.get(f"gradients {step}", 0.0))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return differences
