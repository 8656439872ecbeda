"""One job at a time in a run folder."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import SoftFileLease
from transformers import Trainer

from dilated_attention_pytorch.training import RunError, lease, resume, train
from dilated_attention_pytorch.training import checkpoint as checkpoint_module
from dilated_attention_pytorch.training.callbacks import Metrics
from dilated_attention_pytorch.training.checkpoint import STAGING, file_names, latest_checkpoint, staging_folder
from dilated_attention_pytorch.training.lease import HOLDER_NAME, LEASE_NAME, Lease
from dilated_attention_pytorch.training.lifecycle import OpenRun
from dilated_attention_pytorch.training.run_trainer import RunTrainer
from support.forked import BESIDE, run_forked
from training import overtaken_job
from training.runs import quiet, stopped_run, tiny_settings, write_texts


def _leave(run: Path, *, pid: int, host: str = "elsewhere", start: int = 1) -> None:
    """The lease that a process has, or had."""
    lines = [
        "filelock/2",
        f"pid={pid}",
        f"host={host}",
        "mode=lease",
        "token=theirs",
        f"duration={lease.LEASE_SECONDS}",
    ]
    (run / LEASE_NAME).write_text("\n".join([*lines, f"start={start}", ""]))
    mark = {"host": host, "pid": pid, "place": "another", "started": str(start)}
    record = {"token": "theirs", "holder": mark, "since": "2026-01-01T00:00:00", "command": "train"}
    (run / HOLDER_NAME).write_text(json.dumps(record))


def _token(run: Path) -> str:
    return json.loads((run / HOLDER_NAME).read_text())["token"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of this machine in a lease."""
    with SoftFileLease(tmp_path_factory.mktemp("lease") / "lock") as own:
        assert own.owner is not None
        return own.owner.hostname


@pytest.fixture(scope="module")
def ended() -> int:
    """The number of a process of this machine that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def test_a_second_job_on_a_run_folder_is_refused_and_told_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_settings(write_texts(tmp_path / "texts"))
    run = stopped_run(monkeypatch, settings, tmp_path / "run", 2).run
    before = sorted(path.name for path in run.rglob("*"))
    with Lease(run) as held:
        since = json.loads((run / HOLDER_NAME).read_text())["since"]
        with pytest.raises(RunError, match=rf"in use: process {os.getpid()} on .* holds it since .*{since[:10]}"):
            resume(run, quiet())
        held.check()
    assert sorted(path.name for path in run.rglob("*")) == before
    assert resume(run, quiet()).step == 9
    assert not list(run.glob("lease.*"))


def test_two_jobs_that_begin_at_once_do_not_both_get_the_folder(tmp_path: Path, here: str, ended: int) -> None:
    for _ in range(20):
        together, held, refused = threading.Barrier(4), [], []

        def begin(together: threading.Barrier = together, held: list[Any] = held, refused: list[Any] = refused) -> None:
            own = Lease(tmp_path)
            together.wait()
            try:
                held.append(own.__enter__())
            except RunError as error:
                refused.append(error)

        _leave(tmp_path, host=here, pid=ended)
        jobs = [threading.Thread(target=begin) for _ in range(4)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        assert (len(held), len(refused)) == (1, 3)
        held[0].check()
        held[0].__exit__(None, None, None)
        assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("is_reused", [False, True], ids=["gone", "another process has its number"])
def test_what_a_process_of_this_machine_held_that_has_ended_is_free_at_once(
    tmp_path: Path, here: str, ended: int, is_reused: bool
) -> None:
    said: list[str] = []
    _leave(tmp_path, host=here, pid=os.getpid() if is_reused else ended)
    with Lease(tmp_path, said.append) as own:
        own.check()
    assert said == []
    assert not any(tmp_path.iterdir())


def test_a_stopped_process_of_this_machine_keeps_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.2)
    holder = os.fork()
    if holder == 0:
        with Lease(tmp_path):
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(holder, os.WUNTRACED)[1])
    try:
        time.sleep(0.5)
        with pytest.raises(RunError, match=rf"in use: process {holder} on .* end it \(kill {holder} on"):
            Lease(tmp_path).__enter__()
    finally:
        os.kill(holder, signal.SIGCONT)
        ended = os.waitpid(holder, 0)[1]
    assert ended == 0
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("left", ["another host", "nothing", "no record"])
def test_a_lease_that_nobody_renews_is_taken_over_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.2)
    said: list[str] = []
    _leave(tmp_path, pid=7)
    if left != "another host":
        (tmp_path / LEASE_NAME).write_text("" if left == "nothing" else "{'")
        (tmp_path / HOLDER_NAME).write_text("" if left == "nothing" else "{'")
    with Lease(tmp_path, said.append) as own:
        own.check()
    (line,) = said
    assert "process 7 on elsewhere" in line or left != "another host"
    assert not any(tmp_path.iterdir())


def test_a_lease_that_a_host_renews_whose_processes_cannot_be_seen_is_left_alone(tmp_path: Path) -> None:
    _leave(tmp_path, pid=7)
    before = (tmp_path / LEASE_NAME).stat()

    def renew(line: str) -> None:
        threading.Timer(0.5, os.utime, [tmp_path / LEASE_NAME]).start()

    with pytest.raises(RunError, match=r"in use: process 7 on elsewhere .* end it \(kill 7 on elsewhere\)"):
        Lease(tmp_path, renew).__enter__()
    assert (tmp_path / LEASE_NAME).stat().st_ino == before.st_ino
    assert _token(tmp_path) == "theirs"


def test_a_holder_renews_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.3)
    with Lease(tmp_path) as own:
        first, deadline = (tmp_path / LEASE_NAME).stat().st_mtime_ns, time.monotonic() + 60
        while (tmp_path / LEASE_NAME).stat().st_mtime_ns == first:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        own.check()


@pytest.mark.parametrize("name", [LEASE_NAME, HOLDER_NAME])
def test_a_folder_in_the_place_of_a_lease_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(RunError, match=r"cannot be held \(Is a directory\): .* remove .*lease\.\* if no job"):
        Lease(tmp_path).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def _lose_at_6(monkeypatch: pytest.MonkeyPatch, run: Path) -> threading.Event:
    """Have another job take the lease when the metrics of step 6 are written, and the event set."""
    write, lost = Metrics.on_log, threading.Event()

    def write_and_lose(self: Metrics, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        write(self, args, state, control, logs, **options)
        if state.global_step == 6 and "loss" in logs:
            (run / LEASE_NAME).unlink()
            _leave(run, pid=7)
            lost.set()

    monkeypatch.setattr(Metrics, "on_log", write_and_lose)
    return lost


def test_a_run_whose_lease_was_taken_ends_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    _lose_at_6(monkeypatch, run)
    with pytest.raises(RunError, match="was taken by another job \\(process 7 on elsewhere"):
        # Written at once: a checkpoint still being written when the lease is lost is not published.
        train(tiny_settings(write_texts(tmp_path / "texts"), async_checkpoints=False), run, quiet())
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.name == "checkpoint-4"
    assert _token(run) == "theirs"
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 6


def test_a_checkpoint_that_is_being_written_when_the_lease_is_lost_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write_manifest = tmp_path / "run", checkpoint_module.write_manifest
    lost = _lose_at_6(monkeypatch, run)

    def write_when_lost(*args: Any, **options: Any) -> None:
        assert lost.wait(300)
        write_manifest(*args, **options)

    monkeypatch.setattr(checkpoint_module, "write_manifest", write_when_lost)
    with pytest.raises(RunError, match="was taken by another job \\(process 7 on elsewhere"):
        train(tiny_settings(write_texts(tmp_path / "texts")), run, quiet())
    assert latest_checkpoint(run) is None
    assert _token(run) == "theirs"


def test_what_is_left_of_a_run_that_was_killed_before_it_wrote_anything_is_a_free_folder(
    tmp_path: Path, here: str, ended: int
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    _leave(run, host=here, pid=ended)
    assert train(tiny_settings(write_texts(tmp_path / "texts"), steps=2), run, quiet()).step == 2


def _write_checkpoint(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    for name in file_names(1):
        (folder / name).write_text(text)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _moments(patch: pytest.MonkeyPatch, overtake: Any, moment: int) -> Iterator[int]:
    """Count what publishing does, and call ``overtake`` just before the ``moment``-th deed."""
    count = itertools.count()

    def before(deed: Any) -> Any:
        def do(*args: Any, **options: Any) -> Any:
            if next(count) == moment:
                overtake()
            return deed(*args, **options)

        return do

    for name in ("clear", "sync", "write_manifest"):
        patch.setattr(checkpoint_module, name, before(getattr(checkpoint_module, name)))
    patch.setattr(checkpoint_module.os, "rename", before(os.rename))
    patch.setattr(Lease, "check", before(Lease.check))
    return count


@pytest.mark.parametrize(("is_replacing", "has_same"), [(False, False), (True, False), (True, True)])
def test_a_job_that_is_overtaken_at_any_moment_of_publishing_removes_nothing_of_its_successor(
    tmp_path: Path, is_replacing: bool, has_same: bool
) -> None:
    """Its successor goes on from the checkpoint before, and has published some and staged one when it wakes up."""
    told: list[str] = []
    for moment in itertools.count():
        run = tmp_path / str(moment)
        for step in (40, 50, *([60] if is_replacing else [])):
            _write_checkpoint(run / f"checkpoint-{step}", "before")
        theirs: dict[str, bytes] = {}

        def overtake(run: Path = run, theirs: dict[str, bytes] = theirs) -> None:
            (run / LEASE_NAME).unlink()
            _leave(run, pid=7)
            for path in (run / "checkpoint-40", run / "checkpoint-50", run / "checkpoint-60"):
                shutil.rmtree(path, ignore_errors=True)
            for step in (60, 70, 80, 90) if has_same else (70, 80, 90):
                _write_checkpoint(run / f"checkpoint-{step}", "theirs")
            _write_checkpoint(staging_folder(run, "theirs") / "checkpoint-100", "theirs")
            theirs |= {name: found for name, found in _contents(run).items() if found == b"theirs"}

        with pytest.MonkeyPatch.context() as patch, Lease(run) as own:
            count = _moments(patch, overtake, moment)
            staged = staging_folder(run, own.token) / "checkpoint-60"
            _write_checkpoint(staged, "ours")
            options: dict[str, Any] = {"run_id": "run", "processes": 1, "keep": 2, "rejected": ["checkpoint-60"]}
            try:
                checkpoint_module.publish(staged, run, check=own.check, **options)
            except (RunError, OSError) as error:
                told.append(str(error))
        if next(count) <= moment:
            break
        assert theirs.items() <= _contents(run).items()
    assert sum("was taken by another job (process 7 on elsewhere" in words for words in told) >= 4
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-50", "checkpoint-60"}
    assert (run / "checkpoint-60" / "model.safetensors").read_text() == "ours"


def test_a_job_that_wakes_up_inside_publishing_leaves_its_successors_checkpoints_and_staging_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after the rename, as if on another host; its successor is writing a checkpoint when it wakes up."""
    texts, run = write_texts(tmp_path / "texts"), tmp_path / "run"
    words = "train --preset tiny --steps 9 --save-steps 2 --log-steps 2 --device cpu --threads 1 --keep-checkpoints 1"
    words += f" --data {texts} --output {run}"
    job = BESIDE.submit(run_forked, overtaken_job.train_and_stop, 4, words, folder=tmp_path, seconds=300)
    stopped, stage = tmp_path / "stopped", Trainer._save_checkpoint

    def stage_and_wake(self: Trainer, *args: Any) -> None:
        stage(self, *args)
        if self.state.global_step == 8:
            before = _contents(self.run.staging), _contents(run / "checkpoint-6")
            os.kill(int(stopped.read_text()), signal.SIGCONT)
            job.result()
            assert (_contents(self.run.staging), _contents(run / "checkpoint-6")) == before
            assert all(before)

    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(Trainer, "_save_checkpoint", stage_and_wake)
    while not stopped.exists():
        assert not job.done(), job.result()
        time.sleep(0.05)
    assert resume(run, quiet()).step == 9
    ended = job.result()
    assert ended["code"] == 2
    assert "was taken by another job" in ended["output"]
    assert "Traceback" not in ended["output"]
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-9"}
    assert not list(run.glob(f"{STAGING}*"))


def test_a_run_whose_folder_is_gone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write_texts(tmp_path / "texts")
    for step, save_steps in ((6, 4), (4, 5)):  # at an entry of the losses, and while a checkpoint is written
        run, take = tmp_path / f"run-{step}", RunTrainer.training_step

        def take_and_remove(self: RunTrainer, *args: Any, at: int = step, take: Any = take, **options: Any) -> Any:
            if self.state.global_step == at:
                self.run.folder.rename(self.run.folder.with_name("elsewhere"))
            return take(self, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(RunTrainer, "training_step", take_and_remove)
            with pytest.raises(RunError, match=r"run-\d is gone: it was removed or renamed"):
                train(tiny_settings(texts, save_steps=save_steps), run, quiet())
        assert not run.exists()
        shutil.rmtree(tmp_path / "elsewhere")


def test_what_a_killed_publishing_left_is_removed_when_the_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, run = tiny_settings(write_texts(tmp_path / "texts"), keep_checkpoints=1), tmp_path / "run"

    def be_killed(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "_remove", lambda paths, check: None)
        patch.setattr(OpenRun, "save_finished", be_killed)
        with pytest.raises(KeyboardInterrupt):
            train(settings, run, quiet())
    assert len(list(run.glob("checkpoint-*"))) == 3
    _write_checkpoint(staging_folder(run, "killed") / "checkpoint-9", "half")
    assert resume(run, quiet()).step == 9
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-9"}
    assert not list(run.glob(f"{STAGING}*"))
