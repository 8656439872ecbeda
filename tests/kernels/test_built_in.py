"""Kernels that a wheel brings: used where they fit processor, PyTorch and sources exactly, and nowhere else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.kernels import built_in, compilation, wheel
from dilated_attention_pytorch.kernels.built_in import LEVELS, folder_name, library_built_in

V4 = LEVELS[1].features
ALL = LEVELS[0].features


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a library for every level, on a machine that has all instructions, and neither compiler nor
    compiled kernels."""
    folder = tmp_path / "compiled"
    for level in LEVELS:
        (folder / folder_name(level)).mkdir(parents=True)
        (folder / folder_name(level) / "kernels.so").write_text(level.name)
    monkeypatch.setattr(built_in, "_FOLDER", folder)
    set_machine(monkeypatch, "AVX512", ALL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    compilation.load.cache_clear()
    yield folder
    compilation.load.cache_clear()


def set_machine(monkeypatch: pytest.MonkeyPatch, capability: str, features: frozenset[str]) -> None:
    monkeypatch.setattr(built_in.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(built_in, "_features", lambda: features)


def chosen() -> str | None:
    library = library_built_in()
    return None if library is None else library.read_text()


@pytest.mark.parametrize(
    ("capability", "features", "level"),
    [
        ("AVX512", ALL | {"amx_tile"}, "avx512-bf16"),
        ("AVX512", V4, "avx512"),
        ("AVX512", ALL - {"avx512cd"}, None),
        ("AVX2", ALL, "avx2"),
        ("AVX2", LEVELS[2].features, "avx2"),
        ("AVX2", LEVELS[2].features - {"movbe"}, None),
        ("DEFAULT", ALL, None),
    ],
)
def test_the_level_is_the_highest_that_pytorch_and_the_processor_have(
    capability: str, features: frozenset[str], level: str | None, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch, capability, features)
    assert chosen() == level


def test_another_commit_of_pytorch_or_another_source_has_no_library(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = torch.__version__.partition("+")[0]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", f"{release}+cu130")  # of the same commit, so with the same headers
        assert chosen() == "avx512-bf16"
        patch.setattr(torch, "__version__", "9.9.9")
        assert chosen() is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "git_version", "another")
        assert chosen() is None
    with monkeypatch.context() as patch:
        patch.setattr(built_in, "SOURCES", Path(shutil.copytree(built_in.SOURCES, tmp_path / "csrc")))
        assert chosen() == "avx512-bf16"
        with (tmp_path / "csrc" / "terms.h").open("a") as source:
            source.write("// changed\n")
        assert chosen() is None
    for other in ("aarch64", "arm64"):
        monkeypatch.setattr(built_in.platform, "machine", lambda name=other: name)
        assert chosen() is None


def test_they_need_neither_a_compiler_nor_the_cache(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(compilation.NO_BUILD, "1")
    expected = package / folder_name(LEVELS[0]) / "kernels.so"
    assert compilation.library_path() == expected
    assert compilation.is_compiled()
    assert compilation.refusal() is None
    with monkeypatch.context() as patch:
        patch.setattr(compilation, "load", lambda: None)
        main(["build"])
    assert capsys.readouterr().out == f"native kernels came with the package: {expected}\n"
    assert not (tmp_path / "cache").exists()


def test_one_that_cannot_be_loaded_is_said(package: Path) -> None:
    with pytest.raises(compilation.BuildError, match=r"compiled/.*/kernels\.so cannot be loaded: .* delete it"):
        compilation.load()


def test_a_wheel_gets_a_library_of_every_level_beside_those_of_other_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, calls, folder = tmp_path / "compiler", tmp_path / "calls", tmp_path / "kernels"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nwhile [ "$1" != -o ]; do shift; done; echo compiled > "$2"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    (folder / "torch-2.12.0-avx2-00").mkdir(parents=True)
    assert {path.name for path in wheel.compile_levels(folder)} == {folder_name(level) for level in LEVELS}
    for level in LEVELS:
        assert (folder / folder_name(level) / "kernels.so").read_text() == "compiled\n"
        compiled = [line for line in calls.read_text().splitlines() if " ".join((*level.architecture, "-DCPU")) in line]
        assert len(compiled) == len(list(built_in.SOURCES.glob("*.cpp"))) + 1
        assert all(f"-DCPU_CAPABILITY={level.capability} " in line and "native" not in line for line in compiled)
    assert (folder / "torch-2.12.0-avx2-00").is_dir()


@pytest.mark.slow  # it compiles the kernels three times
@pytest.mark.skipif(shutil.which("objdump") is None, reason="reads machine code with objdump (binutils)")
def test_the_code_of_a_level_has_its_instructions_and_no_library_of_openmp(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dilated_attention_pytorch.kernels.wheel", str(tmp_path)]
    subprocess.run(command, check=True, timeout=900.0)
    for level in LEVELS:
        library = str(tmp_path / folder_name(level) / "kernels.so")
        code = subprocess.run(["objdump", "-d", library], capture_output=True, text=True, check=True).stdout
        assert ("%zmm" in code) == (level.capability == "AVX512")
        assert ("dpbf16" in code) == ("avx512_bf16" in level.features)
        assert "%ymm" in code
        needed = subprocess.run(["objdump", "-p", library], capture_output=True, text=True, check=True).stdout
        assert "libtorch_cpu.so" in needed
        assert "omp" not in needed
