"""The step of one process whose weights others share, traced in a program of its own: see :mod:`.traced_step`.

torch's own distribution splits the weights, among processes that are not there: a process group that sends nothing.
A program can have one group only, so this is started beside the one that asks.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path

from dilated_attention_pytorch.errors import RunError

from .settings import TrainSettings


def split_parts(settings: TrainSettings, num_processes: int) -> tuple[dict[str, int], int]:
    """:func:`.step_bytes.highest` for one of ``num_processes`` that split the weights, in another program.

    Args:
        settings: of the run; this process's rows are ``batch_size`` times ``context_length``.
        num_processes: how many there are.

    Raises:
        RunError: the program fails.
    """
    given = {**settings.to_dict(), "data": [], "parallel": "told"}
    told = json.dumps({"settings": given, "processes": num_processes}, default=str)
    command = [sys.executable, "-m", "dilated_attention_pytorch.training.split_step"]
    run = subprocess.run(command, input=told, capture_output=True, text=True, check=False)
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RunError(
            f"the memory of a step with split weights cannot be counted: {' '.join(command)} failed ({last[0]}); "
            "report this with the settings of the run"
        )
    parts, attention = json.loads(run.stdout.splitlines()[-1])
    return parts, attention


def main() -> None:
    """Read settings from standard input, write the parts to standard output."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from .attention_bytes import attention_bytes
    from .distribution import Distribution
    from .step_bytes import highest, moments

    told = json.loads(sys.stdin.read())
    settings = TrainSettings.from_dict(told["settings"])
    if settings.tokenizer is not None:
        settings = dataclasses.replace(settings, tokenizer=Path(settings.tokenizer))
    # A group that sends nothing has no time to wait for.
    warnings.filterwarnings("ignore", message="Set timeout is now only supported")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=told["processes"])
    distribution = Distribution(settings, "cpu")
    # Meshes are made before tensors are fake: they are looked into.
    _ = distribution.rows_mesh
    print(json.dumps(highest(moments(settings, distribution), attention_bytes(settings))))


if __name__ == "__main__":
    main()
