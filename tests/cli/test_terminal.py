"""The command prints text as it is, in every encoding, and Ctrl-C is one sentence from the first import on."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from rich.console import Console

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.interrupt import leave_on_interrupt
from dilated_attention_pytorch.progress import Pace, counted, progress_bar, spinner
from slides.made_slides import checkpoint, write_slides
from training.runs import write_texts

MARKED = "a [red]x[/] [b] :smile: é"
TINY = "train --preset tiny --steps 2 --log-steps 1 --eval-steps 2 --save-steps 2 --sample-length 20"

# The first import of a package is interrupted; as extension modules do, it makes another error of it.
INTERRUPTED = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except BaseException:
    raise ImportError("needs another package")
"""
# A shell that starts the tests in the background has them ignore SIGINT.
HEEDED = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"


@pytest.mark.parametrize("package", ["torch", pytest.param("tyro", marks=pytest.mark.slow), "rich"])
def test_ctrl_c_during_an_import_is_one_sentence(package: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HEEDED)
    (tmp_path / f"{package}.py").write_text(INTERRUPTED)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, "-m", "dilated_attention_pytorch", "show", "local_window(1)"]
    done = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ndilated-attention: stopped\n")


def test_a_program_that_imports_the_package_keeps_its_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    changed = []
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    monkeypatch.setattr(signal, "signal", lambda number, handler: changed.append(number))
    for words in (["python", "program.py", "dilated-attention"], ["python", "-m", "pytest"], ["python"]):
        leave_on_interrupt(words)
    assert not changed
    leave_on_interrupt(["python", "-m", "dilated_attention_pytorch", "train"])
    assert changed == [signal.SIGINT]


def test_brackets_and_colons_of_paths_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / MARKED
    write_slides(folder / "features", [4])
    texts = write_texts(folder / "texts")
    for command, output in (
        (f"embed|{folder}/features|--checkpoint|{checkpoint(folder)}|--output|{folder}/out", f"written: {folder}/out"),
        (f"show|local_window(1)|--output|{folder}/pattern.png", f"written: {folder}/pattern.png"),
        (f"{TINY.replace(' ', '|')}|--data|{texts}|--output|{folder}/run", f"{folder}/run': model.safetensors"),
        (f"report|{folder}/run|--output|{folder}/report.html", f"written: {folder}/report.html"),
        (f"eval|{folder}/run|--windows|1|--output|{folder}/eval.json", f"written: {folder}/eval.json and {folder}/"),
    ):
        main(command.split("|"))
        assert output in capsys.readouterr().out


@pytest.mark.parametrize(("encoding", "command"), [("ascii", "embed"), ("latin-1", "train")])
def test_a_terminal_that_lacks_a_character_gets_its_number(
    encoding: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, written = tmp_path / "€", io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    if command == "embed":
        write_slides(folder, [4])
        main(["embed", str(folder), "--checkpoint", str(checkpoint(tmp_path)), "--output", str(folder / "out")])
    else:
        main([*TINY.split(), "--data", str(write_texts(folder)), "--output", str(folder / "out")])
    sys.stdout.flush()
    assert "\\u20ac/out" in written.getvalue().decode(encoding)


def test_a_folder_of_text_with_a_name_that_no_settings_file_can_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path / os.fsdecode(b"\xff"))
    for flag in ("--data", "--cache", "--tokenizer"):
        with pytest.raises(SystemExit) as left:
            main([*TINY.split(), flag, str(texts), "--output", str(tmp_path / "run")])
        assert left.value.code == 2
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert f"{flag[2:]} must be UTF-8 text, got" in said
    assert not (tmp_path / "run").exists()


class Full(types.ModuleType):
    def __getattr__(self, name: str) -> None:
        raise MemoryError


def test_memory_that_is_used_up_by_imports_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dilated_attention_pytorch.cli.command", Full("command"))
    with pytest.raises(SystemExit) as left:
        main(["train"])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("dilated-attention: the memory is used up before the command begins")


def test_a_bar_of_tiles_is_drawn_before_and_after_their_number_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100, _environ={})
    with progress_bar(console, "tiles"):
        pass  # measuring the memory takes seconds
    with progress_bar(console, "tiles") as show:
        show("1 of 2 slides", 500, 1000)
    assert "500 of 1,000 tiles" in drawn.getvalue()
    monkeypatch.setattr("dilated_attention_pytorch.progress.LINE_SECONDS", 0.0)
    plain = io.StringIO()
    with progress_bar(Console(file=plain, width=100), "tiles") as show:
        show("1 of 2 slides", 500, 1000)
    assert plain.getvalue() == "1 of 2 slides, 500 of 1,000 tiles\n"


def test_without_a_terminal_lines_come_after_ten_seconds_and_then_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("dilated_attention_pytorch.progress.time.monotonic", lambda: now)
    pace, due = Pace(), []
    for second in range(5000):
        now = float(second)
        if pace.is_due():
            due.append(second)
    assert due[:3] == [10, 20, 30]
    between = [after - before for before, after in itertools.pairwise(due)]
    assert between == sorted(between)
    assert 90 <= between[-1] <= 100


def test_a_loop_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dilated_attention_pytorch.progress.LINE_SECONDS", 0.0)
    plain = io.StringIO()
    assert list(counted([7, 8], "reading", "texts", Console(file=plain, width=100))) == [7, 8]
    assert plain.getvalue() == "reading, 0 of 2 texts\nreading, 1 of 2 texts\n"


def test_what_cannot_be_counted_shows_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, plain = io.StringIO(), io.StringIO()
    with spinner("drawing", Console(file=drawn, force_terminal=True, width=100, _environ={})):
        pass
    assert "drawing" in drawn.getvalue()
    monkeypatch.setattr("dilated_attention_pytorch.progress.LINE_SECONDS", 0.01)
    with spinner("drawing", Console(file=plain, width=100)):
        while plain.getvalue().count("\n") < 2:
            time.sleep(0.01)
    lines = plain.getvalue()
    assert set(lines.splitlines()) == {"drawing, 0 s so far"}
    time.sleep(0.05)
    assert plain.getvalue() == lines
