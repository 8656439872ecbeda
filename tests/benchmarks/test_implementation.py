"""What --impl means: every call of the run is computed by it, and a verdict stands beside every limit."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.implementation import add_choice, chosen, in_words, judged

from dilated_attention_pytorch.kernels.compilation import refusal_to_load
from dilated_attention_pytorch.ops import implementation
from support.operators import implementations_run

NO_KERNELS = refusal_to_load()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.skipif(NO_KERNELS is not None, reason=str(NO_KERNELS))
@pytest.mark.parametrize("impl", ["aten", "native"])
def test_a_run_is_computed_by_what_impl_says(impl: str, tmp_path: Path, monkeypatch: Any) -> None:
    command = ["decoding", "--tiny", "--only", "kernel", "--impl", impl, "--output", str(tmp_path / "decoding.json")]
    monkeypatch.setattr(sys, "argv", command)

    def run() -> None:
        with pytest.raises(SystemExit) as left:
            runpy.run_module("benchmarks.decoding", run_name="__main__")
        assert not left.value.code

    # The check before it is in float64, which the native kernels do not compute.
    assert implementations_run(run) - {"aten"} == {impl} - {"aten"}


def test_a_removed_implementation_is_named_with_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_choice(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--impl", "gluon"])
    assert "argument --impl: impl='gluon', the warp-specialised forward" in capsys.readouterr().err


def test_the_record_names_what_computes_each_dtype() -> None:
    with implementation("aten"):
        assert chosen("aten") == {"asked": "aten", "float32": "aten", "bfloat16": "aten", "float16": "aten"}


def test_a_limit_is_printed_and_recorded_with_its_verdict() -> None:
    assert judged(0.5, 0.5) == {"limit": 0.5, "verdict": "holds"}
    assert judged(0.51, 0.5)["verdict"] == "short"
    assert judged(0.59, 0.6, is_least=True)["verdict"] == "short"
    assert in_words(0.61, 0.6, is_least=True) == "(limit >= 0.6: holds)"
    assert in_words(float("nan"), 0.6) == "(limit <= 0.6: short)"
