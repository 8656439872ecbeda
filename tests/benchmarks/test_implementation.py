"""What --impl means: every call of the run is computed by it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.study import chosen

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
        runpy.run_module("benchmarks.decoding", run_name="__main__", alter_sys=True)

    # The check before it is in float64, which the native kernels do not compute.
    assert implementations_run(run) - {"aten"} == {impl} - {"aten"}


def test_the_record_names_what_computes_each_dtype() -> None:
    with implementation("aten"):
        assert chosen("aten") == {"asked": "aten", "float32": "aten", "bfloat16": "aten", "float16": "aten"}
