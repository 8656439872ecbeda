"""``dilated-attention bench``."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from dataclasses import dataclass

from dilated_attention_pytorch.benchmarks.settings import BenchSettings
from dilated_attention_pytorch.machine import require


@dataclass(kw_only=True, slots=True)
class Bench(BenchSettings):
    """Time attention on this machine against what else computes it.

    Every contestant is first held against the definition on the very shape that is timed next, its gradients too where
    they are timed: who is wrong gets a sentence and no time. Beside each time stand its spread, the operations a second
    of the pattern, how near that is to what this machine reaches in a matrix product in the same run, and the memory.

    One shape at rows of your own, with gradients: bench --shapes slide --rows 5000 --modes forward_backward

    What a change of the code moved: bench --output new --compare old/bench.json

    The earlier package's figures beside this machine's: bench --preset claims

    Does everything work, in seconds: bench --preset gpu --dry-run
    """

    def run_command(self) -> None:
        """Run it.

        Raises:
            RunError: see :func:`dilated_attention_pytorch.benchmarks.run.run`.
        """
        require("the benchmark", ("rich",), "bench")
        from rich.console import Console

        from dilated_attention_pytorch.benchmarks.run import run

        settings = BenchSettings(
            **{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(BenchSettings)}
        )
        console = Console() if sys.stdout.isatty() else Console(width=150)
        run(settings, console, shlex.join(["dilated-attention", *sys.argv[1:]]))
