"""The command ``dilated-attention profile``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dilated_attention_pytorch.benchmarks.settings import ProfileSettings
from dilated_attention_pytorch.machine import require


@dataclass(kw_only=True, slots=True)
class Profile(ProfileSettings):
    """Profile one call of attention: time by kernel, launches, memory, a trace.

    The output folder gets trace.json (for https://ui.perfetto.dev or chrome://tracing), memory.png (memory in
    use during the call, with forward and backward marked) and profile.json (the table).

    The paper's pattern with gradients: profile --shape paper --rows 32768 --backward --dtype bfloat16

    The same call by another implementation: profile --contestant "published route" --output runs/theirs
    """

    def run_command(self) -> None:
        """Run the profiler.

        Raises:
            RunError: see :func:`dilated_attention_pytorch.benchmarks.profiling.profile_call`.
        """
        require("profiling", ("rich",), "bench")
        from dilated_attention_pytorch.benchmarks.profiling import profile_call
        from dilated_attention_pytorch.terminal import plain_console

        names = [entry.name for entry in dataclasses.fields(ProfileSettings)]
        settings = ProfileSettings(**{name: getattr(self, name) for name in names})
        profile_call(settings, plain_console(width=150))
