"""Tests the longest planned text: steps of the planned length run within the memory, steps a tenth longer do not.

    python -m benchmarks.longest [--cases N] [--again] [--output FILE]

The memory limit of a case is drawn at random, and `capacity.longest_context` plans the longest text for it. A separate
program first takes two steps with one layer of the model, so that libraries are loaded, and its memory is measured.
From then on its data segment may grow only by the limit (`RLIMIT_DATA`, which every Linux has and which needs no
privileges; since Linux 4.7 it counts private mappings too). Then the program takes two steps of the whole model. Steps
of the planned length must succeed; for a length a tenth longer, the kernel must refuse memory. glibc is set to return
freed blocks immediately.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.capacity import longest_context
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.autocast import autocast
from dilated_attention_pytorch.training.footprint import footprint

from .measured_code import is_stale
from .options import parse, parser_of, write_results
from .planner import BOUNDED

LONGER = 1.1
STEPS = 2


def draw(number: int, *, is_tiny: bool = False) -> tuple[TrainSettings, int]:
    """Settings of a case and the memory for its tensors, determined by its number."""
    choose = random.Random(f"longest {number}")
    heads = choose.choice([2, 4])
    model = LongNetConfig(
        vocab_size=choose.choice([4099, 16381]),
        embed_dim=heads * choose.choice([32, 64]),
        num_layers=choose.randint(2, 5),
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
        batch_size=1,
        precision=choose.choice(["float32", "bfloat16"]),
        optimizer=choose.choice(["adamw", "muon", "adamw-bf16"]),
    )
    states = footprint(dataclasses.replace(settings, context_length=256), 1).states
    return settings, states + int(choose.uniform(150e6, 350e6) / (8 if is_tiny else 1))


def data_bytes() -> int:
    """Size of the data segment of this process, which RLIMIT_DATA limits."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not say how large the data segment of a process is; Linux does")


def take_steps(settings: TrainSettings, memory: int) -> None:
    """In the process of a case: set the limit, take steps, and print whether they succeeded."""
    import torch

    from dilated_attention_pytorch.memory import begin_peak
    from dilated_attention_pytorch.models import LongNetForCausalLM
    from dilated_attention_pytorch.training.optimizer import build_optimizer

    torch.set_num_threads(1)

    def steps(given: TrainSettings) -> None:
        model = LongNetForCausalLM.from_longnet_config(given.model).train()
        optimizer = build_optimizer(model, given)
        ids = torch.zeros(given.batch_size, given.context_length, dtype=torch.int64)
        for _ in range(STEPS):
            with autocast(given.precision, "cpu"):
                loss = model(input_ids=ids, labels=ids, num_items_in_batch=ids.numel(), skip_logits=True).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), given.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            del loss

    # One layer with the rows of the case, because oneDNN compiles low-precision products for their shapes.
    steps(dataclasses.replace(settings, model=dataclasses.replace(settings.model, num_layers=1)))
    begin_peak()
    base = data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (base + memory, base + memory))
    try:
        steps(settings)
        ended = "ran"
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        ended = "out of memory"
    print("tried " + json.dumps({"ended": ended, "base_bytes": base}), flush=True)


def tried(settings: TrainSettings, memory: int) -> dict[str, Any]:
    """Result of a case in a separate program.

    Raises:
        SystemExit: the program failed for another reason than memory.
    """
    told = json.dumps([settings.to_dict() | {"data": []}, memory], default=str)
    program = subprocess.run(
        [sys.executable, "-m", "benchmarks.longest", "--told", told],
        env=os.environ | BOUNDED,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in program.stdout.splitlines() if line.startswith("tried ")]
    if lines:
        found: dict[str, Any] = json.loads(lines[-1].removeprefix("tried "))
        return found
    # A C++ kernel whose allocation fails aborts the program.
    if "bad_alloc" in program.stderr or "allocate memory" in program.stderr:
        return {"ended": "out of memory", "base_bytes": None}
    raise SystemExit(f"steps of {settings.context_length} tokens failed: {program.stderr[-2000:]}")


def run(number: int, *, is_tiny: bool) -> dict[str, Any]:
    """Plan a case, then test it."""
    settings, memory = draw(number, is_tiny=is_tiny)
    longest = longest_context(settings, 1, memory)
    lengths = {"planned": longest, "longer": int(LONGER * longest)}
    of_length = {name: dataclasses.replace(settings, context_length=length) for name, length in lengths.items()}
    return {
        "case": number,
        "settings": settings.to_dict() | {"data": [], "tokenizer": None},
        "memory_bytes": memory,
        "longest": longest,
        "planned_bytes": {name: footprint(told, 1).total for name, told in of_length.items()},
        **{name: tried(told, memory) for name, told in of_length.items()},
    }


def is_right(case: dict[str, Any]) -> bool:
    """Whether the planned length ran and the longer one ran out of memory."""
    return case["planned"]["ended"] == "ran" and case["longer"]["ended"] == "out of memory"


def main() -> None:
    """Print a line per case, and write all cases with the machine and the command."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--again", action="store_true", help="leave what is in the file, and begin anew")
    parser.add_argument("--told", help=argparse.SUPPRESS)
    arguments = parse(parser, "longest.json")
    if arguments.told is not None:
        told, memory = json.loads(arguments.told)
        take_steps(TrainSettings.from_dict(told), memory)
        return
    import torch

    torch.set_num_threads(1)
    kept: dict[str, Any] = {"machine": origin(module_command()), "cases": []}
    if arguments.output.exists() and not arguments.again:
        earlier = json.loads(arguments.output.read_text())
        kept |= {} if is_stale(earlier) else earlier  # cases of other code are tried again
    for number in range(1 if arguments.tiny else arguments.cases):
        if number not in {one["case"] for one in kept["cases"]}:
            case = run(number, is_tiny=arguments.tiny)
            kept["cases"].append(case)
            told, model = case["settings"], case["settings"]["model"]
            print(
                f"case {number}: {model['num_layers']} x {model['embed_dim']} {told['precision']} {told['optimizer']}, "
                f"{case['memory_bytes'] / 1e6:.0f} MB: {case['longest']:,} tokens {case['planned']['ended']}, a tenth "
                f"more {case['longer']['ended']}",
                flush=True,
            )
            write_results(arguments.output, "planner", kept)
    print(f"{sum(map(is_right, kept['cases']))} of {len(kept['cases'])} as planned; written: {arguments.output}")


if __name__ == "__main__":
    main()
