"""Bits per byte of a model's predictions: by quarter of the context, by context length and position; as charts."""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dilated_attention_pytorch.output import replacing
from dilated_attention_pytorch.progress import counted

from .autocast import autocast
from .row_logits import RowLogits, row_logits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from transformers import PreTrainedModel

    from dilated_attention_pytorch.models import LongNetLM


_ROWS = 1024
"""Rows per loss computation."""
_POINTS_PER_DOUBLING = 2


def xz_bits_per_byte(data: bytes) -> float:
    """Bits per byte of ``data`` compressed by ``xz -9e`` as one stream."""
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


def bits_by_quarter(
    model: LongNetLM, files: Iterable[Tensor], precision: str, lengths: Tensor | None = None
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
    model: LongNetLM, files: Iterable[Tensor], precision: str, lengths: Tensor | None = None
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


@contextmanager
def chart(path: Path, size: tuple[float, float] = (6.4, 4.4)) -> Iterator[Figure]:
    """Context with an empty figure of matplotlib, which is written to ``path`` as PNG at the end.

    Args:
        path: image file.
        size: width and height in inches.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure
    with replacing(path) as staged:
        figure.savefig(staged, dpi=140, format="png")


def legend_above(axes: Axes) -> None:
    """A legend above the axes, where it covers no line."""
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)


def draw_losses(run: Path, *, xz: float, final: tuple[int, float] | None) -> Path:
    """Plot ``loss.png`` from the metrics of a run: training, held-out, final value, and the xz baseline."""
    from .callbacks import read_metrics

    entries = read_metrics(run)
    curves: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("bits_per_byte", "training", {"color": "tab:blue", "linewidth": 0.8, "alpha": 0.6}),
        ("eval_bits_per_byte", "held-out", {"color": "tab:orange", "marker": "o", "markersize": 4}),
    )
    path = run / "loss.png"
    with chart(path) as figure:
        axes = figure.subplots()
        for name, label, style in curves:
            points = [(entry["step"], entry[name]) for entry in entries if name in entry]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **style)
        if final is not None:
            axes.plot(*final, "*", color="tab:red", markersize=12, label=f"held-out, final: {final[1]:.3f}")
        axes.axhline(xz, color="black", linestyle="--", linewidth=1, label=f"xz -9e, same bytes: {xz:.3f}")
        axes.set_xlabel("optimizer step")
        axes.locator_params(axis="x", integer=True)
        axes.set_ylabel("bits per byte")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        legend_above(axes)
    return path


@torch.inference_mode()
def bits_of_tokens(
    model: PreTrainedModel, texts: Sequence[Tensor], context: int, precision: str, console: Console, what: str
) -> list[Tensor]:
    """Bits of every token except the first of each text, with a context of at most ``context`` tokens.

    Texts are split into chunks of ``context`` tokens with an overlap of one token, so that the same tokens are
    predicted for every context.

    Args:
        model: a causal language model.
        texts: int64 ``[N]`` each.
        context: context length in tokens, including the predicted token.
        precision: computation precision (:mod:`.autocast`).
        console: console for the progress.
        what: its label.

    Returns:
        float64 ``[N - 1]`` each, in bits per token.
    """
    model.eval()
    parts = row_logits(model)
    bits = []
    for text in counted(texts, what, "texts", console):
        chunks = [text[start : start + context] for start in range(0, len(text) - 1, context - 1)]
        bits.append(torch.cat([predicted(model, parts, chunk, precision).bits for chunk in chunks]))
    return bits


class Predicted(NamedTuple):
    """Predictions for every token of a text except the first, given the tokens before it."""

    bits: Tensor
    """float64 ``[N - 1]``."""
    is_likeliest: Tensor
    """bool ``[N - 1]``: whether the token had the highest probability."""


@torch.inference_mode()
def predicted(model: PreTrainedModel, parts: RowLogits | None, tokens: Tensor, precision: str) -> Predicted:
    """Evaluate a model's predictions on a text.

    Args:
        model: a causal language model in eval mode.
        parts: from :func:`row_logits`, to compute logits one block of rows at a time; None computes all at once.
        tokens: int64 ``[N]``.
        precision: computation precision (:mod:`.autocast`).
    """
    device = next(model.parameters()).device
    tokens = tokens.to(device)
    bits, is_likeliest = [], []
    with autocast(precision, device.type):
        inputs = tokens[None, :-1]
        computed = model(inputs, use_cache=False).logits[0] if parts is None else parts.hidden(inputs)[0]
        for first in range(0, len(computed), _ROWS):
            rows = computed[first : first + _ROWS]
            logits = (rows if parts is None else parts.output(rows)).float()
            expected = tokens[1 + first : 1 + first + len(rows)]
            bits.append(functional.cross_entropy(logits, expected, reduction="none").double().cpu() / math.log(2))
            is_likeliest.append((logits.argmax(-1) == expected).cpu())
    return Predicted(torch.cat(bits), torch.cat(is_likeliest))


def draw_positions(path: Path, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], own_length: int) -> None:
    """Plot bits per byte by position in the window, one curve per model state.

    Args:
        path: image file.
        curves: positions and bits of each curve, from :func:`binned`, by its label.
        own_length: the model's original context length, drawn as a vertical line.
    """
    with chart(path) as figure:
        axes = figure.subplots()
        for label, (midpoints, means) in curves.items():
            axes.plot(midpoints, means, marker="o", markersize=3, label=label)
        axes.axvline(own_length, color="black", linestyle="--", linewidth=1, label=f"own length, {own_length:,}")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("position in the text, tokens")
        axes.set_ylabel("bits per byte")
        axes.grid(alpha=0.3)
        legend_above(axes)


def binned(bits: Tensor) -> tuple[list[float], list[float]]:
    """Means over geometrically growing ranges of positions, at their geometric midpoints."""
    edges = [1]
    while edges[-1] <= len(bits):
        edges.append(max(edges[-1] + 1, round(edges[-1] * 2 ** (1 / _POINTS_PER_DOUBLING))))
    edges[-1] = len(bits) + 1
    ranges = [(first, after) for first, after in pairwise(edges) if after > first]
    midpoints = [math.sqrt(first * (after - 1)) for first, after in ranges]
    return midpoints, [bits[first - 1 : after - 1].mean().item() for first, after in ranges]
