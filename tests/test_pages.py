"""The pages of docs: their code runs, their commands exist, their pictures are what their code draws."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dilated_attention_pytorch.kernels.compilation import refusal_to_load
from support import pages
from support.pages import DOCS, ROOT, blocks_of
from support.processes import fork

PAGES = {str(page.relative_to(DOCS)): page for page in pages.pages()}
RUN = {name: page for name, page in PAGES.items() if any(b.kind in ("python", "pycon") for b in blocks_of(page))}
KINDS = {"python", "pycon", "bash", "text", "toml"}


@pytest.fixture
def folder(tmp_path: Path, own_cache: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the code of a page runs, and what it writes is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    return tmp_path


@pytest.mark.parametrize("name", [name for name in RUN if not pages.needs_ranks(RUN[name])])
def test_the_code_of_a_page_runs_from_its_first_block_to_its_last(name: str, folder: Path) -> None:
    if name == "cpu-kernels.md" and (refusal := refusal_to_load()):
        pytest.skip(refusal)
    try:
        pages.run(RUN[name])
    finally:
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")
    for drawn in sorted(folder.glob("*.png")):
        check_picture(drawn)


def test_the_code_of_pages_about_ranks_runs_on_one_rank(folder: Path) -> None:
    of_ranks = [page for page in RUN.values() if pages.needs_ranks(page)]
    assert len(of_ranks) > 2
    for page in of_ranks:
        # A process of its own has a process group of its own, and what it sets ends with it.
        ended = fork(functools.partial(pages.run_as_rank, page)).ended()
        assert ended.returncode == 0, ended.stdout + ended.stderr


def check_picture(drawn: Path) -> None:
    """The picture on the page is the one that its code draws (fonts may differ by some pixels)."""
    import matplotlib.image

    kept = DOCS / "pictures" / drawn.name
    assert kept.exists(), f"{kept} is not there; run the page's code and copy its {drawn.name}"
    assert kept.stat().st_size < 60_000
    new, old = matplotlib.image.imread(drawn), matplotlib.image.imread(kept)
    assert new.shape == old.shape
    assert abs(new - old).mean() < 0.01


def test_lines_of_bash_are_commands_of_which_each_has_a_row_or_set_a_variable() -> None:
    for page in PAGES.values():
        for block in (block for block in blocks_of(page) if block.kind == "bash"):
            for words in pages.command_lines(block):
                assert pages.PROGRAM.fullmatch(words[0]) or re.match(r"export$|\w+=", words[0]), f"{page}: {words}"


@pytest.mark.parametrize("name", PAGES)
def test_code_stands_in_a_block_whose_language_is_named(name: str) -> None:
    for block in blocks_of(PAGES[name]):
        assert block.kind in KINDS, f"{name}:{block.line}"
    rest = pages.without_blocks(PAGES[name])
    assert "```" not in rest
    code = re.findall(
        r"^ {4}(?:>>>|import |from \w+ import|[a-z]\w+ = [\w.]+\(|torchrun |dilated-attention ).*", rest, re.MULTILINE
    )
    assert not code, "indented code is run by no test: put it into a fenced block"


@pytest.mark.parametrize("name", PAGES)
def test_a_list_begins_after_an_empty_line(name: str) -> None:
    # Otherwise it is a list in the repository's browser and a paragraph on the site.
    lines = pages.without_blocks(PAGES[name]).splitlines()
    item = re.compile(r" *(?:[-*]|\d+\.) ")
    for before, line in zip(["", *lines], lines, strict=False):
        if item.match(line) and not line.startswith(" "):
            assert not before.strip() or item.match(before) or before.startswith(" "), f"{name}: {line}"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_that_exist(name: str) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", pages.without_blocks(PAGES[name])):
        assert (PAGES[name].parent / link).exists(), f"{name}: {link}"


def test_every_page_is_in_the_navigation_once() -> None:
    named = re.findall(r"[\w-]+(?:/[\w-]+)*\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(named) == sorted(PAGES)


def site_hooks() -> Any:
    specification = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_links_to_files_of_the_repository_lead_to_copies_on_the_site() -> None:
    linked = site_hooks().with_links_to_copies
    assert linked("[`a.py`](../examples/a.py)", "parallel.md") == "[`a.py`](repository/examples/a.py.txt)"
    assert linked("[b](../../benchmarks/b.json#c)", "api/attention.md") == "[b](../repository/benchmarks/b.json)"
    assert linked("[c](../.github/c.yml)", "parallel.md") == "[c](repository/github/c.yml.txt)"
    assert linked("`ops/call.py`, `x/y.py`", "api/attention.md") == (
        "[`ops/call.py`](../repository/src/dilated_attention_pytorch/ops/call.py.txt), `x/y.py`"
    )
    for kept in (
        "[a page](../patterns.md#h)",
        "[a page](attention.md)",
        "![a picture](../loss.png)",
        "[x](https://y.z)",
    ):
        assert linked(kept, "api/attention.md") == kept
    copied = {
        site_hooks().of_repository(link, name)
        for name, page in PAGES.items()
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    } - {None}
    assert len(copied) > 30
    assert [path for path in copied if not (ROOT / path).is_file()] == []


def test_formulas_are_set_as_mathml() -> None:
    set_formulas = site_hooks().with_formulas
    html = set_formulas('<p>x</p><div class="arithmatex">\\[\na &lt; \\frac{b}{c}\n\\]</div><p>$HOME</p>')
    assert re.fullmatch(r'<p>x</p><div class="formula"><math .*<mfrac>.*</math></div><p>\$HOME</p>', html)
    assert set_formulas('<span class="arithmatex">\\(a\\)</span>').startswith("<math ")


def test_every_formula_of_a_page_is_known_to_the_library() -> None:
    import markdown

    reader = markdown.Markdown(
        extensions=["pymdownx.arithmatex"], extension_configs={"pymdownx.arithmatex": {"generic": True}}
    )
    formulas = [
        formula
        for page in PAGES.values()
        for formula in re.findall(
            "<math.*?</math>",
            site_hooks().with_formulas(reader.reset().convert(pages.without_blocks(page))),
            flags=re.DOTALL,
        )
    ]
    assert len(formulas) > 30
    # A command that is not known stays as it is, and so does an environment.
    assert [formula for formula in formulas if "\\" in formula or "&</mi>" in formula] == []


def test_docstrings_become_markdown() -> None:
    docstring = """See :func:`~a.b.attend` and :class:`Pattern`, :mod:`.plan`.

    Args:
        one, two,
            three: numbers.

    >>> for x in range(2):
    ...     print(x)
    0
    1

    The end."""
    assert (
        site_hooks().as_markdown(docstring)
        == """See `attend` and `Pattern`, `plan`.

    Args:
        one, two, three: numbers.

    ```pycon
    >>> for x in range(2):
    ...     print(x)
    0
    1
    ```

    The end."""
    )


def described() -> dict[str, Any]:
    """What the reference describes, by the path that it is described by."""
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    paths = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(paths) == len(set(paths))
    return {path: getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in paths}


def test_every_public_name_is_in_the_reference() -> None:
    import dilated_attention_pytorch

    found = list(described().values())
    parts = [one.parent.name for one in Path(dilated_attention_pytorch.__file__).parent.glob("*/__init__.py")]
    for part in ("", *(f".{part}" for part in parts if part != "cli")):  # the command has a page of its own
        module = importlib.import_module(f"dilated_attention_pytorch{part}")
        for name in vars(module).get("__all__", ()):
            assert any(getattr(module, name) is one for one in found), f"{module.__name__}.{name}"


def test_what_has_the_name_of_a_module_is_described_by_its_full_path() -> None:
    # Griffe takes the module otherwise: ops.attend is one, and ops.attend.attend the function.
    for path, one in described().items():
        if isinstance(one, dict):  # the presets: no module has defined them
            continue
        leaf, package = path.rpartition(".")[2], one.__module__
        while package := package.rpartition(".")[0]:
            folder = ROOT / "src" / package.replace(".", "/")
            if (folder / leaf).is_dir() or (folder / f"{leaf}.py").exists():
                assert path == f"{one.__module__}.{one.__qualname__}"


def test_every_command_is_in_the_reference() -> None:
    from dilated_attention_pytorch.cli import command

    named = re.findall(r"^\| `(\w+)` \|", (DOCS / "api" / "command-line.md").read_text(), re.MULTILINE)
    assert named == list(command.COMMANDS)


def test_how_many_blocks_run(figure: Any) -> None:
    blocks = [block for page in PAGES.values() for block in blocks_of(page)]
    code = sum(block.kind in ("python", "pycon") for block in blocks)
    lines = sum(len(pages.command_lines(block)) for block in blocks if block.kind == "bash")
    figure(
        "pages of the site: blocks of code run", f"{code}, and {lines} command lines read by the commands' own parser"
    )
    assert code
