"""Random training steps of one process, planned and then measured: peak memory and seconds.

    python -m benchmarks.planner [--cases N]

A case is a LongNet, an optimizer, a precision, and recomputation or not. `estimate.plan_run` plans its peak memory, and
its seconds from measurements of this machine (`estimate.measure_here`). Then a new process takes three steps and reads
its peak memory from Linux, above the level after two steps of a model with one layer, which load the libraries and
compile their products. In that process glibc returns large blocks when they are freed, which takes time: another
process without this measures the seconds.
"""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dilated_attention_pytorch.estimate import Device, measure_here, plan_run
from dilated_attention_pytorch.estimate.memory import footprint
from dilated_attention_pytorch.memory import begin_peak, resident
from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.autocast import autocast
from dilated_attention_pytorch.training.optimizer import build_optimizer

from .study import Study, in_new_process, run

LEAST_BYTES, MOST_BYTES = 80e6, 700e6
"""Bounds of the planned memory of a case: below them the memory of libraries would matter."""
STEPS = 3
RETURNED = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}
"""With these variables glibc returns freed blocks at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner(Study):
    """Settings."""

    cases: int = 25
    """Number of random cases."""


def draw(number: int) -> TrainSettings:
    """Settings of a case, determined by its number."""
    attempt = 0
    while True:
        choose = random.Random(f"planner {number} {attempt}")
        heads = choose.choice([2, 4])
        model = LongNetConfig(
            vocab_size=choose.choice([256, 4099, 16381]),
            embed_dim=heads * choose.choice([32, 64]),
            num_layers=choose.randint(2, 8),
            num_heads=heads,
            num_kv_heads=choose.choice([heads, heads // 2]),
            activation=choose.choice(["swiglu", "gelu"]),
            segment_lengths=(512, 4096),
            dilation_rates=(1, 4),
            gradient_checkpointing=choose.random() < 0.5,
        )
        settings = dataclasses.replace(
            PRESETS["tiny"](),
            model=model,
            tokenizer=Path("tokens"),
            context_length=choose.randint(1000, 12000),
            batch_size=choose.choice([1, 2]),
            precision=choose.choice(["float32", "bfloat16"]),
            optimizer=choose.choice(["adamw", "muon", "adamw-bf16"]),
        )
        if LEAST_BYTES < footprint(settings, 1).total < MOST_BYTES:
            return settings
        attempt += 1


def take_steps(settings: TrainSettings) -> tuple[int, float]:
    """Peak bytes of the steps above the level before them, and the median seconds of all but the first."""
    torch.set_num_threads(1)

    def steps(given: TrainSettings, count: int) -> list[float]:
        model, seconds = LongNetForCausalLM.from_longnet_config(given.model).train(), []
        optimizer = build_optimizer(model, given)
        ids = torch.zeros(given.batch_size, given.context_length, dtype=torch.int64)
        for _ in range(count):
            start = time.perf_counter()
            with autocast(given.precision, "cpu"):
                loss = model(input_ids=ids, labels=ids, num_items_in_batch=ids.numel(), skip_logits=True).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), given.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            del loss
            seconds.append(time.perf_counter() - start)
        return seconds

    # One layer with the rows of the case: oneDNN compiles low-precision products for their shapes and keeps the code.
    steps(dataclasses.replace(settings, model=dataclasses.replace(settings.model, num_layers=1)), 2)
    if not begin_peak():
        raise SystemExit("memory is read from Linux's /proc, which is not here")
    before = resident("VmRSS")
    seconds = steps(settings, STEPS)
    return resident("VmHWM") - before, statistics.median(seconds[1:])


def compared(settings: TrainSettings, folder: Path) -> dict[str, Any]:
    """Planned and measured values of a case; the measurements of this machine are kept in ``folder``."""
    here = measure_here(settings, 1, "cpu", is_quiet=True, folder=folder)
    plan = plan_run(settings, 1, Device(sheet=here.sheet, here=here))
    with mock.patch.dict(os.environ, RETURNED):
        measured_bytes, _ = in_new_process(take_steps, settings)
    _, seconds = in_new_process(take_steps, settings)
    return {
        "settings": settings.to_dict() | {"data": [], "tokenizer": None},
        "planned_bytes": plan.footprint.total,
        "measured_bytes": measured_bytes,
        "planned_seconds": plan.seconds.total,
        "seconds": seconds,
    }


def measure(given: Planner) -> dict[str, Any]:
    """Every case."""
    torch.set_num_threads(1)
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.cases):
            settings = draw(number)
            if given.tiny:
                model = dataclasses.replace(settings.model, num_layers=2, vocab_size=256)
                settings = dataclasses.replace(settings, model=model, context_length=256)
            cases.append(compared(settings, Path(folder)))
            print(cases[-1], flush=True)
    return {"cases": cases}


if __name__ == "__main__":
    run(Planner, measure, text=__doc__, name="planner", group="planner", tiny={"cases": 1})
