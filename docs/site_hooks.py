"""What the site needs beside the pages: links out of docs become text, docstrings become Markdown."""

from __future__ import annotations

import posixpath
import re
from typing import Any

import griffe

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>\.\.?/[^)#\s]*)(?:#[^)\s]*)?\)")
_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):`(?P<short>~?)(?P<name>[^`]+)`")
# Names of arguments that take more than one line: Griffe wants what it reads as one entry to begin on one.
_NAMES = re.compile(r"^( +\w+(?:, \w+)*,)\n +(?=\w+(?:, \w+)*: )", flags=re.MULTILINE)
_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).*)*", flags=re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs for every page."""
    return without_links_out_of_docs(markdown, page.file.src_uri)


def without_links_out_of_docs(markdown: str, page: str) -> str:
    """Files of the repository outside of docs are not on the site: a link to one becomes its path.

    Args:
        markdown: the page's text.
        page: its path within docs.
    """

    def replace(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link["target"]))
        if not target.startswith("../"):
            return link[0]
        path, text = target.removeprefix("../"), link["text"]
        return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"

    return _LINK.sub(replace, markdown)


def as_markdown(docstring: str) -> str:
    """Roles of Sphinx as code, examples of doctest as blocks of code, arguments that share a text in one line."""

    def name(role: re.Match[str]) -> str:
        return f"`{role['name'].rpartition('.')[2] if role['short'] else role['name']}`"

    def fence(example: re.Match[str]) -> str:
        return f"{example['indent']}```pycon\n{example[0]}\n{example['indent']}```"

    return _EXAMPLE.sub(fence, _NAMES.sub(r"\1 ", _ROLE.sub(name, docstring)))


class PlainDocstrings(griffe.Extension):
    """Griffe's part: every docstring goes through :func:`as_markdown` before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by Griffe for every object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
