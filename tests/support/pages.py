"""Parses the pages of docs and runs their code: blocks of one page in order, command lines, pictures."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^```$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page on which its text begins."""

    page: Path
    kind: str
    text: str
    line: int


def pages() -> list[Path]:
    """Every page of the site."""
    return sorted(DOCS.rglob("*.md"))


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, match["kind"], match["text"], text.count("\n", 0, match.start()) + 2)
        for match in _FENCE.finditer(text)
    ]


def without_blocks(page: Path) -> str:
    """The text of a page outside of its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def needs_ranks(page: Path) -> bool:
    """Whether the code of a page is for a rank started by torchrun."""
    return any("init_device_mesh" in block.text for block in blocks_of(page) if block.kind == "python")


def run(page: Path) -> dict[str, Any]:
    """Run the code of a page in the current folder, block after block in one namespace, and return this namespace.

    A block of doctest examples (``pycon``) must print the expected output.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.kind == "python":
            # Tracebacks have the line numbers of the page.
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            exec(code, names)
        elif block.kind == "pycon":
            test = doctest.DocTestParser().get_doctest(block.text, {}, page.name, str(page), block.line - 1)
            test.globs = names
            doctest.DebugRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, clear_globs=False)
    return names


def command_lines(block: Block) -> list[list[str]]:
    """The words of every command of a ``bash`` block; lines that end with a backslash are joined."""
    lines = re.sub(r"\\\n", " ", block.text).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@dataclass(frozen=True)
class Command:
    """A command line that a page or the Makefile shows."""

    where: str
    """The page, or Makefile."""
    line: str
    """The command without comments, on one line."""

    @property
    def words(self) -> list[str]:
        """The words, without assignments of environment variables before them."""
        words = shlex.split(self.line)
        while "=" in words[0]:
            del words[0]
        return words


PROGRAM = re.compile("dilated-attention|python|torchrun|pytest|make|srun|sbatch|kubectl|jupyter|pip|pre-commit|apt-get")
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S* +)*(?:{PROGRAM.pattern})(?: .*)?")
_RECIPE = re.compile(r"venv/bin/((?:dilated-attention|python(?! \|)|pytest|ruff|mypy|mkdocs|pip)(?: [^;|&\n]*)?)")


def commands() -> list[Command]:
    """Every command of README, CONTRIBUTING, the examples' page, the pages of docs and the Makefile, once each.

    From pages: lines of bash blocks, indented lines, and inline code, if they begin with a program. From the Makefile:
    what the recipes run in the environment, as ``make`` prints them.
    """
    found: dict[str, Command] = {}
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *pages()):
        rest = without_blocks(page)
        blocks = [block.text for block in blocks_of(page) if block.kind == "bash"]
        shown = "\n".join([*blocks, *re.findall(r"^ {4}.*$", rest, flags=re.MULTILINE)])
        lines = re.sub(r"\\\n", " ", shown).splitlines() + re.findall(r"(?<!`)`([^`]+)`(?!`)", rest)
        for line in (" ".join(line.partition(" #")[0].split()) for line in lines):
            if _COMMAND.fullmatch(line):
                found.setdefault(line, Command(page.name, line))
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert targets is not None
    # The recipes, expanded; nothing is run.
    printed = subprocess.run(
        ["make", "--dry-run", "VENV=venv", *targets[1].split()], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for line in _RECIPE.findall(printed.stdout):
        found.setdefault(line.strip(), Command("Makefile", line.strip()))
    return list(found.values())


def run_as_rank(page: Path) -> None:
    """Run a page as the only rank of ``torchrun --nproc-per-node 1``; the page creates the process group."""
    import torch
    import torch.distributed as dist

    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    # Port 0 selects any free port; no other process needs to know it.
    os.environ.update({**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run(page)
    dist.destroy_process_group()
