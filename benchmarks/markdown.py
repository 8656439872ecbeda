"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Values = dict[str, Any]
"""A file of results, or a section of one."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (head, *rows)]
    return "\n".join(f"|{line}" for line in (lines[0], "---|" * len(head), *lines[1:]))


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.tables --help")
