"""Maps of a trained model: which tiles speak for and against each score, and which can reach it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import torch
from torch import Tensor

from dilated_attention_pytorch.ops import attention_calls, attention_rollout
from dilated_attention_pytorch.output import make_output, replacing
from dilated_attention_pytorch.slides.contribution import gradient_times_input
from dilated_attention_pytorch.slides.heatmap import draw, of_contribution, read_scores
from dilated_attention_pytorch.slides.reading import TileRows
from dilated_attention_pytorch.slides.worker import pooled_rows
from dilated_attention_pytorch.training.autocast import autocast

from .model import SlideModel
from .trainer import Inputs

PICTURE = ".png"


def write_maps(
    model: SlideModel, inputs: Inputs, cases: Sequence[int], folder: Path, done: Callable[[int], None]
) -> None:
    """Write a file for each slide of the cases that has none: `contribution` [K, N], `rollout` [N], `coords` [N, 2].

    A PNG of the same name shows the contributions to the largest score.

    Args:
        model: a model with its encoder.
        inputs: the cases.
        cases: numbers of the cases.
        folder: folder of the files.
        done: called with the number of tiles of each case.
    """
    assert inputs.files is not None
    make_output(folder)
    model.eval().requires_grad_(False)
    for case in cases:
        paths = [folder / f"{name}.h5" for name in inputs.labels.cases[case].slides]
        # The picture is written last: a slide that has one is finished.
        tiles = inputs.files.read(inputs.labels.cases[case])
        if not all(path.with_suffix(PICTURE).is_file() for path in paths):
            features, grid = tiles.features.to(inputs.device).requires_grad_(), tiles.grid.to(inputs.device)
            with autocast(inputs.precision, inputs.device.type):
                scores = model(features, grid)[0].float()
            of_tiles = {"contribution": torch.stack([gradient_times_input(score, features) for score in scores])}
            with torch.no_grad(), autocast(inputs.precision, inputs.device.type), attention_calls() as calls:
                model(features, grid)
                if calls:
                    pooled = pooled_rows([(0, len(features) + 1)], inputs.files.config.pooling)
                    of_tiles["rollout"] = attention_rollout(calls, pooled)[0, 0, 1:]
            lengths = [len(slide.features) for slide in tiles.slides]
            parts = {name: values.float().cpu().split(lengths, dim=-1) for name, values in of_tiles.items()}
            for index, (path, slide) in enumerate(zip(paths, tiles.slides, strict=True)):
                _write(path, slide, {name: values[index] for name, values in parts.items()}, inputs.labels.outputs)
                _draw(path, inputs.labels.outputs[int(scores.argmax())])
        done(tiles.num_tiles)


def _draw(path: Path, output: str) -> None:
    maps = read_scores(path)
    values, what = of_contribution(maps, output)
    figure = draw(maps, values, f"{path.stem}: {what}", thumbnail=None)
    with replacing(path.with_suffix(PICTURE)) as staged:
        figure.savefig(staged, format=PICTURE[1:], dpi=100)


def _write(path: Path, slide: TileRows, of_tiles: dict[str, Tensor], outputs: Sequence[str]) -> None:
    buffer = io.BytesIO()  # where a disk is full, HDF5 raises a RuntimeError when it closes a file
    with h5py.File(buffer, "w") as file:
        for name, values in of_tiles.items():
            file[name] = values.numpy()
        file["contribution"].attrs["scores"] = list(outputs)
        file["coords"] = slide.slide.coordinates.numpy()
        kept = {name: value for name, value in slide.slide.attributes.items() if isinstance(value, (str, int, float))}
        file["coords"].attrs.update({**kept, "patch_size_level0": slide.tile_size})
    with replacing(path) as staged:
        staged.write_bytes(buffer.getbuffer())
