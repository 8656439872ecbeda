"""`dilated-attention tune`: what it prints, what it leaves, and what it says to wrong words."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.selection import (
    DynamicSegmentSelector,
    Hardware,
    Rates,
    SegmentSelectionConfig,
    read_hardware,
    tuning,
)
from dilated_attention_pytorch.selection.profile import Accuracy, load_profile

pytestmark = pytest.mark.usefixtures("own_cache")
WORDS = ["tune", "--dtypes", "float32", "--device", "cpu"]


def test_a_dry_run_prints_correlations_and_stores_no_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*WORDS, "--dry-run", "--output", str(tmp_path / "new")])
    said = capsys.readouterr().out
    for words in ("rank correlation", "formula", "forward + backward", "this was a dry run"):
        assert words in said
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["dry-run.json"]
    assert load_profile(read_hardware("cpu")) is None


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = tuning.cases
    monkeypatch.setattr(tuning, "cases", lambda dtypes, hardware, is_dry: cases(dtypes, hardware, is_dry=True))


def clock_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes from one look at the clock to the next: the first, and one before each case."""
    clock = itertools.count()
    monkeypatch.setattr(tuning, "measure", functools.partial(tuning.measure, clock=lambda: float(next(clock))))


def answering(monkeypatch: pytest.MonkeyPatch, fitted: float, formula: float) -> None:
    """Make every fit have these rank correlations on held-out shapes."""
    fit = tuning.fit_rates

    def fixed(timings: Sequence[tuning.Timing], hardware: Hardware) -> list[Rates]:
        accuracies = {"fitted": Accuracy(fitted, 0.1), "formula": Accuracy(formula, 0.2)}
        return [replace(one, **accuracies) for one in fit(timings, hardware)]  # type: ignore[arg-type]

    monkeypatch.setattr(tuning, "fit_rates", fixed)


def test_a_run_stores_a_profile_a_report_and_goes_on_when_it_is_called_again(
    tmp_path: Path, few_cases: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new"
    clock_of(monkeypatch)
    answering(monkeypatch, 0.9, 0.8)
    main([*WORDS, "--seconds", "36.5", "--output", str(output)])
    profile = load_profile(read_hardware("cpu"))
    assert profile is not None
    assert {(entry.dtype, entry.is_training) for entry in profile.rates} == {("float32", False), ("float32", True)}
    assert "rank correlation" in (output / "report.txt").read_text()
    capsys.readouterr()
    main([*WORDS, "--seconds", "4.5", "--output", str(output)])
    said = capsys.readouterr().out
    assert f"going on after 72 times in {output / 'tune.json'}" in said
    record = json.loads((output / "tune.json").read_text())
    assert Counter(len(samples) for samples in record["samples"].values()) == {4: 4, 2: 32}
    assert record["fits"][0]["dtype"] == "float32"
    assert record["fits"][0]["fitted"] == [0.9, 0.1]
    assert [entry.fitted for entry in profile.rates] == [Accuracy(0.9, 0.1)] * 2


def test_rates_worse_than_the_formula_and_too_few_times_are_not_used_and_said(
    tmp_path: Path, few_cases: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock_of(monkeypatch)
    main([*WORDS, "--seconds", "9.5", "--output", str(tmp_path / "new")])
    said = capsys.readouterr().out
    assert "float32, forward: too few times to fit and judge rates, so the formula stays in use" in said
    assert "rank correlation" not in said
    assert load_profile(read_hardware("cpu")) is None
    answering(monkeypatch, 0.722, 0.778)
    main([*WORDS, "--seconds", "40", "--output", str(tmp_path / "new")])
    said = capsys.readouterr().out
    assert (
        "the fitted rates predict held-out shapes no better (rank correlation 0.722, error 10.0%) than the formula "
        "(0.778, 20.0%), so the formula stays in use"
    ) in said
    assert "the formula stays in use" in (tmp_path / "new" / "report.txt").read_text()
    stored = load_profile(read_hardware("cpu"))
    assert stored is not None
    assert [entry.is_better for entry in stored.rates] == [False, False]
    (case, *_) = tuning.cases([torch.float32], read_hardware("cpu"), is_dry=True)
    choice = DynamicSegmentSelector(SegmentSelectionConfig(min_segment_size=32)).choose(case.workload, "cpu")
    assert not choice.is_measured


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "-1"], "seconds must be at least 0, got -1.0"),
        (["--dtypes"], "dtypes"),
        (["--dtypes", "int8"], "int8"),
        (["--device", "cuda"], "--device cuda: PyTorch finds no CUDA device here"),
        (["--threads", "-2"], "threads must be at least 0, got -2"),
        (["--output", "{}/file"], "file"),
        (["--output", "{}"], "is of another format"),
        (["--speed", "9"], "--speed"),
    ],
)
def test_wrong_words_get_a_sentence_and_code_2(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "file").touch()
    (tmp_path / "dry-run.json").write_text("{}")
    with pytest.raises(SystemExit) as left:
        main(["tune", "--dry-run", *(word.replace("{}", str(tmp_path)) for word in words)])
    assert left.value.code == 2
    said = capsys.readouterr()
    assert message in said.out + said.err
