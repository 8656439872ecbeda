"""``dilated-attention build``."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dilated_attention_pytorch.errors import RunError


@dataclass(kw_only=True, slots=True)
class Build:
    """Compile the package's own CPU kernels for this machine, or say why that cannot be.

    They are compiled once for every version of PyTorch, compiler and processor, and kept in the user's cache folder
    (XDG_CACHE_HOME names another place). The first call that wants them compiles them too, unless
    DILATED_ATTENTION_NO_BUILD=1 is set: this command is for images of machines that start without a compiler, and for
    another try after a failure.
    """

    def run_command(self) -> None:
        """Compile what is not there yet."""
        from dilated_attention_pytorch.kernels.compilation import (
            BuildError,
            build_of_this_machine,
            compile_kernels,
            load,
        )

        try:
            build = build_of_this_machine()
            was_there, start = build.library.exists(), time.perf_counter()
            compile_kernels(build)
            seconds = time.perf_counter() - start
            load()
        except BuildError as error:
            raise RunError(str(error)) from error
        size = build.library.stat().st_size / 1e6
        done = "were there" if was_there else f"compiled in {seconds:.0f} s"
        print(f"native kernels {done}: {build.library} ({size:.1f} MB)")
