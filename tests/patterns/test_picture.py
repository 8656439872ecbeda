"""The picture of a long pattern shows the exact mean count of every cell, at its true position."""

from __future__ import annotations

import time
from dataclasses import replace

import matplotlib.figure
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import DilatedPattern, local_window, random_blocks, strided_blocks
from dilated_attention_pytorch.patterns import SegmentedPattern
from dilated_attention_pytorch.patterns.pattern import Pattern
from dilated_attention_pytorch.patterns.picture import corners, figure_size, grid, pooled_pairs
from support.drawn import DENSE, DrawnCall, block_calls, examples


def drawn_image(
    pattern: Pattern, length: int, heads: int, *, is_causal: bool = False
) -> tuple[matplotlib.figure.Figure, np.ndarray]:
    figure = matplotlib.figure.Figure(figsize=figure_size(heads), layout="constrained")
    axes = pattern.plot(length, num_kv_heads=heads, is_causal=is_causal, axes=figure.subplots())
    return figure, np.ma.filled(axes.images[0].get_array().astype(float), np.nan)


def panels_of(drawn: np.ndarray, heads: int) -> list[np.ndarray]:
    """The 256 x 256 cells of every head."""
    return [drawn[top : top + 256, left : left + 256] for top, left in corners(heads, 256)]


@given(block_calls(), st.integers(1, 20))
@examples(60)
def test_a_cell_holds_the_sum_of_the_dense_counts(call: DrawnCall, cells: int) -> None:
    length, cells = call.num_queries, min(cells, call.num_queries)
    pairs, bounds = pooled_pairs(call.pattern, length, cells, num_kv_heads=call.kv_heads, is_causal=call.is_causal)
    every = torch.arange(length)
    dense = call.pattern.counts(every, every, call.kv_heads, is_causal=call.is_causal).long()
    cell = torch.searchsorted(bounds, every, right=True) - 1
    by_row = torch.zeros(call.kv_heads, cells, length, dtype=torch.int64).index_add_(1, cell, dense)
    assert torch.equal(pairs, torch.zeros_like(pairs).index_add_(2, cell, by_row))


@given(block_calls(sizes=replace(DENSE, lengths=st.integers(257, 3000), segments=st.integers(1, 3000), kv_heads=3)))
@examples(20)
def test_the_drawn_density_is_the_density(call: DrawnCall) -> None:
    length, heads = call.num_queries, call.kv_heads
    figure, drawn = drawn_image(call.pattern, length, heads, is_causal=call.is_causal)
    bounds = torch.arange(257) * length // 256
    cell_sizes = (bounds.diff()[:, None] * bounds.diff()).double().numpy()
    panels = panels_of(drawn, heads)
    dense = length * (length + 1) // 2 if call.is_causal else length**2
    density = sum(float((panel * cell_sizes).sum()) for panel in panels) / (heads * dense)
    assert density == pytest.approx(
        call.pattern.density(length, num_kv_heads=heads, is_causal=call.is_causal), rel=1e-6
    )
    (axes, _) = figure.axes
    texts = [label.get_text() for label in axes.get_xticklabels()]
    assert texts.count(str(length - 1)) == grid(heads)[1]
    assert [label.get_text() for label in axes.get_yticklabels()][-1] == str(length - 1)


def test_every_head_of_a_sparse_pattern_is_drawn_alike() -> None:
    # The four heads see other residues, a sixteenth of all pairs each.
    _, drawn = drawn_image(DilatedPattern([8192], [4]), 8192, 4)
    for panel in panels_of(drawn, 4):
        assert (panel == 1 / 16).all()
    assert np.nansum(drawn) == 4 * 256 * 256 / 16


def test_a_count_has_one_colour_in_every_picture() -> None:
    def colours(pattern: Pattern) -> dict[float, tuple[float, ...]]:
        image = drawn_image(pattern, 32, 1)[0].axes[0].images[0]
        counts = np.unique(image.get_array())
        return {count: image.cmap(image.norm(count)) for count in counts.tolist()}

    one, three = colours(local_window(3)), colours(DilatedPattern([8, 16, 32], [1, 2, 4]))
    assert list(one) == [0, 1]
    assert list(three) == [0, 1, 2, 3]
    assert one == {count: three[count] for count in one}
    assert len(set(three.values())) == 4


def test_the_pixels_of_a_sparse_pattern_have_one_colour() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # In steps of 3 pixels to 2 cells, say, a picture of stripes would be left.
    figure, _ = drawn_image(DilatedPattern([8192], [4]), 8192, 1)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    left, bottom, right, top = (round(edge) for edge in figure.axes[0].get_window_extent().extents)
    pixels = np.asarray(canvas.buffer_rgba())[::-1][bottom + 3 : top - 3, left + 3 : right - 3]
    assert pixels.shape[0] > 200
    assert np.ptp(pixels, axis=(0, 1)).max() <= 1


def test_a_picture_of_two_billion_positions_takes_a_moment() -> None:
    begin = time.perf_counter()
    pattern = DilatedPattern([2048, 1 << 28], [1, 4096], segment_shift=7) + local_window(1 << 20)
    pattern += SegmentedPattern([[0, 5, 1 << 29]], [3])
    pairs, _ = pooled_pairs(pattern, 1 << 31, 256)
    assert int(pairs.sum()) == pattern.num_pairs(1 << 31)
    assert time.perf_counter() - begin < 30


def test_lengths_that_cannot_be_counted_are_refused() -> None:
    for length in ((1 << 31) + 1, 0):
        with pytest.raises(ValueError, match="sequence_length must be at"):
            local_window(1).plot(length)
    with pytest.raises(ValueError, match="pairs of blocks, and at most"):
        (random_blocks(0.1) + strided_blocks(2)).plot(1 << 30)
