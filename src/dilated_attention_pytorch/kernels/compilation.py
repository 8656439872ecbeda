"""Compilation and loading of the package's CPU kernels, cached per machine in the user's cache folder."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.tracing import constant_of_graph

SOURCES = Path(__file__).parents[1] / "csrc"
NO_BUILD = "DILATED_ATTENTION_NO_BUILD"
_LIBRARY, _FAILURE, _LOCK = "kernels.so", "failure.txt", "lock"
_ARCHITECTURES = {
    "AVX512": ("-march=native", "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"),
    "AVX2": ("-march=x86-64-v3", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"),
}
_SHOWN = 12
"""Number of last lines of the compiler's output to show."""


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message gives the reason and what to do."""


@dataclass(frozen=True, slots=True)
class Build:
    """A compilation: its inputs, and the location of the result."""

    compiler: str
    arguments: tuple[str, ...]
    folder: Path

    @property
    def library(self) -> Path:
        """Path of the compiled library."""
        return self.folder / _LIBRARY

    @property
    def failure(self) -> Path:
        """File with the compiler's output after a failure; compilation is then not repeated automatically."""
        return self.folder / _FAILURE


def build_of_this_machine() -> Build:
    """The compilation for this machine.

    Raises:
        BuildError: unsupported processor or system, no compiler found, or no home folder.
    """
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise BuildError(
            f"the native kernels are for x86-64 processors under Linux, this is {machine} ({sys.platform})"
        )
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _ARCHITECTURES:
        raise BuildError(
            f"the native kernels need AVX2 or AVX-512, and PyTorch computes with {capability!r} here "
            "(ATEN_CPU_CAPABILITY can be the reason)"
        )
    name = os.environ.get("CXX") or "c++"
    compiler = shutil.which(name)
    if compiler is None:
        raise BuildError(f"no C++ compiler: {name!r} is not found; install g++ 11 or newer, or name one in CXX")
    try:
        kept = cache_folder()
    except RuntimeError as error:  # Path.home() without a home folder
        raise BuildError(f"no folder for the native kernels: {error} Name one in XDG_CACHE_HOME") from error
    root = Path(torch.__file__).parent
    arguments = (
        "-std=c++20",
        "-O3",
        *_ARCHITECTURES[capability],
        "-fPIC",
        "-shared",
        "-fopenmp",
        f"-I{root / 'include'}",
        f"-L{root / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
    )
    identity = hashlib.blake2b(digest_size=12)
    for part in (torch.__version__, compiler, _version(compiler), _processor(), *arguments):
        identity.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        identity.update(source.name.encode() + source.read_bytes() + b"\0")
    return Build(compiler, arguments, kept / f"native-{identity.hexdigest()}")


def compile_kernels(build: Build) -> None:
    """Compile the kernels into the cache folder, even after an earlier failure; concurrent processes wait.

    Raises:
        BuildError: the folder cannot be written, or the compiler fails.
    """
    with _locked(build.folder):
        if build.library.exists():
            return
        _compile(build)


def library_path() -> Path:
    """Path of this machine's compiled kernels; compiles them if missing, and prints a line about it.

    Raises:
        BuildError: compilation is not possible, failed before, or is disabled (``DILATED_ATTENTION_NO_BUILD``).
    """
    build = build_of_this_machine()
    if build.library.exists():
        return build.library
    _refuse_to_build(build)
    with _locked(build.folder):
        # Another process may have compiled them in the meantime.
        if not build.library.exists():
            _refuse_to_build(build)
            print(
                "dilated-attention-pytorch: compiling its CPU kernels for this machine, once, in about half a minute "
                f"({NO_BUILD}=1 does without them)",
                file=sys.stderr,
                flush=True,
            )
            _compile(build)
    return build.library


@constant_of_graph
def refusal() -> str | None:
    """Why there are no kernels here, as far as known without compiling; None if there may be."""
    try:
        build = build_of_this_machine()
        if not build.library.exists():
            _refuse_to_build(build)
    except BuildError as error:
        return str(error)
    return None


@constant_of_graph
def refusal_to_load() -> str | None:
    """Why the kernels cannot be loaded, after compiling them if necessary; None if they are loaded."""
    try:
        load()
    except BuildError as error:
        return str(error)
    return None


@constant_of_graph
def can_load() -> bool:
    """Whether the kernels can be compiled and loaded; the first call of a process does both."""
    return _is_loaded()


@functools.cache
def _is_loaded() -> bool:
    return refusal_to_load() is None


@constant_of_graph
def was_loaded() -> bool:
    """Whether the kernels are already loaded."""
    return load.cache_info().currsize > 0


@functools.cache
def load() -> None:
    """Load the kernels into PyTorch, once per process.

    Raises:
        BuildError: as :func:`library_path`; or the library cannot be loaded.
    """
    path = library_path()
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}; delete it, and it is compiled anew") from error
    for name in ("attend", "attend_backward"):
        torch.library.register_fake(f"dilated_attention_native::{name}", _write_nothing)


def _write_nothing(*operands: object) -> None:
    """Fake implementation of the kernels, which return nothing."""


def _refuse_to_build(build: Build) -> None:
    if os.environ.get(NO_BUILD, "0") not in ("", "0"):
        raise BuildError(
            f"the native kernels are not compiled yet, and {NO_BUILD} is set: run `dilated-attention build`"
        )
    if build.failure.exists():
        raise BuildError(f"{build.failure.read_text()}\n`dilated-attention build` tries again")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Mutual exclusion between processes of this machine; the lock is released when its holder ends."""
    import fcntl  # Unix only, as is compilation

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("a")
    except OSError as error:
        raise BuildError(
            f"the native kernels are kept in {folder}, which cannot be written ({error.strerror}); let XDG_CACHE_HOME "
            "name a folder that can"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(build: Build) -> None:
    """Compile every source in its own process; the library is renamed into place when complete."""
    with tempfile.TemporaryDirectory(dir=build.folder) as scratch:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        flags = [argument for argument in build.arguments if not argument.startswith(("-l", "-L", "-shared"))]
        commands = [
            [build.compiler, *flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        library = Path(scratch) / _LIBRARY
        _run(build, commands)
        _run(build, [[build.compiler, *map(str, objects), *build.arguments, "-o", str(library)]])
        library.replace(build.library)
    build.failure.unlink(missing_ok=True)


def _run(build: Build, commands: list[list[str]]) -> None:
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        for command in commands
    ]
    said = [process.communicate()[0] for process in processes]
    for process, text in zip(processes, said, strict=True):
        if process.returncode:
            lines = [line for line in text.splitlines() if line.strip()][-_SHOWN:]
            words = f"{build.compiler} could not compile the native kernels (status {process.returncode})"
            words = "\n    ".join([words, *lines])
            build.failure.write_text(words)
            raise BuildError(words)


def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"the C++ compiler {compiler} does not run: {error}") from error


def _processor() -> str:
    """The processor model and its features, for which the kernels are compiled."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    wanted = ("model name", "cpu family", "model\t", "flags")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
