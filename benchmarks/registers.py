"""GPU resources of the compiled Triton kernels: registers, shared memory and spills, read from machine code.

    python -m benchmarks.registers [--targets sm_90 gfx942 ...]
        [--kernels forward ...] [--all] [--output FILE]

Compiles every shipped configuration, by default for compute capability 8.0 and 9.0, and reports which registers it
spills, and in which loops. Needs no GPU. Does not run in Triton's interpreter: unset TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.kernels.select import is_interpreted
from dilated_attention_pytorch.kernels.triton.configurations import Configuration, candidates
from dilated_attention_pytorch.kernels.triton.problem import largest_divisor
from dilated_attention_pytorch.kernels.triton.target import multiplies_e4m3, triton_version
from dilated_attention_pytorch.output import write_text

from .loops import Code, Loop
from .measured_code import code, read_all

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
"""Target devices by the compiler's names, and the shared memory in KiB available to a program."""
KERNELS = ("forward", "few_queries", "query_gradient", "key_gradient", "fp8_forward", "fp8_few_queries")
MASKS = {"none": (False, False), "causal": (True, False), "band": (True, True)}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "key_padding": {"PADDED": True},
    "dropout": {"DROPOUT": True},
    "3_heads": {"RATIO": 3},
    "4_heads": {"RATIO": 4},
}
"""Variants of a call besides the mask; the last two are query heads per key/value head."""
_POINTERS = {
    "ORDER": "*i32",
    "RUNS": "*i32",
    "RANGES": "*i32",
    "PADDING": "*u8",
    "SEED": "*i64",
    "LSE": "*fp32",
    "GRAD_LSE": "*fp32",
    "QUERY_SUM": "*fp32",
    "DELTA": "*fp32",
    "SPANS": "*i32",
    "LISTS": "*i32",
    "GROUPS": "*i32",
    "CU_SEQLENS": "*i32",
    "PARTIAL_OUT": "*fp32",
    "PARTIAL_LSE": "*fp32",
    "QUERY_SCALE": "*fp32",
    "KEY_SCALE": "*fp32",
    "VALUE_SCALE": "*fp32",
    "SCALES": "*fp32",
    "NUMBERS": "*fp8e4nv",
}
_FLOATS = ("scale", "scale_log2", "keep_scale")


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Resource usage of one compiled kernel."""

    kernel: str
    target: str
    head_dim: int
    dtype: str
    causal: bool
    banded: bool
    """Compiled for patterns with a window."""
    call: str
    """One of ``CALLS``."""
    configuration: Configuration
    registers: int
    """Per thread: at most 255 on NVIDIA GPUs, 512 on AMD's, including accumulation registers."""
    accumulation_registers: int
    scalar_registers: int
    """Per warp; AMD only, like the accumulation registers."""
    shared_bytes: int
    """Per program."""
    spill_bytes: int
    """Stores to and loads from thread-local memory for spilled registers, over the whole code."""
    loop_spill_bytes: int
    """Spills inside a loop over runs, heads of a group or blocks."""
    block_loop_spill_bytes: int
    """Spills inside an innermost loop, over blocks; 0 in everything shipped, for plain calls."""
    matrix_instructions: int
    """Number in the code; 0 would mean arithmetic without tensor cores."""
    loops: tuple[Loop, ...]
    """Loops with matrix instructions: over runs at depth 0, and in it the loops over blocks without and with a mask."""
    compile_seconds: float | None
    """Processor seconds of this process and its children; None if Triton had it in its cache."""


def compiled(
    kernel: Any, target: str, dtype: str, constants: dict[str, Any], *, num_warps: int, num_stages: int
) -> Any:
    """A kernel as machine code for a device that may be absent; arguments without constants are sizes or strides."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, hints = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        is_tensor = argument.isupper() and argument not in constants
        if argument in constants:
            signature[argument] = "constexpr"
        elif is_tensor:
            is_scaled = constants.get("SCALED", False) and argument in ("QUERY", "KEY", "VALUE")
            signature[argument] = "*fp8e4nv" if is_scaled else _POINTERS.get(argument, f"*{dtype}")
        else:
            signature[argument] = "fp32" if argument in _FLOATS else "i32"
        # As Triton would find at launch: pointers and strides of whole rows are multiples of 16.
        if is_tensor or "stride" in argument:
            hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    is_amd = target.startswith("gfx")
    device = GPUTarget("hip", target, 64) if is_amd else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    return triton.compile(source, target=device, options=options)


def usage(
    name: str,
    target: str,
    head_dim: int,
    dtype: str,
    chosen: Configuration,
    *,
    causal: bool,
    banded: bool = False,
    call: str = "plain",
    **features: Any,
) -> Usage:
    """Compile one kernel for one device; ``features`` are additional constants, such as ``ZERO_PAD_KEYS=True``."""
    import triton

    from dilated_attention_pytorch.kernels.triton import forward, key_gradients, query_gradients, runs

    kernel = {
        "forward": forward.forward_kernel,
        "few_queries": forward.forward_kernel,
        "fp8_forward": forward.forward_kernel,
        "fp8_few_queries": forward.forward_kernel,
        "query_gradient": query_gradients.query_gradient_kernel,
        "key_gradient": key_gradients.key_gradient_kernel,
        "single_backward": key_gradients.key_gradient_kernel,
    }[name]
    is_scaled = name.startswith("fp8")
    constants: dict[str, Any] = {
        "RATIO": 1,
        "D": head_dim,
        "BLOCK_D": max(32 if is_scaled else 16, triton.next_power_of_2(head_dim)),
        "BLOCK_ROWS": chosen.block_rows,
        "BLOCK_RUN": chosen.block_run,
        "WINDOW": 2048,
        "ORDERED": True,
        "CAUSAL": causal,
        "BANDED": banded,
        "PADDED": False,
        "ZERO_PAD_KEYS": False,
        "DROPOUT": False,
        "ROTATED": banded and name.endswith("few_queries"),
        "HAS_GRAD_LSE": False,
        "SCALED": is_scaled,
        "QUERIES": name == "single_backward",
        **CALLS[call],
        **features,
    }
    pack = 1 if name == "key_gradient" else largest_divisor(constants["RATIO"], 16)
    constants |= {"PACK": pack, "LINE": runs.line_of(chosen.block_rows // pack, is_banded=banded)}
    used = {argument: constants[argument] for argument in kernel.arg_names if argument in constants}
    was_cached: list[bool] = []
    start = _processor_seconds()
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: was_cached.append(cache_hit)
        code = compiled(kernel, target, dtype, used, num_warps=chosen.num_warps, num_stages=chosen.num_stages)
    seconds = None if any(was_cached) else round(_processor_seconds() - start, 2)
    assembly, scalars, accumulators = _machine_code(code), 0, 0
    if "amdgcn" in code.asm:
        registers, scalars, accumulators = (
            int(re.findall(rf"\.{kind}_count: +(\d+)", code.asm["amdgcn"])[-1]) for kind in ("vgpr", "sgpr", "agpr")
        )
    else:
        registers = int(re.findall(r"\bREG:(\d+)", _tool("cuobjdump", code, "-res-usage"))[-1])
    loops = assembly.loops()
    return Usage(
        kernel=name,
        target=target,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
        banded=banded,
        call=call,
        configuration=chosen,
        registers=registers,
        accumulation_registers=accumulators,
        scalar_registers=scalars,
        shared_bytes=code.metadata.shared,
        spill_bytes=assembly.spill_bytes,
        loop_spill_bytes=sum(loop.spill_bytes for loop in loops if loop.depth == 0),
        block_loop_spill_bytes=sum(loop.spill_bytes for loop in loops if loop.is_innermost),
        matrix_instructions=assembly.matrix_instructions,
        loops=tuple(loop for loop in loops if loop.matrix_instructions),
        compile_seconds=seconds,
    )


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _machine_code(code: Any) -> Code:
    return Code(code.asm["amdgcn"] if "amdgcn" in code.asm else _tool("nvdisasm", code, "-c"))


def _tool(name: str, code: Any, option: str) -> str:
    """Output of a tool included in Triton for the code of an NVIDIA GPU."""
    from triton.backends.nvidia import compiler

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        program = Path(compiler.__file__).with_name("bin") / name
        return subprocess.run([program, option, file.name], capture_output=True, text=True, check=True).stdout


def shipped(
    target: str,
    *,
    head_dims: tuple[int, ...] = (64, 128),
    dtypes: tuple[str, ...] = ("bf16",),
    masks: tuple[str, ...] = tuple(MASKS),
    calls: tuple[str, ...] = ("plain",),
    kernels: tuple[str, ...] = KERNELS,
    version: tuple[int, int] | None = None,
) -> Iterator[Usage]:
    """Usage of every shipped configuration for a device: without a mask, causal, and with a band (a causal window).

    For this Triton, or for another ``version``: what would be compiled if it had no configurations of its own.
    """
    version = version or triton_version()
    for name, dtype, head_dim, call, mask in itertools.product(kernels, dtypes, head_dims, calls, masks):
        causal, banded = MASKS[mask]
        if not is_shipped(name, target, dtype, call):
            continue
        for chosen in candidates(name, head_dim, 4 if dtype == "fp32" else 2, target, banded, version):
            yield usage(name, target, head_dim, dtype, chosen, causal=causal, banded=banded, call=call)


def is_shipped(name: str, target: str, dtype: str = "bf16", call: str = "plain") -> bool:
    """Whether a kernel supports a device, an output dtype and a call; e4m3 kernels are the same for all dtypes."""
    return not name.startswith("fp8") or (multiplies_e4m3(target) and dtype != "fp32" and call != "dropout")


def version(text: str) -> tuple[int, int]:
    """``(3, 9)`` for ``"3.9"``; argparse uses the function's name in the message for an invalid argument."""
    major, minor = text.split(".")
    return int(major), int(minor)


def write_figures(file: Path, facts: dict[str, Any], figures: list[Usage]) -> None:
    """Write their origin, and one line per kernel."""
    lines = ",\n".join("  " + json.dumps(asdict(one)) for one in figures)
    head = f'"origin": {json.dumps(facts)},\n "code": {json.dumps(code("triton"))}'
    write_text(file, f'{{\n {head},\n "figures": [\n{lines}\n ]\n}}\n')


def main() -> None:
    """The command line."""
    import triton
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="one kernel for one target: checks the benchmark")
    parser.add_argument(
        "--targets", nargs="+", choices=SHARED_KIB, default=["sm_80", "sm_90"], help="compile for these"
    )
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=[*KERNELS, "single_backward"],
        help="compile these; without it those of 16 and 32 bits",
        default=[name for name in KERNELS if not name.startswith("fp8")],
    )
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=[*MASKS], help="compile with these")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=["plain"], help="compile for such calls")
    parser.add_argument("--all", action="store_true", help="head dim 256 and float32 as well")
    parser.add_argument(
        "--as-for", metavar="3.9", type=version, help="compile what is shipped for this Triton, with the one at hand"
    )
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    read_all()
    if args.tiny:
        args.targets, args.kernels, args.masks = ["sm_90"], ["few_queries"], ["none"]
    if args.output is not None and not args.output.suffix:
        args.output /= "registers.json"
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
    if is_interpreted():
        raise SystemExit("registers: Triton's interpreter compiles nothing; unset TRITON_INTERPRET")
    facts = {**origin(module_command()), "triton": triton.__version__}
    table = Table(
        "kernel",
        "target",
        "D",
        "dtype",
        "mask",
        "call",
        "rows x run",
        "warps",
        "stages",
        "registers",
        "shared KiB",
        "spilled bytes: all, in loops, over blocks",
        "compile s",
    )
    figures: list[Usage] = []
    wider: dict[str, Any] = {"head_dims": (64, 128, 256), "dtypes": ("bf16", "fp32")} if args.all else {}
    for target in args.targets:
        for one in shipped(
            target,
            masks=tuple(args.masks),
            calls=tuple(args.calls),
            kernels=tuple(args.kernels),
            version=args.as_for,
            **wider,
        ):
            figures.append(one)
            blocks = one.configuration
            table.add_row(
                one.kernel,
                target,
                str(one.head_dim),
                one.dtype,
                "band" if one.banded else "causal" if one.causal else "none",
                one.call,
                f"{blocks.block_rows} x {blocks.block_run}",
                str(blocks.num_warps),
                str(blocks.num_stages),
                str(one.registers),
                f"{one.shared_bytes / 1024:.0f} of {SHARED_KIB[target]}",
                f"{one.spill_bytes}, {one.loop_spill_bytes}, {one.block_loop_spill_bytes}",
                "" if one.compile_seconds is None else f"{one.compile_seconds:.1f}",
            )
        if args.output is not None:
            write_figures(args.output, facts, figures)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
