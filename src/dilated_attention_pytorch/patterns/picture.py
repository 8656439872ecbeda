"""Plots of patterns, with matplotlib; a long pattern is drawn by the mean counts of cells of many positions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention_pytorch.installation import importing

from .rules import Spans, span_pairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .blocks import HeadRule
    from .dilated import DilationGroup
    from .pattern import Pattern


_MOST_CELLS = 256
"""Cells of an axis: a panel of the default size has a pixel for each."""


def pooled_pairs(
    pattern: Pattern, sequence_length: int, num_cells: int, *, num_kv_heads: int = 1, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """The counts ``c[g, p, t]`` summed over cells: exact, and without an N x N tensor.

    Cell i holds the positions ``bounds[i]`` to ``bounds[i + 1] - 1``, with ``bounds[i] = i N // num_cells``.

    Args:
        pattern: the pattern.
        sequence_length: number of positions N.
        num_cells: cells of the query axis and of the key axis, at most N.
        num_kv_heads: number of key/value heads G.
        is_causal: count only ``t <= p``.

    Returns:
        int64 ``[G, num_cells, num_cells]``, and the bounds, int64 ``[num_cells + 1]``.

    Raises:
        ValueError: see :meth:`Pattern.density`.
    """
    pattern.check_countable(sequence_length, num_kv_heads)
    bounds = torch.arange(num_cells + 1) * sequence_length // num_cells
    pairs = torch.zeros(num_kv_heads, num_cells, num_cells, dtype=torch.int64)
    for head in range(num_kv_heads):
        for group in pattern.groups:
            pairs[head] += _pairs_of_group(group, head, num_kv_heads, bounds, is_causal=is_causal)
        for rule in pattern.rules:
            for spans in rule.spans_in_parts(head, num_kv_heads, sequence_length):
                pairs[head] += _pairs_of_spans(spans, rule, bounds, is_causal=is_causal)
    return pairs, bounds


def _pairs_of_group(group: DilationGroup, head: int, num_kv_heads: int, bounds: Tensor, *, is_causal: bool) -> Tensor:
    """Pairs ``[cells, cells]`` of one dilation group."""
    offset, shift = group.offset(head, num_kv_heads), group.shift(head)
    first, last = bounds[:-1], bounds[1:] - 1
    if group.boundaries is not None:
        starts = torch.tensor([start for start in group.boundaries if start < bounds[-1]])
        stops = torch.cat([starts[1:], bounds[-1:]])
        inner = torch.zeros_like(first)
    else:
        # Segments that hold the first or the last position of a cell; the others lie inside a cell and are alike.
        ends = torch.stack([first, last]) + shift
        starts = (ends // group.segment_length).unique() * group.segment_length - shift
        stops = starts + group.segment_length
        inner = (ends[1] // group.segment_length - ends[0] // group.segment_length - 1).clamp(min=0)
    start = torch.maximum(starts[:, None], first)
    stop = torch.maximum(torch.minimum(stops[:, None], last + 1), start)
    _, selected = group.selected(starts[:, None], offset, start, stop)  # [segments, cells]
    pairs = selected.T @ selected
    _, alike = group.selected(0, offset, 0, min(group.segment_length, int(bounds[-1])))
    own = selected * (selected + 1) // 2 if is_causal else selected**2
    pairs.diagonal().copy_(own.sum(0) + inner * (alike * (alike + 1) // 2 if is_causal else alike**2))
    return pairs.tril() if is_causal else pairs


def _pairs_of_spans(spans: Spans, rule: HeadRule, bounds: Tensor, *, is_causal: bool) -> Tensor:
    """Pairs ``[cells, cells]`` of rectangles, which are cut at the bounds of the cells."""
    row, index, query_start, query_stop = _cut(spans.query_start, spans.query_stop, bounds)
    column, part, key_start, key_stop = _cut(spans.key_start[index], spans.key_stop[index], bounds)
    cut = Spans(query_start[part], query_stop[part], key_start, key_stop)
    cells = len(bounds) - 1
    pairs = torch.zeros(cells * cells, dtype=torch.int64)
    pairs.index_add_(0, row[part] * cells + column, span_pairs(cut, *rule.band(is_causal=is_causal)))
    return pairs.view(cells, cells)


def _cut(start: Tensor, stop: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ranges cut at ``bounds``: cell, index of the range, start and stop of every part."""
    first = torch.searchsorted(bounds, start.contiguous(), right=True) - 1
    parts = torch.searchsorted(bounds, stop.contiguous()) - first
    index = torch.arange(len(start)).repeat_interleave(parts)
    cell = torch.arange(len(index)) - (parts.cumsum(0) - parts - first)[index]
    return cell, index, torch.maximum(start[index], bounds[cell]), torch.minimum(stop[index], bounds[cell + 1])


def grid(num_panels: int) -> tuple[int, int]:
    """Rows and columns of the panels: as many of one as of the other, so that a picture fits a narrow page."""
    columns = math.ceil(math.sqrt(num_panels))
    return -(-num_panels // columns), columns


def figure_size(num_kv_heads: int) -> tuple[float, float]:
    """Width and height in inches of a figure with a panel for every head."""
    rows, columns = grid(num_kv_heads)
    return 3.0 * columns + 0.9, 3.2 * rows + 0.4


def corners(num_kv_heads: int, cells: int) -> list[tuple[int, int]]:
    """Row and column of the first cell of every head's panel; its title stands in the gap above it."""
    _, columns = grid(num_kv_heads)
    gap = 1 + cells // 8
    return [(head // columns * (cells + gap), head % columns * (cells + gap)) for head in range(num_kv_heads)]


def draw(
    pattern: Pattern, sequence_length: int, *, num_kv_heads: int = 1, is_causal: bool = False, axes: Axes | None = None
) -> Axes:
    """Draw ``c[g, p, t]``, or its means over cells: one panel per key/value head, queries downwards.

    A count has one colour in every picture, and white is 0.
    """
    with importing("drawing a pattern", "plot"):
        import matplotlib.pyplot as plt
        from matplotlib.colors import Colormap, ListedColormap, Normalize, PowerNorm
    cells = max(1, min(sequence_length, _MOST_CELLS))
    is_pooled = cells < sequence_length
    pairs, bounds = pooled_pairs(pattern, sequence_length, cells, num_kv_heads=num_kv_heads, is_causal=is_causal)
    width = bounds.diff()
    places = corners(num_kv_heads, cells)
    bottom, right = (max(place) + cells for place in zip(*places, strict=True))
    panels = torch.full((bottom, right), float("nan"))  # NaN is drawn as background
    for (top, left), counts in zip(places, pairs, strict=True):
        panels[top : top + cells, left : left + cells] = counts / (width[:, None] * width)
    if axes is None:
        _, axes = plt.subplots(figsize=figure_size(num_kv_heads), layout="constrained")
    most = max(1, len(pattern.groups) + len(pattern.rules))
    colors: Colormap = plt.get_cmap("Blues")
    if is_pooled:
        # Square roots, so that a cell of few pairs is seen.
        scale: Normalize = PowerNorm(0.5, 0, max(1.0, float(panels.nan_to_num().max())))
    else:
        colors, scale = (
            ListedColormap([colors(1 - 0.5**count) for count in range(most + 1)]),
            Normalize(-0.5, most + 0.5),
        )
    image = axes.imshow(panels.numpy(), cmap=colors, norm=scale, interpolation="antialiased")
    if is_pooled:
        bar = axes.figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
        bar.set_label(f"mean count c of {-(-sequence_length // cells):,} x {-(-sequence_length // cells):,} pairs")
    elif most > 1:
        bar = axes.figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02, ticks=range(most + 1))
        bar.set_label("count c")
    if num_kv_heads > 1:
        axes.set_frame_on(False)
        for head, (top, left) in enumerate(places):
            axes.text(left + (cells - 1) / 2, top - 0.5 - cells / 50, f"head {head}", horizontalalignment="center")
            frame = plt.Rectangle((left - 0.5, top - 0.5), cells, cells, fill=False, linewidth=0.8, clip_on=False)
            axes.add_patch(frame)
    _number_positions(axes, cells, sequence_length, places)
    axes.set_xlabel("key position")
    axes.set_ylabel("query position")
    return axes


def _number_positions(axes: Axes, cells: int, sequence_length: int, places: list[tuple[int, int]]) -> None:
    """Number the positions of the rows and columns of panels."""
    from matplotlib.ticker import MaxNLocator

    tops, lefts = (sorted(set(firsts)) for firsts in zip(*places, strict=True))
    if cells < sequence_length:
        quarters = range(5)
        rows = [top + (cells - 1) * quarter / 4 for top in tops for quarter in quarters]
        axes.set_yticks(rows, [f"{(sequence_length - 1) * quarter // 4}" for _ in tops for quarter in quarters])
        # The first and the last key alone, aligned inwards: long numbers of two panels would meet.
        axes.set_xticks(
            [left + end for left in lefts for end in (0, cells - 1)], ["0", f"{sequence_length - 1}"] * len(lefts)
        )
        for index, label in enumerate(axes.get_xticklabels()):
            label.set_horizontalalignment(("left", "right")[index % 2])
        return
    numbered = [
        int(tick) for tick in MaxNLocator(4, integer=True).tick_values(0, max(1, cells - 1)) if 0 <= tick < cells
    ]
    axes.set_yticks([top + tick for top in tops for tick in numbered], [f"{tick}" for tick in numbered] * len(tops))
    axes.set_xticks([left + tick for left in lefts for tick in numbered], [f"{tick}" for tick in numbered] * len(lefts))
