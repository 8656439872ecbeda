"""AdamW with moments of 32, 16 and 8 bits on the demo's model: state bytes per weight, and final losses.

    python -m benchmarks.optimizer_states [--tiny] [--steps N] [--context-length N] [--output FILE]

Model, learning rates and seed are those of `dilated-attention train --preset cpu`, with AdamW instead of Muon, on the
source of Python's standard library. Context and number of steps are as given on the command line. Bytes are counted
over the tensors that the optimizer holds after the last step, each storage once.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.optim.optimizer import register_optimizer_step_post_hook

from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.training import PRESETS, TrainSettings, train
from dilated_attention_pytorch.training.run_settings import AdamW

from .options import parse, parser_of, write_results

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


def measure(settings: TrainSettings, kind: AdamW) -> dict[str, Any]:
    """Train once with the given optimizer."""
    used: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: used.append(optimizer))
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(replace(settings, optimizer=kind), Path(folder) / "run", Console(quiet=True))
    hook.remove()
    result = {
        "optimizer": kind,
        "bits_per_byte": outcome.bits_per_byte,
        "state_bytes_per_weight": sum(map(state_bytes, set(used))) / settings.model.num_parameters,
    }
    words = f"{result['state_bytes_per_weight']:.3f} bytes of state a weight"
    print(f"{kind:>12} {outcome.bits_per_byte:.4f} held-out bits per byte, {words}", flush=True)
    return result


def main() -> None:
    """Print one line per result; write all results with the machine and the command."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context-length", type=int, default=8192)
    arguments = parse(parser, "optimizer_states.json")
    settings = PRESETS["tiny"]() if arguments.tiny else PRESETS["cpu"]()
    if not arguments.tiny:
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
    results = [measure(settings, kind) for kind in (KINDS[:1] if arguments.tiny else KINDS)]
    whole = results[0]["bits_per_byte"]
    for result in results:
        result["loss_over_adamw"] = result["bits_per_byte"] / whole
    write_results(arguments.output, "training", {"machine": here, "settings": settings.to_dict(), "results": results})
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
