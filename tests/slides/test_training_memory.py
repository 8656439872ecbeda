"""Memory of a training step: recomputed layers keep only their inputs; what a tile takes is measured."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch.memory import peak_memory, return_freed_blocks
from dilated_attention_pytorch.slides import SlideEncoder, SlideEncoderConfig
from dilated_attention_pytorch.slides.memory import measure_training_bytes
from support.forked import run_forked

CPU = torch.device("cpu")
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


def measure_tiles() -> None:
    """Write the bytes of a tile that are measured on two layers, those of a step, and the bytes beside the tiles."""
    encoder = SlideEncoder(dataclasses.replace(CONFIG, feature_dim=96, embed_dim=64, num_layers=6, ffn_dim=256))
    encoder.gradient_checkpointing_enable()
    encoder.cls_token.requires_grad_(requires_grad=False)

    def run_step(tiles: int) -> None:
        grid = torch.stack((torch.arange(tiles) // 100, torch.arange(tiles) % 100), dim=-1)
        encoder(torch.randn(1, tiles, 96), grid[None], tile_size=1).layers.sum().backward()

    return_freed_blocks()
    measured = measure_training_bytes(encoder, CPU, "float32")
    run_step(100)
    peak = peak_memory(lambda: run_step(7000), CPU)
    assert measured is not None
    assert peak is not None
    trained = 3 * sum(weight.nbytes for weight in encoder.parameters() if weight.requires_grad)
    figures = (measured.tile_bytes, peak[0] // 7000, measured.fixed_bytes, trained)
    Path("figures.txt").write_text(" ".join(map(str, figures)))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_what_a_tile_takes_in_training_is_measured_on_two_layers(
    tmp_path: Path, figure: Callable[[str, object], None]
) -> None:
    # A fork of this process would take small blocks from what earlier tests freed, and they would not be counted.
    ended = run_forked(measure_tiles, folder=tmp_path)
    assert ended["code"] == 0, ended["output"][-8000:]
    measured, taken, fixed, trained = map(int, (tmp_path / "figures.txt").read_text().split())
    figure("slides: bytes of a tile in training over those measured on two layers", taken / measured)
    # Without the inputs of four of the six layers, 1 kB of 10 kB would be missing.
    assert 0.9 < taken / measured < 1.1
    assert fixed == trained
