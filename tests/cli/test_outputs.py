"""No command replaces a file that it did not write; what a killed one left is no obstacle."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.output import check_new_file, write_text

COMMANDS = {
    "tokenizer {}/texts --vocab-size 300 --output {}/new": ["new"],
    "plan --preset tiny --output {}/new": ["new"],
    "report {}/run --output {}/new": ["new"],
    "show local_window(1) --output {}/new.png": ["new.png"],
    "eval {}/run --output {}/new.json": ["new.json", "new.png"],
    "train --preset tiny --data {}/texts --output {}/new": ["new", "new/notes.txt"],
    "extend --model {}/run --data {}/texts --output {}/new": ["new", "new/notes.txt"],
    "bench --output {}/new": ["new", "new/bench.json", "new/page.md"],
    "profile {}/run --output {}/new": ["new", "new/trace.json"],
    "tune --dry-run --output {}/new": ["new", "new/dry-run.json"],
    "tune --output {}/new": ["new/tune.json", "new/report.txt"],
}


@pytest.mark.parametrize(("command", "name"), [(line, name) for line, names in COMMANDS.items() for name in names])
def test_what_is_there_stays_as_it_is(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "run").mkdir()
    precious = tmp_path / name
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as left:
        main(command.replace("{}", str(tmp_path)).split())
    assert left.value.code == 2
    assert str(precious if precious.parent == tmp_path else precious.parent) in capsys.readouterr().err
    assert precious.read_text() == "precious"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("left", ["new.json.part", ".new.json.part"])
def test_what_a_killed_command_left_is_no_obstacle(left: str, tmp_path: Path) -> None:
    (tmp_path / left).write_text("{")
    check_new_file(tmp_path / "new.json")
    write_text(tmp_path / "new.json", "{}")
    assert (tmp_path / "new.json").read_text() == "{}"
    assert not (tmp_path / ".new.json.part").exists()
