"""The grid of native against aten: what is in it, that what is wrong is not timed, and what is said of the ratios."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.cpu_kernels import DTYPES, HEAD_DIMS, KINDS, MODES, MOST, ROWS, Call, Case, grid, summary, timed
from torch import Tensor

from benchmarks import cpu_kernels
from dilated_attention_pytorch.kernels.select import refusal

SMALL = Case(
    dtype="float32", head_dim=16, rows=256, kind="dilated", mode="forward_backward", causal=True, heads=4, kv_heads=2
)
is_compiled = refusal("native", torch.device("cpu"), torch.float32, 16) is None


def test_every_combination_is_a_case_or_named_as_too_long() -> None:
    cases, too_long = grid()
    combinations = {(case.dtype, case.head_dim, case.rows, case.kind, case.mode) for case in (*cases, *too_long)}
    assert combinations == set(itertools.product(DTYPES, HEAD_DIMS, ROWS, KINDS, MODES))
    assert len(combinations) == len(cases) + len(too_long)
    assert len(too_long) < len(cases) / 10
    assert max(case.flops for case in cases) <= MOST
    assert {case.causal for case in cases} == {True, False}
    assert any(case.heads != case.kv_heads for case in cases)
    assert grid() == (cases, too_long)


def test_operations_are_those_of_the_pattern() -> None:
    dense = Case(
        dtype="float32", head_dim=16, rows=256, kind="dense", mode="forward", causal=False, heads=2, kv_heads=2
    )
    assert dense.flops == 4 * 16 * 2 * 256 * 256


@pytest.mark.skipif(not is_compiled, reason="nothing is compiled here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_right_is_timed(kind: str, mode: cpu_kernels.Mode) -> None:
    result = timed(
        Case(dtype="bfloat16", head_dim=48, rows=256, kind=kind, mode=mode, causal=True, heads=4, kv_heads=4), 0.0
    )
    assert 0.0 < result["error"] <= 1.0
    assert result["ratio"] == pytest.approx(result["native_seconds"] / result["aten_seconds"])


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Call.results

    def wrong(self: Call, impl: Any, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        results = list(original(self, "aten", dtype))
        if impl == "native":
            results[2] = results[2] * 1.001
        return tuple(results)

    monkeypatch.setattr(Call, "results", wrong)
    result = timed(SMALL, 0.0)
    assert result["error"] > 1.0
    assert "ratio" not in result


def test_slower_cases_are_counted_and_listed_the_worst_first() -> None:
    values = {name: getattr(SMALL, name) for name in ("mode", "dtype", "head_dim", "rows", "kind", "causal")}
    results = [{**values, "name": str(ratio), "ratio": ratio, "native_seconds": 1.0} for ratio in (0.25, 1.5, 2.0)]
    found = summary([*results, {**values, "name": "bad"}])
    assert (found["cases"], found["slower"], found["worst"], found["wrong"]) == (3, 2, 2.0, ["bad"])
    assert [case["name"] for case in found["slower_cases"]] == ["2.0", "1.5"]
    assert found["geometric_mean"] == pytest.approx(0.75 ** (1 / 3))


@pytest.mark.parametrize(("name", "instructions"), [("cpu_kernels", "AVX512"), ("cpu_kernels_avx2", "AVX2")])
def test_what_auto_takes_on_a_cpu_is_what_the_measured_table_has_as_faster(name: str, instructions: str) -> None:
    """``auto`` is "native" for every kind of call; no kind takes longer there in the geometric mean."""
    table = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.json").read_text())
    assert table["machine"]["vector_instructions"] == instructions
    assert table["wrong"] == []
    assert table["cases"] > 600
    assert {name for names in table["geometric_mean_by"].values() for name in names} >= {
        "decode",
        "forward",
        "forward_backward",
        "float32",
        "bfloat16",
        "float16",
        "dilated",
        "blocks",
        "local_window",
    }
    slower = {name: mean for means in table["geometric_mean_by"].values() for name, mean in means.items() if mean >= 1}
    assert slower == {}
