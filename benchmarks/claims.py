"""Figures of the documents of the earlier package of this name: what a training step takes, by the planner.

    python -m benchmarks.claims

About 10 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dilated_attention_pytorch.estimate import longest_context
from dilated_attention_pytorch.estimate.flops import step_work
from dilated_attention_pytorch.estimate.memory import Footprint, footprint
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.patterns.pattern import MOST_POSITIONS
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.preflight import check_processes

from .study import Study, run

NEAR = 0.1
"""Tolerance of a claim that is rounded."""
VOCABULARY = 50_304
"""GPT-2's 50,257 tokens, rounded up to a multiple of 64."""
DEVICE_BYTES = int(80e9)
SIZES = {
    "125M": (768, 12, 12),
    "350M": (1024, 24, 16),
    "770M": (1536, 24, 16),
    "1.3B": (2048, 24, 32),
    "2.7B": (2560, 32, 32),
    "6B": (4096, 29, 32),
}
"""Width, layers and heads. The documents name models by their weights alone; those that GPT-3's paper has are its own
(arXiv 2005.14165, table 2.1)."""
RUNS: dict[str, tuple[bool, dict[str, Any]]] = {
    "float32": (False, {"precision": "float32", "optimizer": "adamw"}),
    "mixed precision": (False, {"precision": "bfloat16", "optimizer": "adamw"}),
    "recomputed": (True, {"precision": "bfloat16", "optimizer": "adamw"}),
    "all optimizations": (True, {"precision": "bfloat16", "optimizer": "adamw-8bit"}),
    "offloaded": (
        True,
        {"precision": "bfloat16", "optimizer": "adamw", "data_parallel": "zero3", "offload": "parameters"},
    ),
}
"""Runs by the words of the documents: whether blocks are recomputed, and the settings."""
Part = Literal["activations", "optimizer", "total"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What is found of a claim."""

    verdict: Literal["confirmed", "refuted"]
    ours: str
    """The figure to compare with the claimed one."""
    reason: str


def found(is_met: bool, ours: str, reason: str) -> Finding:
    """The finding of a claim that is met or not."""
    return Finding("confirmed" if is_met else "refuted", ours, reason)


def settings_of(model: str, way: str, tokens: int, ranks: int = 1) -> TrainSettings:
    """A run on one text of ``tokens`` tokens, with the segments of the documents' examples."""
    (is_recomputed, changes), (embed_dim, num_layers, num_heads) = RUNS[way], SIZES[model]
    config = LongNetConfig(
        vocab_size=VOCABULARY,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        activation="gelu",
        segment_lengths=(2048, 4096, 8192),
        dilation_rates=(1, 2, 4),
        gradient_checkpointing=is_recomputed,
    )
    shared: dict[str, Any] = {"context_parallel": ranks, "strategy": "ring"} if ranks > 1 else {}
    return dataclasses.replace(
        PRESETS["tiny"](), model=config, tokenizer=Path("t"), context_length=tokens, batch_size=1, **changes, **shared
    )


def longest(model: str, tokens: int) -> Finding:
    """Whether a text of ``tokens`` tokens fits on a device with 80 GB."""
    most = longest_context(settings_of(model, "all optimizations", 8192), 1, DEVICE_BYTES)
    at = footprint(settings_of(model, "all optimizations", tokens), 1)
    return found(
        most >= tokens, f"{most:,} tokens", f"planned: a step of {tokens:,} tokens has {_largest_parts(at)} alive"
    )


def fits(tokens: int, ranks: int) -> Finding:
    """Whether a text fits on ``ranks`` devices with 80 GB, and the number that it takes: ``ranks``, doubled."""
    check_processes(settings_of("125M", "all optimizations", tokens, ranks), ranks)

    def at(number: int) -> Footprint:
        return footprint(settings_of("125M", "all optimizations", tokens, number), number)

    asked = at(ranks)
    enough = next(
        number for number in (ranks << doublings for doublings in range(12)) if at(number).total < DEVICE_BYTES
    )
    reason = f"planned: {_largest_parts(asked)}, at least, and a device has {size(DEVICE_BYTES)}"
    if enough > ranks:
        reason += f"; of {ranks}, {2 * ranks}, {4 * ranks}, ... devices {enough:,} are the first enough"
    return found(enough == ranks, f"{size(asked.total)} a device", reason)


def unlimited(ranks: int, short: int, long: int) -> Finding:
    """How the memory of a rank grows with the text, and where it ends."""
    totals = [
        footprint(settings_of("125M", "all optimizations", tokens * ranks, ranks), ranks).total
        for tokens in (short, long)
    ]
    a_token = (totals[1] - totals[0]) / (long - short)
    most = (DEVICE_BYTES - totals[0] + a_token * short) / a_token * ranks
    return found(
        a_token <= 0,
        f"{most / 1e6:,.0f} M tokens on {ranks} devices",
        f"planned: a rank has {a_token / 1e3:,.1f} KB alive for each token of its rows, so {ranks} devices with 80 GB "
        f"end there, and more tokens take more devices; positions end at {MOST_POSITIONS:,}",
    )


def bytes_of(part: Part, claimed: float, model: str, tokens: int, way: str) -> Finding:
    """Whether one part of a step's memory has ``claimed`` bytes."""
    ours = _part(part, model, tokens, way)
    words = "more" if ours > claimed else "less"
    difference = f"{max(ours, claimed) / min(ours, claimed):.1f} times {words} than claimed"
    return found(abs(ours - claimed) <= NEAR * claimed, size(ours), f"planned: {part}, {difference}")


def saving(part: Part, claimed: float, model: str, tokens: int, over: str, way: str) -> Finding:
    """Whether one run takes ``claimed`` times less than another."""
    before, after = (_part(part, model, tokens, one) for one in (over, way))
    return found(
        before / after >= (1 - NEAR) * claimed,
        f"{before / after:.1f}x less",
        f"planned: {part} {size(before)} ({over}) and {size(after)} ({way}) at {tokens:,} tokens of the {model} model",
    )


def recomputation_time(claimed: float, model: str, tokens: int) -> Finding:
    """Operations that recomputed blocks add to a step."""
    before, after = (step_work(settings_of(model, way, tokens)).total for way in ("mixed precision", "recomputed"))
    more = after / before - 1
    return found(
        abs(more - claimed) <= 0.05,
        f"{more:.0%} more operations",
        f"planned: {before:.3g} operations of matrix products become {after:.3g}; time as well, where they bound it",
    )


CLAIMS: dict[str, Callable[[], Finding]] = {
    "125M: 606K tokens": partial(longest, "125M", 606_000),
    "350M: 246K tokens": partial(longest, "350M", 246_000),
    "770M: 100K tokens": partial(longest, "770M", 100_000),
    "1.3B: 131K tokens": partial(longest, "1.3B", 131_000),
    "1.3B: 200K tokens": partial(longest, "1.3B", 200_000),
    "2.7B: 100K tokens": partial(longest, "2.7B", 100_000),
    "6B: 50K tokens on one GPU": partial(longest, "6B", 50_000),
    "125M: 1M tokens": partial(longest, "125M", 1_000_000),
    "125M: 50M tokens": partial(longest, "125M", 50_000_000),
    "1B tokens on 25-30 GPUs": partial(fits, 1_000_000_000, 30),
    "1B tokens on 64 GPUs": partial(fits, 1_000_000_000, 64),
    "15M tokens a GPU": partial(fits, 15_000_000, 1),
    "unlimited context": partial(unlimited, 64, 1 << 18, 1 << 20),
    "activations without recomputation: 60 GB": partial(
        bytes_of, "activations", 60e9, "125M", 32_768, "mixed precision"
    ),
    "activations with recomputation: 6 GB": partial(bytes_of, "activations", 6e9, "125M", 32_768, "recomputed"),
    "recomputation: 10-50x less": partial(saving, "activations", 10, "125M", 32_768, "mixed precision", "recomputed"),
    "recomputation: 30% more time": partial(recomputation_time, 0.3, "125M", 32_768),
    "AdamW: 15.8 GB of states": partial(bytes_of, "optimizer", 15.8e9, "1.3B", 8192, "mixed precision"),
    "AdamW8bit: 5.3 GB of states": partial(bytes_of, "optimizer", 5.3e9, "1.3B", 8192, "all optimizations"),
    "8-bit optimizer: 3x less": partial(saving, "optimizer", 3, "1.3B", 8192, "mixed precision", "all optimizations"),
    "mixed precision: 2x less memory": partial(saving, "total", 2, "125M", 32_768, "float32", "mixed precision"),
    "offloading: 50-80% less": partial(saving, "total", 2, "2.7B", 8192, "recomputed", "offloaded"),
    "100-200x less memory in total": partial(saving, "total", 100, "125M", 32_768, "float32", "all optimizations"),
}
"""The claims, by their names in the table of the docs, and what decides each."""


def size(num_bytes: float) -> str:
    """Bytes in words."""
    for unit, least in (("TB", 1e12), ("GB", 1e9)):
        if num_bytes >= least:
            return f"{num_bytes / least:,.1f} {unit}"
    return f"{num_bytes / 1e6:,.1f} MB"


def _part(part: Part, model: str, tokens: int, way: str) -> int:
    return int(getattr(footprint(settings_of(model, way, tokens), 1), part))


def _largest_parts(at: Footprint) -> str:
    """The total and the two largest parts."""
    parts = {name: value for name, value in dataclasses.asdict(at).items() if name != "checkpoint"}
    first, second = sorted(parts, key=lambda name: -parts[name])[:2]
    return f"{size(at.total)} ({first} {size(parts[first])}, {second} {size(parts[second])})"


def measure(given: Study) -> Mapping[str, Any]:
    """The finding of every claim."""
    findings = {}
    for name, judge in list(CLAIMS.items())[: 1 if given.tiny else None]:
        findings[name] = dataclasses.asdict(judge())
        print(f"{name}: {findings[name]}", flush=True)
    return {"findings": findings}


if __name__ == "__main__":
    run(Study, measure, text=__doc__, name="claims", group="planner", tiny={})
