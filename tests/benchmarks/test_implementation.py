"""What --impl means: "auto" everywhere, also within models, and a verdict beside every limit."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from benchmarks.implementation import READERS, in_words, judged, take

from dilated_attention_pytorch.kernels import select as selection

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_stays_taken() -> Iterator[None]:
    modules = [vars(importlib.import_module(f"dilated_attention_pytorch.{reader}")) for reader in READERS]
    yield
    for module in modules:
        module["select"] = selection.select


def asked(reader: str, name: str, dtype: torch.dtype) -> str:
    select = vars(importlib.import_module(f"dilated_attention_pytorch.{reader}"))["select"]
    return str(select(name, CPU, dtype, 64))


def test_auto_stands_for_what_was_asked_for_wherever_an_implementation_is_looked_up() -> None:
    assert take("aten") == {"asked": "aten", "float32": "aten", "bfloat16": "aten", "float16": "aten"}
    for reader in READERS:
        assert asked(reader, "auto", torch.float32) == "aten"
        assert asked(reader, "reference", torch.float32) == "reference"


@pytest.mark.skipif(selection.refusal("native", CPU, torch.float32, 64) is not None, reason="nothing is compiled here")
def test_native_is_taken_where_it_can_compute_and_the_rest_goes_on_as_before() -> None:
    before = selection.select("auto", CPU, torch.float64, 64)
    assert take("native")["float32"] == "native"
    assert asked("ops.attend", "auto", torch.float64) == before
    assert asked("ops.attend", "aten", torch.float32) == "aten"


def test_auto_changes_nothing() -> None:
    assert take("auto")["float32"] == selection.select("auto", CPU, torch.float32, 64)
    assert asked("models.reading", "auto", torch.float32) == selection.select("auto", CPU, torch.float32, 64)


def test_a_limit_is_printed_and_recorded_with_its_verdict() -> None:
    assert judged(0.5, 0.5) == {"limit": 0.5, "verdict": "holds"}
    assert judged(0.51, 0.5)["verdict"] == "short"
    assert judged(0.59, 0.6, is_least=True)["verdict"] == "short"
    assert in_words(0.61, 0.6, is_least=True) == "(limit >= 0.6: holds)"
    assert in_words(float("nan"), 0.6) == "(limit <= 0.6: short)"
