"""Background processes that take training steps while a step is measured, to share caches and memory bandwidth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.training.settings import TrainSettings

_BEGUN = "begun"
_TO_LEAVE = 10.0


@dataclass(slots=True)
class Company:
    """Processes that repeat the same small step from :meth:`begin` to :meth:`end`."""

    settings: TrainSettings
    """Settings of the step."""
    count: int
    """Number of processes."""
    threads: int
    """Number of threads of each process."""
    programs: list[subprocess.Popen[str]] = field(default_factory=list)

    def begin(self) -> None:
        """Start the processes unless they are running, and return when each has taken a step.

        Raises:
            RunError: a process failed.
        """
        if self.programs or not self.count:
            return
        told = {"settings": {**self.settings.to_dict(), "data": []}, "threads": self.threads}
        command = [sys.executable, "-m", "dilated_attention_pytorch.capacity.company"]
        for _ in range(self.count):
            program = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self.programs.append(program)
            assert program.stdin is not None
            program.stdin.write(json.dumps(told, default=str) + "\n")
            program.stdin.flush()
        for program in self.programs:
            assert program.stdout is not None
            if not any(line.strip() == _BEGUN for line in program.stdout):
                self.end()
                raise RunError(
                    f"a process that takes steps beside those that are measured failed: {' '.join(command)}; "
                    "plan for one process, or for a device by its name"
                )

    def end(self) -> None:
        """Stop the processes."""
        for program in self.programs:
            program.terminate()
        for program in self.programs:
            try:
                program.wait(_TO_LEAVE)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
            for pipe in (program.stdin, program.stdout):
                if pipe is not None:
                    pipe.close()
        self.programs.clear()


def main() -> None:
    """Take steps until standard input is closed."""
    import torch

    from dilated_attention_pytorch.training.profiled_step import measure_step

    told = json.loads(sys.stdin.readline())

    def leave_with_whoever_started_this() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=leave_with_whoever_started_this, daemon=True).start()
    given = told["settings"]
    if given["tokenizer"] is not None:
        given["tokenizer"] = Path(given["tokenizer"])
    settings = TrainSettings.from_dict(given)
    torch.set_num_threads(told["threads"])
    tokens = torch.zeros(settings.batch_size, settings.context_length, dtype=torch.int64)
    while True:
        measure_step(settings, {"input_ids": tokens, "labels": tokens}, "cpu")
        print(_BEGUN, flush=True)


if __name__ == "__main__":
    main()
