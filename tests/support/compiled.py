"""Compile the Triton kernels for a GPU that need not be there, and print what each uses as JSON.

    TRITON_INTERPRET=0 python -m support.compiled sm_90

Calls are planned on meta tensors: every kernel is compiled with the constants of its launch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dilated_attention_pytorch import DilatedPattern, local_window
from dilated_attention_pytorch.kernels.triton import problem as problems
from dilated_attention_pytorch.kernels.triton.forward import forward_kernel, merge_splits_kernel
from dilated_attention_pytorch.kernels.triton.key_gradients import key_gradient_kernel
from dilated_attention_pytorch.kernels.triton.order import order_kernel
from dilated_attention_pytorch.kernels.triton.plan import plan_of
from dilated_attention_pytorch.kernels.triton.problem import Problem
from dilated_attention_pytorch.kernels.triton.query_gradients import query_gradient_kernel
from dilated_attention_pytorch.kernels.triton.runs import runs_kernel
from support.hazards import faults

TYPES = {
    **dict.fromkeys(("ORDER", "RUNS", "RANGES", "GROUPS", "SPANS", "LISTS", "CU_SEQLENS"), "*i32"),
    **dict.fromkeys(
        ("LSE", "GRAD_LSE", "DELTA", "GRAD_DISTANCE_BIAS", "GRAD_KEY_BIAS", "PARTIAL_OUT", "PARTIAL_LSE"), "*fp32"
    ),
    "TILES": ("*i32", "*i32", "*i32"),
    "PADDING": "*u8",
    "DROPOUT": ("*i64", "i32", "fp32"),
    "scale_log2": "fp32",
    "scales": ("fp32", "fp32"),
}
"""Types of the operands that are neither tensors of the dtype of the call nor integers."""
STRIDED = ("QUERY", "KEY", "VALUE", "GRAD_OUT")
"""Tensors with the strides of sequences, rows and heads."""
PATTERN = DilatedPattern([2048, 8192], [1, 4])
BOTH = DilatedPattern([256, 2048], [1, 3], tail="zero_padded") + local_window(100)


def rows(count: int, heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(1, count, heads, head_dim, dtype=dtype, device="meta")


def terms_of(query: Tensor, key: Tensor) -> dict[str, Any]:
    """Every term of the scores."""
    distances = query.shape[1] + key.shape[1] - 1
    return {
        "distance_bias": query.new_empty(query.shape[2], distances, dtype=torch.float32),
        "key_bias": key.new_empty(key.shape[:3], dtype=torch.float32),
        "softcap": 50.0,
    }


def calls(*, is_short: bool) -> Iterator[tuple[str, Problem]]:
    """Plain calls, calls with terms of the scores, a decoding step whose position lies on the device, and a call with
    every option."""
    for head_dim in (64, 128):
        q = rows(8192, 4, head_dim)
        yield f"plain, D = {head_dim}", Problem(q, q, q, PATTERN.groups, True, 0.1)
    q = rows(8192, 4, 64)
    yield "terms, D = 64", Problem(q, q, q, PATTERN.groups, True, 0.1, **terms_of(q, q))
    if not is_short:
        q, v = rows(8192, 4, 192), rows(8192, 4, 128)
        yield "a cap, D = 192, Dv = 128", Problem(q, q, v, PATTERN.groups, True, 0.1, softcap=50.0)
        q = rows(8192, 1, 256, torch.float32)
        yield "terms, float32, D = 256", Problem(q, q, q, PATTERN.groups, True, 0.1, **terms_of(q, q))
    q = rows(8192, 12, 64)
    terms = {
        "distance_bias": q.new_empty(12, 1, dtype=torch.float32),
        "coordinates": q.new_empty(1, 2, 8192, dtype=torch.float32),
    }
    yield "coordinates, D = 64", Problem(q, q, q, PATTERN.groups, False, 0.1, **terms)
    q, k = rows(1, 4, 64), rows(8192, 4, 64)
    position = torch.empty((), dtype=torch.int64, device="meta")
    yield "decoding", Problem(q, k, k, PATTERN.groups, True, 0.1, position, rules=local_window(255).rules)
    q, k = rows(600, 6, 48, torch.float16), rows(600, 2, 48, torch.float16)
    options: dict[str, Any] = {
        "cu_seqlens": torch.empty(4, dtype=torch.int32, device="meta"),
        "key_padding_mask": torch.empty(1, 600, dtype=torch.bool, device="meta"),
        "dropout_seed": position,
        "dropout_p": 0.1,
        "rules": BOTH.rules,
        **terms_of(q, k),
    }
    yield "every option", Problem(q, k, k[..., :24], BOTH.groups, False, 0.1, **options)


def launches(problem: Problem) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The kernels of a call with the keywords of their launches, for the first candidate of each."""
    plan, is_decoding = plan_of(problem), isinstance(problem.query_offset, Tensor)
    parts = [(plan.forward, forward_kernel)]
    if not is_decoding:
        parts += [(plan.query_gradient, query_gradient_kernel)]
        parts += [(plan.key_gradient, key_gradient_kernel)]
    for part, kernel in parts:
        walk = part.walk(part.choice.candidates[0], part.num_splits if is_decoding else 1)
        yield order_kernel, part.order.keywords
        yield runs_kernel, walk.planning.keywords
        yield kernel, walk.computing.keywords
    yield merge_splits_kernel, {"WIDTH": plan.kind.widths[1], "BLOCK": 4, "num_warps": 4, "enable_fp_fusion": True}


def _types_of_absent(problem: Problem, dtype: str) -> dict[str, Any]:
    """Types of optional operands that the call has not: a launch gives any tensor for them, the queries."""
    types: dict[str, Any] = {}
    if problem.cu_seqlens is None:
        types["CU_SEQLENS"] = dtype
    if problem.key_padding_mask is None:
        types["PADDING"] = dtype
    if problem.dropout_seed is None:
        types["DROPOUT"] = (dtype, "i32", "fp32")
    distance_bias = "constexpr" if problem.distance_bias is None else "*fp32"
    key_bias = "constexpr" if problem.key_bias is None else ("*fp32", "i32", "i32", "i32")
    coordinates = "constexpr" if problem.coordinates is None else "*fp32"
    types["TERMS"] = (distance_bias, coordinates, key_bias, "fp32", "fp32")
    return types


def _absent(problem: Problem) -> dict[str, None]:
    """Operands that the kernels take as None."""
    absent = {"GRAD_LSE": problem.dropout_seed, "GRAD_DISTANCE_BIAS": problem.distance_bias}
    absent |= {"GRAD_KEY_BIAS": problem.key_bias}
    if not plan_of(problem).kind.has_terms:
        absent["TERMS"] = None
    return {name: None for name, operand in absent.items() if operand is None}


def compiled(kernel: Any, keywords: dict[str, Any], problem: Problem, target: str) -> Any:
    """A kernel as machine code; arguments without constants are tensors, in capitals, and sizes."""
    options = {name: keywords[name] for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in keywords}
    constants: dict[Any, Any] = {name: value for name, value in keywords.items() if name in kernel.arg_names}
    dtype = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[problem.query.dtype]
    types = TYPES | _types_of_absent(problem, dtype)
    constants |= {name: None for name in _absent(problem) if name in kernel.arg_names}
    on_device = ("offset", "query_offset") if isinstance(problem.query_offset, Tensor) else ()
    signature: dict[str, Any] = {}
    hints = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in STRIDED:
            signature[name] = (dtype, "i32", "i32", "i32")
        else:
            signature[name] = types.get(name, dtype if name.isupper() else "*i64" if name in on_device else "i32")
        # As Triton would find at launch: pointers and strides of whole rows are multiples of 16.
        parts = signature[name] if isinstance(signature[name], tuple) else None
        for at, one in enumerate(parts or (signature[name],)):
            if isinstance(one, tuple):  # a tensor with strides within a tuple
                hints[index, at, 0] = [["tt.divisibility", 16]]
            elif parts and one == "constexpr":
                constants[index, at] = None
            elif (one.startswith("*") and name not in on_device) or name in STRIDED:
                hints[(index, at) if parts else (index,)] = [["tt.divisibility", 16]]
    is_amd = target.startswith("gfx")
    device = GPUTarget("hip", target, 64) if is_amd else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    return triton.compile(ASTSource(kernel, signature, constants, hints), target=device, options=options)


def stack_bytes(code: Any) -> int:
    """Bytes of a thread's stack, which the kernels use for spilled registers alone; NVIDIA."""
    from triton.backends.nvidia import compiler

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        tool = Path(compiler.__file__).with_name("bin") / "cuobjdump"
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.findall(r"\bSTACK:(\d+)", done.stdout)[-1])


def main(target: str) -> None:
    problems.target_of = lambda device: target
    figures = []
    for name, problem in calls(is_short=target == "sm_90"):  # what every run of the tests compiles for
        for kernel, keywords in launches(problem):
            code = compiled(kernel, keywords, problem, target)
            text = code.asm["amdgcn" if target.startswith("gfx") else "ptx"]
            figures.append(
                {
                    "call": name,
                    "kernel": kernel.__name__,
                    "shared_bytes": code.metadata.shared,
                    "stack_bytes": None if target.startswith("gfx") else stack_bytes(code),
                    "is_on_tensor_cores": re.search(r"wgmma|mma\.sync|tcgen05\.mma|v_mfma", text) is not None,
                    "faults": faults(code, target),
                }
            )
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
