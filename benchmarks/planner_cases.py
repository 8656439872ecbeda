"""The random cases of :mod:`.planner`, and the programs that measure one of them.

    python -m benchmarks.planner_cases SETTINGS

SETTINGS is JSON: the settings of the case, including the lengths for a generation case, and the number of processes; or
the same with a folder, into which measurements of this machine for a case of one process are written, in a process as
new as that of the case.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.estimate import Generation, Here, generation_footprint, measure_here
from dilated_attention_pytorch.estimate.memory import footprint
from dilated_attention_pytorch.memory import begin_peak, resident
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.autocast import autocast

from .sent_bytes import SentBytes, count_sent_bytes

LEAST_BYTES, MOST_BYTES = 80e6, 700e6
"""Bounds on the memory of a process: with less, memory of libraries would matter; with more, several processes would
not fit into one machine."""
STEPS = 3
SPREADS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (1, {}),
    (2, {}),
    (2, {"data_parallel": "fsdp"}),
    (3, {"data_parallel": "fsdp"}),
    (2, {"context_parallel": 2, "strategy": "ring"}),
    (4, {"context_parallel": 2, "strategy": "ring"}),
    (2, {"context_parallel": 2, "strategy": "heads"}),
)
"""Numbers of processes, and the kind of parallelism."""


def draw(number: int) -> tuple[TrainSettings, int]:
    """Settings of a case and its number of processes, determined by its number."""
    attempt = 0
    while True:
        choose = random.Random(f"planner {number} {attempt}")
        processes, spread = choose.choice(SPREADS)
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
            **spread,
            optimizer=choose.choice(["adamw", "muon", "adamw-bf16"]),
        )
        if LEAST_BYTES < footprint(settings, processes).total < MOST_BYTES:
            return settings, processes
        attempt += 1


def take_steps(settings: TrainSettings, processes: int) -> None:
    """In a process of the case: take steps, and print their memory, time and bytes sent."""
    import torch
    import torch.distributed as dist

    from dilated_attention_pytorch.models import LongNetForCausalLM
    from dilated_attention_pytorch.training.distribution import Distribution
    from dilated_attention_pytorch.training.optimizer import build_optimizer

    torch.set_num_threads(1)
    if processes > 1:
        dist.init_process_group("gloo")
    # One layer with the rows of the case, because oneDNN compiles low-precision products for their shapes and keeps the
    # code.
    small = dataclasses.replace(settings, model=dataclasses.replace(settings.model, num_layers=1))

    def steps(given: TrainSettings, count: int) -> tuple[list[float], SentBytes]:
        distribution, seconds = Distribution(given, "cpu"), []
        model = LongNetForCausalLM.from_longnet_config(given.model).train()
        distribution.apply(model)
        optimizer = build_optimizer(model, given)
        wrapped = distribution.wrap(model)
        whole = torch.zeros(given.batch_size, given.context_length, dtype=torch.int64)
        rows = distribution.rows({"input_ids": whole, "labels": whole})
        sent = SentBytes()
        for number in range(count):
            start = time.perf_counter()
            # Bytes are counted in the first step, whose time is discarded.
            with contextlib.nullcontext(sent) if number else count_sent_bytes() as sent:
                with autocast(given.precision, "cpu"):
                    loss = wrapped(**rows, num_items_in_batch=whole.numel(), skip_logits=True).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), given.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            del loss
            seconds.append(time.perf_counter() - start)
        return seconds, sent

    steps(small, 2)
    begin_peak()
    before = resident("VmRSS")
    seconds, sent = steps(settings, STEPS)
    peak, median = resident("VmHWM") - before, statistics.median(seconds[1:])
    found: list[Any] = [
        {"peak_bytes": peak, "seconds": median, "rows_sent": sent.rows, "collectives_sent": sent.collectives}
    ]
    if processes > 1:
        mine, found = found[0], [None] * processes
        dist.all_gather_object(found, mine)
    if processes == 1 or dist.get_rank() == 0:
        print("measured " + json.dumps(found), flush=True)
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()


def draw_decoding(number: int) -> tuple[TrainSettings, Generation]:
    """Settings and lengths of a decoding case, determined by its number."""
    attempt = 0
    while True:
        choose = random.Random(f"decoding {number} {attempt}")
        heads, length = choose.choice([2, 4, 8]), choose.choice([256, 1024, 4096])
        pattern: dict[str, Any] = choose.choice(
            [
                {"segment_lengths": (length, 4 * length), "dilation_rates": (1, 4)},
                {"segment_lengths": (length, 2 * length, 8 * length), "dilation_rates": (1, 2, 8)},
                {"layer_patterns": (f"local_window({length - 1})",)},
                {
                    "layer_patterns": (
                        f"local_window({length // 4 - 1}) + DilatedPattern([{length}, {4 * length}], [2, 8])",
                        f"local_window({length - 1})",
                    )
                },
            ]
        )
        model = LongNetConfig(
            vocab_size=choose.choice([256, 4099, 16381]),
            embed_dim=heads * choose.choice([64, 128]),
            num_layers=choose.randint(2, 8),
            num_heads=heads,
            num_kv_heads=choose.choice([heads, heads // 2]),
            activation=choose.choice(["swiglu", "gelu"]),
            **pattern,
        )
        settings = dataclasses.replace(
            PRESETS["tiny"](),
            model=model,
            tokenizer=Path("tokens"),
            batch_size=choose.choice([1, 2, 4]),
            precision=choose.choice(["float32", "bfloat16"]),
        )
        generation = Generation(
            prompt=choose.randint(500, 12000),
            new_tokens=choose.randint(2, 60),
            chunk_size=choose.choice([512, 1024, 4096]),
        )
        if LEAST_BYTES < generation_footprint(settings, generation).total < MOST_BYTES:
            return settings, generation
        attempt += 1


def generate_texts(settings: TrainSettings, generation: Generation) -> None:
    """In a process of the case: generate, and print memory."""
    import torch

    from dilated_attention_pytorch.models import LongNetCache, LongNetLM, generate

    torch.set_num_threads(1)
    dtype = torch.bfloat16 if settings.precision == "bfloat16" else torch.float32

    def texts(given: LongNetConfig, prompt: int, new_tokens: int, chunk_size: int) -> int:
        model, cache = LongNetLM(given, dtype=dtype).eval(), LongNetCache(given)
        ids = torch.zeros(settings.batch_size, prompt, dtype=torch.int64)
        for _ in generate(model, ids, new_tokens, chunk_size=chunk_size, cache=cache):
            pass
        return cache.num_bytes

    # Run the same calls with one layer first, so that libraries have loaded and compiled everything.
    small = dataclasses.replace(settings.model, num_layers=1)
    texts(small, generation.prompt, generation.new_tokens, generation.chunk_size)
    begin_peak()
    before = resident("VmRSS")
    size = texts(settings.model, generation.prompt, generation.new_tokens, generation.chunk_size)
    found = {"peak_bytes": resident("VmHWM") - before, "cache_bytes": size}
    print("measured " + json.dumps([found]), flush=True)


def machine(settings: TrainSettings, folder: Path, *, is_kept: bool) -> Here:
    """Measurements of this machine for a case of one process.

    Args:
        settings: the case.
        folder: folder of the measurements.
        is_kept: whether all of them exist, so that nothing is measured.
    """
    import torch

    torch.set_num_threads(1)
    seconds = 0.0 if is_kept else math.inf
    return measure_here(settings, "cpu", is_quiet=True, folder=folder, seconds=seconds)


def main() -> None:
    """Measure the case given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", type=json.loads, help="settings, number of processes and folder, as JSON")
    told, processes, *folder = parser.parse_args().case
    lengths = told.pop("generation", None)
    settings = TrainSettings.from_dict(told)
    if folder:
        machine(settings, Path(folder[0]), is_kept=False)
        print("measured []")
    elif lengths is None:
        take_steps(settings, processes)
    else:
        generate_texts(settings, Generation(**lengths))


if __name__ == "__main__":
    main()
