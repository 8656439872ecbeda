"""What each rank checks of slides that several ranks share; run by test_ranks.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dilated_attention_pytorch.ops import attention_maps
from dilated_attention_pytorch.parallel import RankFailure
from dilated_attention_pytorch.slides import SlideEmbeddings, SlideEncoder, SlideEncoderConfig

CONFIG = SlideEncoderConfig(
    feature_dim=5,
    embed_dim=24,
    num_layers=3,
    num_heads=6,
    ffn_dim=20,
    grid_size=60,
    segment_lengths=(16, 54, 1000),
    dilation_rates=(1, 2, 5),
    dropout=0.0,
    drop_path=0.0,
)


class Classifier(nn.Module):
    """A head on an encoder."""

    def __init__(self, config: SlideEncoderConfig) -> None:
        super().__init__()
        self.encoder = SlideEncoder(config, dtype=torch.float64)
        self.head = nn.Linear(2 * config.embed_dim, 3, dtype=torch.float64)

    def forward(self, *slides: Tensor, **options: Any) -> Tensor:
        found: SlideEmbeddings = self.encoder(*slides, tile_size=1, **options)
        return self.head(torch.cat((found.embedding, found.layers[:, 1]), dim=-1)).logsumexp(dim=-1).square().sum()


def made(config: SlideEncoderConfig, tiles: int, num_slides: int = 1) -> tuple[Classifier, Tensor, Tensor]:
    torch.manual_seed(7)
    model = Classifier(config)
    cells = torch.stack([torch.randperm(3600)[:tiles] for _ in range(num_slides)])
    grid = torch.stack((cells // 60, cells % 60), dim=-1)
    return model, torch.randn(num_slides, tiles, 5, dtype=torch.float64), grid


def largest_differences(options: dict[str, Any], tiles: int, num_slides: int, is_recomputed: bool) -> list[float]:
    """Of the loss and of all gradients, averaged over the ranks by DDP, from those of one process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, features, grid = made(dataclasses.replace(CONFIG, **options), tiles, num_slides)
    expected = model(features, grid)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    if is_recomputed:
        model.encoder.gradient_checkpointing_enable()
    wrapped = DistributedDataParallel(model)
    loss = wrapped(features, grid, mesh=mesh)
    loss.backward()
    found = [weight.grad for weight in model.parameters()]
    assert len(found) == len(wanted) > 50
    with torch.no_grad():
        assert torch.equal(model(features, grid, mesh=mesh), loss)
    return [
        float((got - want).detach().abs().max() / want.detach().abs().max().clamp(min=1e-3))
        for got, want in zip([loss, *found], [expected, *wanted], strict=True)
        if got is not None
    ]


def the_head_of_each_rank_draws_for_itself() -> float:
    """Ranks whose losses differ: the mean of the gradients is that of the mean loss."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    model, features, grid = made(CONFIG, 37)
    weights = list(model.encoder.parameters())
    alone = model.encoder(features, grid, tile_size=1).embedding[0]
    wanted = torch.autograd.grad(alone[: mesh.size()].sum() / mesh.size(), weights, allow_unused=True)
    model.encoder(features, grid, tile_size=1, mesh=mesh).embedding[0, rank].backward()
    differences = []
    for weight, want in zip(weights, wanted, strict=True):
        assert weight.grad is not None
        assert want is not None
        dist.all_reduce(weight.grad)
        differences.append(float((weight.grad / mesh.size() - want).abs().max()))
    return max(differences)


def paths_are_dropped_for_whole_slides() -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, features, grid = made(dataclasses.replace(CONFIG, drop_path=0.6), 37, num_slides=5)
    model.encoder.gradient_checkpointing_enable()
    results = []
    for options in ({}, {"mesh": mesh}):
        torch.manual_seed(3 + (dist.get_rank() if options else 0))
        found = model.encoder(features, grid, tile_size=1, **options).layers
        (gradient,) = torch.autograd.grad(found.sin().sum(), [model.encoder.encoder.layers[2].ffn.fc2.weight])
        if options:
            dist.all_reduce(gradient)
            gradient /= mesh.size()
        results.append((found.detach(), gradient))
    (whole, of_whole), (shared, of_shared) = results
    assert of_whole.abs().max() > 1e-3
    return max(float((shared - whole).abs().max()), float((of_shared - of_whole).abs().max()))


def refused() -> None:
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    model, features, grid = made(CONFIG, 37)
    ends = torch.tensor([0, 30, 37], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="packed slides are not shared by ranks, got mesh and cu_seqlens"):
        model(features, grid, cu_seqlens=ends, mesh=mesh)
    split = pytest.raises(NotImplementedError, match="attention maps of a sequence whose rows are split")
    with split, torch.no_grad(), attention_maps([0]):
        model(features, grid, mesh=mesh)
    both = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("slides", "tiles"))
    with pytest.raises(ValueError, match="mesh must have one dimension, the ranks that share a slide, got 2"):
        model(features, grid, mesh=both)
    assert torch.equal(model(features, grid, mesh=both["tiles"]), model(features, grid, mesh=mesh))
    with pytest.raises(TypeError, match="mesh must be"):
        model(features, grid, mesh=dist.get_world_size())
    with pytest.raises(RankFailure, match=r"query \[1, 2[01], 6, 4\]"):
        model(features[:, : 20 - rank], grid[:, : 20 - rank], mesh=mesh)
