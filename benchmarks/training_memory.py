"""Peak memory of a training step of a deep model on a long text, by memory-saving method, each in a new process.

    python -m benchmarks.training_memory [--tiny] [--tokens N] [--longest N] [--output FILE]

A LongNet of 16 layers with a vocabulary of 32,768 on 32,768 random tokens, under bfloat16 autocast. "nothing" keeps
the activations of every block and computes all logits at once (in bfloat16; blocks of rows compute them in float32).
The last case is one step on 262,144 tokens. The gate: the first loss of every case must equal that of "nothing".
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM
from dilated_attention_pytorch.training import PRESETS
from dilated_attention_pytorch.training.optimizer import build_adamw
from dilated_attention_pytorch.training.run_settings import AdamW

from .options import parse, parser_of, write_results

VOCAB = 32768
LOSS_TOLERANCE = 2e-3
"""Relative tolerance of first losses in bfloat16."""


@dataclass(frozen=True, slots=True)
class Case:
    """Methods that reduce the memory of a step."""

    name: str
    recomputed: int = 0
    """Recompute every n-th block in the backward pass; 0 for none."""
    by_blocks: bool = False
    """Whether the loss processes one block of rows at a time."""
    optimizer: AdamW = "adamw"


CASES = (
    Case("nothing"),
    Case("recomputation", recomputed=1),
    Case("loss by blocks of rows", by_blocks=True),
    Case("both", recomputed=1, by_blocks=True),
    Case("both, every second block", recomputed=2, by_blocks=True),
    Case("both, adamw-8bit", recomputed=1, by_blocks=True, optimizer="adamw-8bit"),
)
LONGEST = Case("both, adamw-8bit, one step of the longest text", recomputed=1, by_blocks=True, optimizer="adamw-8bit")


@dataclass(frozen=True, slots=True)
class Point:
    """One step of one case."""

    case: str
    tokens: int
    peak_bytes: int
    """Peak resident memory above the level of the loaded libraries."""
    state_bytes: int
    """Bytes of the optimizer's tensors."""
    loss: float
    seconds: float


def build(recomputed: int) -> LongNetForCausalLM:
    """16 layers of width 128; segments of 2,048 to 32,768 tokens."""
    config = LongNetConfig(
        vocab_size=VOCAB,
        embed_dim=128,
        num_layers=16,
        num_heads=2,
        ffn_dim=320,
        segment_lengths=(2048, 8192, 32768),
        dilation_rates=(1, 4, 16),
        layer_segment_shifts=(0, 1024),
        gradient_checkpointing=recomputed > 0,
        checkpoint_every=max(1, recomputed),
    )
    torch.manual_seed(0)
    return LongNetForCausalLM.from_longnet_config(config).train()


def step(case: Case, tokens: int, threads: int) -> Point:
    """Take one training step."""
    torch.set_num_threads(threads)
    if case.optimizer == "adamw-8bit":
        import bitsandbytes  # noqa: F401 - loading it is not part of the step
    before = _status("VmRSS")
    model = build(case.recomputed)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    optimizer = build_adamw(case.optimizer, groups, PRESETS["cpu"](), (0.9, 0.95))
    ids = torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(1))
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, skip_logits=case.by_blocks).loss
    loss.backward()
    optimizer.step()
    seconds = time.perf_counter() - start
    states = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return Point(case.name, tokens, _status("VmHWM") - before, sum(states.values()), float(loss.detach()), seconds)


def _status(name: str) -> int:
    """A value of /proc/self/status in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def measure(cases: Sequence[tuple[Case, int]], threads: int) -> list[Point]:
    """Measure every case in a separate process.

    Raises:
        SystemExit: a first loss differs from that of the first case by more than rounding explains.
    """
    points: list[Point] = []
    for case, tokens in cases:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            point = pool.apply(step, (case, tokens, threads))
        same = [other for other in points if other.tokens == tokens]
        if same and not abs(point.loss - same[0].loss) <= LOSS_TOLERANCE * same[0].loss:
            raise SystemExit(f"not published: the loss of {case.name!r} is {point.loss}, and {same[0].loss} before")
        points.append(point)
        print(
            f"{case.name:>48} {tokens:>8,} tokens {point.peak_bytes / 1e9:7.2f} GB, states "
            f"{point.state_bytes / 1e6:6.1f} MB {point.seconds:7.1f} s",
            flush=True,
        )
    return points


def main() -> None:
    """Print one line per result; write all results with the machine and the command."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--longest", type=int, default=262144)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parse(parser, "training_memory.json")
    tokens, longest = (256, 512) if arguments.tiny else (arguments.tokens, arguments.longest)
    here: dict[str, Any] = origin(module_command())
    points = measure(
        [*((case, tokens) for case in (CASES[:1] if arguments.tiny else CASES)), (LONGEST, longest)], arguments.threads
    )
    parameters = sum(weight.numel() for weight in build(0).parameters())
    write_results(
        arguments.output,
        "training",
        {
            "machine": here,
            "vocab_size": VOCAB,
            "parameters": parameters,
            "threads": arguments.threads,
            "points": [asdict(point) for point in points],
        },
    )
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
