"""The command ``dilated-attention build``."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dilated_attention_pytorch.errors import RunError


@dataclass(kw_only=True, slots=True)
class Build:
    """Compile the CPU kernels for this machine, or say why not.

    Wheels for Linux on x86-64 bring them compiled for certain releases of PyTorch. With another one they are compiled
    once per version of PyTorch and processor, and stored in the user's cache folder (below XDG_CACHE_HOME if set) with
    a digest: a damaged file is compiled anew. Files of another user, or that others can write, are not loaded. The
    first call that needs them also compiles them, unless DILATED_ATTENTION_NO_BUILD=1 is set: this command is for
    machine images without a compiler at run time, and for retrying after a failure.

        dilated-attention build
    """

    def run_command(self) -> None:
        """Compile the kernels if they are missing."""
        from dilated_attention_pytorch.kernels.built_in import library_built_in
        from dilated_attention_pytorch.kernels.compilation import (
            BuildError,
            build_of_this_machine,
            compile_kernels,
            load,
        )

        try:
            if (built_in := library_built_in()) is not None:
                load()
                print(f"native kernels came with the package: {built_in}")
                return
            build = build_of_this_machine()
            start = time.perf_counter()
            is_new = compile_kernels(build)
            seconds = time.perf_counter() - start
            load()
        except BuildError as error:
            raise RunError(str(error)) from error
        size = build.library.stat().st_size / 1e6
        done = f"compiled in {seconds:.0f} s" if is_new else "were there"
        print(f"native kernels {done}: {build.library} ({size:.1f} MB)")
