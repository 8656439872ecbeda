"""Figures name the code that they measured."""

from __future__ import annotations

import ast
import functools
import json
from pathlib import Path

import pytest
from benchmarks.measured_code import (
    FOLDERS,
    GROUPS,
    PACKAGE,
    Group,
    code,
    codes_of,
    digest,
    files_of,
    is_stale,
    meaning,
    read_all,
)
from benchmarks.study import file_of_results, write_results

from benchmarks import measured_code

OF_NO_FIGURE = {
    "errors.py",
    "folders.py",
    "html_page.py",
    "installation.py",
    "kernels/triton",  # in the groups whose figures are of a CPU
    "legacy",
    "machine.py",  # names the machine
    "output.py",
    "parent.py",
    "progress.py",
    "readable.py",
}
"""What the code of a group imports, and no figure depends on."""
ELSEWHERE = {
    ("models/cache.py", "parallel"),  # a type
    ("nn/dynamic.py", "selection"),  # measured by benchmarks.selection alone
    ("parallel/modules.py", "nn"),
    ("parallel/selection.py", "selection"),
    ("slides/rank_rows.py", "parallel"),  # measured by benchmarks.slide_training alone
    ("slides/finetune/settings.py", "training/run_settings.py"),
    ("slides/finetune/trainer.py", "training/checkpoint.py"),
    ("slides/finetune/trainer.py", "training/manifest.py"),
    ("slides/ray_engine.py", "training/run_settings.py"),
    ("slides/settings.py", "training/run_settings.py"),
}
"""What one file imports, and no figure of the groups without it depends on."""


def test_results_carry_the_code_of_their_group(tmp_path: Path) -> None:
    for group in GROUPS:
        write_results(tmp_path / "found.json", group, {"machine": {}, "results": []})
        values = json.loads((tmp_path / "found.json").read_text())
        assert values["code"] == {"group": group, "digest": digest(group)}
        assert not is_stale(values)


def test_each_section_of_a_file_has_its_own_code() -> None:
    now = code("parallel")
    sections = {"traffic": {"machine": {}, "code": now}, "memory": {"machine": {}, "code": now}}
    assert codes_of(sections) == [now, now]
    assert not is_stale(sections)
    for old in ({"machine": {}}, {"machine": {}, "code": {"group": "parallel", "digest": "0"}}):
        assert is_stale({**sections, "memory": old})
        assert is_stale(old)
    assert is_stale({"format": "without a machine"})


def test_words_do_not_age_a_figure_and_code_does() -> None:
    text = '"""Words."""\n\n\ndef f(x):\n    """More words."""\n    return x + "# no comment"  # why\n'
    same = (
        '"""Other."""\ndef f(x):\n    # because\n    """Others,\n    two lines."""\n\n    return x + "# no comment"\n'
    )
    assert meaning(text, ".py") == meaning(same, ".py") == 'def f(x):\n    return x + "# no comment"\n'
    assert meaning(text.replace("x +", "x -"), ".py") != meaning(text, ".py")
    assert meaning("int f(); // why\n\n/* so\n */ int g();\n", ".h") == meaning("int f();\n int g();\n", ".h")


def test_a_string_with_slashes_and_a_line_of_code_after_a_docstring_are_code() -> None:
    text = 'f("https://a");  // why\n'
    assert meaning(text, ".h") == 'f("https://a");\n'
    assert meaning('def f(): "words"; return 1\n', ".py") == 'def f(): "words"; return 1\n'


def test_the_digest_is_of_the_code_at_the_start_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ops").mkdir()
    file = tmp_path / "ops" / "attend.py"
    monkeypatch.setattr(measured_code, "PACKAGE", tmp_path)
    monkeypatch.setattr(measured_code, "FOLDERS", dict.fromkeys(GROUPS, ("ops",)))
    results = tmp_path / "speed.json"
    caches = (digest, files_of, measured_code._text_of)
    digests = []
    for before, after in (("x = 1", "x = 2"), ("x = 1", "x = 1"), ("x = 2", "x = 2")):
        for cache in caches:
            cache.cache_clear()
        file.write_text(before)
        read_all()
        file.write_text(after)
        measured_code._meaning_of.cache_clear()
        write_results(results, "attention", {})
        digests.append(json.loads(results.read_text())["code"]["digest"])
    for cache in caches:
        cache.cache_clear()
    assert digests[0] == digests[1] != digests[2]


def test_results_of_todays_code_are_not_measured_again_where_that_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    assert file_of_results(file, "speed.json", is_tiny=False, is_if_stale=True) == file
    write_results(file, "attention", {"machine": {}})
    with pytest.raises(SystemExit) as left:
        file_of_results(file, "speed.json", is_tiny=False, is_if_stale=True)
    assert left.value.code == 0
    file.write_text(json.dumps({"machine": {}, "code": {"group": "attention", "digest": "0"}}))
    assert file_of_results(file, "speed.json", is_tiny=False, is_if_stale=True) == file


@functools.cache
def imported_files(file: Path) -> set[Path]:
    """Files of the package that a file of it imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = (node.module or "").split(".") if node.module else []
        if node.level:
            base = file.parents[node.level - 1].joinpath(*parts)
        elif parts[0] == PACKAGE.name:
            base = PACKAGE.joinpath(*parts[1:])
        else:
            continue
        for name in node.names:
            choices = (
                base / f"{name.name}.py",
                base / name.name / "__init__.py",
                base.with_suffix(".py"),
                base / "__init__.py",
            )
            found.add(next(path for path in choices if path.exists()))
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_what_the_code_of_a_group_imports_is_of_the_group(group: Group) -> None:
    def is_named(file: Path, imported: str) -> bool:
        ways = [imported, *(f"{parent}" for parent in Path(imported).parents)]
        return any(way in OF_NO_FIGURE or (file.relative_to(PACKAGE).as_posix(), way) in ELSEWHERE for way in ways)

    missing = {
        (file.relative_to(PACKAGE).as_posix(), imported.relative_to(PACKAGE).as_posix())
        for file in files_of(group)
        if file.suffix == ".py"
        for imported in imported_files(file) - set(files_of(group))
        if imported != PACKAGE / "__init__.py" and not is_named(file, imported.relative_to(PACKAGE).as_posix())
    }
    assert missing == set()


@pytest.mark.parametrize("group", GROUPS)
def test_every_folder_of_a_group_has_code(group: str) -> None:
    parts = {file.relative_to(files_of("attention")[0].parents[1]).parts[0] for file in files_of(group)}  # type: ignore[arg-type]
    assert parts == {folder.partition("/")[0] for folder in FOLDERS[group]}  # type: ignore[index]


def test_a_folder_with_a_dot_takes_the_results_and_one_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path,
) -> None:
    (tmp_path / "results.v2").mkdir()
    (tmp_path / "a-file").touch()

    def output(text: str) -> Path:
        return file_of_results(tmp_path / text, "x.json", is_tiny=False, is_if_stale=False)

    assert output("results.v2") == tmp_path / "results.v2" / "x.json"
    assert output("y.json") == tmp_path / "y.json"
    with pytest.raises(SystemExit, match=r"cannot be written \(File exists\); name another one"):
        output("a-file")
