"""Plots of patterns, with matplotlib; a long pattern is drawn by the mean counts of cells of many positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

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


def draw(
    pattern: Pattern, sequence_length: int, *, num_kv_heads: int = 1, is_causal: bool = False, axes: Axes | None = None
) -> Axes:
    """Draw ``c[g, p, t]``, or its means over cells: one panel per key/value head, queries downwards."""
    with importing("drawing a pattern", "plot"):
        import matplotlib.pyplot as plt
        from matplotlib.colors import Normalize, PowerNorm
    cells = max(1, min(sequence_length, _MOST_CELLS))
    pairs, bounds = pooled_pairs(pattern, sequence_length, cells, num_kv_heads=num_kv_heads, is_causal=is_causal)
    width = bounds.diff()
    # One blank column between panels: NaN is drawn as background.
    panels = torch.full((cells, num_kv_heads * (cells + 1) - 1), float("nan"))
    for head in range(num_kv_heads):
        left = head * (cells + 1)
        panels[:, left : left + cells] = pairs[head] / (width[:, None] * width)
    if axes is None:
        _, axes = plt.subplots(figsize=(3.4 * num_kv_heads + 0.9, 3.6), layout="constrained")
    most = max(1, len(pattern.groups) + len(pattern.rules))
    colors, scale = plt.get_cmap("Blues", most + 1), Normalize(-0.5, most + 0.5)
    if cells < sequence_length:
        # Square roots, so that a cell of few pairs is seen.
        colors, scale = plt.get_cmap("Blues"), PowerNorm(0.5, 0, max(1.0, float(panels.nan_to_num().max())))
    image = axes.imshow(panels.numpy(), cmap=colors, norm=scale, interpolation="antialiased")
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
    if cells < sequence_length:
        bar.set_label(f"mean count c of {-(-sequence_length // cells):,} x {-(-sequence_length // cells):,} pairs")
    else:
        bar.set_ticks(range(most + 1))
        bar.set_label("count c")
    _number_the_keys(axes, cells, sequence_length, num_kv_heads)
    axes.set_ylabel("query position")
    return axes


def _number_the_keys(axes: Axes, cells: int, sequence_length: int, num_kv_heads: int) -> None:
    """Label every panel with its head, and with the positions of its first and last key, aligned inwards."""
    ticks: list[float] = []
    words: list[tuple[str, Literal["left", "center", "right"]]] = []
    for head in range(num_kv_heads):
        first, last = head * (cells + 1), head * (cells + 1) + cells - 1
        ticks.append((first + last) / 2)
        words.append((f"keys, head {head}", "center"))
        if sequence_length > 1:
            ticks += [first, last]
            words += [("0", "left"), (str(sequence_length - 1), "right")]
    axes.set_xticks(ticks, [text for text, _ in words])
    for label, (_, side) in zip(axes.get_xticklabels(), words, strict=True):
        label.set_horizontalalignment(side)
    if cells < sequence_length:
        rows = [(cells - 1) * quarter / 4 for quarter in range(5)]
        axes.set_yticks(rows, [f"{(sequence_length - 1) * quarter // 4}" for quarter in range(5)])
