"""Memory that data parallelism keeps in every process, and whether its losses equal those of one process.

    python -m benchmarks.sharded_states

A small LongNet with AdamW in float32 takes 20 steps on the same windows: in one process, then in two processes over
gloo with DDP, FSDP2 and every stage of DeepSpeed's ZeRO, with offloading to the CPU and to files. Counted are the float
tensors that a process holds when its optimizer begins the last step, each storage once: weights, gradients, moments,
and buffers of the engine.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import TrainSettings, train
from dilated_attention_pytorch.training.callbacks import read_metrics
from dilated_attention_pytorch.training.distribution import leaving_together
from dilated_attention_pytorch.training.offload_files import load_operator

from .study import Study, run

FILES = "ZeRO-3, optimizer and weights in files"
CASES: dict[str, dict[str, Any]] = {
    "DDP": {"data_parallel": "ddp"},
    "FSDP2": {"data_parallel": "fsdp"},
    "ZeRO-1": {"data_parallel": "zero1"},
    "ZeRO-2": {"data_parallel": "zero2"},
    "ZeRO-3": {"data_parallel": "zero3"},
    "ZeRO-3, optimizer on the CPU": {"data_parallel": "zero3", "offload": "optimizer"},
    "ZeRO-3, optimizer and weights on the CPU": {"data_parallel": "zero3", "offload": "parameters"},
    FILES: {"data_parallel": "zero3", "offload": "nvme"},
}
LOSS_TOLERANCE = 1e-3  # nats
PART = "SHARDED_STATES_PART"
"""Set in the processes of a case: their arguments are a folder and the names of cases."""


def settings_of(texts: Path, **changes: Any) -> TrainSettings:
    """Settings of a run that takes seconds, with 2 windows per step."""
    model = LongNetConfig(
        embed_dim=128, num_layers=4, num_heads=4, ffn_dim=256, segment_lengths=(32, 128), dilation_rates=(1, 4)
    )
    given: dict[str, Any] = {
        "model": model,
        "data": (texts,),
        "context_length": 128,
        "steps": 20,
        "batch_size": 2,
        "threads": 1,
        "optimizer": "adamw",
        "precision": "float32",
        "device": "cpu",
        "log_steps": 1,
        "eval_steps": 20,
        "eval_windows": 1,
        "final_eval_windows": 1,
        "quarter_files": 1,
        "save_steps": 20,
        "sample_length": 1,
    }
    return TrainSettings(**{**given, **changes})


def float_bytes() -> int:
    """Bytes of the float tensors of this process, each storage once."""
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        # Check the class itself: some objects compute their __class__.
        if issubclass(type(found), torch.Tensor) and found.is_floating_point() and found.device.type == "cpu":
            local = found.to_local() if isinstance(found, DTensor) else found
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def run_cases(folder: Path, names: list[str]) -> None:
    """The runs of this process; the first process writes the bytes that each of them held."""
    counted: list[int] = []
    before = [float_bytes()]
    register_optimizer_step_pre_hook(lambda *_: counted.append(float_bytes() - before[0]))
    for name in names:
        counted.clear()
        changes = dict(CASES.get(name, {}))
        if changes.get("offload") == "nvme":
            changes["offload_folder"] = folder
        size = 1 if name in CASES else 2
        train(settings_of(folder / "texts", batch_size=size, **changes), folder / name, Console(quiet=True))
        held = [max(counted[len(counted) // 2 :])]
        if dist.is_initialized():
            all_held: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(all_held, held[0])
            held = all_held
        if not dist.is_initialized() or dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(held))
        gc.collect()
        before[0] = float_bytes()


def compared(names: list[str]) -> list[dict[str, Any]]:
    """Run all cases in separate processes, and compare them.

    Raises:
        SystemExit: a run fails, or its losses differ.
    """
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        for number in range(23):
            lines = [f"def f{number}_{line}(x): return x * {line % 7} + {number}\n" for line in range(9 + 2 * number)]
            (folder / "texts" / f"module{number}.py").write_text("".join(lines))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        for launch, listed in (([], ["one process"]), (launcher, names)):
            script = ["-m", "benchmarks.sharded_states", str(folder), *listed]
            subprocess.run([sys.executable, *launch, *script], check=True, env={**os.environ, PART: "1"})
        expected = _losses(folder / "one process")
        parameters = settings_of(folder / "texts").model.num_parameters
        for case in ("one process", *names):
            furthest = max(abs(a - b) for a, b in zip(expected, _losses(folder / case), strict=True))
            if not furthest <= LOSS_TOLERANCE:
                raise SystemExit(f"not published: a loss of {case} is {furthest} nats from that of one process")
            held = json.loads((folder / f"{case}.json").read_text())
            results.append(
                {
                    "case": case,
                    "bytes_per_weight": [value / parameters for value in held],
                    "largest_difference": furthest,
                }
            )
            figures = ", ".join(f"{value / parameters:.2f}" for value in held)
            print(f"{case:>42}: {figures} bytes a weight, losses within {furthest:.1e} nats", flush=True)
    return results


def _losses(run: Path) -> list[float]:
    return [entry["bits_per_byte"] * math.log(2) for entry in read_metrics(run) if "bits_per_byte" in entry]


def measure(given: Study) -> dict[str, Any]:
    """Every case; the one with files is left out where DeepSpeed cannot write them."""
    names = ["DDP"] if given.tiny else list(CASES)
    if FILES in names:
        try:
            load_operator()
        except RunError as error:
            print(f"left out: {FILES}: {error}")
            names.remove(FILES)
    return {"settings": settings_of(Path("texts")).to_dict() | {"data": []}, "results": compared(names)}


if __name__ == "__main__":
    if PART in os.environ:
        torch.set_num_threads(1)
        with leaving_together():
            run_cases(Path(sys.argv[1]), sys.argv[2:])
    else:
        run(Study, measure, text=__doc__, name="sharded_states", group="training", tiny={})
