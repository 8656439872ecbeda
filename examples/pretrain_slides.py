"""Pretrain a slide encoder on your own tile features by masked autoencoding, as GigaPath was pretrained.

python examples/pretrain_slides.py --output runs/encoder                          # made slides, 3 minutes on a CPU
python examples/pretrain_slides.py features_uni/ --width 768 --layers 12 --steps 20000 --output runs/encoder
dilated-attention embed features_uni/ --checkpoint runs/encoder/slide_encoder.safetensors --encoder uni_v2 --output out/

Three of four tiles of a slide are hidden (He et al. 2021, arXiv 2111.06377). The encoder computes the states of the
others; a shallow decoder, a LongNet too, gets them with a learned vector at the places of the hidden tiles, and
predicts the features of those. The width of the features comes from the files, so any tile encoder will do. The same
command resumes. Needs the extras `slides` and `train`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from dilated_attention_pytorch.slides import SlideEncoder, SlideEncoderConfig, pack_slides, read_slide, tile_grid

HIDDEN = 0.75
HELD_OUT = 8


class Slides(Dataset):
    """Features ``[N, C]`` and grid cells ``[N, 2]`` of each slide, read when they are needed."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        slide = read_slide(self.files[index])
        size = slide.tile_size or slide.spacing
        if size is None:
            raise SystemExit(f"{self.files[index]} records no tile size, and its tiles stand irregularly")
        return slide.features.float(), tile_grid(slide.coordinates, size, 1000)


class MadeSlides(Dataset):
    """Slides of regions of three of eight tissues, with noise: what is hidden follows from what is near."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self.tissues = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.numbers[index])
        rows, columns = torch.randint(15, 30, (2,), generator=generator).tolist()
        grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        centres = 30 * torch.rand(6, 2, generator=generator)
        tissue_of = torch.randperm(8, generator=generator)[:3].repeat(2)
        tissues = tissue_of[torch.cdist(grid.float(), centres).argmin(dim=1)]
        return self.tissues[tissues] + 0.5 * torch.randn(len(grid), 64, generator=generator), grid


class MaskedTiles(nn.Module):
    """The loss of predicting hidden tiles, each feature vector standardised: predicting zeros gives 1."""

    def __init__(self, encoder: SlideEncoder, width: int, layers: int) -> None:
        super().__init__()
        self.encoder = encoder
        sizes = encoder.config
        self.hidden_tile = nn.Parameter(0.02 * torch.randn(sizes.embed_dim))
        self.decoder = SlideEncoder(
            SlideEncoderConfig(
                feature_dim=sizes.embed_dim,
                embed_dim=width,
                num_layers=layers,
                num_heads=sizes.num_heads,
                ffn_dim=4 * width,
                dropout=0.0,
                drop_path=0.0,
            )
        )
        self.predicted = nn.Linear(width, sizes.feature_dim)

    def forward(self, features: Tensor, grid: Tensor, cu_seqlens: Tensor) -> dict[str, Tensor]:
        """``features [1, N, C]`` of packed slides at ``grid [1, N, 2]``; of each slide a random quarter is visible.

        It is drawn here, not by the data loader, which reads ahead: a resumed run draws the same.
        """
        is_hidden = hidden_tiles(cu_seqlens)
        seen = ~is_hidden
        seen_before = functional.pad(seen.cumsum(0, dtype=torch.int32), (1, 0))
        states = self.encoder.tile_states(
            features[:, seen], grid[:, seen], tile_size=1, cu_seqlens=seen_before[cu_seqlens.long()]
        )
        rows = self.hidden_tile.expand(1, len(seen), -1).to(states.dtype)
        rows = rows.index_put((torch.zeros_like(cu_seqlens[:1].long()), seen.nonzero()[:, 0]), states[0])
        states = self.decoder.tile_states(rows, grid, tile_size=1, cu_seqlens=cu_seqlens)
        target = functional.layer_norm(features[:, is_hidden], features.shape[2:])
        return {"loss": functional.mse_loss(self.predicted(states[:, is_hidden]), target)}


def hidden_tiles(cu_seqlens: Tensor) -> Tensor:
    """Whether each of the tiles ``[N]`` of packed slides is hidden."""
    return torch.cat(
        [
            torch.randperm(tiles, device=cu_seqlens.device) >= math.ceil((1 - HIDDEN) * tiles)
            for tiles in cu_seqlens.diff().tolist()
        ]
    )


def collate(slides: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Packed slides."""
    return dict(zip(("features", "grid", "cu_seqlens"), pack_slides(list(slides)), strict=True))


def main(arguments: Sequence[str] | None = None) -> float:
    """Train and save the encoder; returns the loss on slides that were held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="folder of tile features; default: made slides")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoints and the encoder")
    parser.add_argument("--width", type=int, default=96, help="of the encoder; a multiple of 16 (768 in GigaPath)")
    parser.add_argument("--layers", type=int, default=3, help="of the encoder (12 in GigaPath)")
    parser.add_argument("--decoder-width", type=int, default=96)
    parser.add_argument("--decoder-layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--slides-per-step", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="use 5e-4 or less for a large encoder")
    chosen = parser.parse_args(arguments)
    if chosen.folder is None:
        training, held_out = MadeSlides(range(HELD_OUT, 10**6)), MadeSlides(range(HELD_OUT))
    else:
        files = sorted(path for path in chosen.folder.iterdir() if path.suffix in (".h5", ".pt"))
        if len(files) < 2 * HELD_OUT:
            parser.error(f"{chosen.folder} must hold at least {2 * HELD_OUT} .h5 or .pt files, got {len(files)}")
        training, held_out = Slides(files[HELD_OUT:]), Slides(files[:HELD_OUT])

    torch.manual_seed(0)
    encoder = SlideEncoder(
        SlideEncoderConfig(
            feature_dim=training[0][0].shape[1],
            embed_dim=chosen.width,
            num_layers=chosen.layers,
            ffn_dim=4 * chosen.width,
            dropout=0.0,
            drop_path=0.0,
        )
    )
    encoder.gradient_checkpointing_enable()
    settings = TrainingArguments(
        output_dir=str(chosen.output),
        max_steps=chosen.steps,
        per_device_train_batch_size=chosen.slides_per_step,
        per_device_eval_batch_size=1,
        learning_rate=chosen.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=chosen.steps // 20,
        weight_decay=0.05,
        logging_steps=max(1, chosen.steps // 10),
        save_steps=max(1, chosen.steps // 5),
        save_total_limit=2,
        remove_unused_columns=False,
        prediction_loss_only=True,
        label_names=["features"],
        report_to="none",
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    model = MaskedTiles(encoder, chosen.decoder_width, chosen.decoder_layers)
    trainer = Trainer(model, settings, collate, training, held_out)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(chosen.output) if chosen.output.is_dir() else None)
    torch.manual_seed(0)  # the same tiles of the slides that are held out are hidden in every run
    loss = trainer.evaluate()["eval_loss"]
    save_file(encoder.state_dict(), chosen.output / "slide_encoder.safetensors")
    print(f"hidden tiles of {HELD_OUT} slides that were held out: {1 - loss:.1%} of their variance is predicted")
    return loss


if __name__ == "__main__":
    main()
