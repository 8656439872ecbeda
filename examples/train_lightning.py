"""Train a LongNet language model with Lightning on the source of Python's standard library.

python examples/train_lightning.py
python examples/train_lightning.py --length 8192 --steps 2000 --width 256

`LongNetLM` is an nn.Module like any other: the LightningModule holds it, its loss and its optimizer. Lightning is no
dependency of this package: `pip install lightning`.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from dilated_attention_pytorch import LongNetConfig, LongNetLM


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the loss on text that was held out, in nats a byte."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=256, help="bytes of a row")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--width", type=int, default=64, help="width of the model")
    chosen = parser.parse_args(arguments)
    try:
        import lightning
    except ImportError as error:
        raise SystemExit("this example needs Lightning, which is not installed: pip install lightning") from error

    class LanguageModel(lightning.LightningModule):
        """A LongNet, its loss and its optimizer."""

        def __init__(self, config: LongNetConfig) -> None:
            super().__init__()
            self.save_hyperparameters(config.to_dict())  # LongNetConfig.from_dict reads them back
            self.model = LongNetLM(config)

        def loss(self, rows: Tensor) -> Tensor:
            """Nats a byte of rows `[B, N]`, without the first byte of each."""
            return cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

        def training_step(self, rows: Tensor) -> Tensor:
            loss = self.loss(rows)
            self.log("loss", loss, prog_bar=True)
            return loss

        def test_step(self, rows: Tensor) -> None:
            self.log("held_out", self.loss(rows), batch_size=len(rows))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    lightning.seed_everything(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    rows = list(text[: len(text) // chosen.length * chosen.length].view(-1, chosen.length))
    held_out, rest = rows[::50], [row for index, row in enumerate(rows) if index % 50]

    config = LongNetConfig(
        embed_dim=chosen.width,
        num_layers=2,
        num_heads=4,
        segment_lengths=[chosen.length // 8, chosen.length],
        dilation_rates=[1, 4],
    )
    module = LanguageModel(config)
    trainer = lightning.Trainer(
        max_steps=chosen.steps,
        logger=False,
        enable_checkpointing=False,
        limit_test_batches=8,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rest, 8, shuffle=True))
    (found,) = trainer.test(module, DataLoader(held_out, 8), verbose=False)
    print(f"text that was held out: {found['held_out']:.3f} nats a byte")
    return found["held_out"]


if __name__ == "__main__":
    main()
