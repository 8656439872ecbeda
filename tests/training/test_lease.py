"""One job at a time in a run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.training import RunError, lease, publishing, resume, train
from dilated_attention_pytorch.training.callbacks import Metrics
from dilated_attention_pytorch.training.checkpoint import latest_checkpoint
from dilated_attention_pytorch.training.lease import LEASE_NAME, Lease
from dilated_attention_pytorch.training.process import mark_of
from training.runs import quiet, stopped_run, tiny_settings, write_texts


def _leave(run: Path, **holder: Any) -> dict[str, Any]:
    """A lease that somebody has, or had."""
    mark = {**mark_of(os.getpid()).to_dict(), **holder}
    record = {"token": "theirs", "holder": mark, "since": "2026-01-01T00:00:00", "command": "train", "renewed": "0"}
    (run / LEASE_NAME).write_text(json.dumps(record))
    return record


def _ended() -> dict[str, Any]:
    """The mark of a process of this machine that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        return mark_of(process.pid).to_dict()


def test_a_second_job_on_a_run_folder_is_refused_and_told_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_settings(write_texts(tmp_path / "texts"))
    run = stopped_run(monkeypatch, settings, tmp_path / "run", 2).run
    before = sorted(path.name for path in run.rglob("*"))
    with Lease(run) as held:
        since = json.loads((run / LEASE_NAME).read_text())["since"]
        with pytest.raises(RunError, match=rf"in use: process {os.getpid()} on .* holds it since .*{since[:10]}"):
            resume(run, quiet())
        held.check()
    assert sorted(path.name for path in run.rglob("*")) == before
    assert resume(run, quiet()).step == 9
    assert not (run / LEASE_NAME).exists()


def test_two_jobs_that_begin_at_once_do_not_both_get_the_folder(tmp_path: Path) -> None:
    for _ in range(20):
        together, held, refused = threading.Barrier(4), [], []

        def begin(together: threading.Barrier = together, held: list[Any] = held, refused: list[Any] = refused) -> None:
            own = Lease(tmp_path)
            together.wait()
            try:
                held.append(own.__enter__())
            except RunError as error:
                refused.append(error)

        _leave(tmp_path, **_gone)
        jobs = [threading.Thread(target=begin) for _ in range(4)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        assert (len(held), len(refused)) == (1, 3)
        held[0].check()
        held[0].__exit__(None, None, None)
        assert not any(tmp_path.iterdir())


_gone = _ended()


@pytest.mark.parametrize(
    "holder",
    [
        _gone,
        {**mark_of(os.getpid()).to_dict(), "started": "1"},  # its number was given to this process
    ],
    ids=["gone", "another process has its number"],
)
def test_what_a_process_of_this_machine_held_that_has_ended_is_free_at_once(
    tmp_path: Path, holder: dict[str, Any]
) -> None:
    said: list[str] = []
    _leave(tmp_path, **holder)
    with Lease(tmp_path, said.append) as own:
        own.check()
    assert said == []
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("left", ["another host", "nothing", "no JSON"])
def test_a_lease_that_nobody_renews_is_taken_over_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.2)
    said: list[str] = []
    _leave(tmp_path, host="elsewhere", place="another", pid=7)
    if left != "another host":
        (tmp_path / LEASE_NAME).write_text("" if left == "nothing" else "{'")
    with Lease(tmp_path, said.append) as own:
        own.check()
    (line,) = said
    assert "process 7 on elsewhere" in line or left != "another host"


def test_a_lease_that_a_host_renews_whose_processes_cannot_be_seen_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 300.0)
    record = _leave(tmp_path, host="elsewhere", place="another", pid=7)

    def renew(line: str) -> None:
        (tmp_path / LEASE_NAME).write_text(json.dumps({**record, "renewed": "1"}))

    with pytest.raises(RunError, match=r"in use: process 7 on elsewhere .* end it \(kill 7 on elsewhere\)"):
        Lease(tmp_path, renew).__enter__()
    assert json.loads((tmp_path / LEASE_NAME).read_text())["renewed"] == "1"


def test_a_holder_renews_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.01)
    renewed = threading.Event()
    renew = Lease._renew

    def note(self: Lease, beats: int) -> None:
        renew(self, beats)
        if beats == 3:
            renewed.set()

    monkeypatch.setattr(Lease, "_renew", note)
    with Lease(tmp_path):
        first = json.loads((tmp_path / LEASE_NAME).read_text())["renewed"]
        assert renewed.wait(60)
        assert json.loads((tmp_path / LEASE_NAME).read_text())["renewed"] > first


def test_a_run_whose_lease_was_taken_ends_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Metrics.on_log
    run = tmp_path / "run"

    def write_and_lose(self: Metrics, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        write(self, args, state, control, logs, **options)
        if state.global_step == 6 and "loss" in logs:
            (run / LEASE_NAME).unlink()
            _leave(run, pid=7, host="elsewhere")

    monkeypatch.setattr(Metrics, "on_log", write_and_lose)
    with pytest.raises(RunError, match="was taken by another job \\(process 7 on elsewhere"):
        # Written at once: a checkpoint still being written when the lease is lost is not published.
        train(tiny_settings(write_texts(tmp_path / "texts"), async_checkpoints=False), run, quiet())
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.name == "checkpoint-4"
    assert json.loads((run / LEASE_NAME).read_text())["token"] == "theirs"
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 6


def test_a_checkpoint_that_is_being_written_when_the_lease_is_lost_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lost = tmp_path / "run", threading.Event()
    write, write_manifest = Metrics.on_log, publishing.write_manifest

    def write_and_lose(self: Metrics, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        write(self, args, state, control, logs, **options)
        if state.global_step == 6 and "loss" in logs:
            (run / LEASE_NAME).unlink()
            _leave(run, pid=7, host="elsewhere")
            lost.set()

    def write_when_lost(*args: Any, **options: Any) -> None:
        assert lost.wait(300)
        write_manifest(*args, **options)

    monkeypatch.setattr(Metrics, "on_log", write_and_lose)
    monkeypatch.setattr(publishing, "write_manifest", write_when_lost)
    with pytest.raises(RunError, match="was taken by another job \\(process 7 on elsewhere"):
        train(tiny_settings(write_texts(tmp_path / "texts")), run, quiet())
    assert latest_checkpoint(run) is None
    assert json.loads((run / LEASE_NAME).read_text())["token"] == "theirs"


def test_what_is_left_of_a_run_that_was_killed_before_it_wrote_anything_is_a_free_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    _leave(run, **_gone)
    assert train(tiny_settings(write_texts(tmp_path / "texts"), steps=2), run, quiet()).step == 2
