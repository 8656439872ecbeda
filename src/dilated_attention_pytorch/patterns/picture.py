"""Plots of patterns, with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from dilated_attention_pytorch.installation import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .pattern import Pattern


_MOST_CELLS = 2048
"""Longest sequence plotted at full resolution."""


def draw(
    pattern: Pattern, sequence_length: int, *, num_kv_heads: int = 1, is_causal: bool = False, axes: Axes | None = None
) -> Axes:
    """Draw ``c[g, p, t]``: one panel per key/value head, queries downwards, keys to the right."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(f"drawing a pattern needs matplotlib: {install_command('plot')}") from error
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, got {sequence_length}")
    step = -(-sequence_length // _MOST_CELLS)
    positions = torch.arange(0, sequence_length, step)
    sequence_length = len(positions)
    counts = pattern.counts(positions, positions, num_kv_heads, is_causal=is_causal)
    # One blank column between panels: NaN is drawn as background.
    panels = torch.full((sequence_length, num_kv_heads * (sequence_length + 1) - 1), float("nan"))
    for head in range(num_kv_heads):
        left = head * (sequence_length + 1)
        panels[:, left : left + sequence_length] = counts[head].float()
    if axes is None:
        _, axes = plt.subplots(figsize=(3.4 * num_kv_heads + 0.9, 3.6), layout="constrained")
    most = max(1, len(pattern.groups) + len(pattern.rules))
    image = axes.imshow(
        panels.numpy(), cmap=plt.get_cmap("Blues", most + 1), vmin=-0.5, vmax=most + 0.5, interpolation="nearest"
    )
    axes.figure.colorbar(image, ax=axes, ticks=range(most + 1), label="count c", fraction=0.03, pad=0.02)
    _number_the_keys(axes, sequence_length, num_kv_heads)
    axes.set_ylabel("query position" if step == 1 else f"query position, every {step}th")
    return axes


def _number_the_keys(axes: Axes, sequence_length: int, num_kv_heads: int) -> None:
    """Label every panel with its head, and with the numbers of its first and last key, aligned inwards."""
    ticks: list[float] = []
    words: list[tuple[str, Literal["left", "center", "right"]]] = []
    for head in range(num_kv_heads):
        first, last = head * (sequence_length + 1), head * (sequence_length + 1) + sequence_length - 1
        ticks.append((first + last) / 2)
        words.append((f"keys, head {head}", "center"))
        if sequence_length > 1:
            ticks += [first, last]
            words += [("0", "left"), (str(sequence_length - 1), "right")]
    axes.set_xticks(ticks, [text for text, _ in words])
    for label, (_, side) in zip(axes.get_xticklabels(), words, strict=True):
        label.set_horizontalalignment(side)
