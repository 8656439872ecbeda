"""Made files of tile features, and a small encoder for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import torch
from torch import Tensor

from dilated_attention_pytorch.slides import SlideEncoder, SlideEncoderConfig

WIDTH, SIZE = 12, 512
CONFIG = SlideEncoderConfig(feature_dim=WIDTH, embed_dim=32, num_layers=2, ffn_dim=48)


def checkpoint(folder: Path) -> Path:
    """Weights of the small encoder, as GigaPath saves its own."""
    torch.manual_seed(5)
    path = folder / "slide_encoder.pth"
    torch.save({"model": SlideEncoder(CONFIG).state_dict()}, path)
    return path


def tiles_of(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features ``[N, C]`` and corners ``[N, 2]`` of different tiles."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(300 * 300, generator=generator)[:number]
    corners = SIZE * torch.stack((places // 300, places % 300), dim=-1)
    return torch.randn(number, WIDTH, generator=generator), corners


def write_hdf5(path: Path, features: Any, coordinates: Any, *, has_batch: bool = False, **attributes: Any) -> Path:
    """A file as TRIDENT (attributes of ``coords``) or CLAM (none) writes it; with a leading axis of 1 or without."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["features"] = features[None] if has_batch else features
        file["coords"] = coordinates[None] if has_batch else coordinates
        file["coords"].attrs.update(attributes)
    return path


def write_slides(folder: Path, numbers: list[int]) -> list[Path]:
    """A folder of slides of so many tiles."""
    return [
        write_hdf5(folder / f"slide{index}.h5", *tiles_of(number, index), patch_size_level0=SIZE)
        for index, number in enumerate(numbers)
    ]
