"""The page on whether length pays has the figures of the results."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.image
import pytest
from benchmarks.length import CONTESTANTS, LENGTHS, chart, draw
from benchmarks.study import RESULTS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "length.md").read_text()
RECORDS = {record["contestant"]: record for record in json.loads((RESULTS / "length.json").read_text())["results"]}


@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_row_of_the_page_has_the_figures_of_the_results(name: str) -> None:
    record = RECORDS[name]
    bits = [f"{record['bits_per_byte'][str(length)]:.4f}" for length in LENGTHS]
    gain = record["bits_per_byte"][str(LENGTHS[0])] - record["bits_per_byte"][str(LENGTHS[-1])]
    cells = [name, f"{record['steps']}", f"{record['tokens'] / 1e6:.1f} M", *bits, f"{gain:.3f}"]
    assert f"| {' | '.join(cells)} |" in PAGE


def test_all_took_as_many_operations() -> None:
    flops = [record["flops"] for record in RECORDS.values()]
    assert max(flops) < 1.005 * min(flops)


def test_the_picture_of_the_page_is_drawn_from_the_results(tmp_path: Path) -> None:
    draw([*RECORDS.values()], tmp_path / "length.png")
    new, old = (matplotlib.image.imread(folder / "length.png") for folder in (tmp_path, DOCS / "pictures"))
    assert new.shape == old.shape
    assert abs(new - old).mean() < 0.01  # fonts may differ by some pixels


def test_a_model_has_one_colour_on_all_panels() -> None:
    figure = chart([*RECORDS.values()])
    (legend,) = figure.legends
    colours = {
        text.get_text(): line.get_color() for text, line in zip(legend.texts, legend.legend_handles, strict=True)
    }
    assert len(set(colours.values())) == len(colours) == len(CONTESTANTS)
    by_length, by_position, by_distance, by_compute = (
        [line.get_color() for line in axes.lines if len(line.get_xdata())] for axes in figure.axes
    )
    assert by_length == by_position == by_distance == [*colours.values()]
    assert by_compute == [colour for name, colour in colours.items() if name.startswith("LongNet")]
