"""How well a model predicts texts, by how far back it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from dilated_attention_pytorch.output import replacing

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

_ROWS = 1024
"""Rows whose losses are computed at once."""
_POINTS_PER_DOUBLING = 2


@torch.inference_mode()
def bits_by_position(
    model: PreTrainedModel, windows: Sequence[Tensor], context: int, precision: str, console: Console, what: str
) -> Tensor:
    """Mean bits of every token of the windows but the first where the model reads ``context`` tokens at most.

    A window is cut into pieces of ``context`` tokens that share one token with the next, so that whatever the context
    the same tokens are predicted.

    Args:
        model: a causal language model.
        windows: int64 ``[N]`` each.
        context: tokens that the model sees at once; the token predicted is one of them.
        precision: "bfloat16" computes under autocast.
        console: where to draw a bar.
        what: what the bar says.

    Returns:
        float64 ``[N - 1]``, in bits per token.
    """
    from rich.progress import track

    model.eval()
    device = next(model.parameters()).device
    total = torch.zeros(len(windows[0]) - 1, dtype=torch.float64)
    for window in track(windows, what, console=console, disable=not console.is_terminal, transient=True):
        for start in range(0, len(window) - 1, context - 1):
            tokens = window[start : start + context].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                logits = model(tokens[None, :-1], use_cache=False).logits[0]
            for first in range(0, len(logits), _ROWS):
                rows = logits[first : first + _ROWS].float()
                nats = functional.cross_entropy(rows, tokens[1 + first : 1 + first + _ROWS], reduction="none")
                place = start + first
                total[place : place + len(nats)] += nats.double().cpu() / math.log(2)
    return total / len(windows)


def draw_positions(path: Path, curves: Mapping[str, Tensor], own_length: int) -> None:
    """Draw bits per byte by position in the window, a curve for every state of the model.

    Args:
        path: of the picture.
        curves: bits of every position, ``[N - 1]``, by name.
        own_length: the length that the model was trained on before, a vertical line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, bits in curves.items():
        places, means = _binned(bits)
        axes.plot(places, means, marker="o", markersize=3, label=f"{name}: {bits.mean():.3f} on average")
    axes.axvline(own_length, color="black", linestyle="--", linewidth=1, label=f"length before: {own_length:,}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("position in the text, tokens")
    axes.set_ylabel("bits per byte")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as staged:
        figure.savefig(staged, dpi=120, format="png")


def _binned(bits: Tensor) -> tuple[list[float], list[float]]:
    """Means over ranges that grow with the position, at their geometric middles."""
    edges = [1]
    while edges[-1] <= len(bits):
        edges.append(max(edges[-1] + 1, round(edges[-1] * 2 ** (1 / _POINTS_PER_DOUBLING))))
    edges[-1] = len(bits) + 1
    ranges = [(first, after) for first, after in pairwise(edges) if after > first]
    places = [math.sqrt(first * (after - 1)) for first, after in ranges]
    return places, [bits[first - 1 : after - 1].mean().item() for first, after in ranges]
