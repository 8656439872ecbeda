"""Measure several processes of this machine, run as separate programs: their communication, and steps they share.

    python -m torch.distributed.run ... -m dilated_attention_pytorch.estimate.processes DEVICE [STEPS]

STEPS is a JSON list with the settings of every step; without it the processes time all-reduces.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training.settings import TrainSettings

_LARGE, _SMALL = 1 << 21, 64
"""Number of float32 values in an all-reduce."""
_REPEATS = 5
_STEPS = 3
_LEAST_SECONDS = 60.0
_TO_LEAVE = 10.0


def exchange_rates(device: str, seconds: float) -> list[float]:
    """Bytes per second that one of two processes sends while it receives as many, and additional seconds per message.

    Args:
        device: "cpu" or "cuda".
        seconds: time limit of the processes, at least a minute; infinity is no limit.

    Raises:
        RunError: the processes cannot be started, or exceed the limit.
    """
    return _printed_by(2, [device], seconds)


def shared_step_seconds(
    steps: Sequence[TrainSettings], num_processes: int, device: str, threads: int, seconds: float
) -> list[float]:
    """Seconds of steps that processes share as the settings say, of the slowest process.

    Args:
        steps: settings of each step, with its model and batch.
        num_processes: number of processes, all on this machine.
        device: "cpu" or "cuda".
        threads: threads per process.
        seconds: see :func:`exchange_rates`.

    Returns:
        For each step, the seconds of its gradients and of its optimizer.

    Raises:
        RunError: the processes cannot be started, or exceed the limit.
    """
    values = [{**one.to_dict(), "data": [], "threads": threads} for one in steps]
    return _printed_by(num_processes, [device, json.dumps(values, default=str)], seconds)


def _printed_by(num_processes: int, arguments: list[str], seconds: float) -> list[float]:
    """Start the processes and return the numbers that the first one prints."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes), "-m"]
    command = [sys.executable, *launch, __name__]
    most = max(_LEAST_SECONDS, seconds)
    run = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = run.communicate(timeout=None if math.isinf(most) else most)
    except subprocess.TimeoutExpired as error:
        # The launcher ends its processes on SIGTERM, but cannot on SIGKILL.
        run.terminate()
        try:
            run.wait(_TO_LEAVE)
        except subprocess.TimeoutExpired:
            run.kill()
        raise RunError(
            f"{num_processes} processes took more than {most:.0f} s for a few small steps; measure again when less "
            "runs on this machine"
        ) from error
    lines = [line for line in out.splitlines() if line.startswith("[")]
    if run.returncode or not lines:
        last = err.strip().splitlines()[-1:] or ["no message"]
        raise RunError(f"{num_processes} processes could not be measured: {' '.join(command)} failed ({last[0]})")
    numbers: list[float] = json.loads(lines[-1])
    return numbers


def _seconds_of_a_sum(numbers: int, device: str) -> float:
    """Minimum time of a few all-reduces over the processes."""
    import torch
    import torch.distributed as dist

    operand, least = torch.zeros(numbers, device=device), float("inf")
    for _ in range(_REPEATS):
        dist.barrier()
        start = _now(device)
        dist.all_reduce(operand)
        least = min(least, _now(device) - start)
    return least


def step_seconds(settings: TrainSettings, device: str) -> list[float]:
    """Median seconds of a few steps of a new model after a warm-up step: of its gradients, and of its optimizer.

    Processes of a group share the steps as the settings say, and the slowest of them is returned. torch.compile and
    float8 are ignored.
    """
    import torch
    import torch.distributed as dist

    from dilated_attention_pytorch.models import LongNetForCausalLM
    from dilated_attention_pytorch.training.autocast import autocast
    from dilated_attention_pytorch.training.distribution import Distribution
    from dilated_attention_pytorch.training.optimizer import build_optimizer

    is_shared = dist.is_initialized()
    model = LongNetForCausalLM.from_longnet_config(settings.model)
    torch.nn.Module.to(model, device).train()
    tokens = torch.zeros(settings.batch_size, settings.context_length, dtype=torch.int64, device=device)
    rows = {"input_ids": tokens, "labels": tokens}
    wrapped: torch.nn.Module = model
    if is_shared:
        distribution = Distribution(settings, device)
        distribution.apply(model)
        wrapped, rows = distribution.wrap(model), distribution.rows(rows)
    optimizer = build_optimizer(model, settings)
    seconds = []
    for _ in range(1 + _STEPS):
        if is_shared:
            dist.barrier()
        times = [_now(device)]
        with autocast(settings.precision, device):
            loss = wrapped(**rows, num_items_in_batch=tokens.numel(), skip_logits=True).loss
        loss.backward()
        del loss
        times.append(_now(device))
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        times.append(_now(device))
        seconds.append((times[1] - times[0], times[2] - times[1]))
    mine = [statistics.median(column) for column in zip(*seconds[1:], strict=True)]
    if not is_shared:
        return mine
    of_ranks: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return max(of_ranks, key=sum)


def _now(device: str) -> float:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """In each process: time the steps or all-reduces; the first process prints the results."""
    import torch
    import torch.distributed as dist

    device, *steps = sys.argv[1:]
    if device == "cuda":
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
    else:
        dist.init_process_group("gloo")
    if steps:
        numbers: list[float] = []
        for values in json.loads(steps[0]):
            values["tokenizer"] = None if values["tokenizer"] is None else Path(values["tokenizer"])
            settings = TrainSettings.from_dict(values)
            torch.set_num_threads(settings.threads)
            numbers += step_seconds(settings, device)
    else:
        torch.set_num_threads(1)
        _seconds_of_a_sum(_SMALL, device)
        small, large = _seconds_of_a_sum(_SMALL, device), _seconds_of_a_sum(_LARGE, device)
        # Each of the two processes sends one half of the operand twice.
        numbers = [4 * _LARGE / max(large - small, 1e-9), small / 2]
    if dist.get_rank() == 0:
        print(json.dumps(numbers), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
