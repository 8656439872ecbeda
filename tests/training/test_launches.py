"""Runs that torchrun starts: what is left when it, or one of its processes, is killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from dilated_attention_pytorch.training import process_group, train
from dilated_attention_pytorch.training.faults import cost_of_faults, read_faults
from dilated_attention_pytorch.training.lease import Lease
from dilated_attention_pytorch.training.process_identity import ProcessId, TorchrunLaunch, launch_record
from support.forked import run_forked
from support.processes import TESTS, end_whole, environment, run_whole, torchrun
from training import failing_rank
from training.runs import assert_same_weights, quiet, tiny_settings, write_texts

HANG_SECONDS = 1200.0


def _command(num_processes: int, words: list[str], *options: str) -> list[str]:
    return [*torchrun(num_processes, *options), str(TESTS / "training" / "failing_rank.py"), *words]


def _environment() -> dict[str, str]:
    return environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def _words(texts: Path, output: Path) -> list[str]:
    """The command line of :func:`tiny_settings`; what fails at step 6 finds the checkpoint of step 4 complete."""
    words = (
        "train --preset tiny --steps 9 --save-steps 4 --log-steps 2 --eval-steps 5 --sample-length 20 --device cpu "
        "--threads 1 --precision float32 --model.dropout 0.1 --no-async-checkpoints"
    )
    return [*words.split(), "--data", str(texts), "--output", str(output)]


def test_a_run_that_torchrun_starts_again_goes_on_and_ends_bit_for_bit_where_it_would_have(
    tmp_path: Path, figure: Any
) -> None:
    texts = write_texts(tmp_path / "texts")
    whole = train(tiny_settings(texts, threads=1, device="cpu", precision="float32"), tmp_path / "whole", quiet())
    # It is killed before its first checkpoint, and after it.
    words = ["dies", "0", "2,6", *_words(texts, tmp_path / "run")]
    ended = run_forked(failing_rank.launch, 2, *words, folder=tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert ended["code"] == 0, ended["output"]
    assert (tmp_path / "reached-2").exists()
    assert (tmp_path / "reached-6").exists()
    assert ended["output"].count("going on after step 4") == 1
    down = [
        (fault["after"], fault["step"], fault["down_seconds"]) for fault in read_faults(tmp_path / "run", "resumed")
    ]
    assert [entry[:2] for entry in down] == [("killed", 0), ("killed", 4)]
    figure("killed under torchrun --max-restarts: step gone on from, seconds until computing again", down)
    assert_same_weights(tmp_path / "run", whole.run)


MEETING = """
import sys
from dilated_attention_pytorch.training.distribution import leaving_together
from dilated_attention_pytorch.training.process_group import joined
with leaving_together(), joined("gloo", float(sys.argv[1])):
    print("met")
"""


def test_ranks_that_are_started_again_do_not_meet_those_of_before_in_the_store_of_their_agent(tmp_path: Path) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    script = tmp_path / "meeting.py"
    script.write_text(MEETING)

    def said(ranks: int, timeout: int) -> str:
        told = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2"}
        told |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        output: str = run_forked(script, str(timeout), folder=tmp_path, ranks=ranks, **told)["output"]
        return output

    assert said(2, 120) == "met\n" * 2
    alone = said(1, 2)
    assert "starting: rank 1 does not answer" in alone, alone
    assert "--timeout 2, while the ranks met" in alone
    assert said(2, 120) == "met\n" * 2


def test_any_error_of_a_call_in_a_thread_is_raised_at_once_where_it_is_awaited() -> None:
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        process_group._within(60.0, lambda: 1 / 0)
    assert time.monotonic() - begun < 30
    with pytest.raises(TimeoutError, match=r"no answer for 0\.1 s"):
        process_group._within(0.1, lambda: time.sleep(1))


def test_a_launch_knows_the_runs_that_it_began_and_no_others() -> None:
    agent, other = ProcessId("node1", 7, "place", "100"), ProcessId("node2", 7, "elsewhere", "200")
    record = launch_record(
        [TorchrunLaunch("none", agent), TorchrunLaunch("none", agent), TorchrunLaunch("none", other)]
    )
    assert record == {"name": "none", "agents": [agent.to_dict(), other.to_dict()]}
    assert TorchrunLaunch("none", agent).is_in(record)
    assert TorchrunLaunch("none", other).is_in(record)
    # Launches are called alike where nobody names them: the agent's process tells them apart.
    for started in ("101", ""):
        assert not TorchrunLaunch("none", dataclasses.replace(agent, started=started)).is_in(record)
    assert not TorchrunLaunch("run2", agent).is_in(record)
    assert not TorchrunLaunch("none", agent).is_in(None)
    assert launch_record([None, None]) is None


def test_ranks_end_when_their_agent_is_killed_and_the_folder_is_free_at_once(tmp_path: Path) -> None:
    words = ["waits", "1", "6", *_words(write_texts(tmp_path / "texts"), tmp_path / "run")]
    with subprocess.Popen(
        _command(2, words),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        start_new_session=True,
        text=True,
    ) as agent:
        try:
            reached = tmp_path / "reached-6"
            _wait_until(reached.exists, agent)
            ranks = [
                int(reached.read_text()),
                json.loads((tmp_path / "run" / "lease.json").read_text())["holder"]["pid"],
            ]
            assert all(_is_running(rank) for rank in ranks)
            os.kill(agent.pid, signal.SIGKILL)
            _wait_until(lambda: not any(_is_running(rank) for rank in ranks))
        finally:
            end_whole(agent)
    with Lease(tmp_path / "run", lambda line: None) as lease:
        lease.check()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]


@pytest.mark.slow
def test_a_run_in_which_a_rank_stands_still_begins_again_and_comes_to_its_end(tmp_path: Path, figure: Any) -> None:
    """More than half a minute: torchrun waits so long for a process that does not end when it is told to."""
    words = ["waits", "1", "6", *_words(write_texts(tmp_path / "texts"), tmp_path / "run"), "--eval-windows", "1"]
    ended = run_whole(_command(2, [*words, "--timeout", "6"], "--max-restarts", "2"), HANG_SECONDS, env=_environment())
    assert ended.returncode == 0, ended.stderr
    (failed,), (resumed,) = (read_faults(tmp_path / "run", kind) for kind in ("failed", "resumed"))
    assert failed["reason"].startswith("training: rank 1 is alive, but takes no part"), failed
    assert (resumed["step"], resumed["processes"]) == (4, 2)
    assert (tmp_path / "run" / "checkpoint-9").is_dir()
    figure("rank 1 of 2 stands still in step 7: seconds lost", cost_of_faults(tmp_path / "run").seconds_lost)


@pytest.mark.slow
def test_a_run_that_loses_a_node_goes_on_without_it(tmp_path: Path, figure: Any) -> None:
    """Two agents stand for two nodes; the one with rank 1 is killed with all that it has started."""
    words = ["waits", "1", "6", *_words(write_texts(tmp_path / "texts"), tmp_path / "run"), "--eval-windows", "1"]
    # Neither node holds the store at which agents meet: with the one that does, torchrun ends all of them.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts",
        "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{store.port}", "--rdzv-id", "run", "--rdzv-conf",
        "is_host=0,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2",
        str(TESTS / "training" / "failing_rank.py"), *words,
    ]  # fmt: skip
    with open(tmp_path / "said", "w") as said, contextlib.ExitStack() as nodes:
        agents = [
            nodes.enter_context(
                subprocess.Popen(command, stdout=said, stderr=said, env=_environment(), start_new_session=True)
            )
            for _ in range(2)
        ]
        try:
            reached = tmp_path / "reached-6"
            _wait_until(reached.exists, *agents)
            rank = int(reached.read_text())
            lost = next(agent for agent in agents if agent.pid == _parent(rank))
            (left,) = (agent for agent in agents if agent is not lost)
            os.kill(lost.pid, signal.SIGKILL)
            os.kill(rank, signal.SIGKILL)
            assert left.wait(HANG_SECONDS) == 0, (tmp_path / "said").read_text()
        finally:
            for agent in agents:
                end_whole(agent)
    assert "the run began with 2 processes and goes on with 1" in (tmp_path / "said").read_text()
    resumed = read_faults(tmp_path / "run", "resumed")[-1]
    assert (resumed["step"], resumed["processes"]) == (4, 1)
    assert (tmp_path / "run" / "checkpoint-9").is_dir()
    figure("a lost node of two: seconds lost", cost_of_faults(tmp_path / "run").seconds_lost)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _wait_until(holds: Callable[[], bool], *agents: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not holds():
        assert all(agent.poll() is None for agent in agents)
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.1)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
