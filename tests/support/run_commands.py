"""Runs command lines one after the other, each in a process forked from one that has imported PyTorch once.

    python run_commands.py < jobs.json > results.json

A line of the input is a list of jobs, and of the output the list of their results. A job has ``words``, those of a
program for Python or ``module:function`` with arguments, ``environment``, ``folder``, ``seconds`` and perhaps
``ranks``, a number of processes that run it together; its result the exit code, the seconds and the output.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Any

# Imported once, for all of them.
import accelerate  # noqa: F401
import matplotlib.figure  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import transformers.trainer  # noqa: F401

import dilated_attention_pytorch.cli.command
import dilated_attention_pytorch.training.model_evaluation
import dilated_attention_pytorch.training.trainer  # noqa: F401


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job in processes of its own; all that they started and left behind is killed, and they after its time."""
    begin = time.monotonic()
    variables = _of_ranks(job["ranks"]) if job.get("ranks") else [{}]
    children: dict[int, Path] = {}
    for number, of_rank in enumerate(variables):
        output = Path(job["folder"], f"output-{number}.txt" if of_rank else "output.txt")
        child = os.fork()
        if child == 0:
            os.setsid()
            os.environ.update(of_rank)
            _become(job, output)
        children[child] = output
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        while any(os.waitid(os.P_PID, child, options) is None for child in children):
            if time.monotonic() - begin > job["seconds"]:
                break
            time.sleep(0.01)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):  # one that has no session of its own yet
                os.killpg(child, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in children.values())
    return {"code": max(codes, key=abs), "seconds": time.monotonic() - begin, "output": text}


def _of_ranks(size: int) -> list[dict[str, str]]:
    """What torchrun tells ranks of one machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    alike = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "localhost"}
    return [alike | {"MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def _become(job: dict[str, Any], output: Path) -> None:
    """Run the program of ``job`` in this process and end it."""
    code = 1
    try:
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, 1)
        os.dup2(written, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(job["environment"])
        os.chdir(job["folder"])
        del sys.path[0]  # this file's folder
        program, *rest = job["words"]
        if ":" in program:
            module, _, name = program.partition(":")
            getattr(importlib.import_module(module), name)(*rest)
        elif program == "-m":
            sys.argv = rest
            _run_module(rest[0])
        else:
            sys.argv = job["words"]
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the process ends here, whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_module(name: str) -> None:
    """``python -m NAME``; multiprocessing finds it as the main module too, which it would not after runpy."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    assert spec is not None
    assert isinstance(spec.loader, InspectLoader)
    module = importlib.util.module_from_spec(spec)
    module.__name__ = "__main__"
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    sys.argv[0] = str(spec.origin)
    exec(spec.loader.get_code(spec.name), module.__dict__)


if __name__ == "__main__":
    gc.freeze()  # no process goes through what was imported
    for line in sys.stdin:
        print(json.dumps([run(job) for job in json.loads(line)]), flush=True)
