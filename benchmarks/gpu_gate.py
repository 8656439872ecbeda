"""Random calls of every implementation on this device, checked against the definition: output and gradients, no timing.

    python -m benchmarks.gpu_gate --contestants triton --calls 40 --output gate.json

Sizes are not multiples of any block size. Operands and the gradient of the output come in two memory layouts, since a
plan that a library caches for one layout must not be used for another. Kernels of this package run under deterministic
algorithms, which select one candidate each and fill new memory with NaN.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.benchmarks.contestants import Contestant, find_contestants
from dilated_attention_pytorch.benchmarks.exactness import draw_samples, judge, sampled_gradient
from dilated_attention_pytorch.benchmarks.measure import errors_of_contestants, in_a_line, is_alive
from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.benchmarks.shapes import Case, DtypeName
from dilated_attention_pytorch.machine import choose_device

from .measured_code import code, read_all

WHO = ("ours", "published")
LEAVES_WHEN_REFUSED = 77
"""Exit code if nothing could be computed."""
ROWS = (2, 63, 64, 65, 127, 129, 191, 192, 193, 320, 700)


def draw_case(generator: random.Random, dtype: DtypeName, most_rows: int) -> Case:
    """A random call."""
    kv_heads, groups = generator.randint(1, 4), generator.randint(1, 3)
    rows = generator.choice([generator.randint(2, most_rows), generator.choice([n for n in ROWS if n <= most_rows])])
    return Case(
        shape="drawn",
        mode="forward_backward",
        rows=rows,
        batch=generator.randint(1, 2),
        kv_heads=kv_heads,
        heads=kv_heads * generator.choice([1, 1, 2, 3]),
        head_dim=generator.choice([64, 128, 256]),
        segment_lengths=tuple(generator.randint(2, most_rows + 100) for _ in range(groups)),
        dilation_rates=tuple(generator.randint(1, 9) for _ in range(groups)),
        offset_rule=generator.choice(["modulo", "modulo", "block"]),
        causal=generator.random() < 0.5,
        dtype=dtype,
    )


def check(case: Case, contestant: Contestant, device: torch.device) -> tuple[float, list[str]]:
    """Largest error as a fraction of the allowed error, and a sentence for every failure."""
    used, wrong = 0.0, []
    samples = draw_samples(case)
    for turn, lay_out in enumerate((as_drawn, heads_outside_rows)):
        query, key, value = (lay_out(x.detach()).requires_grad_() for x in case.operands(device))
        operands = (query, key, value)
        attention = contestant.prepare(case, operands)
        for lay_out_gradient in (heads_outside_rows, as_drawn):
            grad_out = lay_out_gradient(sampled_gradient(case, samples, query.detach()))
            with deterministic(contestant):
                out = attention(*operands)
                grads = torch.autograd.grad(out, operands, grad_out)
            verdict = judge(case, contestant.computes, samples, operands, out.detach(), grad_out, grads)
            used = max([used, *(error / verdict.allowed for error in verdict.errors.values())])
            if not verdict.passes:
                wrong.append(f"{case.name}, layout {turn}: {verdict.describe()}")
    return used, wrong


def checked(case: Case, contestant: Contestant, device: torch.device) -> tuple[float, list[str]]:
    """:func:`check`, with exceptions of the contestant as failures."""
    try:
        return check(case, contestant, device)
    except errors_of_contestants() as error:
        return 0.0, [f"{case.name}: {in_a_line(error)}"]


def as_drawn(x: Tensor) -> Tensor:
    """Contiguous ``[B, N, H, D]``."""
    return x.contiguous()


def heads_outside_rows(x: Tensor) -> Tensor:
    """The same ``[B, N, H, D]``, stored as ``[B, H, N, D]``."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@contextlib.contextmanager
def deterministic(contestant: Contestant) -> Iterator[None]:
    """Deterministic algorithms for kernels that have several candidates."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or contestant.name == "ours, triton")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def gate(
    who: Sequence[str], calls: int, dtypes: Sequence[DtypeName], most_rows: int, device: torch.device
) -> list[dict[str, Any]]:
    """One record per contestant and dtype."""
    records = []
    for contestant in find_contestants(tuple(who), device):
        for dtype in dtypes:
            generator = random.Random(f"{dtype} {most_rows}")
            cases = [draw_case(generator, dtype, most_rows) for _ in range(calls)]
            refusals = [contestant.refusal(case, device) for case in cases]
            record: dict[str, Any] = {
                "contestant": contestant.name,
                "dtype": dtype,
                "calls": 0,
                "used_of_allowed": 0.0,
                "wrong": [],
                "refusal": next((reason for reason in refusals if reason is not None), None),
            }
            for case, refusal in zip(cases, refusals, strict=True):
                if refusal is None and is_alive(device):
                    used, wrong = checked(case, contestant, device)
                    record["calls"] += 1
                    record["used_of_allowed"] = max(record["used_of_allowed"], used)
                    record["wrong"] += wrong
            records.append(record)
            said = f"{record['calls']} calls, {len(record['wrong'])} wrong"
            share = f"{record['used_of_allowed']:.2f} of the error that rounding explains"
            line = f"{said}, {share}" if record["calls"] else record["refusal"]
            print(f"{contestant.name:>24} {dtype:>8}: {line}", flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=40, help="drawn calls of every implementation and dtype")
    parser.add_argument("--contestants", nargs="+", default=WHO, help="parts of their names")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--most-rows", type=int, default=700)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--output", type=Path, required=True, help="file of the records")
    words = parser.parse_args()
    read_all()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires this for deterministic algorithms
    device = torch.device(choose_device(words.device))
    records = gate(words.contestants, words.calls, words.dtypes, words.most_rows, device)
    found = {"machine": origin(module_command()), "device": str(device), "records": records, "code": code("triton")}
    write_json(words.output, found)
    for record in records:
        for sentence in record["wrong"]:
            print(f"WRONG {record['contestant']}: {sentence}")
    if any(record["wrong"] for record in records):
        raise SystemExit(1)
    if not any(record["calls"] for record in records):
        raise SystemExit(LEAVES_WHEN_REFUSED)


if __name__ == "__main__":
    main()
