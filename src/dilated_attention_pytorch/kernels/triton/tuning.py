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

    The first call of a key compiles every choice and times each for some milliseconds (Triton's ``do_bench``, which
    takes some memory to flush the device's cache with). Nothing is timed, and the first choice taken, under
    deterministic algorithms (timings vary from run to run), in Triton's interpreter, and where a CUDA graph is captured
    before the kind of call was timed.
    """
    if len(choices) == 1 or is_interpreted() or torch.are_deterministic_algorithms_enabled():
        return choices[0]
    name = (kernel, choices, *key)
    if name not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return choices[0]
        _chosen[name] = min(choices, key=lambda choice: _milliseconds(launch, choice))
    return _chosen[name]


def _milliseconds(launch: Callable[[Configuration], None], choice: Configuration) -> float:
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        return do_bench(lambda: launch(choice), warmup=5, rep=20)
    except OutOfResources:  # a device with less shared memory than others of its capability
        return float("inf")
