"""The examples of the README and of the pages run, and the commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("patterns", "adaptive", "selection"))]
EXAMPLES = {
    f"{page.name}, example {number}": text
    for page in PAGES
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str) -> None:
    exec(compile(EXAMPLES[name], name, "exec"), {})


def test_the_commands_it_names_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"demo", "test"} <= set(re.findall(r"`?make ([a-z]+)", README)) <= targets


def test_files_and_folders_it_names_exist() -> None:
    package = ROOT / "src" / "dilated_attention_pytorch"
    for name in re.findall(r"^      ([a-z_]+(?:/|\.py)) ", README, flags=re.MULTILINE):
        assert (package / name).exists(), name
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
