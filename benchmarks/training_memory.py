"""Peak memory of a training step of a deep model on a long text, by memory-saving method, each in a new process.

    python -m benchmarks.training_memory [--tokens N] [--longest N]

A LongNet of 16 layers with a vocabulary of 32,768 on 32,768 random tokens, under bfloat16 autocast. "nothing" keeps
the activations of every block and computes all logits at once (in bfloat16; blocks of rows compute them in float32).
The last case is one step on 262,144 tokens. The gate: the first loss of every case must equal that of "nothing".
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dilated_attention_pytorch.memory import resident
from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM
from dilated_attention_pytorch.training import PRESETS
from dilated_attention_pytorch.training.optimizer import build_adamw
from dilated_attention_pytorch.training.run_settings import AdamW

from .study import Study, in_new_process, run

VOCAB = 32768
LOSS_TOLERANCE = 2e-3
"""Relative tolerance of first losses in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class TrainingMemory(Study):
    """Settings."""

    tokens: int = 32768
    """Tokens of a step."""
    longest: int = 262144
    """Tokens of the last case."""


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
    before = resident("VmRSS")
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
    return Point(case.name, tokens, resident("VmHWM") - before, sum(states.values()), float(loss.detach()), seconds)


def measure(given: TrainingMemory) -> dict[str, Any]:
    """Every case in a process of its own.

    Raises:
        SystemExit: a first loss differs from that of the first case by more than rounding explains.
    """
    points: list[Point] = []
    cases = CASES[: 1 if given.tiny else None]
    for case, tokens in (*((case, given.tokens) for case in cases), (LONGEST, given.longest)):
        point: Point = in_new_process(step, case, tokens, torch.get_num_threads())
        same = [other for other in points if other.tokens == tokens]
        if same and not abs(point.loss - same[0].loss) <= LOSS_TOLERANCE * same[0].loss:
            raise SystemExit(f"not published: the loss of {case.name!r} is {point.loss}, and {same[0].loss} before")
        points.append(point)
        print(point, flush=True)
    return {
        "vocab_size": VOCAB,
        "parameters": sum(weight.numel() for weight in build(0).parameters()),
        "threads": torch.get_num_threads(),
        "points": [asdict(point) for point in points],
    }


if __name__ == "__main__":
    tiny = {"tokens": 256, "longest": 512}
    run(TrainingMemory, measure, text=__doc__, name="training_memory", group="training", tiny=tiny)
