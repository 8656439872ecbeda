"""Resources of the warp-specialised forward kernel on compute capability 9.0, and its loops. Needs no GPU.

    python -m benchmarks.warp_specialized [--tiny] [--output FILE]

Compiles it for heads of 64 and 128, without a mask, with a causal mask and with a window, and reads the machine code;
``--tiny`` compiles the causal kernels only. Does not run in Triton's interpreter: unset TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.kernels.select import is_interpreted
from dilated_attention_pytorch.kernels.triton.configurations import candidates

from .options import parse, parser_of, write_results

_POINTERS = {"ORDER": "*i32", "RUNS": "*i32", "RANGES": "*i32", "LSE": "*fp32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """A loop over blocks of keys, as one warp executes it, for 64 lines of the tile."""

    instructions: int
    matrix_instructions: int
    exponentials: int
    exponentials_before_wait: int
    """Exponentials before the last wait for a product: all, if the product with the values overlaps the softmax."""
    spills: int
    """Loads and stores of spilled registers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Resource usage of one compiled kernel."""

    head_dim: int
    causal: bool
    banded: bool
    block_rows: int
    block_run: int
    stages: int
    stack_bytes: int
    """Per thread: spilled registers, over the whole code."""
    shared_bytes: int
    descriptor_bytes: int
    """Memory per program for the descriptors of its runs."""
    loops: tuple[Loop, ...]
    """For each half of the tile: the loop without a mask and the one with it."""


def usage(head_dim: int, *, causal: bool, banded: bool, dtype: str = "bf16") -> Usage:
    """Compile the kernel for ordered rows and one query head per key/value head."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from dilated_attention_pytorch.kernels.triton.problem import next_power_of_2
    from dilated_attention_pytorch.kernels.triton.runs import BITS
    from dilated_attention_pytorch.kernels.triton.target import triton_version
    from dilated_attention_pytorch.kernels.triton.warp_specialized import warp_specialized_kernel as kernel

    block_d = next_power_of_2(head_dim)
    (chosen,) = candidates("warp_specialized", block_d, 2, "sm_90", banded, triton_version())
    constants: dict[str, Any] = {
        "RATIO": 1,
        "PACK": 1,
        "D": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_RUN": chosen.block_run,
        "STAGES": chosen.num_stages,
        "LINE": BITS.value + chosen.block_rows // 32 + 2 * banded,
        "WINDOW": 2048,
        "ORDERED": True,
        "CAUSAL": causal,
        "BANDED": banded,
    }
    signature, hints = {}, {}
    for index, name in enumerate(kernel.arg_names):
        is_tensor = name.isupper() and name not in constants
        kind = "fp32" if name == "scale_log2" else "i32"
        signature[name] = "constexpr" if name in constants else _POINTERS.get(name, f"*{dtype}") if is_tensor else kind
        if is_tensor or "stride" in name:
            hints[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    options = {"num_warps": chosen.num_warps, "enable_fp_fusion": True}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        used, listing = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True)
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    stack = re.search(r"STACK:(\d+)", used.stdout + used.stderr)
    if stack is None:
        raise RuntimeError(f"cuobjdump was expected to report the stack, got: {used.stdout}")
    return Usage(
        head_dim=head_dim,
        causal=causal,
        banded=banded,
        block_rows=chosen.block_rows,
        block_run=chosen.block_run,
        stages=chosen.num_stages,
        stack_bytes=int(stack[1]),
        shared_bytes=code.metadata.shared,
        descriptor_bytes=code.metadata.global_scratch_size,
        loops=tuple(_loops(listing.stdout)),
    )


def _loops(listing: str) -> Iterator[Loop]:
    """The innermost loops with matrix instructions and exponentials."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x?_?\w+):", line):
            labels[label[1]] = len(instructions)
        elif listed := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
            instructions.append(listed[1].strip())
    found: list[tuple[int, int]] = []
    for end, instruction in enumerate(instructions):
        branch = re.match(r"BRA.*`\((\.L\w+)\)", instruction)
        begin = end + 1 if branch is None else labels.get(branch[1], end + 1)
        body = instructions[begin : end + 1]
        if any("HGMMA" in one for one in body) and any("MUFU.EX2" in one for one in body):
            if any(one.startswith("STG") for one in body):  # a partition of the warps, which returns
                continue
            found.append((begin, end))
    for begin, end in found:
        if any(begin <= first and last <= end and (begin, end) != (first, last) for first, last in found):
            continue
        body = instructions[begin : end + 1]
        waits = [index for index, one in enumerate(body) if "WARPGROUP.DEPBAR" in one]
        yield Loop(
            instructions=len(body),
            matrix_instructions=sum("HGMMA" in one for one in body),
            exponentials=sum("MUFU.EX2" in one for one in body),
            exponentials_before_wait=sum("MUFU.EX2" in one for one in body[: waits[-1]]),
            spills=sum(one.startswith(("LDL", "STL")) for one in body),
        )


def compiled(*, is_tiny: bool) -> Iterator[Usage]:
    """Usage of every kernel, or only of the causal ones."""
    for head_dim in (64, 128):
        for causal, banded in ((True, False),) if is_tiny else ((False, False), (True, False), (True, True)):
            yield usage(head_dim, causal=causal, banded=banded)


def main() -> None:
    """The command line."""
    import triton

    parser = parser_of(__doc__)
    args = parse(parser, "warp_specialized.json")
    if is_interpreted():
        raise SystemExit("warp_specialized: Triton's interpreter compiles nothing; unset TRITON_INTERPRET")
    figures = [asdict(one) for one in compiled(is_tiny=args.tiny)]
    print(json.dumps(figures))
    here = {**origin(module_command()), "triton": triton.__version__}
    write_results(args.output, "triton", {"origin": here, "figures": figures})


if __name__ == "__main__":
    main()
