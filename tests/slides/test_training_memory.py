"""Recomputed layers: the same loss and gradients, and only their inputs kept."""

from __future__ import annotations

import torch
from torch import Tensor

from dilated_attention_pytorch.slides import SlideEncoder, SlideEncoderConfig

CONFIG = SlideEncoderConfig(
    feature_dim=16,
    embed_dim=32,
    num_layers=4,
    num_heads=4,
    ffn_dim=128,
    grid_size=100,
    segment_lengths=(64, 512),
    dilation_rates=(1, 2),
)


def step(encoder: SlideEncoder, features: Tensor, coordinates: Tensor) -> tuple[list[Tensor], int]:
    """Gradients of a training step with dropout, and the bytes that the forward pass kept for it."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = encoder(features, coordinates, tile_size=1).layers.sin().sum()
    return list(torch.autograd.grad(loss, list(encoder.parameters()), allow_unused=True)), sum(kept.values())


def test_recomputed_layers_have_the_same_gradients_and_keep_their_inputs_alone() -> None:
    torch.manual_seed(0)
    encoder = SlideEncoder(CONFIG).train()
    features, coordinates = torch.randn(1, 700, 16), torch.stack((torch.arange(700) // 50, torch.arange(700) % 50), -1)
    expected, stored = step(encoder, features, coordinates[None])
    encoder.gradient_checkpointing_enable()
    found, kept = step(encoder, features, coordinates[None])
    encoder.gradient_checkpointing_disable()
    assert step(encoder, features, coordinates[None])[1] == stored
    for got, want in zip(found, expected, strict=True):
        assert (got is None and want is None) or torch.equal(got, want)
    assert kept < stored / 4
