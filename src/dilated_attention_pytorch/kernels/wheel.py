"""Compiles the kernels that a wheel brings, for the installed PyTorch: ``python -m`` with the folder to write to."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from .built_in import LEVELS, folder_name
from .compilation import Compilation, compile_into_folder, compiler_arguments, find_compiler


def compile_levels(folder: Path) -> list[Path]:
    """Compile a library for every level of :data:`LEVELS` into ``folder``, beside those of other releases of PyTorch.

    Raises:
        BuildError: the compiler is missing or fails.
    """
    compiler = find_compiler()
    folders = [folder / folder_name(level) for level in LEVELS]
    for level, target in zip(LEVELS, folders, strict=True):
        with tempfile.TemporaryDirectory() as scratch:
            arguments = compiler_arguments(level.capability, level.architecture)
            build = Compilation(arguments, Path(scratch))
            compile_into_folder(build, compiler)
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(build.library, target)
    return folders


if __name__ == "__main__":
    (written,) = sys.argv[1:]
    for compiled in compile_levels(Path(written)):
        print(compiled)
