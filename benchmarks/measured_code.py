"""Digests of the code that figures depend on: a figure is stale when the code has changed since it was measured."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import re
import tokenize
from pathlib import Path
from typing import Any, Literal, get_args

Group = Literal[
    "attention",
    "triton",
    "models",
    "training",
    "planner",
    "parallel",
    "selection",
    "slides",
    "slide training",
    "fine-tuning",
    "transformers",
]
PACKAGE = Path(__file__).parents[1] / "src" / "dilated_attention_pytorch"
_ATTENTION = ("csrc", "kernels/*", "ops", "patterns", "plan", "precision.py", "tracing.py")
_MODELS = (*_ATTENTION, "models", "nn")
_STEPS = tuple(
    f"estimate/{name}.py"
    for name in (
        "attention", "batch", "flops", "live_bytes", "memory", "parallel", "parallel_choice", "step",
        "workload",
    )
)  # fmt: skip
"""Estimates that a training run reads."""
_TRAINING = (*_MODELS, "integrations", "training", "parallel", *_STEPS, "memory.py")
_SELECTION = (
    "selection",
    "estimate/attention.py",
    "estimate/workload.py",
    "data_sheets.py",
    "data_sheets.toml",
    "memory.py",
)
_SLIDES = (*_MODELS, "integrations", "slides/*", "memory.py", "training/autocast.py")
FOLDERS: dict[Group, tuple[str, ...]] = {
    "attention": _ATTENTION,
    "triton": (*_ATTENTION, "kernels/triton"),
    "models": _MODELS,
    "training": _TRAINING,
    "planner": (*_TRAINING, *_SELECTION, "estimate"),
    "parallel": (*_ATTENTION, "parallel", "estimate/parallel.py"),
    "selection": (*_ATTENTION, *_SELECTION),
    "slides": _SLIDES,
    "slide training": (*_SLIDES, "parallel", "estimate/parallel.py"),
    "fine-tuning": (*_SLIDES, "slides/finetune"),
    "transformers": (*_MODELS, "integrations"),
}
"""Files and folders of the package that figures of a group depend on; "kernels/*": without its subfolders."""
GROUPS: tuple[Group, ...] = get_args(Group)
_SUFFIXES = (".py", ".cpp", ".h", ".toml")


def code(group: Group) -> dict[str, str]:
    """For the record of a result: the group and its digest now."""
    return {"group": group, "digest": digest(group)}


def codes_of(values: dict[str, Any]) -> list[dict[str, str] | None]:
    """The recorded code of a file of results: one for the file, or one for each of its sections; None where missing."""
    if "code" in values or "machine" in values or "origin" in values:
        return [values.get("code")]
    return [section.get("code") for section in values.values() if isinstance(section, dict)] or [None]


def is_stale(values: dict[str, Any]) -> bool:
    """Whether figures are not of today's code."""
    return any(found is None or found != code(found["group"]) for found in codes_of(values))  # type: ignore[arg-type]


def is_current(file: Path) -> bool:
    """Whether a file has figures, of today's code."""
    return file.is_file() and not is_stale(json.loads(file.read_text(encoding="utf-8")))


@functools.cache
def digest(group: Group) -> str:
    """A digest of the code of a group. Comments, docstrings and blank lines do not change it."""
    found = hashlib.blake2b(digest_size=8)
    for file in files_of(group):
        found.update(f"{file.relative_to(PACKAGE).as_posix()}\n".encode())
        found.update(_meaning_of(file).encode())
    return found.hexdigest()


def read_all() -> None:
    """Read the code of all groups: digests are of the code at this time from now on."""
    for group in GROUPS:
        for file in files_of(group):
            _text_of(file)


@functools.cache
def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@functools.cache
def _meaning_of(file: Path) -> str:
    return meaning(_text_of(file), file.suffix)


@functools.cache
def files_of(group: Group) -> list[Path]:
    """The source files of a group."""
    found: set[Path] = set()
    for folder in FOLDERS[group]:
        if folder.endswith("/*"):
            found.update((PACKAGE / folder[:-2]).glob("*.py"))
        else:
            path = PACKAGE / folder
            found.update(file for file in (path.rglob("*") if path.is_dir() else [path]) if file.suffix in _SUFFIXES)
    return sorted(found)


def meaning(text: str, suffix: str) -> str:
    """A source text without comments, docstrings and blank lines."""
    if suffix == ".toml":
        return text
    return _python(text) if suffix == ".py" else _cpp(text)


def _python(text: str) -> str:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            before, after = lines[first].encode()[: node.col_offset], lines[last].encode()[node.end_col_offset :]
            if not (before.strip() or after.strip()):  # code in the docstring's lines keeps them
                lines[first : last + 1] = [""] * (last + 1 - first)
    return _without_blank_lines(lines)


def _cpp(text: str) -> str:
    parts = r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/'
    return _without_blank_lines(re.sub(parts, lambda one: one[1] or "", text, flags=re.DOTALL).splitlines())


def _without_blank_lines(lines: list[str]) -> str:
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.attention --help")
