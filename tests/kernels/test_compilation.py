"""Compiling the native kernels: once, whole, by one process; and a sentence where it cannot be."""

from __future__ import annotations

import platform
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch import attend, local_window
from dilated_attention_pytorch.kernels import compilation
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
    sources = {source.name for source in compilation.SOURCES.glob("*.cpp")}
    said = calls.read_text().splitlines()
    assert len(said) == len(sources) + 1
    assert all(any(f"/{name} " in line for line in said) for name in sources)
    assert library_path() == path
    assert len(calls.read_text().splitlines()) == len(said)
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    assert "compiling its CPU kernels for this machine, once" in line
    assert {file.name for file in path.parent.iterdir()} == {"kernels.so", "lock"}


def test_another_compiler_torch_or_processor_has_kernels_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, monkeypatch, WRITES)
    folders = {build_of_this_machine().folder}
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    folders.add(build_of_this_machine().folder)
    monkeypatch.setattr(compilation, "_processor", lambda: "another one")
    folders.add(build_of_this_machine().folder)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    folders.add(build_of_this_machine().folder)
    compiler(tmp_path, monkeypatch, "true")
    (tmp_path / "compiler").write_text("#!/bin/sh\necho compiler 2")
    folders.add(build_of_this_machine().folder)
    assert len(folders) == 5


def test_of_two_processes_one_compiles_and_the_other_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = compiler(tmp_path, monkeypatch, f"sleep 0.5; {WRITES}")
    program = (
        "import torch; torch.backends.cpu.get_cpu_capability = lambda: 'AVX2'\n"
        "from dilated_attention_pytorch.kernels.compilation import library_path\n"
        "print(library_path().read_text())"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=HANG_SECONDS)[0] for process in processes]
    assert said == ["compiled\n\n"] * 3
    assert len(calls.read_text().splitlines()) == len(list(compilation.SOURCES.glob("*.cpp"))) + 1


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
        BuildError, match=r"could not compile the native kernels \(status 3\)\n    this header is missing"
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


def test_a_compiler_that_does_not_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "compiler"
    program.write_text("#!/bin/sh\nexit 1")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    with pytest.raises(BuildError, match=r"the C\+\+ compiler .* does not run"):
        library_path()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, WRITES)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"file/dilated-attention-pytorch/.* cannot be written .*XDG_CACHE_HOME"):
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


def test_the_command_compiles_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, "echo no good >&2; exit 1")
    build = [sys.executable, "-m", "dilated_attention_pytorch", "build"]
    found = run_whole(build, HANG_SECONDS, env=environment())
    assert found.returncode == 2
    assert "dilated-attention: " in found.stderr
    assert "could not compile the native kernels (status 1)\n    no good" in found.stderr
    assert "Traceback" not in found.stderr


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
