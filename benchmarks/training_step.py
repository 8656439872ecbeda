"""A training step of the demo's model: tokens per second with the package's CPU kernels and with PyTorch's.

    python -m benchmarks.training_step [--repeats N]

Settings are those of `dilated-attention train` on two CPU cores (the preset "cpu"), with random bytes as text. A step
is forward, backward, clipping and the optimizer, in float32 or under bfloat16 autocast, with the implementations in
turn, from the same weights on the same text. Before anything is timed, their first losses must agree.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import attend
from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.models import LongNetForCausalLM
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.optimizer import build_optimizer

from .study import Study, run, seconds

IMPLS: tuple[Impl, ...] = ("aten", "native")
PRECISIONS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative tolerance of first losses."""


@dataclass(frozen=True, kw_only=True)
class TrainingStep(Study):
    """Settings."""

    repeats: int = 7
    """Steps that are timed with each implementation."""


class Run:
    """A model with its optimizer."""

    def __init__(self, model: LongNetForCausalLM, settings: TrainSettings, impl: Impl, dtype: torch.dtype) -> None:
        self.model, self.settings, self.dtype = copy.deepcopy(model).train(), settings, dtype
        self.model.model.attention = functools.partial(attend, impl=impl)
        self.optimizer = build_optimizer(self.model, settings)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, ids: Tensor) -> None:
        """One optimizer step."""
        lower = self.dtype != torch.float32
        with torch.autocast("cpu", self.dtype) if lower else contextlib.nullcontext():
            loss = self.model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


def timed(settings: TrainSettings, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Median times of the steps after the first, with the implementations in turn.

    Raises:
        SystemExit: the first losses differ by more than rounding explains; nothing is timed.
    """
    torch.manual_seed(0)
    model = LongNetForCausalLM.from_longnet_config(settings.model)
    runs = {impl: Run(model, settings, impl, dtype) for impl in IMPLS}
    for repeat in range(1 + repeats):
        ids = torch.randint(256, (settings.batch_size, settings.context_length))
        for one in runs.values():
            one.seconds.append(seconds(functools.partial(one.step, ids)))
        first = [one.losses[0] for one in runs.values()]
        if not repeat and not max(first) - min(first) <= PRECISIONS[dtype] * max(first):
            raise SystemExit(f"not timed, because first losses differ: {dict(zip(runs, first, strict=True))}")
    tokens = settings.batch_size * settings.context_length
    result: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "tokens_per_step": tokens}
    for impl, one in runs.items():
        taken = statistics.median(one.seconds[1:])
        result[impl] = {
            "seconds": taken,
            "fastest": min(one.seconds[1:]),
            "tokens_per_second": tokens / taken,
            "losses": one.losses,
        }
    result["native_over_aten"] = result["native"]["seconds"] / result["aten"]["seconds"]
    print(result, flush=True)
    return result


def measure(given: TrainingStep) -> dict[str, Any]:
    """Both precisions."""
    settings = PRESETS["tiny" if given.tiny else "cpu"]()
    results = [timed(settings, dtype, given.repeats) for dtype in PRECISIONS]
    return {"impl": list(IMPLS), "preset": "cpu", "settings": settings.to_dict(), "results": results}


if __name__ == "__main__":
    run(TrainingStep, measure, text=__doc__, name="training_step", group="training", tiny={"repeats": 1})
