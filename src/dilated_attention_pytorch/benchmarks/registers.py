"""What the compiled Triton kernels take of a GPU: registers, shared memory and spills, read from ptxas. Needs no GPU.

    python -m dilated_attention_pytorch.benchmarks.registers [--all] [--output FILE]

Compiles every shipped configuration for compute capability 8.0 and 9.0. Not in Triton's interpreter: without
TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.kernels.select import is_interpreted
from dilated_attention_pytorch.kernels.triton.configurations import Configuration, candidates

from .results import module_command, origin, write_json

CAPABILITIES = (80, 90)
_POINTERS = {
    "ORDER": "*i32", "RUNS": "*i32", "RANGES": "*i32", "PADDING": "*u8", "SEED": "*i64", "LSE": "*fp32",
    "GRAD_LSE": "*fp32", "DELTA": "*fp32", "SPANS": "*i32", "LISTS": "*i32",
    "GROUPS": "*i32", "CU_SEQLENS": "*i32", "PARTIAL_OUT": "*fp32", "PARTIAL_LSE": "*fp32",
}  # fmt: skip
_FLOATS = ("scale", "scale_log2", "keep_scale")


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """One compiled kernel."""

    kernel: str
    capability: int
    head_dim: int
    dtype: str
    causal: bool
    banded: bool
    """Compiled for patterns with a window."""
    configuration: Configuration
    registers: int
    """Of a thread, at most 255."""
    shared_bytes: int
    """Of a program."""
    spill_bytes: int
    """Stores and loads of registers that did not fit; 0 in everything shipped."""
    matrix_instructions: int
    """wgmma (9.0) or mma (8.0) instructions in the code; 0 would be arithmetic without tensor cores."""
    compile_seconds: float


def compiled(
    kernel: Any, capability: int, dtype: str, constants: dict[str, Any], *, num_warps: int, num_stages: int
) -> Any:
    """A kernel as machine code for a device that need not be there; what has no constant is a size or a stride."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, hints = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        is_tensor = argument.isupper() and argument not in constants
        if argument in constants:
            signature[argument] = "constexpr"
        elif is_tensor:
            signature[argument] = _POINTERS.get(argument, f"*{dtype}")
        else:
            signature[argument] = "fp32" if argument in _FLOATS else "i32"
        # What Triton finds out at a launch: pointers and strides of whole rows are multiples of 16.
        if is_tensor or "stride" in argument:
            hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(
    name: str,
    capability: int,
    head_dim: int,
    dtype: str,
    chosen: Configuration,
    *,
    causal: bool,
    banded: bool = False,
    **features: Any,
) -> Usage:
    """Compile one kernel for one device; ``features`` are its other constants, such as ``DROPOUT=True``."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    from dilated_attention_pytorch.kernels.triton import backward, forward, runs

    kernel = {
        "forward": forward.forward_kernel,
        "few_queries": forward.forward_kernel,
        "query_gradient": backward.query_gradient_kernel,
        "key_gradient": backward.key_gradient_kernel,
    }[name]
    constants: dict[str, Any] = {
        "RATIO": 1, "PACK": 1, "D": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_ROWS": chosen.block_rows, "BLOCK_RUN": chosen.block_run,
        "LINE": runs.BITS.value + max(32, chosen.block_rows) // 32 + 2 * banded, "WINDOW": 2048, "ORDERED": True,
        "CAUSAL": causal, "BANDED": banded, "PADDED": False, "PHANTOMS": False, "DROPOUT": False, "ROTATED": False,
        "HAS_GRAD_LSE": False, **features,
    }  # fmt: skip
    used = {argument: constants[argument] for argument in kernel.arg_names if argument in constants}
    start = time.perf_counter()
    code = compiled(kernel, capability, dtype, used, num_warps=chosen.num_warps, num_stages=chosen.num_stages)
    seconds = time.perf_counter() - start
    assembly = code.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(assembly)
        file.flush()
        # The command with which Triton makes the cubin, once more, for what it says.
        command = [
            get_ptxas(capability).path, "-v", "-lineinfo", "--regAllocOptLevel=2",
            f"--gpu-name={sm_arch_from_capability(capability)}", file.name, "-o", "/dev/null",
        ]  # fmt: skip
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas was expected to report registers and spills, got: {said}")
    return Usage(
        kernel=name, capability=capability, head_dim=head_dim, dtype=dtype, causal=causal, banded=banded,
        configuration=chosen, registers=int(registers[1]), shared_bytes=code.metadata.shared,
        spill_bytes=int(spills[1]) + int(spills[2]), compile_seconds=seconds,
        matrix_instructions=assembly.count("wgmma.mma_async") + assembly.count("mma.sync"),
    )  # fmt: skip


def shipped(
    capability: int, *, head_dims: tuple[int, ...] = (64, 128), dtypes: tuple[str, ...] = ("bf16",)
) -> Iterator[Usage]:
    """Every shipped configuration for a device: without a mask, with the causal one, with a band (a causal window)."""
    for name in ("forward", "few_queries", "query_gradient", "key_gradient"):
        for dtype in dtypes:
            for head_dim in head_dims:
                itemsize = 4 if dtype == "fp32" else 2
                for causal, banded in ((False, False), (True, False), (True, True)):
                    of_device = (capability // 10, capability % 10)
                    for chosen in candidates(name, head_dim, itemsize, of_device, banded):
                        features = {"ROTATED": True} if banded and name == "few_queries" else {}
                        yield usage(name, capability, head_dim, dtype, chosen, causal=causal, banded=banded, **features)


def main() -> None:
    """The command line."""
    import triton
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="head dim 256 and float32 as well")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    if is_interpreted():
        raise SystemExit("registers: Triton's interpreter compiles nothing; unset TRITON_INTERPRET")
    table = Table(
        "kernel", "sm", "D", "dtype", "mask", "rows x run", "warps", "stages", "registers", "shared KiB", "spills",
        "compile s",
    )  # fmt: skip
    figures = []
    for capability in CAPABILITIES:
        wider: dict[str, Any] = {"head_dims": (64, 128, 256), "dtypes": ("bf16", "fp32")} if args.all else {}
        for one in shipped(capability, **wider):
            figures.append(asdict(one))
            blocks = one.configuration
            table.add_row(
                one.kernel, str(capability), str(one.head_dim), one.dtype,
                "band" if one.banded else "causal" if one.causal else "none",
                f"{blocks.block_rows} x {blocks.block_run}", str(blocks.num_warps), str(blocks.num_stages),
                str(one.registers), f"{one.shared_bytes / 1024:.0f}", str(one.spill_bytes),
                f"{one.compile_seconds:.1f}",
            )  # fmt: skip
    Console(width=120).print(table)
    if args.output is not None:
        write_json(
            args.output, {"origin": {**origin(module_command()), "triton": triton.__version__}, "figures": figures}
        )


if __name__ == "__main__":
    main()
