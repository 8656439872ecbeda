"""Help, other names and misspelt names: what they say, that every flag is there, and that they come without torch.

``python tests/cli/test_help.py`` writes ``help.json`` anew from the commands' classes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from dilated_attention_pytorch.cli import help_page, main, names, words
from dilated_attention_pytorch.cli.command import COMMANDS, _parse, defaults_for
from support.described_commands import describe

FILE = Path(help_page.__file__).with_name("help.json")
MOST_LINES = {**dict.fromkeys(COMMANDS, 62), "train": 80, "": 45}
TYRO_FLAG = re.compile(r"(--[a-z][a-z0-9-]*(?:\.[a-z0-9-]+)*)")


def written() -> str:
    """The file: a line for every flag."""
    return re.sub(r', (?=\{"name"|"[a-z]+": \{"summary")', ",\n", json.dumps(describe(), ensure_ascii=False)) + "\n"


def printed(*line: str, code: int = 0) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(line)
    assert (left.value.code or 0) == code
    return out.getvalue() + err.getvalue()


def flags_of(command: str) -> set[str]:
    told = help_page.descriptions()[command]["flags"]
    return {flag["name"] for flag in told} | {help_page.negated(flag["name"]) for flag in told if flag["is_switch"]}


def test_the_file_is_what_the_commands_say() -> None:
    assert FILE.read_text(encoding="utf-8") == written(), "after a change of a command: python tests/cli/test_help.py"


@pytest.mark.parametrize("command", COMMANDS)
def test_all_flags_of_the_parser_are_on_the_page_of_all(command: str) -> None:
    default = defaults_for(command, ["--preset", "hybrid"])
    parsed = io.StringIO()
    with contextlib.redirect_stdout(parsed), pytest.raises(SystemExit):
        tyro.cli(COMMANDS[command], args=["--help"], **({} if default is None else {"default": default}))
    heads = [line.strip("│| ") for line in parsed.getvalue().partition("options")[2].splitlines()]
    of_tyro = {flag for head in heads if head.startswith("-") for flag in TYRO_FLAG.findall(head.split("  ")[0])}
    assert flags_of(command) == of_tyro - {"--help", "--given", "--no-given"}
    page = printed(command, "--help-all")
    for flag in help_page.descriptions()[command]["flags"]:
        assert flag["help"], flag["name"]
        assert re.search(rf"^  {re.escape(help_page._left(flag))}( |$)", page, re.MULTILINE), flag["name"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_page_is_short_and_plain(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    line = (command,) if command else ()
    page, every = printed(*line, "--help"), printed(*line, "--help-all")
    assert len(page.splitlines()) <= MOST_LINES[command]
    for text in (page, every):
        assert not re.search(r":\w+:`|``|\(default: \)|\{None\}|--given", text)
        assert "examples:\n  " in text
        assert all(len(row) <= 90 for row in text.splitlines())
    assert ("--help-all shows every flag" in page) == (len(page) < len(every)) or not command


def test_the_flags_that_one_begins_with_come_first_and_required_ones_are_in_the_usage() -> None:
    page = printed("train", "--help")
    assert (
        page.index("--output PATH") < page.index("--data PATH") < page.index("--steps N") < page.index("--save-steps")
    )
    assert "--adam-beta2" not in page
    assert (
        printed("embed", "--help").splitlines()[0].startswith("usage: dilated-attention embed SLIDES ... --checkpoint")
    )


def test_a_switch_that_is_on_is_shown_with_both_of_its_names() -> None:
    page = " ".join(printed("train", "--help-all").split())
    assert "--[no-]async-checkpoints Write a checkpoint while training goes on" in page
    assert "--model.[no-]tie-embeddings Use the embedding table as the output matrix. (default: yes)" in page


def test_the_examples_are_command_lines(tmp_path: Path) -> None:
    import shlex

    for told in help_page.descriptions().values():
        for example in told["examples"]:
            program, *line = shlex.split(example["line"].partition(" < ")[0])
            assert program == "dilated-attention"
            _parse(["train"] if "--resume" in line else line)


def test_a_preset_before_help_shows_its_numbers() -> None:
    assert "(default: 32768)" in printed("train", "--preset", "gpu", "--help")
    assert "(default: 32768)" in printed("plan", "--preset=gpu", "--help")
    assert "(default: 8192)" in printed("train", "--help")


def test_other_names_mean_our_flags() -> None:
    for command, others in names.OTHER_NAMES.items():
        known = flags_of(command)
        assert not known & others.keys(), command
        assert {ours[0] for ours in others.values()} <= known, command
        assert not (known | others.keys()) & names.REFUSED.get(command, {}).keys(), command
    assert set(names.OTHER_COMMANDS.values()) <= COMMANDS.keys()
    assert not names.OTHER_COMMANDS.keys() & COMMANDS.keys()


def test_a_line_with_other_names_is_the_line_with_ours() -> None:
    theirs = (
        "train --max-steps 7 --lr=1e-4 --seq-len 512 --bf16 --gradient_accumulation_steps 2 --gradient-checkpointing"
    )
    ours = (
        "train --steps 7 --learning-rate=1e-4 --context-length 512 --precision bfloat16 --gradient-accumulation 2 "
        "--model.gradient-checkpointing"
    )
    assert words.in_our_names(theirs.split()) == ours.split()
    assert _parse(theirs.split()) == _parse(ours.split())


def test_a_setting_that_is_on_by_default_or_by_a_file_can_be_named_both_ways(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("compile = true\n")
    file = ["--config", str(tmp_path / "run.toml")]
    for line, name, value in (
        (["--async-checkpoints"], "async_checkpoints", True),
        (["--no-async-checkpoints"], "async_checkpoints", False),
        ([*file, "--no-compile"], "compile", False),
        (file, "compile", True),
    ):
        assert getattr(_parse(["train", *line]), name) is value


@pytest.mark.parametrize(
    "line",
    ["", "--help", "--version", "train --help", "plan --preset gpu --help-all", "trian", "train --stepz 3",
     "show x --lenght 3", "bench --row 3", "embed x --batch-size 3", "help extend"],
)  # fmt: skip
def test_help_and_misspelt_names_import_neither_torch_nor_tyro(line: str) -> None:
    program = [sys.executable, "-X", "importtime", "-m", "dilated_attention_pytorch", *line.split()]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if done.stdout else 2)
    imported = {row.rpartition("|")[2].strip() for row in done.stderr.splitlines() if row.startswith("import time:")}
    assert imported
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "tyro", "rich", "numpy")}
    said = [row for row in done.stderr.splitlines() if not row.startswith("import time:")]
    assert done.stdout or said


def test_a_module_of_the_package_has_its_own_words() -> None:
    program = [sys.executable, "-m", "dilated_attention_pytorch.benchmarks", "--help"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert "usage: dilated-attention " not in done.stdout
    assert "--dry-run" in done.stdout


def test_the_reader_of_a_page_may_go_away() -> None:
    program = [sys.executable, "-m", "dilated_attention_pytorch", "train", "--help-all"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(timeout=60)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_for_bash_completes_commands_and_flags(tmp_path: Path) -> None:
    script = tmp_path / "completion.sh"
    script.write_text(printed("--print-completion", "bash"))
    ask = (
        f"source {script}\n"
        "COMP_WORDS=(dilated-attention {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        "$(complete -p dilated-attention | sed 's/.*-F \\([^ ]*\\).*/\\1/') dilated-attention\n"
        'printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    for given, offered in (
        ("tra", "train"),
        ("train --steps 3 --learn", "--learning-rate"),
        ("show --seq", "--sequence-length"),
    ):
        done = subprocess.run(["bash", "-c", ask.format(words=given)], capture_output=True, text=True, env=os.environ)
        assert offered in [row.strip() for row in done.stdout.splitlines()], (given, done.stdout, done.stderr)


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
