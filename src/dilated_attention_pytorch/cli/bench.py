"""The command ``dilated-attention bench``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

from dilated_attention_pytorch.benchmarks.settings import BenchSettings
from dilated_attention_pytorch.machine import require


@dataclass(kw_only=True, slots=True)
class Bench(BenchSettings):
    """Benchmark attention on this machine against other implementations.

    Every contestant is first checked against the definition on the shape to be timed, including gradients if they are
    timed: a contestant with wrong results is reported and not timed. Reported for each: time and its spread, operations
    per second of the pattern, and memory.

    One shape with a given number of rows, with gradients: bench --shapes slide --rows 5000 --modes forward_backward

    Smoke test, in seconds: bench --preset gpu --dry-run
    """

    def run_command(self) -> None:
        """Run the benchmark.

        Raises:
            RunError: see :func:`dilated_attention_pytorch.benchmarks.run.run`.
        """
        require("the benchmark", ("rich",), "bench")
        from dilated_attention_pytorch.benchmarks.run import run
        from dilated_attention_pytorch.terminal import plain_console

        run(self, plain_console(width=150), shlex.join(["dilated-attention", *sys.argv[1:]]))
