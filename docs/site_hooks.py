"""What the site needs beside the pages: files of the repository, formulas, the version, docstrings as Markdown."""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
_COPIES = "repository"
_LINK = re.compile(r"(?<=\]\()(?P<target>\.\.?/[^)#\s]*)(?:#[^)\s]*)?(?=\))")
_NAMED_FILE = re.compile(r"(?<!\[)`(?P<path>[\w.-]+(?:/[\w.-]+)+)`(?!\])")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</\1>', flags=re.DOTALL)
_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):`(?P<short>~?)(?P<name>[^`]+)`")
# Names of arguments that take more than one line: Griffe wants what it reads as one entry to begin on one.
_NAMES = re.compile(r"^( +\w+(?:, \w+)*,)\n +(?=\w+(?:, \w+)*: )", flags=re.MULTILINE)
_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", flags=re.MULTILINE)


def on_config(config: Any) -> None:
    """Called by MkDocs: the foot of every page names the version."""
    package = (ROOT / "src/dilated_attention_pytorch/__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"', package, flags=re.MULTILINE)
    config.copyright = f"{config.site_name} {version}"


def on_files(files: Any, *, config: Any) -> None:
    """Called by MkDocs: the site gets a copy of every page's source, and of every file that a page links to."""
    paths: set[str | None] = set()
    for file in files.documentation_pages():
        paths.add(f"docs/{file.src_uri}")
        paths |= {of_repository(link["target"], file.src_uri) for link in _LINK.finditer(file.content_string)}
        paths |= {named_file(name["path"]) for name in _NAMED_FILE.finditer(file.content_string)}
    for path in sorted(filter(None, paths)):
        files.append(File.generated(config, copy_of(path), abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs for every page."""
    return with_links_to_copies(markdown, page.file.src_uri)


def on_page_content(content: str, **_: Any) -> str:
    """Called by MkDocs for every page, as HTML."""
    return with_formulas(content)


def on_page_context(context: Any, *, page: Any, **_: Any) -> None:
    """Called by MkDocs: the button at the head of a page leads to its source."""
    page.edit_url = posixpath.relpath(copy_of(f"docs/{page.file.src_uri}"), posixpath.dirname(page.file.dest_uri))


def of_repository(target: str, page: str) -> str | None:
    """The path in the repository that a link of a page means; None within docs."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return path.removeprefix("../") if path.startswith("../") else None


def named_file(name: str) -> str | None:
    """The path in the repository of a file that a page names, also by its path in the package; None for other code."""
    paths = (f"{folder}{name}" for folder in ("", "src/dilated_attention_pytorch/"))
    return next((path for path in paths if (ROOT / path).is_file()), None)


def copy_of(path: str) -> str:
    """Where the site has a file of the repository. Browsers show text and JSON, and would save a ``.py``.

    MkDocs leaves out folders whose names begin with a dot.
    """
    copy = f"{_COPIES}/{path.removeprefix('.')}"
    return copy if copy.endswith((".json", ".txt")) else f"{copy}.txt"


def with_links_to_copies(markdown: str, page: str) -> str:
    """Links to files of the repository outside of docs, and their bare names, lead to the site's copies of them.

    Args:
        markdown: the page's text.
        page: its path within docs.
    """

    def to_copy(path: str) -> str:
        return posixpath.relpath(copy_of(path), posixpath.dirname(page))

    def replace(link: re.Match[str]) -> str:
        path = of_repository(link["target"], page)
        return link[0] if path is None else to_copy(path)

    def link_name(name: re.Match[str]) -> str:
        path = named_file(name["path"])
        return name[0] if path is None else f"[{name[0]}]({to_copy(path)})"

    return _NAMED_FILE.sub(link_name, _LINK.sub(replace, markdown))


def with_formulas(page: str) -> str:
    """LaTeX as MathML, which browsers set by themselves.

    Args:
        page: HTML in which the extension ``arithmatex`` has marked the formulas.
    """

    def replace(formula: re.Match[str]) -> str:
        is_block = formula[1] == "div"
        mathml = convert(html.unescape(formula["latex"]).strip(), display="block" if is_block else "inline")
        return f'<div class="formula">{mathml}</div>' if is_block else mathml

    return _FORMULA.sub(replace, page)


def as_markdown(docstring: str) -> str:
    """Roles of Sphinx as code, examples of doctest as blocks of code, arguments that share a text in one line."""

    def name(role: re.Match[str]) -> str:
        return f"`{role['name'].rpartition('.')[2] if role['short'] else role['name'].lstrip('.')}`"

    def fence(example: re.Match[str]) -> str:
        return f"{example['indent']}```pycon\n{example[0]}\n{example['indent']}```"

    return _EXAMPLE.sub(fence, _NAMES.sub(r"\1 ", _ROLE.sub(name, docstring)))


class PlainDocstrings(griffe.Extension):
    """Griffe's part: every docstring goes through :func:`as_markdown` before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by Griffe for every object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
