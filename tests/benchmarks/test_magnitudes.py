"""The table of magnitudes: what it says of the CPU's implementations is so, and the page prints what was measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from benchmarks.magnitudes import DTYPES, IMPLS, MAGNITUDES, Outcome, can_run, outcome, row_of

from support.pages import DOCS, ROOT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", ["aten", "native"])
def test_every_magnitude_is_finite_and_as_right_as_the_reference(impl: str, dtype: torch.dtype) -> None:
    """Element-wise bounds are those of tests/ops/test_extremes.py."""
    if not can_run(impl, dtype):
        pytest.skip("not in this dtype, or not on this machine")
    # Rounding of results, and, where the reference in the same dtype is exact, of log-sum-exps up to 2**13.
    rounding = torch.finfo(dtype).eps * (2**14 if dtype == torch.float64 else 4)
    for magnitude in MAGNITUDES:
        found, reference = outcome(impl, dtype, magnitude), outcome("reference", dtype, magnitude)
        assert found.is_finite, magnitude
        assert found.error <= rounding + 4 * reference.error, (magnitude, found, reference)


def test_the_page_prints_what_was_measured() -> None:
    page = (DOCS / "definition.md").read_text()
    records: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/magnitudes.json").read_text())["records"]
    for record in records:
        errors = {name: Outcome(x is not None, 0.0 if x is None else x) for name, x in record["errors"].items()}
        if record["dtype"] == "float32":
            assert row_of(record["magnitude"], errors) in page
        for name in IMPLS[:3]:  # what the page says of all dtypes
            assert record["errors"].get(name, 0.0) is not None
