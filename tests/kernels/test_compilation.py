"""Compiling the native kernels: once, whole, by one process; and a sentence where it cannot be."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch import attend, local_window
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.kernels import compilation
from dilated_attention_pytorch.kernels import select as select_module
from dilated_attention_pytorch.kernels.built_in import SOURCES
from dilated_attention_pytorch.kernels.compilation import (
    BuildError,
    build_of_this_machine,
    compile_kernels,
    library_path,
    refusal,
)
from dilated_attention_pytorch.kernels.select import select
from support.processes import environment, run_whole

HANG_SECONDS = 120.0
CAPABILITY = torch.backends.cpu.get_cpu_capability()
KERNELS = library_path() if refusal() is None else None
"""Of this machine."""


@pytest.fixture(autouse=True)
def _nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(compilation.NO_BUILD, raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    forget()
    yield
    forget()


def forget() -> None:
    """What this process knows of the kernels of this machine."""
    compilation.load.cache_clear()
    compilation._is_loaded.cache_clear()
    select_module._CHOSEN.clear()


def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """A compiler of a few lines, which notes every call; the list of calls."""
    program, calls = tmp_path / "compiler", tmp_path / "calls"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo compiler 1; exit 0; fi\necho "$@" >> {calls}\n{body}\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(program))
    return calls


WRITES = 'while [ "$1" != -o ]; do shift; done; echo compiled > "$2"'


def test_the_kernels_are_compiled_once_and_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = compiler(tmp_path, monkeypatch, WRITES)
    path = library_path()
    assert path.read_text() == "compiled\n"
    sources = {source.name for source in SOURCES.glob("*.cpp")}
    said = calls.read_text().splitlines()
    assert len(said) == len(sources) + 1
    assert all(any(f"/{name} " in line for line in said) for name in sources)
    assert library_path() == path
    assert len(calls.read_text().splitlines()) == len(said)
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    assert "compiling its CPU kernels for this machine, once" in line
    assert {file.name for file in path.parent.iterdir()} == {"kernels.so", "kernels.blake2b", "lock"}


def test_another_torch_or_processor_has_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {build_of_this_machine().folder}
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    folders.add(build_of_this_machine().folder)
    monkeypatch.setattr(compilation, "processor_features", lambda: "another one")
    folders.add(build_of_this_machine().folder)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    folders.add(build_of_this_machine().folder)
    assert len(folders) == 4


def test_of_ten_callers_one_compiles_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads hold the lock against each other as processes do: each opens the file."""
    calls = compiler(tmp_path, monkeypatch, f"sleep 0.2; {WRITES}")
    for damage in (False, True):
        if damage:
            put(library_path(), b"comp")
        with ThreadPoolExecutor(10) as pool:
            paths = [pool.submit(library_path) for _ in range(10)]
        assert {path.result().read_text() for path in paths} == {"compiled\n"}
        assert len(calls.read_text().splitlines()) == (1 + damage) * (len(list(SOURCES.glob("*.cpp"))) + 1)


@pytest.mark.slow
def test_of_ten_processes_one_compiles_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = compiler(tmp_path, monkeypatch, f"sleep 0.5; {WRITES}")
    program = (
        "import torch; torch.backends.cpu.get_cpu_capability = lambda: 'AVX2'\n"
        "from dilated_attention_pytorch.kernels.compilation import library_path\n"
        "print(library_path().read_text())"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(10)
    ]
    said = [process.communicate(timeout=HANG_SECONDS)[0] for process in processes]
    assert said == ["compiled\n\n"] * 10
    assert len(calls.read_text().splitlines()) == len(list(SOURCES.glob("*.cpp"))) + 1


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: 'no-such-compiler' is not found; install g\+\+"):
        library_path()
    assert "no C++ compiler" in str(refusal())
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(NotImplementedError, match=r"impl='native' cannot compute this call: no C\+\+ compiler"):
        attend(q, q, q, local_window(3), impl="native")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert select("auto", q.device, q.dtype, 16) == "aten"
    torch.testing.assert_close(
        attend(q, q, q, local_window(3)), attend(q, q, q, local_window(3), impl="reference"), rtol=1e-5, atol=1e-5
    )


def test_auto_does_without_the_kernels_where_the_user_has_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert "Could not determine home directory. Name one in XDG_CACHE_HOME" in str(refusal())
    q = torch.randn(1, 8, 2, 16)
    assert select("auto", q.device, q.dtype, 16) == "aten"
    with pytest.raises(NotImplementedError, match="no folder for the native kernels"):
        attend(q, q, q, local_window(3), impl="native")


def test_a_broken_compiler_is_quoted_and_not_called_again_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = compiler(tmp_path, monkeypatch, "echo this header is missing >&2; exit 3")
    with pytest.raises(
        BuildError, match=r"could not compile the native kernels \(status 3\): this header is missing\n    this header"
    ):
        library_path()
    called = len(calls.read_text().splitlines())
    with pytest.raises(BuildError, match="this header is missing\n`dilated-attention build` tries again"):
        library_path()
    assert "this header is missing" in str(refusal())
    assert len(calls.read_text().splitlines()) == called
    (tmp_path / "compiler").write_text((tmp_path / "compiler").read_text().replace("exit 3", WRITES))
    compile_kernels(build_of_this_machine())
    assert library_path().read_text() == "compiled\n"
    assert refusal() is None


def test_another_compiler_is_asked_after_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(BuildError, match="status 1"):
        library_path()
    compiler(tmp_path, monkeypatch, f"{WRITES} # a newer one")
    assert library_path().read_text() == "compiled\n"


def test_a_compiler_that_is_no_program_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "compiler"
    program.write_text("no program")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    with pytest.raises(BuildError, match=r"compiler .*compiler does not run: Exec format error"):
        library_path()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, WRITES)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"file/dilated-attention-pytorch/.* cannot be used .*XDG_CACHE_HOME"):
        library_path()


def test_another_architecture_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "for x86-64 processors under Linux, this is aarch64" in str(refusal())


def test_a_processor_without_avx2_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "need AVX2 or AVX-512, and PyTorch computes with 'DEFAULT'" in str(refusal())


def test_a_machine_can_be_kept_from_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = compiler(tmp_path, monkeypatch, WRITES)
    monkeypatch.setenv(compilation.NO_BUILD, "1")
    with pytest.raises(BuildError, match="DILATED_ATTENTION_NO_BUILD is set: run `dilated-attention build`"):
        library_path()
    assert not calls.exists()
    compile_kernels(build_of_this_machine())  # asked for by name
    assert refusal() is None


def test_what_cannot_be_loaded_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, WRITES)
    compilation.load.cache_clear()
    with pytest.raises(BuildError, match=r"kernels\.so cannot be loaded: .* delete it"):
        compilation.load()


def test_the_command_compiles_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler(tmp_path, monkeypatch, "echo no good >&2; exit 1")
    with pytest.raises(SystemExit) as left:
        main(["build"])
    said = capfd.readouterr().err
    assert left.value.code == 2
    assert "dilated-attention: " in said
    assert "could not compile the native kernels (status 1): no good\n    no good" in said
    assert "Traceback" not in said


@pytest.mark.skipif(CAPABILITY not in ("AVX512", "AVX2"), reason="the processor has less than AVX2")
def test_a_process_told_to_compute_with_avx2_has_kernels_of_avx2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = compiler(tmp_path, monkeypatch, WRITES)
    program = "from dilated_attention_pytorch.kernels.compilation import library_path; print(library_path().parent)"
    folder = run_whole(
        [sys.executable, "-c", program], HANG_SECONDS, env=environment(ATEN_CPU_CAPABILITY="avx2")
    ).stdout.strip()
    compiled = [line for line in calls.read_text().splitlines() if " -c " in line]
    assert compiled
    assert all("-march=x86-64-v3 -DCPU_CAPABILITY=AVX2 " in f"{line} " for line in compiled)
    assert not any("native" in line.split("-fPIC")[0] or "AVX512" in line for line in compiled)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert folder != str(build_of_this_machine().folder)


# What is odd in the cache folder, and compilers that misbehave.


def computed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What ``attend`` says in a new process of this machine when it computes without the kernels, twice."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    forget()
    capfd.readouterr()
    q = torch.randn(1, 8, 2, 16)
    assert select("auto", q.device, q.dtype, 16) == "aten"
    for _ in range(2):
        torch.testing.assert_close(
            attend(q, q, q, local_window(3)), attend(q, q, q, local_window(3), impl="reference"), rtol=1e-5, atol=1e-5
        )
    said = [line for line in capfd.readouterr().err.splitlines() if "compiling its CPU kernels" not in line]
    assert len(said) == 1
    assert said[0].startswith("dilated-attention: computing without its CPU kernels: ")
    return said[0]


def put(library: Path, content: bytes) -> None:
    library.unlink()
    library.write_bytes(content)


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "no digest", "cut digest", "another's digest"])
def test_damaged_kernels_are_compiled_anew(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = compiler(tmp_path, monkeypatch, WRITES)
    library = library_path()
    whole, digest, called = library.read_bytes(), library.with_name("kernels.blake2b"), len(calls.read_text())
    if "digest" not in damage:
        put(library, {"cut": whole[:3], "empty": b"", "flipped": bytes(b ^ 1 for b in whole)}[damage])
    elif damage == "no digest":
        digest.unlink()
    else:
        digest.write_text("" if damage == "cut digest" else "0" * 128)
    assert library_path().read_bytes() == whole
    assert len(calls.read_text()) == 2 * called
    put(library, b"")
    assert compile_kernels(build_of_this_machine())
    assert not compile_kernels(build_of_this_machine())
    assert library.read_bytes() == whole


def test_damaged_kernels_without_a_compiler_are_left_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler(tmp_path, monkeypatch, WRITES)
    put(library_path(), b"comp")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler" in computed(capfd, monkeypatch)
    monkeypatch.setenv(compilation.NO_BUILD, "1")
    assert "kernels.so is damaged (its digest differs)" in computed(capfd, monkeypatch)


def test_the_line_about_a_compiler_has_its_error_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler(tmp_path, monkeypatch, "echo In file included from here; echo x.h:1: error: no such thing; exit 1")
    said = computed(capfd, monkeypatch)
    assert "(status 1): x.h:1: error: no such thing (`dilated-attention build` tries again" in said


def test_a_folder_that_others_can_write_is_not_compiled_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = compiler(tmp_path, monkeypatch, WRITES)
    folder = build_of_this_machine().folder
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(BuildError, match=r"can be written by others \(mode 777\)"):
        library_path()
    assert not calls.exists()


def test_compiled_kernels_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, WRITES)
    path = library_path()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library_path() == path
    assert refusal() is None
    (tmp_path / "compiler").write_text("#!/bin/sh\nsleep 600")
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    assert library_path() == path


@pytest.mark.parametrize("what", ["kernels.so", "folder"])
def test_kernels_of_somebody_else_are_not_loaded(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler(tmp_path, monkeypatch, WRITES)
    library = library_path()
    path = library if what == "kernels.so" else library.parent
    path.chmod(0o777)
    with pytest.raises(BuildError, match=r"can be written by others \(mode 777\): .* delete"):
        library_path()
    path.chmod(0o755)
    assert library_path() == library
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    if mine == 0:
        assert library_path() == library, "the superuser's are everybody's"
        os.chown(path, 2, 2)
    with pytest.raises(BuildError, match=r"belongs to user \d+, and this process runs as user \d+: .* delete"):
        library_path()
    assert "belongs to user" in str(refusal())
    assert "belongs to user" in computed(capfd, monkeypatch)
    with pytest.raises(BuildError, match="belongs to user"):
        compile_kernels(build_of_this_machine())


@pytest.mark.parametrize("odd", ["a loop", "a long name", "a folder", "a pipe", "a lock that is a folder", "a link"])
def test_whatever_is_odd_in_the_cache_folder_attention_is_computed(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler(tmp_path, monkeypatch, WRITES)
    folder = build_of_this_machine().folder
    if odd == "a loop":
        (tmp_path / "loop").symlink_to("loop")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "loop"))
    elif odd == "a long name":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("long" * 99)))
    else:
        folder.mkdir(parents=True)
        if odd == "a folder":
            (folder / "kernels.so").mkdir()
        elif odd == "a pipe":
            os.mkfifo(folder / "kernels.so", mode=0o600)
        elif odd == "a link":
            (folder / "kernels.so").symlink_to("/dev/null")
        else:
            (folder / "lock").mkdir()
    said = computed(capfd, monkeypatch)
    assert "cannot be used" in said or "is no file" in said or "can be written by others" in said
    assert str(refusal()) in said or odd == "a lock that is a folder"


def test_a_cache_folder_that_may_not_be_searched_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As its owner, since nothing is closed to the superuser."""
    compiler(tmp_path, monkeypatch, WRITES)
    library_path()
    of_path = Path.stat

    def closed(path: Path, **options: bool) -> os.stat_result:
        if path.name.startswith("native-"):
            raise PermissionError(13, "Permission denied", str(path))
        return of_path(path, **options)

    monkeypatch.setattr(Path, "stat", closed)
    assert "Permission denied" in computed(capfd, monkeypatch)
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(NotImplementedError, match=r"cannot be used \(.*Permission denied.*XDG_CACHE_HOME"):
        attend(q, q, q, local_window(3), impl="native")


def test_a_compiler_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compilation, "_SECONDS", 1.0)
    calls = compiler(tmp_path, monkeypatch, f"sh -c 'sleep 600; : {tmp_path}'")
    assert "did not compile the native kernels within 1 s" in computed(capfd, monkeypatch)
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            assert str(tmp_path).encode() not in process.read_bytes()
    calls.unlink(missing_ok=True)
    with pytest.raises(BuildError, match="within 1 s\n`dilated-attention build` tries again"):
        library_path()
    assert not calls.exists()


def test_a_process_that_holds_the_lock_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compilation, "_SECONDS", 0.2)
    compiler(tmp_path, monkeypatch, WRITES)
    with compilation._locked(build_of_this_machine().folder):
        assert "another process has been compiling" in computed(capfd, monkeypatch)
    monkeypatch.setattr(compilation, "_SECONDS", 60.0)
    assert library_path().read_text() == "compiled\n"


@pytest.mark.parametrize(
    "end",
    [
        "echo 'cc1plus: fatal error: kernels.o: No space left on device' >&2; exit 1",
        "echo 'c++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
        "echo 'virtual memory exhausted: Cannot allocate memory' >&2; exit 1",
        "kill -9 $$",
    ],
)
def test_a_failure_that_may_pass_is_not_kept(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, f"if [ -e {tmp_path}/full ]; then {end}; fi; {WRITES}")
    (tmp_path / "full").touch()
    with pytest.raises(BuildError, match="could not compile"):
        library_path()
    (tmp_path / "full").unlink()
    assert library_path().read_text() == "compiled\n"


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, WRITES)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(BuildError, match=r"cannot be used \(.*No space left on device"):
            library_path()
        assert [file.name for file in build_of_this_machine().folder.iterdir()] == ["lock"]
    assert library_path().read_text() == "compiled\n"


@pytest.mark.skipif(CAPABILITY not in ("AVX512", "AVX2"), reason="the processor has less than AVX2")
def test_no_damage_of_the_real_kernels_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded, a library that is cut short ends a process by SIGBUS, one with other bytes by SIGSEGV."""
    if KERNELS is None:
        pytest.skip("no compiled kernels here")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: CAPABILITY)
    folder, whole = build_of_this_machine().folder, KERNELS.read_bytes()
    folder.mkdir(parents=True)
    (folder / "kernels.blake2b").write_text(KERNELS.with_name("kernels.blake2b").read_text())
    program = """
import sys, torch
from pathlib import Path
from dilated_attention_pytorch import attend, local_window
from dilated_attention_pytorch.kernels import compilation, select
q = torch.randn(1, 100, 2, 16)
for file in sys.argv[2:]:
    Path(sys.argv[1]).write_bytes(Path(file).read_bytes())
    for known in (compilation.load, compilation._is_loaded):
        known.cache_clear()
    select._CHOSEN.clear()
    print(bool(attend(q, q, q, local_window(3)).isfinite().all()), file, file=sys.stderr)
"""
    page = 4096
    noise = bytes(255 - byte for byte in whole[16 * page : -page])
    libraries = (whole[: len(whole) // 2], whole[:-1], whole[: 16 * page] + noise + whole[-page:], whole)
    files = [tmp_path / str(number) for number in range(len(libraries))]
    for file, library in zip(files, libraries, strict=True):
        file.write_bytes(library)
    command = [sys.executable, "-c", program, str(folder / "kernels.so"), *map(str, files)]
    found = run_whole(command, HANG_SECONDS, env=environment(CXX="no-such-compiler"))
    assert found.returncode == 0, found.stderr
    refused = "dilated-attention: computing without its CPU kernels: no C++ compiler"
    for file, said in zip(files, re.split("(?<=True) .*\n", found.stderr), strict=False):
        assert said.startswith(refused) == (file != files[-1]), found.stderr
        assert said.endswith("True"), found.stderr
