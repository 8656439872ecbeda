"""The command ``dilated-attention diagnose``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tyro

from dilated_attention_pytorch.training import RunError

_MOST_BYTES = 1 << 28
"""Bytes to read from the end of a log, where its errors are."""


@dataclass(kw_only=True, slots=True)
class Diagnose:
    """Show what takes a run's time and memory and which settings to change, or explain an error.

    For a run folder: time and memory by component, from its log, and changes in order of effect. For a log file or an
    error message: known failures with cause and remedy.

        dilated-attention diagnose runs/mine --step

        dilated-attention diagnose slurm-123.out
    """

    what: tyro.conf.Positional[str]
    """Run folder, log file, or the text of an error; - reads it from standard input."""
    step: bool = False
    """Measure a step of the run on its own data, and of the same run with other settings; takes a minute or more."""

    def run_command(self) -> None:
        """Print the diagnosis.

        Raises:
            RunError: the run or file does not exist, or holds no known failure.
        """
        from dilated_attention_pytorch.training import preflight

        preflight.check_packages("training")
        from dilated_attention_pytorch.training.diagnosis import diagnose_run, failure_in_words, in_words
        from dilated_attention_pytorch.training.failures import known_failures

        path = Path(self.what)
        if self.what != "-" and path.is_dir():
            _print(in_words(diagnose_run(path, step=self.step)))
            return
        if self.step:
            raise RunError(f"--step measures a run, and {self.what} is not a run folder; leave it out")
        text = self._text(path)
        found = known_failures(text)
        if not found:
            last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
            raise RunError(
                f"no known failure is in the {len(text.splitlines())} lines; the last is {last[:200]!r}. "
                "With several ranks, pass the log of the one that ended first"
            )
        for failure in found:
            _print(failure_in_words(failure))

    def _text(self, path: Path) -> str:
        if self.what == "-":
            return sys.stdin.buffer.read().decode("utf-8", errors="replace")
        if len(self.what) < 4096 and path.is_file():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _MOST_BYTES))
                return file.read().decode("utf-8", errors="replace")
        if len(self.what.split()) < 2:
            raise RunError(
                f"diagnose {self.what}: there is no such run folder or file; name one, or quote the words of an error"
            )
        return self.what


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)
