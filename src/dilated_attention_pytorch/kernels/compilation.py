"""Loading of the package's CPU kernels; those that no wheel brought are compiled, once per machine and user."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.tracing import constant_of_graph

from .built_in import LIBRARY, SOURCES, add_sources, library_built_in

NO_BUILD = "DILATED_ATTENTION_NO_BUILD"
_DIGEST, _LOCK = "kernels.blake2b", "lock"
_ARCHITECTURES = {"AVX512": "-march=native", "AVX2": "-march=x86-64-v3"}
_SHOWN = 12
"""Number of last lines of the compiler's output to show."""
_SECONDS = 900.0
"""Time limit of the compiler, which takes half a minute, and a little less than that of waiting for another process."""
_PASSING = (
    "no space left on device",
    "disk quota exceeded",
    "cannot allocate memory",
    "virtual memory exhausted",
    "out of memory",
    "killed",
)
"""What compilers say of a failure that may not happen again."""


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message gives the reason and what to do."""


class NotMeantError(BuildError):
    """There are to be no kernels here: the processor has none, or compilation is disabled."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compilation: its inputs, and the location of the result."""

    arguments: tuple[str, ...]
    folder: Path

    @property
    def library(self) -> Path:
        """Path of the compiled library."""
        return self.folder / LIBRARY

    @property
    def digest(self) -> Path:
        """File with the digest of the library."""
        return self.folder / _DIGEST

    def failure(self, compiler: Path) -> Path:
        """File with the output of a compiler that failed; that compiler is then not called again automatically."""
        status = compiler.stat()
        identity = f"{compiler}\0{status.st_size}\0{status.st_mtime_ns}".encode()
        return self.folder / f"failure-{hashlib.blake2b(identity, digest_size=6).hexdigest()}.txt"


def build_of_this_machine() -> Compilation:
    """The compilation for this machine. No compiler is needed until there is something to compile.

    Raises:
        BuildError: unsupported processor or system, or no home folder.
    """
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise NotMeantError(
            f"the native kernels are for x86-64 processors under Linux, this is {machine} ({sys.platform})"
        )
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _ARCHITECTURES:
        raise NotMeantError(
            f"the native kernels need AVX2 or AVX-512, and PyTorch computes with {capability!r} here "
            "(ATEN_CPU_CAPABILITY can be the reason)"
        )
    try:
        kept = cache_folder()
    except RuntimeError as error:  # Path.home() without a home folder
        raise BuildError(f"no folder for the native kernels: {error} Name one in XDG_CACHE_HOME") from error
    arguments = compiler_arguments(capability, (_ARCHITECTURES[capability],))
    identity = hashlib.blake2b(digest_size=12)
    for part in (torch.__version__, processor_features(), *arguments):
        identity.update(part.encode() + b"\0")
    add_sources(identity)
    return Compilation(arguments, kept / f"native-{identity.hexdigest()}")


def compiler_arguments(capability: str, architecture: tuple[str, ...]) -> tuple[str, ...]:
    """Arguments of the compiler for the installed PyTorch.

    Args:
        capability: PyTorch's name of the instructions, which its headers are written for.
        architecture: the arguments that let the compiler use them.
    """
    root = Path(torch.__file__).parent
    return (
        "-std=c++20",
        "-O3",
        *architecture,
        f"-DCPU_CAPABILITY={capability}",
        f"-DCPU_CAPABILITY_{capability}",
        "-fPIC",
        "-shared",
        "-fopenmp",
        f"-I{root / 'include'}",
        f"-L{root / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
    )


def compile_kernels(build: Compilation) -> bool:
    """Compile the kernels into the cache folder unless they are there, even after an earlier failure.

    Concurrent processes wait. Returns whether they were compiled.

    Raises:
        BuildError: the folder cannot be used, or the compiler is missing or fails.
    """
    with _in_words(build.folder), _locked(build.folder):
        if _is_whole(build):
            return False
        compile_into_folder(build, find_compiler())
        return True


def library_path() -> Path:
    """Path of the compiled kernels: those that the package brought, or else this machine's.

    The latter are compiled if they are missing or damaged, and a line about it is printed.

    Raises:
        BuildError: compilation is not possible, failed before, or is disabled (``DILATED_ATTENTION_NO_BUILD``); or the
            library belongs to somebody else, or others can write it.
    """
    if (built_in := library_built_in()) is not None:
        return built_in
    build = build_of_this_machine()
    with _in_words(build.folder):
        if _is_whole(build):
            return build.library
        _compiler_to_ask(build)
        with _locked(build.folder):
            # Another process may have compiled them in the meantime.
            if not _is_whole(build):
                compiler = _compiler_to_ask(build)
                print(
                    "dilated-attention: compiling its CPU kernels for this machine, once, in about half a "
                    f"minute ({NO_BUILD}=1 does without them)",
                    file=sys.stderr,
                    flush=True,
                )
                compile_into_folder(build, compiler)
    return build.library


def is_compiled() -> bool:
    """Whether the kernels of this machine are there, so that loading them needs no compiler."""
    if library_built_in() is not None:
        return True
    try:
        build = build_of_this_machine()
        with _in_words(build.folder):
            return _is_whole(build)
    except BuildError:
        return False


@constant_of_graph
def refusal() -> str | None:
    """Why there are no kernels here, as far as known without compiling; None if there may be."""
    if library_built_in() is not None:
        return None
    try:
        build = build_of_this_machine()
        with _in_words(build.folder):
            if not _is_whole(build):
                _compiler_to_ask(build)
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
    """Whether the kernels can be compiled and loaded; the first call of a process does both.

    If something is wrong, it prints a line about it.
    """
    return _is_loaded()


@functools.cache
def _is_loaded() -> bool:
    try:
        load()
    except NotMeantError:
        return False
    except BuildError as error:
        reason, *more = str(error).splitlines()
        reason += " (`dilated-attention build` tries again and shows all of it)" if more else ""
        print(f"dilated-attention: computing without its CPU kernels: {reason}", file=sys.stderr, flush=True)
        return False
    return True


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


@contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into a :class:`BuildError`."""
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"the native kernels are kept in {folder}, which cannot be used ({error}); let XDG_CACHE_HOME name a "
            "folder that can"
        ) from error


def _is_whole(build: Compilation) -> bool:
    """Whether the library is there, as it was compiled.

    Raises:
        BuildError: it may be somebody else's.
        OSError: the folder may not be searched.
    """
    for path in (build.folder, build.library):
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        what = None
        if status.st_uid not in (os.geteuid(), 0):
            what = f"belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
        elif status.st_mode & 0o022:
            what = f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
        if what is not None:
            raise BuildError(f"{path} {what}: compiled kernels are not loaded from there; delete {build.folder}")
    if not stat.S_ISREG(status.st_mode):
        raise BuildError(f"{build.library} is no file: delete {build.folder}, and the kernels are compiled anew")
    try:
        return build.digest.read_text() == _digest(build.library)
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _digest(library: Path) -> str:
    return hashlib.blake2b(library.read_bytes()).hexdigest()


def find_compiler() -> Path:
    """The C++ compiler.

    Raises:
        BuildError: it is not found.
    """
    name = os.environ.get("CXX") or "c++"
    compiler = shutil.which(name)
    if compiler is None:
        raise BuildError(f"no C++ compiler: {name!r} is not found; install g++ 11 or newer, or name one in CXX")
    return Path(compiler)


def _compiler_to_ask(build: Compilation) -> Path:
    """The compiler, unless it is not to be called without being asked for by name."""
    if os.environ.get(NO_BUILD, "0") not in ("", "0"):
        if build.library.exists():
            raise BuildError(
                f"{build.library} is damaged (its digest differs), and {NO_BUILD} is set: run `dilated-attention build`"
            )
        raise NotMeantError(
            f"the native kernels are not compiled yet, and {NO_BUILD} is set: run `dilated-attention build`"
        )
    compiler = find_compiler()
    failure = build.failure(compiler)
    if failure.exists():
        raise BuildError(f"{failure.read_text(errors='replace')}\n`dilated-attention build` tries again")
    return compiler


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Mutual exclusion between processes of this machine; the lock is released when its holder ends."""
    import fcntl  # Unix only, as is compilation

    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    # Without waiting for the other end of a pipe.
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        end = time.monotonic() + 1.1 * _SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise BuildError(
                        f"another process has been compiling the native kernels for {1.1 * _SECONDS:.0f} s; end the "
                        f"one that holds {folder / _LOCK}"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


def compile_into_folder(build: Compilation, compiler: Path) -> None:
    """Compile every source in its own process; the library is renamed into place when complete.

    It is linked without OpenMP's library: the one that PyTorch has loaded is there, whatever its name.
    """
    failure = build.failure(compiler)
    with tempfile.TemporaryDirectory(dir=build.folder) as scratch:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        flags = [argument for argument in build.arguments if not argument.startswith(("-l", "-L", "-shared"))]
        commands = [
            [str(compiler), *flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        library, digest = Path(scratch) / LIBRARY, Path(scratch) / _DIGEST
        _run(commands, failure)
        linked = [argument for argument in build.arguments if argument != "-fopenmp"]
        _run([[str(compiler), *map(str, objects), *linked, "-o", str(library)]], failure)
        library.chmod(0o755)
        digest.write_text(_digest(library))
        # A power failure must not leave a file under the final name that is only partly on the disk.
        for path in (library, digest):
            _synchronise(path)
        library.replace(build.library)
        digest.replace(build.digest)
        _synchronise(build.folder)
    failure.unlink(missing_ok=True)


def _synchronise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _run(commands: list[list[str]], failure: Path) -> None:
    """Run the commands at the same time.

    Raises:
        BuildError: one fails, or they take too long; the reason is kept in ``failure`` unless it may pass.
    """
    environment = os.environ | {"LC_ALL": "C"}  # the language of _PASSING
    processes: list[subprocess.Popen[str]] = []
    end = time.monotonic() + _SECONDS
    try:
        for command in commands:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
            processes.append(process)
        said = [process.communicate(timeout=max(0.0, end - time.monotonic()))[0] for process in processes]
    except subprocess.TimeoutExpired as error:
        words = f"{commands[0][0]} did not compile the native kernels within {_SECONDS:.0f} s"
        failure.write_text(words)
        raise BuildError(words) from error
    except OSError as error:
        raise BuildError(f"the C++ compiler {commands[0][0]} does not run: {error.strerror}") from error
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the programs that it started
                process.communicate()
    for process, text in zip(processes, said, strict=True):
        if process.returncode:
            lines = [line for line in text.splitlines() if line.strip()]
            first = next((line.strip() for line in lines if "error" in line), lines[0] if lines else "no output")
            words = f"{commands[0][0]} could not compile the native kernels (status {process.returncode}): {first}"
            words = "\n    ".join([words, *lines[-_SHOWN:]])
            if process.returncode > 0 and not may_pass(text):
                failure.write_text(words)
            raise BuildError(words)


def may_pass(text: str) -> bool:
    """Whether an error's text names a cause, such as a full disk, that another attempt may not meet."""
    return any(cause in text.lower() for cause in _PASSING)


def processor_features() -> str:
    """The processor model and its features, for which the kernels are compiled."""
    description = Path("/proc/cpuinfo")
    if not description.exists():
        return platform.processor() or platform.machine()
    lines = description.read_text().splitlines()
    wanted = ("model name", "cpu family", "model\t", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
