"""Programs of tests that are forked from a process that has imported PyTorch, transformers and this package once."""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.processes import TESTS, environment

BESIDE = ThreadPoolExecutor(1)
"""``BESIDE.submit(run_forked, ...)`` runs a program beside the test."""


@functools.cache
def _server() -> subprocess.Popen[str]:
    environ = environment(TRITON_INTERPRET="0")
    environ["PYTHONPATH"] += f":{TESTS.parent}"
    command = [sys.executable, str(TESTS / "support" / "run_commands.py")]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    atexit.register(server.communicate)
    return server


def run_jobs(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of jobs, which run one after the other; see ``run_commands.py``."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(jobs, default=str), file=server.stdin, flush=True)
    results: list[dict[str, Any]] = json.loads(server.stdout.readline())
    return results


def run_forked(
    program: Path | str | Callable[..., None],
    *args: Any,
    folder: Path,
    ranks: int = 0,
    seconds: float = 1200.0,
    **told: str,
) -> dict[str, Any]:
    """The result of a program; with ``ranks``, of as many processes.

    Args:
        program: a file, the first word for Python, or a function of a module, which gets ``args`` as JSON has them.
        folder: where it runs, and writes what it prints.
        told: more for its environment, in which ranks have what torchrun tells them.
    """
    name = f"{program.__module__}:{program.__name__}" if callable(program) else program
    job = {"words": [name, *args], "folder": folder, "ranks": ranks, "seconds": seconds, "environment": told}
    (result,) = run_jobs([job])
    return result
