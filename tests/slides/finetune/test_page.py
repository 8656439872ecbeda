"""The page of a fine-tuning says what its records say, and a browser shows its charts."""

from __future__ import annotations

import html
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.slides.finetune.metrics import metrics, with_intervals
from dilated_attention_pytorch.slides.finetune.page import FinetuneRecord, RunRecord, results, write_page
from slides.finetune.made_records import CLASSES, made_record
from support.browser import Browser

CHARTS = {
    "binary": ["confusion", "roc"],
    "classification": ["confusion", "roc"],
    "multilabel": ["roc"],
    "regression": ["scatter-0", "scatter-1"],
    "survival": ["survival"],
}


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, its first line the heads of the columns."""
    table = page.partition(f"<h2>{heading}</h2>")[2].partition("</table>")[0]
    return [
        [html.unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", table)
    ]


def written(folder: Path, record: FinetuneRecord, resamples: int = 20) -> str:
    return write_page(folder, record, results(record, resamples=resamples)).read_text()


@pytest.mark.parametrize("kind", CLASSES)
def test_results_are_those_of_the_runs_and_of_their_cases_together(kind: str) -> None:
    record = made_record(kind, seeds=2)
    found = results(record, resamples=20, seed=3)
    of_runs = [metrics(record.task, run.scores, run.targets) for run in record.runs]
    assert found.runs == of_runs
    for name, mean in found.mean.items():
        assert mean == pytest.approx(statistics.fmean(of_run[name] for of_run in of_runs))
        assert found.deviation[name] == pytest.approx(statistics.stdev(of_run[name] for of_run in of_runs))
    scores, targets = (torch.cat([getattr(run, name) for run in record.runs]) for name in ("scores", "targets"))
    patients = [patient for run in record.runs for patient in run.patients]
    assert found.pooled == with_intervals(record.task, scores, targets, patients, resamples=20, seed=3)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_page_shows_the_metrics_the_worst_cases_and_the_settings(kind: str, tmp_path: Path) -> None:
    record = made_record(kind)
    found = results(record, resamples=20)
    page = written(tmp_path, record)
    head, *rows = rows_of(page, "Test metrics")
    assert len(head) == 3 + len(found.mean)
    best = max(record.runs, key=lambda run: run.fold)
    assert rows[2][:3] == [f"fold {best.fold}, seed 0", "4", "40"]
    assert [float(cell.replace(",", "")) for cell in rows[2][3:]] == pytest.approx(
        list(found.runs[2].values()), abs=0.05
    )
    assert [row[0] for row in rows[3:]] == ["mean of the runs", "standard deviation", "all test cases", "95% interval"]
    low, high = (float(end.replace(",", "")) for end in rows[-1][3].split(" to "))
    assert (low, high) == pytest.approx(next(iter(found.pooled.values()))[1:3], abs=0.0006)
    head, *rows = rows_of(page, "Test cases predicted worst")
    errors = [float(row[5]) for row in rows]
    assert errors == sorted(errors, reverse=True)
    assert len(rows) == 20
    for row in rows:
        number = int(row[0].rpartition("-")[2])
        assert row[6] == ("open" if number % 2 == 0 else "\u2013")
        assert (f'href="maps/case%20{row[0][5:]}.png"' in page) == (number % 2 == 0)
    assert [row[0] for row in rows_of(page, "Settings")[1:]] == ["checkpoint", "epochs", "learning_rate"]
    assert "<b>0" not in page


def one_run(task: str, classes: tuple[str, ...], scores: list[list[float]], targets: torch.Tensor) -> FinetuneRecord:
    names = [f"case {index}" for index in range(len(scores))]
    run = RunRecord(1, 0, [{"epoch": 1, "loss": 1.0}], 1, names, names, torch.tensor(scores), targets)
    return FinetuneRecord(task, classes, {}, [run])  # type: ignore[arg-type]


def test_the_worst_case_is_the_one_that_is_wrong_and_sure_of_it(tmp_path: Path) -> None:
    record = one_run("classification", ("a", "b"), [[2.0, 0.0], [0.0, 3.0], [9.0, 0.0]], torch.tensor([0, 1, 1]))
    assert rows_of(written(tmp_path, record), "Test cases predicted worst")[1][:6] == [
        "case 2", "case 2", "fold 1, seed 0", "b", "a (100%)", "9.000",
    ]  # fmt: skip
    record = one_run("multilabel", ("er", "pr"), [[2.0, -2.0], [2.0, 2.0]], torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    rows = rows_of(written(tmp_path, record), "Test cases predicted worst")
    assert (rows[1][0], rows[1][3:5]) == ("case 1", ["\u2013", "er 88%, pr 88%"])
    assert rows[2][3:5] == ["er", "er 88%, pr 12%"]
    record = one_run("regression", ("age",), [[50.0], [10.0]], torch.tensor([[40.0], [60.0]]))
    assert rows_of(written(tmp_path, record), "Test cases predicted worst")[1][3:6] == ["60", "10", "5.000"]
    times = torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0]])
    record = one_run("survival", ("time", "event"), [[1.0], [0.0], [2.0]], times)
    rows = rows_of(written(tmp_path, record), "Test cases predicted worst")
    assert [(row[0], row[3], row[5]) for row in rows[1:]] == [
        ("case 2", "event at 3", "1.000"),
        ("case 0", "event at 1", "0.500"),
        ("case 1", "censored at 2", "0.000"),
    ]


def test_a_metric_that_is_not_defined_is_a_dash_with_its_reason(tmp_path: Path) -> None:
    record = made_record("binary", folds=2, cases=4)
    runs = [replace(record.runs[0], targets=torch.zeros(4, dtype=torch.long)), record.runs[1]]
    record = replace(record, runs=runs)
    page = written(tmp_path, record)
    _, first, _, mean, deviation, *_ = rows_of(page, "Test metrics")
    assert [first[3], first[5]] == [
        "\u2013",
        f"{metrics(record.task, runs[0].scores, runs[0].targets)['accuracy']:.3f}",
    ]
    assert mean[3] == f"{metrics(record.task, runs[1].scores, runs[1].targets)['auroc']:.3f}"
    assert deviation[3] == "\u2013"
    assert "fold 1, seed 0: No case has the class tumour, so some metrics are not defined." in page
    undefined = results(record, resamples=20).pooled["auroc"].undefined
    assert undefined > 0
    assert f"left out: {undefined} for AUROC, " in page
    assert math.isnan(results(record, resamples=20).deviation["auroc"])


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        ("binary", 1280),
        ("survival", 390),
        *(pytest.param(kind, 1280, marks=pytest.mark.slow) for kind in CLASSES if kind != "binary"),
    ],
)
def test_a_browser_shows_every_chart_within_its_section(
    kind: str, width: int, tmp_path: Path, browser: Browser
) -> None:
    record = made_record(kind)
    written(tmp_path, record)
    browser.open(tmp_path / "report.html", width=width, dark=width < 500)
    shown = browser.evaluate("[...document.querySelectorAll('.plotly-graph-div')].map(chart => chart.id)")
    assert shown == [f"chart-{name}" for name in ("loss", "validation", *CHARTS[kind])]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("""[...document.querySelectorAll('section')].every(section =>
        section.querySelector('.main-svg').getBoundingClientRect().width <= section.clientWidth)""")
    assert [url for url in browser.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert "undefined" not in browser.evaluate("document.body.innerText")
    if CHARTS[kind][0] == "confusion":
        texts = browser.evaluate("document.getElementById('chart-confusion').data[0].text")
        pairs = [
            (int(target), int(score.argmax()))
            for r in record.runs
            for score, target in zip(r.scores, r.targets, strict=True)
        ]
        counts = [[pairs.count((row, column)) for column in range(len(texts))] for row in range(len(texts))]
        assert [[int(text.partition("<")[0]) for text in row] for row in texts] == counts
        assert sum(int(text.partition(">")[2].rstrip("%")) for text in texts[0]) in range(98, 103)
    elif kind == "survival":
        curves = browser.evaluate("document.getElementById('chart-survival').data.map(line => line.y)")
        assert all(curve[0] == 1 and curve == sorted(curve, reverse=True) for curve in curves)
