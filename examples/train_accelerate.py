"""A plain training loop with accelerate around MultiheadDilatedAttention, with checkpoints, stopped and resumed.

python examples/train_accelerate.py --output runs/plain                  # trains on Python's standard library
python examples/train_accelerate.py --output runs/plain --resume         # goes on after the last checkpoint
torchrun --nproc-per-node 2 examples/train_accelerate.py --output runs/plain   # each with 8 rows of a step

A run that was stopped and resumed takes the same steps as one that never stopped. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dilated_attention_pytorch import MultiheadDilatedAttention

LENGTH = 256


class Block(nn.Module):
    """A pre-norm block: dilated attention, then a feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = MultiheadDilatedAttention(width, 4, segment_lengths=[32, LENGTH], dilation_rates=[1, 4])
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, N, E]` to `[B, N, E]`."""
        y = self.norm(x)
        x = x + self.attention(y, y, y, is_causal=True)[0]
        return x + self.feed(self.feed_norm(x))


def main(arguments: Sequence[str] | None = None) -> dict[int, float]:
    """Train; returns the loss of every step taken, in nats a byte, by the number of the step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --output")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=40, help="steps between two checkpoints")
    chosen = parser.parse_args(arguments)
    steps_file = chosen.output / "steps.txt"
    if chosen.save_every < 1:
        parser.error(f"--save-every must be at least 1, got {chosen.save_every}")
    if steps_file.exists() != chosen.resume:
        there = "a checkpoint: add --resume, or name another folder" if steps_file.exists() else "no checkpoint"
        parser.error(f"{chosen.output} has {there}")

    set_seed(0)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    # Without positions, to be short: the mask alone tells the order. LongNetLM has rotary positions.
    model = nn.Sequential(nn.Embedding(256, 64), Block(64), Block(64), nn.LayerNorm(64), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(rows), 8, shuffle=True))

    done = 0
    if chosen.resume:
        accelerator.load_state(str(chosen.output))
        done = int(steps_file.read_text())
    accelerator.print(f"{accelerator.num_processes} processes, from step {done + 1}")
    losses = {}
    for step, (row,) in enumerate(accelerator.skip_first_batches(batches, done), start=done + 1):
        if step > chosen.steps:
            break
        row = row.long()
        loss = cross_entropy(model(row[:, :-1]).flatten(0, 1), row[:, 1:].flatten())
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses[step] = float(accelerator.reduce(loss.detach(), reduction="mean"))
        if step % 10 == 0:
            accelerator.print(f"step {step}: {losses[step]:.3f} nats a byte")
        if step % chosen.save_every == 0:
            accelerator.save_state(str(chosen.output))
            if accelerator.is_main_process:
                steps_file.write_text(str(step))
    return losses


if __name__ == "__main__":
    main()
