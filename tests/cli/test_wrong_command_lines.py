"""Wrong command lines: each gives a sentence that says what to do, exit code 2, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.wrong_command_lines import ROWS, Row, run_row
from cli.wrong_world import make_world
from dilated_attention_pytorch.benchmarks import run as bench_run
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.output import check_new_file, write_text
from dilated_attention_pytorch.training import extension, profiled_step
from dilated_attention_pytorch.training import run as training_run


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the command lines are about, in which none of them may change anything."""
    made = make_world(tmp_path_factory.mktemp("world"))
    before = _state(made)
    yield made
    assert _state(made) == before


@pytest.fixture
def _nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*run: Any, **options: Any) -> None:
        raise AssertionError("the run began")

    monkeypatch.setattr(training_run, "_train_and_report", forbidden)
    monkeypatch.setattr(extension, "_train_and_report", forbidden)
    monkeypatch.setattr(extension, "_measure", forbidden)
    monkeypatch.setattr(bench_run, "_time_cases", forbidden)
    monkeypatch.setattr(profiled_step, "profile", forbidden)


def _state(folder: Path) -> dict[str, tuple[int, int] | str]:
    """Size and time of the last change of every file."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


@pytest.mark.usefixtures("_nothing_begins")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.line} {row.toml}".strip())
def test_a_wrong_command_line_says_what_to_do_and_changes_nothing(
    row: Row, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, written, said = run_row(row, world, tmp_path, monkeypatch)
    assert code == 2
    assert row.message.replace("{}", str(world)) in said
    assert "Traceback" not in said
    assert written == ""
    assert not any(tmp_path.iterdir())


def test_the_folder_that_one_stands_in_is_refused_with_a_name_beside_it(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world / "taken")
    for command in (
        "train --preset tiny --data ../texts",
        "extend --model ../short --data ../texts",
        "bench",
        "profile ../finished",
    ):
        with pytest.raises(SystemExit) as left:
            main([*command.split(), "--output", "."])
        assert left.value.code == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "--output . exists and is not empty; nothing in it was changed." in said
        assert f"for example --output {world}/taken-2" in said


@pytest.mark.parametrize("left", ["new.json.part", ".new.json.part"])
def test_what_a_killed_command_left_is_no_obstacle(left: str, tmp_path: Path) -> None:
    (tmp_path / left).write_text("{")
    check_new_file(tmp_path / "new.json")
    write_text(tmp_path / "new.json", "{}")
    assert (tmp_path / "new.json").read_text() == "{}"
    assert not (tmp_path / ".new.json.part").exists()
