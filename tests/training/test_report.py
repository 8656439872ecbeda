"""The page of runs, as the files say it and as a browser shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.machine import machine
from dilated_attention_pytorch.training import train
from dilated_attention_pytorch.training.manifest import sealed
from dilated_attention_pytorch.training.report import CHARTS, read_run, write_report
from support.browser import Browser
from training.runs import quiet, tiny_settings, write_texts


def write_run(folder: Path, losses: list[float], **changes: Any) -> Path:
    """A run that logged ``losses`` every fifth step and was killed before its end."""
    folder.mkdir(parents=True)
    settings = tiny_settings(Path("texts"), steps=100, **changes).to_dict()
    (folder / "training.json").write_text(sealed({"settings": settings, "machine": machine()}))
    entries: list[dict[str, float]] = [{"step": 0, "seconds": 0.0, "matrix_product_flops": 5e10, "restarts": 0}]
    for index, loss in enumerate(losses, start=1):
        entries.append({
            "step": 5 * index, "seconds": 2.0 * index, "loss": loss, "bits_per_byte": 1.5 * loss, "restarts": 2,
            "tokens_per_second": 1000 * index, "mfu": 0.01 * index, "peak_memory_bytes": 3e9, "grad_norm": 1 / index,
            "learning_rate": 1e-3 * index, "seconds_lost": 7.5,
        })  # fmt: skip
        if index % 3 == 0:
            entries.append({"step": 5 * index, "seconds": 2.0 * index, "eval_bits_per_byte": 1.75 * loss})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


FIRST, SECOND = [4.0, 3.0, 2.5, 2.25, 2.125, 2.0], [5.0, 4.5, 4.25, 4.125]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / "one", FIRST), write_run(tmp_path / "<b>other & longer", SECOND, learning_rate=0.01)]


def test_figures_are_those_of_the_files(runs: list[Path], tmp_path: Path) -> None:
    one, other = write_report(runs, tmp_path / "report.html")
    assert (one.figures["state"], one.figures["steps"]) == ("not finished", "30 of 100")
    assert one.figures["last bits per byte, training"] == "3.000"
    assert one.figures["last bits per byte, held-out, on the way"] == "3.500"
    assert one.figures["tokens a second, median"] == "3,500"
    assert one.figures["model FLOP utilisation, median"] == "3.5%"
    assert one.figures["peak memory, GB"] == "3.00"
    assert (one.figures["restarts"], one.figures["seconds lost by restarts"]) == ("2", "7.5")
    assert other.figures["steps"] == "20 of 100"
    page = (tmp_path / "report.html").read_text()
    differing = re.findall(r"<tr><th>([^<]*)</th>", page.partition("Settings that differ")[2])
    assert differing == ["learning_rate"]
    assert "<b>other" not in page


def test_a_run_as_train_leaves_it_is_read(tmp_path: Path) -> None:
    outcome = train(tiny_settings(write_texts(tmp_path / "texts"), steps=2, log_steps=1), tmp_path / "run", quiet())
    run = read_run(outcome.run)
    assert run.figures["state"] == "finished"
    assert run.figures["bits per byte, held-out, at the end"] == f"{outcome.bits_per_byte:.3f}"
    assert run.figures["xz -9e on the same bytes"] == f"{outcome.xz_bits_per_byte:.3f}"
    assert run.settings["model.segment_lengths"] == "64, 256"
    logged = {name for entry in run.entries for name in entry}
    assert {chart.name for chart in CHARTS} <= logged


_PLACE = """(() => {
  const chart = document.getElementById("chart-%s");
  chart.scrollIntoView({block: "center"});
  const inside = chart.querySelector(".nsewdrag").getBoundingClientRect(), axis = chart._fullLayout.xaxis;
  return [inside.left + axis.l2p(%s), inside.top + inside.height / 2];
})()"""
_COLORS = """[getComputedStyle(document.body).backgroundColor,
  getComputedStyle(document.querySelector("#chart-loss .xtick text")).fill]"""


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_browser_shows_every_chart_and_pointing_at_it_says_its_values(
    width: int, dark: bool, runs: list[Path], tmp_path: Path, browser: Browser
) -> None:
    write_report(runs, tmp_path / "report.html")
    browser.open(tmp_path / "report.html", width=width, dark=dark)
    shown = browser.evaluate("[...document.querySelectorAll('.plotly-graph-div')].map(chart => chart.id)")
    assert shown == [f"chart-{chart.name}" for chart in CHARTS]
    # Nothing is wider than the screen, and nothing comes from elsewhere.
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert [url for url in browser.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    for name, expected in (
        ("loss", (2.5, 4.25)),
        ("bits_per_byte", (3.75, 4.375, 6.375, 7.438)),
        ("tokens_per_second", (3000, 3000)),
        ("mfu", (3, 3)),
        ("peak_memory_bytes", (3, 3)),
        ("grad_norm", (0.3333, 0.3333)),
        ("learning_rate", (0.003, 0.003)),
    ):
        browser.point_at(*browser.evaluate(_PLACE % (name, 15)))
        texts = browser.evaluate(
            f"[...document.querySelectorAll('#chart-{name} .hoverlayer text')].map(text => text.textContent)"
        )
        said = [float(text.rpartition(" : ")[2].replace("k", "e3")) for text in texts if " : " in text]
        assert sorted(said) == pytest.approx(sorted(expected)), (name, texts)
    background, text = ([int(part) for part in re.findall(r"\d+", color)[:3]] for color in browser.evaluate(_COLORS))
    assert (sum(background) < sum(text)) == dark
    assert abs(sum(background) - sum(text)) > 300
