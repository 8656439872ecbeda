"""Which configuration is fastest here: timed once for every kind of call, remembered while the process lives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dilated_attention_pytorch.kernels.select import is_interpreted

from .configurations import Configuration

_chosen: dict[tuple[object, ...], Configuration] = {}


def fastest(
    kernel: str,
    key: tuple[object, ...],
    choices: tuple[Configuration, ...],
    launch: Callable[[Configuration], None],
) -> Configuration:
    """The fastest of ``choices`` for calls of this key.

    The first call of a key compiles every choice and times each for some milliseconds. Nothing is timed, and the first
    choice taken, under deterministic algorithms (timings vary from run to run), while a CUDA graph is captured, and in
    Triton's interpreter.
    """
    if (
        len(choices) == 1
        or is_interpreted()
        or torch.are_deterministic_algorithms_enabled()
        or torch.cuda.is_current_stream_capturing()
    ):
        return choices[0]
    name = (kernel, choices, *key)
    if name not in _chosen:
        from triton.testing import do_bench

        _chosen[name] = min(choices, key=lambda choice: do_bench(lambda: launch(choice), warmup=5, rep=20))
    return _chosen[name]
