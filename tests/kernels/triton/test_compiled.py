"""The shipped kernels compile for devices that need not be there, and spill no register in a loop over blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.registers import KERNELS, SHARED_KIB, is_shipped

from support.drawn import SWEEP

ROOT = Path(__file__).parents[3]
COMPILE = """
import json, sys
from dataclasses import asdict
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from benchmarks.registers import _FLOATS, _POINTERS, compiled, shipped, usage
from dilated_attention_pytorch.kernels.triton.forward import forward_kernel, merge_splits_kernel
from dilated_attention_pytorch.kernels.triton.order import order_kernel
from dilated_attention_pytorch.kernels.triton.runs import runs_kernel
from dilated_attention_pytorch.kernels.triton.fp8 import quantize_kernel
from dilated_attention_pytorch.kernels.triton.configurations import candidates
from dilated_attention_pytorch.kernels.triton.target import multiplies_e4m3, triton_version
target = sys.argv[1]
wider = {"head_dims": (64, 128, 256), "dtypes": ("bf16", "fp16", "fp32")} if sys.argv[2] == "sweep" else {}
figures = [asdict(one) for one in shipped(target, **wider)]
for head_dim in (64, 128, 256)[:3 if sys.argv[2] == "sweep" else 2]:
    (chosen,) = candidates("single_backward", head_dim, 2, target, False, triton_version())
    figures.append(asdict(usage("single_backward", target, head_dim, "bf16", chosen, causal=True)))
# Heads that no power of two fills, and what a call can ask for beside the pattern: they compile as well.
for name in ("forward", "query_gradient", "key_gradient"):
    for head_dim in (48, 96):
        chosen = candidates(name, 64 if head_dim == 48 else 128, 2, target, False, triton_version())[0]
        features = {"DROPOUT": head_dim == 48, "PADDED": head_dim == 96, "ZERO_PAD_KEYS": head_dim == 48}
        usage(name, target, head_dim, "fp16", chosen, causal=True, call="4_heads", **features)
for kernel, constants in (
    (order_kernel, {"WINDOW": 2048, "PACKED": True}),
    (runs_kernel, {"TILE_ROWS": 42, "SLOTS": 64, "WINDOW": 256, "ORDERED": True, "CAUSAL": True, "PACKED": True,
                   "ZERO_PAD_KEYS": False, "OF_QUERIES": True, "RULES": True, "BANDED": True, "LINE": 9}),
    (runs_kernel, {"TILE_ROWS": 128, "SLOTS": 128, "WINDOW": 2048, "ORDERED": False, "CAUSAL": False, "PACKED": False,
                   "ZERO_PAD_KEYS": True, "OF_QUERIES": False, "RULES": True, "BANDED": False, "LINE": 9}),
    (runs_kernel, {"TILE_ROWS": 128, "SLOTS": 128, "WINDOW": 2048, "ORDERED": False, "CAUSAL": True, "PACKED": False,
                   "ZERO_PAD_KEYS": False, "OF_QUERIES": False, "RULES": False, "BANDED": False, "LINE": 9}),
    (merge_splits_kernel, {"D": 48, "BLOCK_D": 64, "BLOCK": 4}),
    *([(quantize_kernel, {"D": 48, "BLOCK_D": 64, "BLOCK": 16})] if multiplies_e4m3(target) else []),
):
    compiled(kernel, target, "bf16", constants, num_warps=4, num_stages=3)
# Where the position of the queries lies on the device, a pointer stands for it.
for kernel, constants in (
    (order_kernel, {"WINDOW": 256, "PACKED": False}),
    (runs_kernel, {"TILE_ROWS": 16, "SLOTS": 32, "WINDOW": 16, "ORDERED": False, "CAUSAL": True, "PACKED": False,
                   "ZERO_PAD_KEYS": False, "OF_QUERIES": False, "RULES": True, "BANDED": True, "LINE": 8}),
    (forward_kernel, {"RATIO": 1, "PACK": 1, "D": 64, "BLOCK_D": 64, "BLOCK_ROWS": 16, "BLOCK_RUN": 64, "LINE": 8,
                      "WINDOW": 16, "ORDERED": False, "CAUSAL": True, "BANDED": True, "PADDED": False,
                      "ZERO_PAD_KEYS": False, "DROPOUT": False, "ROTATED": True, "SCALED": False}),
):
    signature = {name: "constexpr" if name in constants else "*i64" if name in ("offset", "query_offset")
                 else _POINTERS.get(name, "*bf16") if name.isupper() else "fp32" if name in _FLOATS else "i32"
                 for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    code = triton.compile(source, target=GPUTarget("cuda", int(target[3:]), 32), options=options)
    assert "min.s64" in code.asm["ptx"], "the position is loaded, and kept within its bounds"
print(json.dumps(figures))
"""

FIRST = """
import json, sys
from dataclasses import asdict
from benchmarks.registers import KERNELS, is_shipped, usage
from dilated_attention_pytorch.kernels.triton.configurations import candidates
from dilated_attention_pytorch.kernels.triton.target import triton_version
target, figures = sys.argv[1], []
for name in KERNELS:
    if not is_shipped(name, target):
        continue
    chosen = candidates(name, 64, 2, target, False, triton_version())[0]
    figures.append(asdict(usage(name, target, 64, "bf16", chosen, causal=True)))
print(json.dumps(figures))
"""


def compiled_by(script: str, *arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_it_fits(one: dict[str, Any], shared_kib: int) -> None:
    assert one["block_loop_spill_bytes"] == 0, one
    assert one["shared_bytes"] <= shared_kib * 1024, one
    assert one["matrix_instructions"] > 0 or one["dtype"] == "fp32", one
    # The rule is about loops that were found: one over runs and, in it, those over blocks.
    assert {(loop["depth"], loop["is_innermost"]) for loop in one["loops"]} == {(0, False), (1, True)} or (
        one["dtype"] == "fp32"
    ), one


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_no_shipped_configuration_spills_a_register_in_a_loop_over_blocks(target: str, figure: Any) -> None:
    figures = compiled_by(COMPILE, target, "sweep" if SWEEP else "gate")
    named = {(one["kernel"], one["head_dim"], one["causal"] + one["banded"]) for one in figures}
    kernels = [name for name in KERNELS if is_shipped(name, target)]
    assert named >= {(name, width, mask) for name in kernels for width in (64, 128) for mask in (0, 1, 2)}
    for one in figures:
        # No product is outside of the loops that are looked at.
        products = sum(loop["matrix_instructions"] for loop in one["loops"] if loop["is_innermost"])
        assert products == one["matrix_instructions"], one
        # 8.6 to 8.9 have the candidates of 8.0 and less shared memory.
        assert_it_fits(one, SHARED_KIB["sm_86" if target == "sm_80" else target])
    figure(
        f"{target}: {len(figures)} compiled kernels, bytes spilled in loops over blocks",
        f"0; elsewhere at most {max(one['spill_bytes'] for one in figures)}, in loops over runs "
        f"{max(one['loop_spill_bytes'] for one in figures)}; at most "
        f"{max(one['registers'] for one in figures)} registers, "
        f"{max(one['shared_bytes'] for one in figures) // 1024} KiB",
    )


@pytest.mark.parametrize("target", [*SHARED_KIB] if SWEEP else ["gfx942", "sm_89"])
def test_every_kernel_compiles_for_the_other_devices(target: str) -> None:
    figures = compiled_by(FIRST, target)
    assert len(figures) == sum(is_shipped(name, target) for name in KERNELS)
    for one in figures:
        assert_it_fits(one, SHARED_KIB[target])


def test_the_warp_specialized_forward_overlaps_its_products_with_the_softmax(tmp_path: Path, figure: Any) -> None:
    compiled = subprocess.run(
        [sys.executable, "-m", "benchmarks.warp_specialized", "--output", str(tmp_path)] + ["--tiny"] * (not SWEEP),
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    for one in json.loads((tmp_path / "warp_specialized.json").read_text())["figures"]:
        # Each half of the tile has a loop without a mask and one with it, each with both products.
        plain, masked = (sorted(loop["instructions"] for loop in one["loops"])[half] for half in (0, 3))
        assert len(one["loops"]) == 4
        for loop in one["loops"]:
            products = one["head_dim"] // 16 + one["block_run"] // 16
            assert loop["matrix_instructions"] == products, one
            assert loop["exponentials_before_wait"] == loop["exponentials"] > 0, one
            assert loop["spills"] == 0, one
        assert one["stack_bytes"] <= 16, one
        assert one["shared_bytes"] <= 227 * 1024, one
        figure(
            f"warp-specialised forward, D = {one['head_dim']}, instructions of a warp for 64 x 128 pairs",
            f"{plain} without a mask, {masked} with the causal one, {one['stack_bytes']} bytes of stack",
        )
