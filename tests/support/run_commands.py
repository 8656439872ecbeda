"""Runs command lines one after the other, each in a process forked from one that has imported PyTorch once.

    python run_commands.py < jobs.json > results.json

A job has ``words``, ``environment``, ``folder`` and ``seconds``; its result the exit code, the seconds and the output.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import runpy
import signal
import sys
import time
import traceback
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Any

# Imported once, for all of them.
import accelerate  # noqa: F401
import matplotlib.figure  # noqa: F401
import transformers.trainer  # noqa: F401

import dilated_attention_pytorch.cli.command
import dilated_attention_pytorch.training.model_evaluation
import dilated_attention_pytorch.training.trainer  # noqa: F401


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job in a process of its own, which is killed with all that it started after its time."""
    output, begin = Path(job["folder"], "output.txt"), time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        _become(job, output)
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() - begin > job["seconds"]:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.01)
    _, status = os.waitpid(child, 0)
    text = output.read_text(encoding="utf-8", errors="replace")
    return {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - begin, "output": text}


def _become(job: dict[str, Any], output: Path) -> None:
    """Run the program of ``job`` in this process and end it."""
    code = 1
    try:
        written = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(written, 1)
        os.dup2(written, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(job["environment"])
        os.chdir(job["folder"])
        del sys.path[0]  # this file's folder
        program, *rest = job["words"]
        if program == "-m":
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
    print(json.dumps([run(job) for job in json.load(sys.stdin)]))
