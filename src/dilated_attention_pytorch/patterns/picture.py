"""Pictures of patterns, with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dilated_attention_pytorch.installation import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .pattern import Pattern


_MOST_CELLS = 2048
"""More positions than these are not drawn one by one."""


def draw(
    pattern: Pattern, sequence_length: int, *, num_kv_heads: int = 1, is_causal: bool = False, axes: Axes | None = None
) -> Axes:
    """Draw ``c[g, p, t]``: a panel for every key/value head, queries downwards, keys to the right."""
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
    # One blank column between the panels of two heads: NaN is drawn as the background.
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
    axes.set_xticks([head * (sequence_length + 1) + sequence_length / 2 for head in range(num_kv_heads)])
    axes.set_xticklabels([f"keys, head {head}" for head in range(num_kv_heads)])
    axes.set_ylabel("query position" if step == 1 else f"query position, every {step}th")
    return axes
