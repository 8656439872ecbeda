"""Tables of the README and the docs are those of the files of results."""

from __future__ import annotations

import re
import sys

import pytest
from benchmarks.measured_code import is_stale
from benchmarks.tables import OLDER, RESULTS, ROOT, TABLES, markdown, pages, written

from benchmarks import tables


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_tables_of_a_page_are_those_of_the_results(page: object) -> None:
    text = page.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    assert text == written(text), "python -m benchmarks.tables writes them"


def test_every_table_stands_in_one_page() -> None:
    found = [name for page in pages() for name in re.findall(r"<!-- table ([\w-]+) -->", page.read_text())]
    assert sorted(found) == sorted([*TABLES, OLDER])
    ends = sum(page.read_text().count("<!-- end of table -->") for page in pages())
    assert ends == len(TABLES) + 1


def test_a_figure_that_was_changed_by_hand_is_written_again() -> None:
    text = (ROOT / "docs" / "cost.md").read_text(encoding="utf-8")
    changed = re.sub(r"(\| 16,384 \| float32 \| no \|) [0-9.]+ s \|", r"\1 0.07 s |", text, count=1)
    assert changed != text
    assert written(changed) == text


def test_the_command_names_the_tables_of_other_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tables", "--tiny"])
    tables.main()
    stale = [name for name in TABLES if is_stale(tables.read(name))]
    assert re.findall(r"table ([\w-]+) is of other code", capsys.readouterr().out) == stale


def test_a_model_without_a_time_at_a_length_has_an_empty_cell() -> None:
    points = [{"rows": rows, "model": "fast", "seconds": [1.0], "peak_bytes": 10**6} for rows in (10, 20)]
    found = tables.slide_encoder({"points": [*points, {**points[0], "model": "slow"}]})
    assert found.splitlines()[2:] == ["| 10 | 1.00 s, 1 MB | 1.00 s, 1 MB |", "| 20 | 1.00 s, 1 MB | |"]


def test_a_table_is_markdown() -> None:
    assert markdown(("a", ""), [("1", "x"), ("", "y")]) == "| a | |\n|---|---|\n| 1 | x |\n| | y |"


def test_no_result_names_a_folder_of_the_machine_that_measured_it() -> None:
    for file in sorted(RESULTS.rglob("*.json")):
        text = file.read_text(encoding="utf-8")
        assert not re.findall(r'["= ]/(?:home|root|tmp|work|Users)/[^"]*', text), file
