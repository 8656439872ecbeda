"""Programs that tests start: their environment, and cleanup so that no process outlives the test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import dilated_attention_pytorch

TESTS = Path(__file__).parents[1]


def environment(**variables: str) -> dict[str, str]:
    """Environment of a single-threaded program that imports this package and modules of tests."""
    source = Path(dilated_attention_pytorch.__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(source), str(TESTS), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}


def torchrun(num_processes: int, *options: str) -> list[str]:
    """The beginning of a command that starts ``num_processes`` ranks of a program on this machine."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return [sys.executable, *launch, *options]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def run_whole(
    command: Sequence[str], seconds: float, *, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. After ``seconds`` it is stopped with all processes that it started.

    Raises:
        subprocess.TimeoutExpired: the program took longer than ``seconds``.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=cwd, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:  # interrupts too: the terminal does not send them to another session
            end_whole(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def in_triton(*command: str) -> str:
    """Output of a Python program in which Triton compiles, with the warnings as errors."""
    variables = environment(TRITON_INTERPRET="0")
    command = (sys.executable, "-W", "error", *command)
    done = subprocess.run(command, cwd=TESTS, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Fork(NamedTuple):
    """A process that was forked from this one, and what it writes."""

    pid: int
    stdout: IO[str]
    stderr: IO[str]

    def ended(self) -> subprocess.CompletedProcess[str]:
        """Its exit code and what it wrote, at its end."""
        with self.stdout, self.stderr:
            out, err = self.stdout.read(), self.stderr.read()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return subprocess.CompletedProcess([], code, out, err)


def fork(function: Callable[[], Any]) -> Fork:
    """Run a function in a fork of this process, which has imported what it needs; it ends as a program would."""
    (out, of_out), (err, of_err) = os.pipe(), os.pipe()
    if not (pid := os.fork()):
        code = 1
        try:
            os.dup2(of_out, 1)
            os.dup2(of_err, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            # A shell that starts the tests in the background has them ignore it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            function()
            code = 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        except BaseException:  # noqa: BLE001 - the process ends here, whatever happened
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(of_out)
    os.close(of_err)
    return Fork(pid, open(out), open(err))


def end_whole(process: subprocess.Popen[str]) -> None:
    """Stop a program that has its own session, with all processes that it started."""
    # The workers of torchrun have their own sessions. On SIGTERM, torchrun stops them, and kills them after 30 s.
    _send(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=60)
    _send(process.pid, signal.SIGKILL)
    process.wait()


def _send(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
