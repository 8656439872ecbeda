"""A run that was cut off goes on: nothing is measured twice, nothing of another run is taken up."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from dilated_attention_pytorch.benchmarks import measure, run
from dilated_attention_pytorch.benchmarks.contestants import CONTESTANTS, Contestant
from dilated_attention_pytorch.benchmarks.measure import OUT_OF_TIME
from dilated_attention_pytorch.benchmarks.presets import PRESETS, planned_cases
from dilated_attention_pytorch.benchmarks.report import print_page
from dilated_attention_pytorch.benchmarks.results import Row
from dilated_attention_pytorch.benchmarks.run import RESULTS_NAME
from dilated_attention_pytorch.benchmarks.settings import BenchSettings
from dilated_attention_pytorch.errors import RunError

SMALL: dict[str, Any] = {"shapes": ("three",), "contestants": ("aten", "dense SDPA"), "dry_run": True}


def bench(output: Path, **options: Any) -> tuple[dict[str, Any], str]:
    console = Console(file=io.StringIO(), width=200)
    run.run(BenchSettings(output=output, **SMALL | options), console, "the command")
    return json.loads((output / RESULTS_NAME).read_text()), console.file.getvalue()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return bench(tmp_path_factory.mktemp("measured"))[0]


@pytest.fixture
def cut_off(measured: dict[str, Any], tmp_path: Path) -> Path:
    """A run whose second case the time limit cut off."""
    values = copy.deepcopy(measured)
    first = values["rows"][0]["name"]
    for row in values["rows"]:
        if row["name"] != first:
            row |= {"status": "skipped", "reason": OUT_OF_TIME, "samples": [], "errors": {}}
    file = tmp_path / RESULTS_NAME
    file.write_text(json.dumps(values | {"complete": False}))
    return file


def test_what_was_measured_stays_and_the_rest_is_measured(cut_off: Path) -> None:
    before = json.loads(cut_off.read_text())
    after, _ = bench(cut_off.parent, resume=True)
    assert after["complete"]
    assert after["seconds"] > before["seconds"]
    final = [row for row in before["rows"] if row["reason"] != OUT_OF_TIME]
    assert [row["samples"] for row in after["rows"][: len(final)]] == [row["samples"] for row in final]
    names = [(row["name"], row["contestant"]) for row in after["rows"]]
    assert len(names) == len(set(names)) == len(before["rows"])
    assert sum(row["status"] == "timed" for row in after["rows"]) == 4


def test_a_run_without_time_is_not_complete_and_says_how_to_go_on(tmp_path: Path) -> None:
    values, said = bench(tmp_path, time_limit=0.0)
    assert not values["complete"]
    assert {row["reason"] for row in values["rows"] if row["contestant"] == "ours, aten"} == {OUT_OF_TIME}
    assert "--resume continues there" in said
    values, _ = bench(tmp_path, resume=True)
    assert values["complete"]


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        ({"batch": 2}, {}, "has batch=1, this one 2"),
        ({"shapes": ("paper",)}, {}, r"has shapes=\['three'\], this one \['paper'\]"),
        ({}, {"machine": {"processor": "another"}}, "of another machine or installation"),
        ({}, {"format": "something"}, "is not written by this version"),
    ],
)
def test_another_run_is_not_taken_up(
    cut_off: Path, options: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    before = json.loads(cut_off.read_text())
    cut_off.write_text(json.dumps(before | change))
    with pytest.raises(RunError, match=words):
        bench(cut_off.parent, resume=True, **options)


def test_a_folder_without_a_run_cannot_be_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"--resume: .* cannot be read"):
        bench(tmp_path / "none", resume=True)


@pytest.mark.parametrize("when", ["at its gate", "at its third call"])
def test_who_breaks_the_device_ends_the_run_and_is_left_out_when_it_goes_on(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def breaks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if when == "at its gate" or calls == 5:
            raise RuntimeError("an illegal memory access was encountered")
        return right.prepare(case, (query, key, value))(query, key, value)

    case = next(iter(planned_cases(BenchSettings(**SMALL), PRESETS["cpu"])))
    right = next(entry for entry in CONTESTANTS if entry.name == "ours, aten")
    entrant = Contestant("ours, broken", "pattern", lambda case, device: None, lambda case, operands: breaks)
    monkeypatch.setattr(run, "find_contestants", lambda names, device: (right, entrant))
    with monkeypatch.context() as patch:
        patch.setattr(measure, "is_alive", lambda device: False)
        with pytest.raises(
            measure.DeviceLostError, match=r"after ours, broken in .* \(RuntimeError: an illegal memory"
        ):
            bench(tmp_path)
    values = json.loads((tmp_path / RESULTS_NAME).read_text())
    assert [(row["contestant"], row["status"]) for row in values["rows"]] == [("ours, broken", "failed")]
    calls = 0 if when == "at its gate" else 10
    values, _ = bench(tmp_path, resume=True)
    by_case = [(row["name"] == case.name, row["contestant"], row["status"]) for row in values["rows"]]
    assert by_case[:2] == [(True, "ours, broken", "failed"), (True, "ours, aten", "timed")]
    assert len(by_case) == 4


def test_rows_come_back_from_their_file(cut_off: Path) -> None:
    for values in json.loads(cut_off.read_text())["rows"]:
        row = Row.from_dict(values)
        again = json.loads(json.dumps(row.to_dict()))
        assert again == {name: values[name] for name in again}


def test_the_page_is_made_of_the_file_alone(cut_off: Path) -> None:
    values = json.loads(cut_off.read_text())
    console = Console(file=io.StringIO(), width=1000)
    print_page(values, [Row.from_dict(row) for row in values["rows"]], console)
    page = console.file.getvalue()
    for words in (
        "the command",
        "A dry run",
        "Not complete",
        "| ours, aten ",
        "dense SDPA (all pairs)",
        f"skipped: {OUT_OF_TIME}",
    ):
        assert words in page


def test_flexattention_is_timed_on_two_shapes_of_the_gpu_preset_or_where_it_is_named() -> None:
    def shapes(settings: BenchSettings) -> set[tuple[str, int]]:
        cases = planned_cases(settings, PRESETS["gpu"])
        return {(case.shape, case.rows) for case, without in cases.items() if "FlexAttention" not in without}

    assert shapes(BenchSettings()) == {("paper", 32768), ("blocks", 32768)}
    assert len(shapes(BenchSettings(contestants=("FlexAttention",)))) > 10
