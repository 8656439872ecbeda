"""Memory of a model's objects in training: what a block takes beyond its tensors.

    python -m benchmarks.object_bytes [--output FILE]

Modules, parameters, hooks and the optimizer's records are objects of Python and C++ outside of all tensors. Models of 8
and 24 narrow blocks take steps, alone and in two processes that share their weights as `dilated-attention train` can.
Then free memory is returned to the system, and the resident memory of the process is compared with that before the
model was built, less the bytes of all tensors that remain. The difference between the two models is that of 16 blocks.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dilated_attention_pytorch.benchmarks.results import module_command, origin
from dilated_attention_pytorch.memory import begin_peak, resident
from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.distribution import Distribution
from dilated_attention_pytorch.training.optimizer import build_optimizer
from dilated_attention_pytorch.training.settings import Optimizer

from .options import parse, parser_of, write_results
from .planner import BOUNDED, printed

KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "ddp": (2, {"data_parallel": "ddp"}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "tensor": (2, {"tensor_parallel": 2}),
}
"""Number of processes, and settings that tell how they share the weights."""
VARIANTS: tuple[tuple[Optimizer, bool], ...] = (("adamw", False), ("adamw", True), ("muon", False), ("muon", True))
"""Optimizer, and whether blocks are recomputed."""
SHALLOW, DEEP = 8, 24
STEPS, LENGTH = 3, 64


def _settings(kind: str, optimizer: Optimizer, recomputed: bool, num_layers: int) -> TrainSettings:
    model = LongNetConfig(
        vocab_size=256,
        embed_dim=32,
        num_layers=num_layers,
        num_heads=2,
        segment_lengths=(512, 4096),
        dilation_rates=(1, 4),
        gradient_checkpointing=recomputed,
    )
    return dataclasses.replace(
        PRESETS["tiny"](),
        model=model,
        tokenizer=Path("tokens"),
        context_length=LENGTH,
        batch_size=1,
        precision="float32",
        optimizer=optimizer,
        **KINDS[kind][1],
    )


def _storages(tensors: Iterable[Any]) -> int:
    """Bytes of the distinct storages of tensors; of a DTensor's own shard."""
    found = {}
    for one in tensors:
        if isinstance(one, Tensor):
            storage = (one.to_local() if hasattr(one, "to_local") else one).untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _resident() -> int:
    gc.collect()
    assert begin_peak(), "free memory cannot be returned to the system here"
    return resident("VmRSS")


def _objects(settings: TrainSettings, kept: list[Any]) -> int:
    """Bytes that a model's objects take after some steps.

    The model is added to ``kept``: if it were freed, the next one would reuse its pages.
    """
    before = _resident()
    distribution = Distribution(settings, "cpu")
    model = LongNetForCausalLM.from_longnet_config(settings.model).train()
    distribution.apply(model)
    optimizer = build_optimizer(model, settings)
    wrapped = distribution.wrap(model)
    whole = torch.zeros(settings.batch_size, settings.context_length, dtype=torch.int64)
    rows = distribution.rows({"input_ids": whole, "labels": whole})
    for _ in range(STEPS):
        wrapped(**rows, num_items_in_batch=whole.numel(), skip_logits=True).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    kept.append((model, optimizer, wrapped, distribution))
    tensors = _storages([*model.parameters(), *model.buffers()])
    tensors += _storages(value for state in optimizer.state.values() for value in state.values())
    if settings.data_parallel == "ddp" and dist.is_initialized() and settings.tensor_parallel == 1:
        tensors += sum(weight.nbytes for weight in model.parameters())  # DDP's buckets hold all gradients
    return _resident() - before - tensors


def measure(kind: str, *, is_tiny: bool) -> None:
    """In a process of its own, for one way to share weights: print the bytes of a block's objects of all variants."""
    torch.set_num_threads(1)
    if KINDS[kind][0] > 1:
        dist.init_process_group("gloo")
    kept: list[Any] = []
    _objects(_settings(kind, *VARIANTS[0], 1), kept)  # libraries are loaded
    found = []
    for optimizer, recomputed in VARIANTS[:1] if is_tiny else VARIANTS:
        _objects(_settings(kind, optimizer, recomputed, 1), kept)
        shallow, deep = (_objects(_settings(kind, optimizer, recomputed, layers), kept) for layers in (SHALLOW, DEEP))
        found.append(
            {"optimizer": optimizer, "recomputed": recomputed, "bytes": round((deep - shallow) / (DEEP - SHALLOW))}
        )
    if KINDS[kind][0] == 1 or dist.get_rank() == 0:
        print("measured " + json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Measure all kinds; print and write the bytes of a block."""
    parser = parser_of(__doc__)
    parser.add_argument("--kind", choices=list(KINDS), help="measure this kind only, in this process; writes no file")
    arguments = parse(parser, "object_bytes.json")
    if arguments.kind:
        measure(arguments.kind, is_tiny=arguments.tiny)
        return
    record: dict[str, Any] = {"machine": origin(module_command()), "kinds": {}}
    for kind in list(KINDS)[:1] if arguments.tiny else KINDS:
        words = ["-m", "benchmarks.object_bytes", "--kind", kind, *(["--tiny"] if arguments.tiny else [])]
        found = printed(words, KINDS[kind][0], BOUNDED, kind)
        median = round(statistics.median(one["bytes"] for one in found))
        record["kinds"][kind] = {"median": median, "variants": found}
        print(f"{kind:12} {median / 1e3:6.0f} kB a block: {', '.join(str(one['bytes']) for one in found)}", flush=True)
    write_results(arguments.output, "training", record)
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
