"""How fast two processes of this machine exchange numbers over gloo, measured in a program of their own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time

from dilated_attention_pytorch.errors import RunError

_LARGE, _SMALL = 1 << 21, 64
"""Numbers in float32 of a sum over the processes."""
_REPEATS = 5
_LEAST_SECONDS = 60.0
_TO_LEAVE = 10.0


def exchange_rates(seconds: float) -> list[float]:
    """Bytes a second that a process sends while it receives as many, and seconds of a message beside its bytes.

    Args:
        seconds: that the processes may take, a minute at least; infinite for as long as they take.

    Raises:
        RunError: the processes cannot be started, or take longer.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [sys.executable, *launch, "dilated_attention_pytorch.capacity.link_probe"]
    most = max(_LEAST_SECONDS, seconds)
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = run.communicate(timeout=None if math.isinf(most) else most)
    except subprocess.TimeoutExpired as error:
        # The launcher ends its processes when it is asked to end, not when it is killed.
        run.terminate()
        try:
            run.wait(_TO_LEAVE)
        except subprocess.TimeoutExpired:
            run.kill()
        raise RunError(
            f"two processes took more than {most:.0f} s to exchange a few megabytes; measure again when less runs on "
            "this machine"
        ) from error
    lines = [line for line in out.splitlines() if line.startswith("[")]
    if run.returncode or not lines:
        last = err.strip().splitlines()[-1:] or ["no message"]
        raise RunError(f"two processes could not exchange anything: {' '.join(command)} failed ({last[0]})")
    rates: list[float] = json.loads(lines[-1])
    return rates


def _seconds(numbers: int) -> float:
    """The least of some sums over two processes."""
    import torch
    import torch.distributed as dist

    operand, least = torch.zeros(numbers), float("inf")
    for _ in range(_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(operand)
        least = min(least, time.perf_counter() - start)
    return least


def main() -> None:
    """In each of the two processes: add numbers up, and have the first say how long that takes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _seconds(_SMALL)
    small, large = _seconds(_SMALL), _seconds(_LARGE)
    if dist.get_rank() == 0:
        # Of two processes each sends one half of the operand twice.
        print(json.dumps([4 * _LARGE / max(large - small, 1e-9), small / 2]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
