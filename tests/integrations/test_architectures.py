"""The table of transformers' architectures: whole, shown in the docs, and true where it is judged again."""

from __future__ import annotations

import datetime
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.architectures import reference
from benchmarks.architectures.judge import judge
from benchmarks.architectures.kinds import Kind, kinds_of
from benchmarks.architectures.page import COMMAND, PAGE, RESULTS, page, read_results
from benchmarks.architectures.verdict import NEITHER, NOT_APPLICABLE, WORKS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from dilated_attention_pytorch import DilatedPattern, attend
from dilated_attention_pytorch.integrations.transformers import attention
from support.oracle import Groups, dense_counts

ROOT = Path(__file__).parent.parent.parent
ORIGIN, VERDICTS = read_results(ROOT / RESULTS)
ROWS = {Kind(v.model_type, v.class_name, v.is_decoder).name: v for v in VERDICTS}
SWEEP = os.environ.get("HYPOTHESIS_PROFILE") == "sweep"


def judged_again() -> list[str]:
    """A sample of the rows, the same in every run; under `make sweep` more of them, others every day."""
    names = sorted(
        name
        for name, row in ROWS.items()
        if row.recipe and row.verdict != NOT_APPLICABLE and row.model_type in CONFIG_MAPPING_NAMES
    )
    draw = random.Random(datetime.date.today().toordinal() if SWEEP else 0)
    return draw.sample(names, 80 if SWEEP else 4)


def test_every_type_of_model_that_is_installed_has_a_row() -> None:
    missing = sorted(set(CONFIG_MAPPING_NAMES) - {row.model_type for row in VERDICTS})
    assert not missing, f"no row for {', '.join(missing)}: run {COMMAND}"


def test_every_row_works_or_is_refused_in_words() -> None:
    assert [name for name, row in ROWS.items() if row.verdict == NEITHER] == []


def test_the_page_of_the_docs_shows_the_table() -> None:
    assert (ROOT / PAGE).read_text() == page(ORIGIN, VERDICTS), f"run {COMMAND} --page"


@pytest.mark.parametrize("name", judged_again())
def test_a_row_that_is_judged_again_says_the_same(name: str) -> None:
    row = ROWS[name]
    kind = Kind(row.model_type, row.class_name, row.is_decoder)
    assert kind in kinds_of(row.model_type), f"transformers has other classes now: run {COMMAND}"
    again = judge(kind, row.recipe)
    assert (again.verdict, again.way, again.checks) == (row.verdict, row.way, row.checks), again.reason


@pytest.mark.parametrize("model_type", ["llama", "vit"])
def test_dense_attention_in_place_of_the_pattern_is_neither(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def dense(query: Any, key: Any, value: Any, pattern: Any, **options: Any) -> Any:
        return attend(query, key, value, DilatedPattern([1000], [1]), **options)

    kind = kinds_of(model_type)[0]
    assert judge(kind).verdict == WORKS
    monkeypatch.setattr(attention, "attend", dense)
    verdict = judge(kind)
    assert verdict.verdict == NEITHER
    assert "results are dense" in verdict.reason


def test_a_leak_of_the_future_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    def both_ways(query: Any, key: Any, value: Any, pattern: Any, *, is_causal: bool, **options: Any) -> Any:
        return attend(query, key, value, pattern, is_causal=False, **options)

    monkeypatch.setattr(attention, "attend", both_ways)
    verdict = judge(kinds_of("llama")[0])
    assert verdict.verdict == NEITHER
    assert "a later token changes earlier results" in verdict.reason


def test_the_counts_of_the_reference_are_those_of_the_oracle() -> None:
    expected, _ = dense_counts(Groups(reference.LENGTHS, reference.RATES), 71, 71, 4)
    torch.testing.assert_close(reference.counts(4, 71), expected[0].double())
