"""The gate draws the same calls in every run, whatever ran before in the same process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given

from support.drawn import DENSE, SWEEP, DrawnCall, calls, examples


def drawn() -> list[str]:
    found: list[str] = []

    @examples(60)
    @given(calls(sizes=DENSE))
    def collect(call: DrawnCall) -> None:
        found.append(repr(call))

    collect()
    return found


@pytest.mark.skipif(SWEEP, reason="the sweep draws new calls")
def test_draws_do_not_depend_on_the_modules_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    numbers = ", ".join(str(n) for n in range(150))
    (tmp_path / "module_of_numbers.py").write_text(f"NUMBERS = [{numbers}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("module_of_numbers")
    try:
        assert drawn() == before
    finally:
        del sys.modules["module_of_numbers"]
