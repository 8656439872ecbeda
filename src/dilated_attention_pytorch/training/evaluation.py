"""Final evaluation of a trained model: bits per byte by quarter of its context, compared with xz, as a chart."""

from __future__ import annotations

import lzma
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from dilated_attention_pytorch.output import replacing

from .autocast import autocast
from .callbacks import read_metrics

if TYPE_CHECKING:
    from dilated_attention_pytorch.models import LongNetLM


def xz_bits_per_byte(data: bytes) -> float:
    """Bits per byte of ``data`` compressed by ``xz -9e`` as one stream."""
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


def bits_by_quarter(
    model: LongNetLM, files: Sequence[Tensor], precision: str, lengths: Tensor | None = None
) -> list[float]:
    """Mean bits per byte over each quarter of the context.

    The quarters hold different text (the beginnings of files are hard to predict), so a decrease from the first to the
    last does not by itself show use of long context; :func:`bits_of_last_quarter_alone` measures that.

    Args:
        model: the model, on its device; put into eval mode.
        files: int64 ``[context + 1]`` each, the separator and the beginning of a file.
        precision: computation precision (:mod:`.autocast`).
        lengths: int64 ``[vocab_size]``, bytes per token; None = 1.
    """
    means = []
    for file in files:
        bits, sizes = _bits(model, file, precision), _sizes(file, lengths)
        parts = zip(bits.tensor_split(4), sizes.tensor_split(4), strict=True)
        means.append([part.mean() / size.mean() for part, size in parts])
    return torch.tensor(means, dtype=torch.float64).mean(dim=0).tolist()


def bits_of_last_quarter_alone(
    model: LongNetLM, files: Sequence[Tensor], precision: str, lengths: Tensor | None = None
) -> float:
    """Mean bits per byte over the last quarter of the context, without the context before that quarter.

    The difference from the last value of :func:`bits_by_quarter` is the benefit of the earlier context.
    """
    means = []
    for file in files:
        quarter = file[-((len(file) - 1) // 4) - 1 :]
        means.append(_bits(model, quarter, precision).mean() / _sizes(quarter, lengths).mean())
    return torch.tensor(means, dtype=torch.float64).mean().item()


def _sizes(tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """Bytes of every token except the first, ``[tokens - 1]``."""
    return torch.ones(len(tokens) - 1) if lengths is None else lengths[tokens[1:]].float()


@torch.inference_mode()
def _bits(model: LongNetLM, tokens: Tensor, precision: str) -> Tensor:
    """Bits of every token except the first, given those before it, ``[tokens - 1]``."""
    model.eval()
    tokens = tokens.to(model.embedding.weight.device)
    with autocast(precision, tokens.device.type):
        logits = model(tokens[None, :-1])[0]
    return functional.cross_entropy(logits.float(), tokens[1:], reduction="none") / math.log(2)


def draw_losses(run: Path, *, xz: float, final: tuple[int, float] | None) -> Path:
    """Plot ``loss.png`` from the metrics of a run: training, held-out, final value, and the xz baseline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = read_metrics(run)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    curves: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("bits_per_byte", "training", {"color": "tab:blue", "linewidth": 0.8, "alpha": 0.6}),
        ("eval_bits_per_byte", "held-out, on the way", {"color": "tab:orange", "marker": "o", "markersize": 4}),
    )
    for name, label, style in curves:
        points = [(entry["step"], entry[name]) for entry in entries if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    if final is not None:
        axes.plot(*final, "*", color="tab:red", markersize=12, label=f"held-out, at the end: {final[1]:.3f}")
    axes.axhline(xz, color="black", linestyle="--", linewidth=1, label=f"xz -9e on the same bytes: {xz:.3f}")
    axes.set_xlabel("optimizer step")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel("bits per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path = run / "loss.png"
    with replacing(path) as staged:
        figure.savefig(staged, dpi=120, format="png")
    return path
