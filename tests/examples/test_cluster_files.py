"""The files for clusters start the commands as they are, with settings that they take. What trains: `make cluster`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dilated_attention_pytorch.cli.command import _parse
from dilated_attention_pytorch.cli.embed import Embed
from dilated_attention_pytorch.cli.train import defaults_of
from dilated_attention_pytorch.training.preflight import check_processes
from slides.made_slides import checkpoint, tiles_of, write_hdf5, write_slides
from support.processes import environment

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


def _of_nextflow(part: int, parts: int) -> str:
    """The script of the process, as Nextflow writes it."""
    script = re.search(r'"""\n(.*?)"""', (CLUSTER / "embed.nf").read_text(), re.S)
    assert script is not None
    values = {"features": "features", "checkpoint": "slide_encoder.pth", "part": part, "params.parts": parts}
    values["task.cpus"] = 1
    text = script[1].replace("\\\\", "\\").replace("\\$?", "$?")
    return re.sub(r"\$\{(.*?)\}", lambda found: str(values[found[1]]), text)


def _words(script: Path | str, program: str, folder: Path, **variables: str) -> list[str]:
    """The words with which a script starts a program."""
    (folder / program).write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/words\n')
    (folder / program).chmod(0o755)
    words = [str(script)] if isinstance(script, Path) else ["-c", script]
    path = f"{folder}:{os.environ['PATH']}"
    subprocess.run(["bash", *words], env={**os.environ, **variables, "PATH": path}, check=True, cwd=folder)
    return (folder / "words").read_text().splitlines()


def test_the_scripts_that_embed_start_a_command_that_is_one(tmp_path: Path) -> None:
    array = _words(CLUSTER / "embed_slurm.sh", "dilated-attention", tmp_path)
    command = _parse(array)
    assert isinstance(command, Embed)
    assert (command.slides, command.output) == ((Path("/shared/features_gigapath"),), Path("/shared/embeddings"))
    part = _parse(_words(_of_nextflow(3, 16), "dilated-attention", tmp_path))
    assert isinstance(part, Embed)
    assert (part.part, part.output, part.threads) == ("3/16", Path("embeddings"), 1)
    (tmp_path / "ray").write_text("#!/bin/sh\n")
    (tmp_path / "ray").chmod(0o755)
    *ray, last = _words(CLUSTER / "embed_ray.sh", "srun", tmp_path, HEAD="node1:6379", SLURM_NNODES="4")
    begin = ["ray", "symmetric-run", "--address", "node1:6379", "--min-nodes", "4", "--", "dilated-attention"]
    assert ray[: len(begin)] == begin
    on_ray = _parse([*ray[len(begin) :], last])
    assert isinstance(on_ray, Embed)
    assert (on_ray.engine, on_ray.ray_address) == ("ray", "node1:6379")


@pytest.mark.slow
def test_tasks_of_an_array_and_parts_of_nextflow_embed_every_slide(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path)
    write_slides(tmp_path / "features", [9, 30, 20, 4, 5])
    write_hdf5(tmp_path / "features" / "broken.h5", *tiles_of(9, 0))  # without a tile size
    paths = {"FEATURES": str(tmp_path / "features"), "CHECKPOINT": str(weights), "OUTPUT": str(tmp_path / "out")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    array = {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "2", "PATH": path, **paths}
    tasks = [
        subprocess.Popen(["bash", CLUSTER / "embed_slurm.sh"], env=environment(**array, SLURM_ARRAY_TASK_ID=task))
        for task in ("1", "2")
    ]
    assert [task.wait(120) for task in tasks] == [1, 1]  # a slide was skipped
    for part in (1, 2):
        script = ["bash", "-euc", _of_nextflow(part, 2)]
        subprocess.run(script, env=environment(PATH=path), check=True, cwd=tmp_path, timeout=120)
    skipped = [(tmp_path / f"skipped.{part}.txt").read_text() for part in (1, 2)]
    assert "broken.h5" in "".join(skipped)
    for folder in ("out", "embeddings"):
        assert len(list((tmp_path / folder).glob("*.h5"))) == 5
