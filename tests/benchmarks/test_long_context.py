"""The picture of the long-context recipe is drawn from the numbers that its file of results keeps."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.image
import torch
from benchmarks.long_context import draw

from dilated_attention_pytorch.training.evaluation import binned, draw_positions
from dilated_attention_pytorch.training.record import STATES


def test_the_picture_from_the_results_is_that_of_the_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    curves = {state: 2 + torch.rand(63, dtype=torch.float64) for state in STATES}
    record = {
        "settings": {"context_length": 64},
        "own_length": 16,
        "measured": {
            state: {"bits_per_byte": {"64": curve.mean().item()}, "by_position": binned(curve)}
            for state, curve in curves.items()
        },
    }
    draw(json.loads(json.dumps(record)), tmp_path / "results.png")
    points = {f"{STATES[state]}, mean {curve.mean():.3f}": binned(curve) for state, curve in curves.items()}
    draw_positions(tmp_path / "run.png", points, 16)
    drawn, run = (matplotlib.image.imread(tmp_path / f"{name}.png") for name in ("results", "run"))
    assert (drawn == run).all()
