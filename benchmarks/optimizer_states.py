"""AdamW with moments of 32, 16 and 8 bits on the demo's model: state bytes per weight, and final losses.

    python -m benchmarks.optimizer_states [--quick] [--steps N] [--context-length N] [--output FILE]

Model, learning rates and seed are those of `dilated-attention train --preset cpu`, with AdamW instead of Muon, on the
source of Python's standard library. Context and number of steps are as given on the command line. Bytes are counted
over the tensors that the optimizer holds after the last step, each storage once.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerCallback

from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.training import PRESETS, TrainSettings, train
from dilated_attention_pytorch.training import trainer as trainers
from dilated_attention_pytorch.training.run_settings import AdamW

KINDS: tuple[AdamW, ...] = ("adamw", "adamw-bf16", "adamw-8bit")


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors that an optimizer keeps, each storage once."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(storages.values())


class Counting(TrainerCallback):
    """Counts the optimizer's bytes at the end of training."""

    counted = 0

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Count the bytes."""
        Counting.counted = state_bytes(optimizer)


class CountingTrainer(trainers.LongNetTrainer):
    """The trainer of a run, with :class:`Counting` as a callback."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.add_callback(Counting)


def measure(settings: TrainSettings, kind: AdamW) -> dict[str, Any]:
    """Train once with the given optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(replace(settings, optimizer=kind), Path(folder) / "run", Console(quiet=True))
    result = {
        "optimizer": kind,
        "bits_per_byte": outcome.bits_per_byte,
        "state_bytes_per_weight": Counting.counted / settings.model.num_parameters,
    }
    words = f"{result['state_bytes_per_weight']:.3f} bytes of state a weight"
    print(f"{kind:>12} {outcome.bits_per_byte:.4f} held-out bits per byte, {words}", flush=True)
    return result


def main() -> None:
    """Print one line per result; write all results with the machine and the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the preset tiny, 20 steps: checks")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "optimizer_states.json")
    arguments = parser.parse_args()
    settings = PRESETS["tiny"]() if arguments.quick else PRESETS["cpu"]()
    if not arguments.quick:
        settings = replace(
            settings,
            steps=arguments.steps,
            context_length=arguments.context_length,
            eval_steps=arguments.steps,
            save_steps=arguments.steps,
            sample_length=1,
            quarter_files=1,
            final_eval_windows=64,
            eval_windows=1,
            device="cpu",
        )
    here = origin(module_command())
    trainers.LongNetTrainer = CountingTrainer  # type: ignore[misc]
    results = [measure(settings, kind) for kind in KINDS]
    whole = results[0]["bits_per_byte"]
    for result in results:
        result["loss_over_adamw"] = result["bits_per_byte"] / whole
    write_json(arguments.output, {"machine": here, "settings": settings.to_dict(), "results": results})
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
