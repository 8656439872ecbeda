"""How many functions of the package a call passes, counted by a profile hook: what a reader has to follow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dilated_attention_pytorch
from dilated_attention_pytorch import DilatedPattern, attend
from dilated_attention_pytorch.kernels import select

PACKAGE = str(Path(dilated_attention_pytorch.__file__).parent)
PATTERN = DilatedPattern([64, 256], [1, 4])


def trip(function: Callable[[], Any]) -> tuple[int, int, int]:
    """Functions, files and greatest depth of the package's own frames in a call, the third of its kind."""
    function()
    function()
    passed, depths = set(), [0]

    def hook(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and event in ("call", "return"):
            passed.add((code.co_filename, code.co_firstlineno))
            depths.append(depths[-1] + (1 if event == "call" else -1))

    sys.setprofile(hook)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(passed), len({file for file, _ in passed}), max(depths)


@pytest.mark.parametrize(
    ("impl", "most"), [("native", (30, 10, 12)), ("aten", (60, 14, 13)), ("reference", (32, 11, 10))]
)
def test_a_forward_call_passes_few_functions(impl: Any, most: tuple[int, int, int], figure: Any) -> None:
    if select.refusal(impl, torch.device("cpu"), torch.float32, 32) is not None:
        pytest.skip("not on this machine")
    q, k, v = torch.randn(3, 1, 512, 4, 32)
    found = trip(lambda: attend(q, k, v, PATTERN, is_causal=True, impl=impl))
    figure(f"{impl}, forward: functions, files, depth", found)
    assert all(number <= bound for number, bound in zip(found, most, strict=True))
