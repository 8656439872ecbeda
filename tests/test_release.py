"""What a release states: one version and one set of addresses in all files, a page whose links work elsewhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

import dilated_attention_pytorch
from support.pages import ROOT

VERSION = dilated_attention_pytorch.__version__
ADDRESS = "https://host/owner/name"


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = module_of(ROOT / ".github" / "check_release.py")
PAGE = module_of(ROOT / "setup.py")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_link_and_picture_of_the_index_page_is_absolute_and_of_the_tag() -> None:
    page = PAGE.index_page(README, ADDRESS, f"v{VERSION}")
    links, targets = (re.findall(r"(!?)\[[^\[\]]*\]\((\S+?)\)", text) for text in (page, README))
    assert len(links) == len(targets) > 10
    assert any(picture for picture, _ in targets)
    for (picture, link), (_, target) in zip(links, targets, strict=True):
        if target.startswith("https:"):
            assert link == target
        else:
            assert link == f"{ADDRESS}/{'raw' if picture else 'blob'}/v{VERSION}/{target}"
    assert "](docs" not in page


def test_the_index_page_changes_nothing_but_links() -> None:
    page = PAGE.index_page(README, ADDRESS, "v1")
    assert re.sub(rf"{ADDRESS}/(raw|blob)/v1/", "", page) == README
    assert PAGE.index_page(README, None, "v1") == README


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that are checked, as they are before the first release."""
    package = tmp_path / "src" / "dilated_attention_pytorch"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "src" / "dilated_attention_pytorch" / "__init__.py", package)
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def complete(checkout: Path) -> None:
    """Set every address, and the day of the release."""
    edit(checkout / "pyproject.toml", r"^.*\[project.urls\]\n", "[project.urls]\n" + "".join(
        f'{name} = "{ADDRESS}{end}"\n'
        for name, end in zip(CHECK.ADDRESSES, ("", "/docs", "/issues", "/CHANGELOG.md"), strict=True)
    ))  # fmt: skip
    edit(checkout / "CITATION.cff", r"^version: .*\n", rf"\g<0>repository-code: {ADDRESS}\n")
    edit(checkout / "CHANGELOG.md", r"\(unreleased\)", "(2026-12-01)")


def edit(file: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, file.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1
    file.write_text(text)


def test_a_complete_checkout_can_be_released(checkout: Path) -> None:
    complete(checkout)
    assert CHECK.problems(checkout, f"v{VERSION}") == []


@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "said"),
    [
        ("pyproject.toml", "^Issues = .*\n", "", "must have Issues, an address that begins with https://, got None"),
        ("pyproject.toml", "^Changelog = .*", 'Changelog = "CHANGELOG.md"', "must have Changelog, an address"),
        ("CITATION.cff", "^repository-code: .*", "repository-code: https://host/else", f"must be {ADDRESS}, got https"),
        ("CITATION.cff", "^repository-code: .*\n", "", f"repository-code must be {ADDRESS}, got none"),
        ("CITATION.cff", "^version: .*", "version: 0.0.9", f"CITATION.cff: version must be {VERSION}, got 0.0.9"),
        ("CHANGELOG.md", r"\(2026-12-01\)", "(unreleased)", f"must begin with '## {VERSION} (YYYY-MM-DD)'"),
    ],
)
def test_what_stands_against_a_release_is_said(
    file: str, pattern: str, replacement: str, said: str, checkout: Path
) -> None:
    complete(checkout)
    edit(checkout / file, pattern, replacement)
    (problem,) = CHECK.problems(checkout, f"v{VERSION}")
    assert said in problem


def test_the_tag_of_another_version_is_refused(checkout: Path) -> None:
    complete(checkout)
    for tag in (VERSION, "v99.0.0"):
        assert CHECK.problems(checkout, tag) == [
            f"the tag must be v{VERSION}, the version of src/dilated_attention_pytorch/__init__.py, got {tag}"
        ]


def test_no_file_names_an_address_that_the_metadata_do_not_have() -> None:
    for problem in CHECK.problems(ROOT, f"v{VERSION}"):
        assert re.match(r"pyproject.toml: \[project.urls\] must have \w+, .* got None|CHANGELOG.md must begin", problem)


def test_actions_of_the_release_are_pinned_to_commits() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    used = re.findall(r"uses: (\S+)", workflow)
    assert len(used) == 5
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)
