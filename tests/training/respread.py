"""Run under torchrun: go on with a training run, spread in another way, and stop it after a step.

    torchrun --nproc-per-node N tests/training/respread.py RUN STOP CHANGES SAMPLES

STOP is a step or null, CHANGES is JSON: settings that say how the run is spread, and SAMPLES a folder where each
process writes down what it trains on.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch.training import resume
from dilated_attention_pytorch.training.distribution import leaving_together
from training.runs import quiet, record_samples, stop_after


def main() -> None:
    """Do it."""
    run, stop, changes, samples = Path(sys.argv[1]), *map(json.loads, sys.argv[2:4]), Path(sys.argv[4])
    torch.set_num_threads(1)
    with leaving_together(), pytest.MonkeyPatch.context() as monkeypatch:
        record_samples(monkeypatch, samples)
        if stop is not None:
            stop_after(monkeypatch, stop, signal.SIGINT)
        resume(run, quiet(), changes)


if __name__ == "__main__":
    main()
