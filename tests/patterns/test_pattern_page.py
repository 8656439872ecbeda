"""The page "See a pattern", in a browser: what it computes is what the library computes."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.patterns import Pattern, pattern_from_expression
from support.browser import Browser
from support.pages import DOCS, ROOT

MEASURE = """(settings => {
  const found = Patterns.measure(settings);
  return {
    problems: Patterns.problems(settings), expression: Patterns.expression(settings), pairs: found.pairs,
    density: found.density, counts: found.countsOfHeads.map(one => Array.from(one)), first: Array.from(found.first),
    byDistance: found.byDistance,
  };
})(%s)"""
SET = """(async values => {
  for (const [id, value] of Object.entries(values)) {
    const field = document.getElementById(id);
    if (field.type === "checkbox") field.checked = value; else field.value = value;
    field.dispatchEvent(new Event(["example", "head"].includes(id) ? "change" : "input", {bubbles: true}));
  }
  await new Promise(done => setTimeout(done, 50));
})(%s)"""
TEXT = "document.getElementById('%s').textContent"


def drawn_settings(draw: random.Random) -> dict[str, Any]:
    """What the form can hold, small enough to be compared number by number."""
    groups = draw.choice((0, 1, 1, 2, 3))
    settings: dict[str, Any] = {
        "length": draw.choice((1, 2, 7, 31, 32, 33, 64, 65, 83, 100)),
        "heads": draw.randint(1, 5),
        "layers": draw.randint(1, 4),
        "isCausal": draw.random() < 0.5,
        "segmentLengths": [draw.randint(1, 70) for _ in range(groups)],
        "dilationRates": [draw.randint(1, 9) for _ in range(groups)],
        "offsetRule": draw.choice(("modulo", "block")),
        "segmentShift": [draw.randint(0, 90) for _ in range(draw.randint(1, 3))],
        "window": [draw.randint(0, 40), draw.randint(0, 20)] if draw.random() < 0.4 else None,
        "globalTokens": draw.choice((0, 0, 0, 1, 2, 40, 500)),
        "blocks": None,
    }
    kind, block_size = draw.choice(("none", "strided", "random", "random", "hierarchical")), draw.randint(1, 40)
    blocks: dict[str, Any] = {"kind": kind, "blockSize": block_size}
    if kind == "strided":
        blocks["stride"] = draw.randint(1, 6)
    if kind == "random":
        out_of = draw.choice((1, 2, 4, 5, 10, 63, 64))
        blocks |= {"some": draw.randint(1, out_of), "outOf": out_of, "seed": draw.choice((0, 1, 2**53 - 1))}
    if kind == "hierarchical":
        blocks |= {"near": draw.randint(1, 3), "levels": draw.randint(1, 4), "factor": draw.randint(2, 3)}
    if kind != "none":
        settings["blocks"] = blocks
    elif not groups and settings["window"] is None and settings["globalTokens"] == 0:
        settings["globalTokens"] = 1
    return settings


def check_measured(found: dict[str, Any], pattern: Pattern, settings: dict[str, Any]) -> None:
    length, heads, layers = settings["length"], settings["heads"], settings["layers"]
    options = {"num_kv_heads": heads, "is_causal": settings["isCausal"]}
    positions = torch.arange(length)
    counts = pattern.counts(positions, positions, heads, is_causal=settings["isCausal"])
    assert torch.equal(torch.tensor(found["counts"]).view_as(counts), counts)
    assert found["pairs"] == pattern.num_pairs(length, **options)
    assert found["density"] == pattern.density(length, **options)
    reach = pattern.reach(length, layers, **options)
    assert torch.equal(torch.tensor(found["first"]).view(length, length), reach.first_layer)
    assert found["byDistance"] == [reach.by_distance(layer).tolist() for layer in range(layers + 1)]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """What the page brings itself, without the site around it."""
    text = (DOCS / "see-a-pattern.md").read_text()
    start, end = text.index("<link"), text.rindex("</script>") + len("</script>")
    for name in ("javascripts", "stylesheets"):
        (tmp_path / name).symlink_to(DOCS / name)
    (tmp_path / "see-a-pattern").mkdir()
    file = tmp_path / "see-a-pattern" / "index.html"
    file.write_text(f'<!doctype html><meta charset="utf-8"><body>{text[start:end]}</body>')
    return file


@pytest.mark.parametrize("number", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_drawn_patterns_are_measured_as_the_library_measures_them(
    number: int, page: Path, browser: Browser, figure: Any
) -> None:
    browser.open(page, width=1280)
    draw = random.Random(number)
    for _ in range(number):
        settings = drawn_settings(draw)
        found = browser.evaluate(MEASURE % json.dumps(settings))
        assert found["problems"] == []
        check_measured(found, pattern_from_expression(found["expression"]), settings)
    figure("the page of patterns equals the library on drawn patterns", f"{number} of {number}")


def test_the_expression_says_what_was_set() -> None:
    """Else a wrong page would be compared with a wrong pattern."""
    from dilated_attention_pytorch import DilatedPattern, global_tokens, hierarchical, local_window, random_blocks

    written = {
        'DilatedPattern([4, 8], [1, 2], offset_rule="block", segment_shift=[1, 0])': DilatedPattern(
            [4, 8], [1, 2], offset_rule="block", segment_shift=[1, 0]
        ),
        "local_window(3, 1) + global_tokens(2)": local_window(3, 1) + global_tokens(2),
        "random_blocks(0.75, seed=5, block_size=4)": random_blocks(0.75, seed=5, block_size=4),
        "hierarchical(2, levels=3, factor=2, block_size=1)": hierarchical(2, levels=3, factor=2, block_size=1),
    }
    for text, pattern in written.items():
        assert pattern_from_expression(text) == pattern


FORM = {
    "length": "70", "heads": "3", "layers": "2", "causal": False, "segmentLengths": "[4, 8]", "dilationRates": "1 2",
    "offsetRule": "block", "segmentShift": "1, 0", "hasWindow": True, "before": "3", "after": "1", "globalTokens": "2",
    "blocks": "random", "blockSize": "4", "some": "6", "outOf": "8", "seed": "5",
}  # fmt: skip


def test_the_form_says_what_is_shown(page: Path, browser: Browser) -> None:
    browser.open(page, width=1280)
    browser.evaluate(SET % json.dumps(FORM))
    text = browser.evaluate(TEXT % "expression")
    assert text == (
        'DilatedPattern([4, 8], [1, 2], offset_rule="block", segment_shift=[1, 0]) + local_window(3, 1) '
        "+ global_tokens(2) + random_blocks(0.75, seed=5, block_size=4)"
    )
    pattern = pattern_from_expression(text)
    assert browser.evaluate(TEXT % "density") == f"{100 * pattern.density(70, num_kv_heads=3):.2f} %"
    assert browser.evaluate(TEXT % "pairs") == f"{pattern.num_pairs(70, num_kv_heads=3):,}"
    # The address holds the settings.
    address = browser.evaluate("location.hash")
    browser.evaluate(SET % json.dumps({"example": "LongNet"}))
    assert browser.evaluate(TEXT % "expression") == "DilatedPattern([16, 32, 64], [1, 2, 4])"
    browser.evaluate(f"location.hash = {json.dumps(address)}; new Promise(done => setTimeout(done, 300))")
    assert browser.evaluate(TEXT % "expression") == text


@pytest.mark.parametrize(("values", "message", "field"), [
    ({"length": "1025"}, "Positions must be an integer between 1 and 1024, got 1025.", "length"),
    ({"segmentLengths": "4, x, 8"}, 'A segment length must be an integer of at least 1, got "x".', "segmentLengths"),
    ({"dilationRates": "1"}, "Every segment length has one dilation rate, got 3 lengths and 1 rates.", "dilationRates"),
    ({"blocks": "random", "some": "9"}, "Blocks that are seen must be an integer between 1 and 4, got 9.", "some"),
    ({"segmentLengths": "", "dilationRates": ""},
     "Nothing is seen: set segments, a window, global tokens or blocks.", "segmentLengths"),
])  # fmt: skip
def test_wrong_settings_are_named_and_the_last_pattern_stays(
    values: dict[str, str], message: str, field: str, page: Path, browser: Browser
) -> None:
    browser.open(page, width=390)
    *first, last = values.items()
    browser.evaluate(SET % json.dumps(dict(first)))
    before = browser.evaluate(TEXT % "density")
    browser.evaluate(SET % json.dumps(dict([last])))
    assert message in browser.evaluate(TEXT % "problems")
    assert browser.evaluate(f"document.getElementById('{field}').getAttribute('aria-invalid')") == "true"
    assert browser.evaluate(TEXT % "density") == before


def test_pairs_are_chosen_by_the_arrow_keys_and_colors_are_those_of_the_counts(page: Path, browser: Browser) -> None:
    browser.open(page, width=1280)
    browser.evaluate(SET % json.dumps({"layers": "2", "head": "1"}))
    pattern = pattern_from_expression(browser.evaluate(TEXT % "expression"))
    counts = pattern.counts(torch.arange(64), torch.arange(64), 4, is_causal=True)[1]
    reach = pattern.reach(64, 2, num_kv_heads=4, is_causal=True)
    press = """for (const [key, times] of [["ArrowDown", %d], ["ArrowRight", %d]]) for (let i = 0; i < times; i++)
      document.getElementById("mask").dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));"""
    browser.evaluate(press % (21, 9))
    count, layer = int(counts[21, 9]), int(reach.first_layer[21, 9])
    assert (count, layer) == (2, 1)
    assert browser.evaluate(TEXT % "pair") == (
        "Query 21, key 9: head 1 counts it 2 times; the query depends on it after 1 layer."
    )
    pixels = browser.evaluate(
        "['mask', 'reach'].map(id => { const canvas = document.querySelector(`#${id} canvas`);"
        "return Array.from(canvas.getContext('2d').getImageData(0, 0, 64, 64).data); })"
    )
    for drawn, values in zip(pixels, (counts, reach.first_layer.clamp(min=-1)), strict=True):
        colors = torch.tensor(drawn).view(64, 64, 4)
        # 0 layers, a position itself, has the color of 1.
        values = torch.where(values == 0, 1, values) if values is not counts else values
        found = {int(value): set(map(tuple, colors[values == value].tolist())) for value in values.unique()}
        assert all(len(color) == 1 for color in found.values())
        assert all(a != b for a, b in itertools.combinations(found.values(), 2))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_site_shows_it_at_every_width(width: int, dark: bool, tmp_path: Path, browser: Browser) -> None:
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")], cwd=ROOT, check=True
    )
    browser.open(tmp_path / "site" / "see-a-pattern" / "index.html", width=width, dark=dark)
    browser.evaluate("new Promise(done => setTimeout(done, 1000))")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert [url for url in browser.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert browser.evaluate("document.body.dataset.mdColorScheme") == ("slate" if dark else "default")
    pixel = browser.evaluate(
        "Array.from(document.querySelector('#mask canvas').getContext('2d').getImageData(63, 0, 1, 1).data)"
    )
    assert (sum(pixel[:3]) < 300) == dark
