"""A subprocess that traces the step of one process with sharded weights, see :mod:`.traced_step`.

torch's own distribution shards the weights over a fake process group that communicates nothing.
A program has only one default process group, hence the subprocess.
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


def split_parts(settings: TrainSettings, num_processes: int, of_others: int) -> tuple[dict[str, int], int]:
    """:func:`.step_bytes.highest` for one of ``num_processes`` with sharded weights, in a subprocess.

    Args:
        settings: settings of the run; this process's rows are ``batch_size`` times ``context_length``.
        num_processes: number of processes.
        of_others: bytes that are there beside what attention takes by itself, while it is computed.

    Raises:
        RunError: the subprocess failed.
    """
    given = {**settings.to_dict(), "data": [], "parallel": "told"}
    told = json.dumps({"settings": given, "processes": num_processes, "of_others": of_others}, default=str)
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
    """Read settings from standard input, write the categories to standard output."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from .attention_bytes import attention_bytes
    from .distribution import Distribution
    from .step_bytes import highest, moments

    told = json.loads(sys.stdin.read())
    settings = TrainSettings.from_dict(told["settings"])
    if settings.tokenizer is not None:
        settings = dataclasses.replace(settings, tokenizer=Path(settings.tokenizer))
    # The fake group has no timeout.
    warnings.filterwarnings("ignore", message="Set timeout is now only supported")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=told["processes"])
    distribution = Distribution(settings, "cpu")
    # Create meshes before fake tensors are enabled, since their values are read.
    _ = distribution.rows_mesh
    own = {name: size + told["of_others"] for name, size in attention_bytes(settings).items()}
    print(json.dumps(highest(moments(settings, distribution), own)))


if __name__ == "__main__":
    main()
