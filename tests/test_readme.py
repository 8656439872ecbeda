"""The examples of the README run, and what it names exists. test_pages.py does the same for the pages of docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = {
    f"example {number}": text for number, text in enumerate(re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str) -> None:
    exec(compile(EXAMPLES[name], name, "exec"), {})


def test_the_commands_it_names_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"demo", "test"} <= set(re.findall(r"`?make ([a-z]+)", README)) <= targets


def test_the_oldest_pytorch_it_promises_is_the_one_that_is_required_and_tested() -> None:
    (oldest,) = re.findall(r'"torch>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    for text in (README, (ROOT / "docs" / "index.md").read_text()):
        assert f"torch {oldest} or newer" in text


def test_the_tree_of_the_documentation_is_that_of_the_package() -> None:
    package = ROOT / "src" / "dilated_attention_pytorch"
    internals = (ROOT / "docs" / "internals.md").read_text()
    named = set(re.findall(r"^      ([a-z_]+(?:/|\.py)) ", internals, flags=re.MULTILINE))
    there = {f"{path.name}/" if path.is_dir() else path.name for path in package.iterdir()}
    assert named == there - {"__pycache__/", "__init__.py", "__main__.py", "py.typed", "data_sheets.toml"}


def test_its_times_are_those_of_the_page_of_costs() -> None:
    costs = (ROOT / "docs" / "cost.md").read_text()
    for rows in ("16,384", "65,536"):
        (times,) = re.findall(rf"^\| {rows} \| none \| \S+ s \| \S+ s \| (\d+) \|$", costs, re.MULTILINE)
        assert re.search(rf"1/{times}(?: of the time of dense attention)? at {rows}", " ".join(README.split()))


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 100


def test_files_and_folders_it_names_exist() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
