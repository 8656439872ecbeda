"""Stand-ins for routines that are measured."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.measured_choice import Routine

RESULT = torch.tensor([1.0, -2.0, 3.0])


def taking(seconds: float, result: Tensor = RESULT) -> Routine:
    """A routine that takes so many seconds."""

    def call() -> tuple[Tensor, ...]:
        time.sleep(seconds)
        return (result,)

    return call


def failing() -> tuple[Tensor, ...]:
    """A routine that this machine has not."""
    raise RuntimeError("could not create a primitive\nin a file")
