"""The command ``dilated-attention bench``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from dilated_attention_pytorch.benchmarks.settings import BenchSettings
from dilated_attention_pytorch.machine import require


@dataclass(kw_only=True, slots=True)
class Bench(BenchSettings):
    """Time attention on this machine beside other implementations.

    Every implementation is first checked against the definition on the shape to be timed, including gradients if they
    are timed: one with wrong results is reported and not timed. Reported for each: time and its spread, operations per
    second of the pattern, and memory.

    One shape at one length, with gradients:

        dilated-attention bench --shapes slide --sequence-lengths 5000 --modes forward_backward

    A smoke test, in seconds:

        dilated-attention bench --preset gpu --dry-run
    """

    rows: Annotated[tuple[int, ...], tyro.conf.arg(name="sequence-lengths")] = ()
    contestants: Annotated[tuple[str, ...], tyro.conf.arg(name="implementations")] = ()

    def run_command(self) -> None:
        """Run the benchmark.

        Raises:
            RunError: see :func:`dilated_attention_pytorch.benchmarks.run.run`.
        """
        require("the benchmark", ("rich",), "bench")
        from dilated_attention_pytorch.benchmarks.run import run
        from dilated_attention_pytorch.terminal import plain_console

        run(self, plain_console(width=150), shlex.join(["dilated-attention", *sys.argv[1:]]))
