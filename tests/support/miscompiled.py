"""Kernels of the forms that compilers got wrong; compiled without a GPU, with what is found in them printed as JSON.

TRITON_INTERPRET=0 python -m support.miscompiled
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .machine_code import disassembled, violations
from .products import forms


@triton.jit
def transposed_result(A, B, C, count, SIZE: tl.constexpr):
    line = tl.arange(0, SIZE)
    tile = line[:, None] * SIZE + line[None, :]
    a, total = tl.load(A + tile), tl.zeros([SIZE, SIZE], tl.float32)
    for index in range(count):
        score = tl.dot(a, tl.load(B + index * SIZE * SIZE + tile))
        total = tl.dot(tl.trans(tl.exp2(score).to(tl.bfloat16)), a, total)
    tl.store(C + tile, total)


@triton.jit
def result_in_shared_memory(A, B, C, count, SIZE: tl.constexpr):
    line = tl.arange(0, SIZE)
    tile = line[:, None] * SIZE + line[None, :]
    a, total = tl.load(A + tile), tl.zeros([SIZE, SIZE], tl.float32)
    for index in range(count):
        score = tl.dot(a, tl.load(B + index * SIZE * SIZE + tile))
        total = tl.dot(a, score.to(tl.bfloat16), total)
    tl.store(C + tile, total)


@triton.jit
def two_products_an_iteration(A, B, C, count, SIZE: tl.constexpr):
    line = tl.arange(0, SIZE)
    tile = line[:, None] * SIZE + line[None, :]
    a, total = tl.load(A + tile), tl.zeros([SIZE, SIZE], tl.float32)
    for index in range(count):
        b = tl.load(B + index * SIZE * SIZE + tile)
        total = tl.dot(a, b, total * 0.5)
        total = tl.dot(b, a, total)
    tl.store(C + tile, total)


@triton.jit
def accumulator_as_operand(A, B, C, count, SIZE: tl.constexpr):
    line = tl.arange(0, SIZE)
    tile = line[:, None] * SIZE + line[None, :]
    a, state, total = tl.load(A + tile), tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
    for index in range(count):
        b = tl.load(B + index * SIZE * SIZE + tile)
        total += tl.dot(a, state.to(tl.bfloat16))
        state = tl.dot(a, b, state * 0.5)
    tl.store(C + tile, total + state)


@triton.jit
def cast_operand(A, B, C, count, SIZE: tl.constexpr):
    """Operand A of every product is cast in registers while the products of the iteration before are pending."""
    line, column = tl.arange(0, SIZE), tl.arange(0, 4 * SIZE)
    a = A + line[:, None] * count + line[None, :]
    b = B + line[:, None] * (4 * SIZE) + column[None, :]
    total = tl.zeros([SIZE, 4 * SIZE], tl.float32)
    for _ in range(0, count, SIZE):
        total = tl.dot(tl.load(a).to(tl.bfloat16), tl.load(b), total)
        a += SIZE
        b += SIZE * 4 * SIZE
    tl.store(C + line[:, None] * (4 * SIZE) + column[None, :], total)


def compiled(kernel: Any, a: str) -> Any:
    types = {"A": a, "B": "*bf16", "C": "*fp32", "count": "i32", "SIZE": "constexpr"}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(4)}
    source = ASTSource(kernel, types, {"SIZE": 64}, aligned)
    options = {"num_warps": 4, "num_stages": 4, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def assembled(ptx: str, tool: str) -> bytes:
    """A kernel by an assembler, which may be older than the one that Triton would take."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(re.sub(r"\.version \d+\.\d+", ".version 8.7", ptx))
        subprocess.run([tool, "--gpu-name=sm_90a", source, "-o", cubin], capture_output=True, check=True)
        return cubin.read_bytes()


def main() -> None:
    found: dict[str, Any] = {}
    for kernel in (transposed_result, result_in_shared_memory, two_products_an_iteration, accumulator_as_operand):
        code = compiled(kernel, "*bf16")
        found[kernel.__name__] = [*forms(code.asm["ttir"]), *forms(code.asm["ttgir"])]
    ptx = compiled(cast_operand, "*i8").asm["ptx"]
    found["cast_operand"] = {
        tool.version: violations(disassembled(assembled(ptx, tool.path)), num_warps=4)
        for tool in (knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell)
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
