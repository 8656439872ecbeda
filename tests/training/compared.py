"""How far two runs are from each other: losses, weights, moments."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from dilated_attention_pytorch.training.callbacks import read_metrics
from training.runs import weights


def moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The states of the optimizer in a checkpoint."""
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    return {f"{name}.{key}": value for name, of in state.items() for key, value in of.items() if key != "step"}


def losses(run: Path) -> dict[int, float]:
    """Nats per byte of every step."""
    entries = [entry for entry in read_metrics(run) if "bits_per_byte" in entry]
    return {entry["step"]: entry["bits_per_byte"] * math.log(2) for entry in entries}


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of two tensors of one name."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def distances(run: Path, other: Path, step: int) -> tuple[float, float, float]:
    """Largest difference of a loss, a weight and a moment after ``step`` steps, the last."""
    name, expected = f"checkpoint-{step}", losses(other)
    assert losses(run).keys() == expected.keys()
    return (
        max(abs(loss - expected[at]) for at, loss in losses(run).items()),
        furthest(weights(run), weights(other)),
        furthest(moments(run / name), moments(other / name)),
    )
