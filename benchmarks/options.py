"""Options that all benchmarks have, and the files that their results go to."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.benchmarks.results import write_json

from .measured_code import Group, code, is_current, read_all

RESULTS = Path(__file__).parent / "results"
_TRIED: list[tempfile.TemporaryDirectory[str]] = []
"""Folders of tiny runs without ``--output``, removed at the end of the process."""


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser with ``--tiny``, ``--output`` and ``--if-stale``."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few small cases, in seconds: checks the benchmark")
    parser.add_argument(
        "--output",
        type=Path,
        help="file of the results, or a folder for it (default: benchmarks/results; with --tiny, nothing is kept)",
    )
    parser.add_argument("--if-stale", action="store_true", help="measure nothing if the results are of today's code")
    return parser


def parse(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """The arguments; ``output`` is the file of the results, by default ``name``.

    The digests are of the code at this time, when it is imported, not of the code when the results are written.
    """
    arguments = parser.parse_args()
    read_all()
    arguments.output = file_of_results(arguments.output, name, is_tiny=arguments.tiny, is_if_stale=arguments.if_stale)
    return arguments


def file_of_results(output: Path | None, name: str, *, is_tiny: bool, is_if_stale: bool) -> Path:
    """The file that results go to: ``output``, or ``name`` in the folder ``output``.

    Raises:
        SystemExit: the file cannot be written, or, with ``is_if_stale``, has results of today's code.
    """
    if output is None and is_tiny:
        _TRIED.append(tempfile.TemporaryDirectory())
    file = output or (Path(_TRIED[-1].name) if is_tiny else RESULTS)
    if file.is_dir() or not file.suffix:
        file /= name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise SystemExit(f"--output {file} cannot be written ({error.strerror}); name another one") from error
    if is_if_stale and is_current(file):
        print(f"{file} is of today's code")
        raise SystemExit(0)
    return file


def write_results(file: Path, measured: Group, values: dict[str, Any]) -> None:
    """Write results with a digest of the code that they depend on."""
    write_json(file, {**values, "code": code(measured)})


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.attention --help")
