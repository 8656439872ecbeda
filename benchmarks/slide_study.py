"""Fine-tuning on made slides whose label depends on a few tiles: does the encoder find them, and do the maps show them?

    python -m benchmarks.slide_study

A slide is a rectangle of tiles of three tissues, with noise. Every slide has a few tiles of a decoy, and those of class
1 have as many of a rare kind elsewhere: which tiles decide is known. `finetune` trains a classifier alone (`--freeze`)
and the whole encoder, from the same random weights, on the same splits. Of the slides of class 1 in the test part, the
study counts how many of the n tiles with the largest contribution to class 1, and with the largest rollout, are among
the n tiles that decide.
"""

from __future__ import annotations

import csv
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.slides import SlideEncoder, SlideEncoderConfig

from .study import Study, run

WIDTH, SIZE = 32, 512


@dataclass(frozen=True, kw_only=True)
class SlideStudy(Study):
    """Settings."""

    slides: int = 240
    """Number of slides, half of each class."""
    side: int = 20
    """Mean edge of a slide, in tiles."""
    deciding: int = 6
    """Tiles of the decoy, and of the rare kind."""
    epochs: int = 20
    """Epochs of fine-tuning."""


def make_slides(folder: Path, given: SlideStudy) -> dict[str, Tensor]:
    """Write slides and labels.csv; returns the numbers of the tiles that decide, by slide of class 1."""
    import h5py

    generator = torch.Generator().manual_seed(0)
    kinds = torch.randn(5, WIDTH, generator=generator)  # three tissues, the decoy, the rare kind
    deciding = {}
    (folder / "features").mkdir()
    with (folder / "labels.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["slide", "label"])
        for index in range(given.slides):
            rows, columns = (given.side + torch.randint(-4, 5, (2,), generator=generator)).tolist()
            grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
            centres = given.side * torch.rand(6, 2, generator=generator)
            kind = (torch.cdist(grid.float(), centres).argmin(dim=1)) % 3
            places = torch.randperm(len(grid), generator=generator)[: 2 * given.deciding]
            kind[places[: given.deciding]] = 3
            label = index % 2
            if label:
                kind[places[given.deciding :]] = 4
                deciding[f"slide{index:03}"] = places[given.deciding :]
            with h5py.File(folder / "features" / f"slide{index:03}.h5", "w") as file:
                noise = torch.randn(len(grid), WIDTH, generator=generator)
                file["features"] = (kinds[kind] + 0.5 * noise).numpy()
                file["coords"] = (SIZE * grid).numpy()
                file["coords"].attrs["patch_size_level0"] = SIZE
            writer.writerow([f"slide{index:03}", label])
    return deciding


def measure(given: SlideStudy) -> dict[str, Any]:
    """Train, and compare the maps with the tiles that decide."""
    import h5py

    from dilated_attention_pytorch.slides.finetune.run import Finetuner
    from dilated_attention_pytorch.slides.finetune.settings import FinetuneSettings

    torch.manual_seed(0)
    config = SlideEncoderConfig(feature_dim=WIDTH, embed_dim=64, num_layers=3, ffn_dim=128)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        deciding = make_slides(folder, given)
        checkpoint = folder / "slide_encoder.pth"
        torch.save({"model": SlideEncoder(config).state_dict()}, checkpoint)
        common = FinetuneSettings(
            layers=(3,), pooling="mean", validation=0.2, test=0.3, device="cpu", threads=given.threads or 0
        )
        for name, settings in {
            "classifier": replace(common, freeze=True),
            "encoder": replace(
                common, epochs=given.epochs, cases_per_step=8, learning_rate=2e-3, layer_decay=1.0, maps=True
            ),
        }.items():
            outcome = Finetuner([folder / "features"], folder / "labels.csv", checkpoint, folder / name, settings).run()
            assert outcome.metrics is not None
            found[name] = outcome.metrics["pooled"]
        right: dict[str, list[float]] = {"contribution": [], "rollout": []}
        chance = []
        for file in sorted((folder / "encoder").glob("**/maps/*.h5")):
            if file.stem not in deciding:
                continue
            which = deciding[file.stem]
            with h5py.File(file) as content:
                maps = {"contribution": content["contribution"][()][-1], "rollout": content["rollout"][()]}
            for name, values in maps.items():
                largest = torch.from_numpy(values).topk(len(which)).indices
                right[name].append(float(torch.isin(largest, which).float().mean()))
            chance.append(len(which) / len(values))
        found["tiles found"] = {name: sum(values) / len(values) for name, values in right.items()}
        found["tiles found by chance"] = sum(chance) / len(chance)
    return found


if __name__ == "__main__":
    tiny = {"slides": 24, "side": 9, "deciding": 2, "epochs": 1}
    run(SlideStudy, measure, text=__doc__, name="slide_study", group="fine-tuning", tiny=tiny)
