"""The files for clusters start the command as it is, with settings that it takes. What runs them: `make cluster`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dilated_attention_pytorch.cli.train import defaults_of
from dilated_attention_pytorch.training.preflight import check_processes

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
START = ["-m", "dilated_attention_pytorch", "train"]


def _of_slurm() -> list[str]:
    line = re.search(r"^srun (.*?) &$", (CLUSTER / "slurm.sh").read_text().replace("\\\n", ""), re.M)
    assert line is not None
    return shlex.split(line[1])


def _of_kubernetes() -> list[str]:
    _, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


@pytest.mark.parametrize("words", [_of_slurm(), _of_kubernetes()], ids=["slurm", "kubernetes"])
def test_torchrun_is_told_to_start_the_run_again(words: list[str]) -> None:
    assert words[0] == "torchrun"
    start = words.index("-m")
    assert words[start : start + 3] == START
    told = dict(zip(words[start + 3 :: 2], words[start + 4 :: 2], strict=True))
    assert told.keys() == {"--config", "--output", "--resume"}
    assert told["--resume"] == "auto"
    assert any("max-restarts" in word for word in words[:start])


def test_the_configuration_is_one_that_two_nodes_of_eight_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = defaults_of(["--config", str(CLUSTER / "run.toml")])
    check_processes(settings, 16)
    assert (settings.context_parallel, settings.data_parallel, settings.keep_checkpoints) == (8, "fsdp", 3)


def test_pods_find_each_other_under_the_names_of_the_job() -> None:
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"] | {"selector": None} == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": None,
    }
    assert service["spec"]["selector"] == {"job-name": name}
    (port,) = pod["containers"][0]["ports"]
    assert f"--rdzv-endpoint={name}-0.{pod['subdomain']}:{port['containerPort']}" in _of_kubernetes()
    assert f"--nnodes={job['spec']['parallelism']}" in _of_kubernetes()
    assert f"--nproc-per-node={pod['containers'][0]['resources']['limits']['nvidia.com/gpu']}" in _of_kubernetes()


def test_processes_have_the_time_that_the_scheduler_gives_for_the_last_checkpoint() -> None:
    _, job = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    given = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    assert 30 < int(given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    script = (CLUSTER / "slurm.sh").read_text()
    (seconds,) = re.findall(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)$", script, re.M)
    (before_the_end,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", script, re.M)
    assert 30 < int(seconds) < int(before_the_end)
