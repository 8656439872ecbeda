"""The cluster files run as far as one machine goes: `make cluster`.

A Slurm job of two nodes, played by two agents here, is told to end, saves a checkpoint and queues itself again; started
again, it comes to its end. The Kubernetes manifest is validated against the published schemas, and TorchX makes its
request for two schedulers.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
STEPS = 300
SECONDS = 300.0

SCONTROL = """#!/usr/bin/env bash
case "$1" in
show) printf 'localhost\\nlocalhost\\n' ;;
requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""
SRUN = """#!/usr/bin/env bash
for node in $(seq "$SLURM_NNODES"); do "$@" & tasks+=($!); done
trap 'kill -TERM "${tasks[@]}"' TERM
status=0
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2> /dev/null; do wait "$task" || status=$?; done
done
exit "$status"
"""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def _slurm_job(folder: Path, restarts: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_RESTART_COUNT": str(restarts),
        "CONFIG": str(folder / "run.toml"),
        "OUTPUT": str(folder / "run"),
        "PROCESSES": "1",
        "PORT": str(_free_port()),
        "REQUEUED": str(folder / "requeued"),
        "OMP_NUM_THREADS": "1",
    }
    output = (folder / f"slurm-{restarts}.out").open("wb")
    return subprocess.Popen(
        ["bash", str(CLUSTER / "slurm.sh")], cwd=ROOT, env=environment, stdout=output, stderr=output
    )


def _steps(folder: Path) -> list[int]:
    metrics = folder / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [entry["step"] for entry in map(json.loads, lines) if "bits_per_byte" in entry]


def slurm(folder: Path) -> None:
    """Two starts of one job.

    Raises:
        AssertionError: it did not go on, or what it printed says why.
    """
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    texts = folder / "texts"
    texts.mkdir()
    for number in range(23):
        (texts / f"{number}.txt").write_text("".join(f"{number} and {line}\n" for line in range(99)))
    (folder / "run.toml").write_text(
        f'preset = "tiny"\ndata = ["{texts}"]\nsteps = {STEPS}\nsave_steps = 1000\nlog_steps = 1\neval_steps = 1000\n'
    )
    job = _slurm_job(folder, 0)
    deadline = time.monotonic() + SECONDS
    while len(_steps(folder)) < 5 and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    status = job.wait(SECONDS)
    printed = (folder / "slurm-0.out").read_text()
    assert status == 128 + signal.SIGTERM, (status, printed)
    assert (folder / "requeued").read_text() == "7\n", printed
    assert list((folder / "run").glob("checkpoint-*")), printed
    status = _slurm_job(folder, 1).wait(SECONDS)
    printed = (folder / "slurm-1.out").read_text()
    assert status == 0, printed
    assert "going on after step" in printed
    assert _steps(folder) == list(range(1, STEPS + 1))
    assert (folder / "run" / "model.safetensors").exists()
    print(f"slurm.sh: told to end, queued again, all of {STEPS} steps once")


def manifest() -> None:
    """The Kubernetes manifest against the schemas."""
    subprocess.run(["kubernetes-validate", "--strict", str(CLUSTER / "kubernetes.yaml")], check=True)


def torchx() -> None:
    """A request for each scheduler."""
    component = f"{CLUSTER / 'torchx_train.py'}:train"
    for scheduler in ("local_cwd", "slurm"):
        made = subprocess.run(
            [
                "torchx",
                "run",
                "--dryrun",
                "--scheduler",
                scheduler,
                component,
                "--config",
                "run.toml",
                "--output",
                "run",
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        assert "-m dilated_attention_pytorch train --config run.toml --output run --resume auto" in made.stdout
        print(f"torchx, {scheduler}: {made.stdout.count('dilated_attention_pytorch train')} requests")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        slurm(Path(scratch))
    manifest()
    torchx()
