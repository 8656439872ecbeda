"""Compile the Triton kernels for a GPU that need not be there, and print what each uses as JSON.

    TRITON_INTERPRET=0 python -m support.compiled sm_90

Calls have meta tensors: every kernel is compiled for the arguments and constants of its launch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from dilated_attention_pytorch import DilatedPattern, local_window
from dilated_attention_pytorch.kernels.triton import launch
from dilated_attention_pytorch.kernels.triton import problem as problems
from dilated_attention_pytorch.kernels.triton.problem import Problem
from support.hazards import faults

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
    q = rows(300, 2, 64)
    yield "a cap alone, Dv = 1", Problem(q, q, rows(300, 2, 1), PATTERN.groups, True, 0.1, softcap=50.0)
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


def launches(problem: Problem, **options: Any) -> list[tuple[Any, dict[str, Any]]]:
    """The kernels that a call launches with the first candidates, and the arguments of each by name."""
    launched: list[tuple[Any, dict[str, Any]]] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launched.append((kernel, dict(zip(kernel.arg_names, arguments, strict=False)) | keywords))

    is_decoding = isinstance(problem.query_offset, Tensor)
    with (
        mock.patch.object(triton.JITFunction, "run", run),
        mock.patch.object(launch, "fastest", lambda choice, launch: choice.candidates[0]),
    ):
        out, lse = launch.forward(problem, 2 if is_decoding else None)
        if not is_decoding:
            launch.backward(problem, out, lse, out, None if problem.dropout_seed is None else lse)
    return launched


def use(target: str) -> None:
    """Have Triton compile for a GPU by the compiler's name; nothing can be launched."""
    is_amd = target.startswith("gfx")
    gpu = GPUTarget("hip", target, 64) if is_amd else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: gpu, get_current_device=lambda: target, get_current_stream=lambda device: 0
        )
    )
    problems.target_of = lambda device: target


def compiled(kernel: Any, arguments: dict[str, Any]) -> Any:
    """A kernel as machine code of the GPU in :func:`use`."""
    return kernel.run(**arguments, grid=(1,), warmup=True)


def specializations(problem: Problem) -> Iterator[tuple[str, str, str]]:
    """For every launch: the kernel, its constants, and all that decides whether Triton compiles it again."""
    for kernel, arguments in launches(problem):
        binder = kernel.device_caches[triton.runtime.driver.active.get_current_device()][-1]
        _, specialization, options = binder(**arguments)
        constants = [arguments[kernel.arg_names[index]] for index in kernel.constexprs]
        yield kernel.__name__, str((constants, options)), str((specialization, options))


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
    use(target)
    figures = []
    for name, problem in calls(is_short=target == "sm_90"):  # what every run of the tests compiles for
        for kernel, arguments in launches(problem):
            code = compiled(kernel, arguments)
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
