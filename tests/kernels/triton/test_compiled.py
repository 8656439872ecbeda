"""The kernels compile for devices that need not be there, fit their shared memory and spill few registers."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from dilated_attention_pytorch.kernels import triton as kernels
from dilated_attention_pytorch.kernels.triton.target import triton_version
from support.processes import in_triton

SHARED_KIB = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx942": 64,
    "gfx950": 160,
}
"""Devices by the compiler's names, and the shared memory in KiB available to a program."""
STACK_BYTES = 64 if triton_version() >= (3, 9) else 136
"""Of a thread, where registers are spilled, by the first candidates: on an H200 they were faster than block sizes that
spill nothing (4.4 against 5.2 ms for the gradients of heads of 128)."""
COMPUTING = ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel")


MOST_PARAMETERS = 20
LENGTHS = """
import torch
from support.compiled import PATTERN, Problem, local_window, rows, specializations, use
use("sm_90")
groups, rules = PATTERN.groups, local_window(9).rules
seed = torch.empty((), dtype=torch.int64, device="meta")
for length in range(1, 41):
    q, bounds = rows(length, 3, 64), torch.empty(length + 1, dtype=torch.int32, device="meta")
    problem = Problem(q, q, q, groups, True, 0.1, length, length, bounds, None, seed, 0.1, rules=rules)
    print(*specializations(problem), sep="\\n")
"""


@pytest.mark.parametrize(
    "target", [one if one == "sm_90" else pytest.param(one, marks=pytest.mark.slow) for one in SHARED_KIB]
)
def test_every_kernel_compiles_and_fits_the_device(target: str) -> None:
    figures = json.loads(in_triton("-m", "support.compiled", target))
    assert {one["kernel"] for one in figures} == {*COMPUTING, "order_kernel", "runs_kernel", "merge_splits_kernel"}
    for one in figures:
        assert one["shared_bytes"] <= SHARED_KIB[target] * 1024, one
        assert one["faults"] == [], one
        # Products of float32 numbers are exact, on other cores.
        assert one["is_on_tensor_cores"] == (one["kernel"] in COMPUTING and "float32" not in one["call"]), one
        # Values of one channel have the blocks of wider ones.
        if one["call"] not in ("every option", "a cap alone, Dv = 1") and target in ("sm_80", "sm_90"):
            assert one["stack_bytes"] <= STACK_BYTES, one


def test_no_kernel_is_compiled_again_for_another_length() -> None:
    compiled: dict[tuple[str, str], set[str]] = {}
    lines = in_triton("-c", LENGTHS).splitlines()
    for name, constants, specialization in map(ast.literal_eval, lines):
        compiled.setdefault((name, constants), set()).add(specialization)
    assert len(lines) > 10 * len(compiled)
    assert {name for name, _ in compiled} == {*COMPUTING, "runs_kernel"}
    assert [len(one) for one in compiled.values()] == [1] * len(compiled)


def test_no_function_has_too_many_parameters() -> None:
    for file in Path(kernels.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                words = node.args
                number = len([*words.posonlyargs, *words.args, *words.kwonlyargs])
                assert number <= MOST_PARAMETERS, f"{node.name} of {file.name} has {number} parameters"


def test_tuples_are_used_in_ways_that_triton_3_6_compiles() -> None:
    """No integer of a tuple is in a list for a function that is not built in, and no tuple is compared with None."""
    for file in Path(kernels.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            said = ast.unparse(node) if isinstance(node, ast.Call | ast.Compare) else ""
            assert not re.search(r"^tl\.zeros\(\[.*WIDTH\.BLOCK_D", said), f"{file.name}: tl.full compiles, {said} not"
            assert not re.search(r"\bTERMS is (not )?None$", said), f"{file.name}: read OPTIONS instead of {said}"
