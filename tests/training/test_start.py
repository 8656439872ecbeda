"""The start of a run of several processes: who does not come, or was started otherwise, is named by all others."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dilated_attention_pytorch import parent
from dilated_attention_pytorch.parent import end_worker_with_trainer
from dilated_attention_pytorch.training import RunError, process_group
from dilated_attention_pytorch.training import run as training_run
from support.forked import run_forked
from support.processes import free_port
from training.killed_launches import kill_launcher, kill_trainer
from training.killed_runs import launch
from training.runs import small_settings
from training.unlike_ranks import start_unlike

SECONDS = 2.0


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Where two ranks meet; this process is the first one."""
    port = free_port()
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return port


def test_a_rank_that_does_not_come_is_named(port: int) -> None:
    began = time.monotonic()
    with pytest.raises(RunError, match=r"^starting: rank 1 does not answer: .*--timeout 2, while the ranks met"):
        process_group._join("gloo", SECONDS)
    assert time.monotonic() - began >= SECONDS


def test_the_rank_that_holds_the_store_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RunError, match=r"^starting: rank 0, which holds the store at which the ranks meet, does not"):
        process_group._join("gloo", SECONDS)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(RunError, match=r"^starting: torchrun's agent on the first host, which holds the store"):
        process_group._join("gloo", SECONDS)


def test_a_stopped_process_that_holds_the_store_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    read, write = os.pipe()
    holder = os.fork()
    if holder == 0:
        store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        os.kill(os.getpid(), signal.SIGSTOP)
    assert os.read(read, 9) == str(port).encode()
    try:
        with pytest.raises(RunError, match=r"^starting: rank 0, which holds the store .* no answer for 5 s"):
            process_group._join("gloo", SECONDS)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(read)
        os.close(write)


def test_a_rank_that_is_stopped_while_the_ranks_connect_is_named(port: int) -> None:
    def come_and_stop() -> None:
        dist.TCPStore("localhost", port, is_master=False).set("dilated_attention_pytorch/here/1", "")

    other = threading.Thread(target=come_and_stop)
    other.start()
    with pytest.raises(RunError, match=r"^starting: rank 1 does not answer: "):
        process_group._join("gloo", SECONDS)
    other.join()
    assert not dist.is_initialized()


def _stop_reading(rank: int) -> None:
    def stop(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    if rank == 1:
        training_run.read_data = stop


def test_a_rank_that_is_stopped_while_it_reads_the_text_is_named(texts: Path, tmp_path: Path) -> None:
    attempt = launch(small_settings(texts, timeout=6), tmp_path / "run", 2, tmp_path / "log", disturb=_stop_reading)
    attempt.ranks[0].join(300)
    ended, said = attempt.ranks[0].exitcode, attempt.said()
    attempt.end()
    assert ended == 1, said
    assert re.search(r"RunError: starting: rank 1 does not answer: the process was killed or stopped", said)
    assert not (tmp_path / "run").exists()


def test_ranks_that_are_started_otherwise_end_before_the_first_step_and_say_what_differs(
    texts: Path, tmp_path: Path
) -> None:
    """Settings, text and versions; data, context and tensor parallel, fsdp; begun and resumed."""
    ended = run_forked(start_unlike, tmp_path, texts, folder=tmp_path, ranks=2)
    assert ended["code"] == 0, ended["output"][-8000:]
    trials = [json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in range(2)]
    assert len(trials[0]) >= 18
    for (name, code, said, seconds), (_, *of_other) in zip(*trials, strict=True):
        assert (code, of_other[0]) == (2, 2), name
        assert said == of_other[1], name
        assert re.search(rf"the ranks were not started alike: rank 1 has {re.escape(name)}.*, rank 0 has ", said), said
        assert seconds < 60, name  # the timeout is 600
    assert not (tmp_path / "new").exists()


def test_ranks_end_with_a_launcher_that_is_killed_while_they_start(texts: Path, tmp_path: Path, figure: Any) -> None:
    seconds = [kill_launcher(texts, tmp_path / str(number), after=after) for number, after in enumerate((0.5, 3.0))]
    figure("launcher killed 0.5 s and 3 s after its start: seconds until its ranks had ended", seconds)


@pytest.mark.slow
def test_data_workers_end_with_a_trainer_that_is_killed_while_they_start(
    texts: Path, tmp_path: Path, figure: Any
) -> None:
    figure("trainer killed while its data workers start: seconds until they had ended", kill_trainer(texts, tmp_path))


def test_a_process_ends_with_its_parent_and_at_once_if_that_has_ended() -> None:
    read, write = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        if os.fork() == 0:
            end_worker_with_trainer(os.getppid(), 0)
            os.write(write, b"ready")
            while True:
                time.sleep(1)
        os.close(write)
        os.read(read, 5)
        os._exit(0)
    os.close(write)
    assert os.waitpid(trainer, 0)[1] == 0
    assert os.read(read, 1) == b""  # its child has ended, too
    os.close(read)
    late = os.fork()
    if late == 0:
        end_worker_with_trainer(trainer, 0)  # which is not its parent any more
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(late, 0)[1]) == 1


@pytest.mark.parametrize(
    ("command", "environment", "is_bound"),
    [
        (["python", "-m", "dilated_attention_pytorch", "train"], {"TORCHELASTIC_RUN_ID": "none"}, True),
        (["python", "-m", "dilated_attention_pytorch", "train"], {}, False),
        (["python", "train.py"], {"TORCHELASTIC_RUN_ID": "none"}, False),
    ],
)
def test_importing_the_package_binds_only_its_own_command_to_torchrun(
    command: list[str], environment: dict[str, str], is_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[bool] = []
    monkeypatch.setattr(parent, "end_with_parent", lambda: bound.append(True))
    parent.end_command_with_launcher(environment, command)
    assert bound == [True] * is_bound
