"""The frame of a study: its settings on the command line, and its file of results.

A study is a dataclass of settings that extends :class:`Study`, and a function that measures what they ask for.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import tyro

from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.kernels.select import select
from dilated_attention_pytorch.ops import implementation

from .measured_code import Group, code, is_current, read_all

RESULTS = Path(__file__).parent / "results"
_TRIED: list[tempfile.TemporaryDirectory[str]] = []
"""Folders of tiny runs without ``--output``, removed at the end of the process."""
LEAST_VECTORS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""The first variable limits PyTorch's own kernels and ours, the others oneDNN's and MKL's products, which both use."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Study:
    """Settings of every study."""

    tiny: bool = False
    """A few small cases, in seconds: checks the benchmark."""
    output: Path | None = None
    """File of the results, or a folder for it; default: benchmarks/results; with --tiny, nothing is kept."""
    if_stale: bool = False
    """Measure nothing if the results are of today's code."""
    threads: int | None = None
    """Threads of PyTorch; default: those it takes by itself."""
    avx2: bool = False
    """Measure in a process that uses no more than AVX2; the results go to NAME_avx2.json."""


@dataclass(frozen=True, kw_only=True)
class StudyOfCalls(Study):
    """Settings of a study of calls whose implementation can be chosen."""

    impl: Literal["auto", "native", "aten"] = "auto"
    """What impl="auto" stands for in this run."""


S = TypeVar("S", bound=Study)


def run(
    settings: type[S],
    measure: Callable[[S], Mapping[str, Any]],
    *,
    text: str | None,
    name: str,
    group: Group | None,
    tiny: Mapping[str, Any],
) -> Path:
    """Measure what the command line asks for, and write it with the machine and a digest of the measured code.

    Args:
        settings: the options of the study.
        measure: returns the results, without the keys ``machine``, ``impl`` and ``code``.
        text: what the study measures, for ``--help``.
        name: of the file of results, without its suffix.
        group: the code that is measured; None if ``measure`` writes the file, in sections with a machine and code each.
        tiny: settings that ``--tiny`` changes.

    Returns:
        The file of the results.
    """
    given = tyro.cli(settings, description=text, config=(tyro.conf.FlagCreatePairsOff,))
    if given.avx2 and LEAST_VECTORS.items() - os.environ.items():
        module = sys.modules["__main__"].__spec__
        assert module is not None
        command = [sys.executable, "-m", module.name, *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env={**os.environ, **LEAST_VECTORS}, check=False).returncode)
    read_all()
    name = f"{name}_avx2.json" if given.avx2 else f"{name}.json"
    file = file_of_results(given.output, name, is_tiny=given.tiny, is_if_stale=given.if_stale)
    given = replace(given, **{"output": file, **(tiny if given.tiny else {})})
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    impl = given.impl if isinstance(given, StudyOfCalls) else "auto"
    with implementation(impl):
        record = {"machine": origin(module_command())}
        if isinstance(given, StudyOfCalls):
            record["impl"] = chosen(impl)
            print(f"impl: {record['impl']}")
        found = measure(given)
        if group is not None:
            write_results(file, group, {**record, **found})
    print(f"written: {file}")
    return file


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


def chosen(impl: str) -> dict[str, str]:
    """For the record of a run with ``--impl``: that, and the implementation used for each dtype on a CPU now."""
    return {"asked": impl, **{name: select("auto", torch.device("cpu"), dtype, 64) for name, dtype in DTYPES.items()}}


def seconds(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run the function in a new process and return its result."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


if __name__ == "__main__":
    raise SystemExit("a part of another benchmark: python -m benchmarks.attention --help")
