"""A run is refused for its memory only where it could not have run: the estimate is near real peaks."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.planner import settings_of
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import LlamaConfig

from dilated_attention_pytorch import memory
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate import memory as estimates
from dilated_attention_pytorch.estimate.memory import check_training_memory, extension_footprint, footprint
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.training import PRESETS, ExtensionSettings, TrainSettings
from training.runs import write_texts

_LIBRARIES = 100e6
"""What the first step loads beside what is imported: about 103 MB in a run of 30 thousand weights."""
_PEAK = """
import resource, sys
import accelerate, matplotlib.figure, transformers
from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.training import run, run_trainer, trainer
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
main(sys.argv[1:])
# Of this program: the peak that getrusage tells is that of the process that started it, where that was larger.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("bytes", int(status["VmHWM"].split()[0]) * 1024 - before)
"""


def _settings(words: str) -> TrainSettings:
    settings = PRESETS["tiny"]()
    values: dict[str, Any] = {}
    model: dict[str, Any] = {}
    for flag in words.split():
        name, _, value = flag.partition("=")
        target = model if name.startswith("model.") else values
        target[name.removeprefix("model.").replace("-", "_")] = int(value) if value.isdecimal() else value
    if model:
        # ffn_dim and the key/value heads of the preset stay.
        values["model"] = LongNetConfig(**{**dataclasses.asdict(settings.model), **model})
    return dataclasses.replace(settings, **values)


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read as Linux counts them")
def test_the_estimate_is_below_the_peak_of_a_run_and_above_a_third_of_it(tmp_path: Path, figure: Any) -> None:
    words = "precision=float32 batch-size=16 model.embed-dim=256 model.ffn-dim=1024"
    texts = write_texts(tmp_path / "texts")
    flags = " ".join(f"--{word.replace('=', ' ')}" for word in words.split())
    line = (
        f"train --preset tiny --data {texts} --output {tmp_path}/run --steps 2 --eval-windows 1 --final-eval-windows 1 "
        f"--quarter-files 1 --sample-length 1 --threads 1 {flags}"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _PEAK, *line.split()], env=environment, capture_output=True, text=True, check=True
    )
    peak = int(run.stdout.split()[-1]) - _LIBRARIES
    estimate = footprint(_settings(words), 1).total
    assert peak / 3 < estimate < peak
    figure(f"peak of a training run beside its estimate, {words}", f"{peak / 1e6:.0f} MB, {estimate / 1e6:.0f} MB")


def test_processes_share_what_they_split() -> None:
    alone = footprint(_settings(""), 1)
    deep = footprint(_settings("model.num-layers=8"), 1)
    split = footprint(_settings("model.num-layers=8 data-parallel=fsdp"), 4)
    # While a block is computed its weights are there as a whole.
    assert deep.states / 4 < split.states < deep.states / 2
    assert footprint(_settings("context-parallel=4"), 4).activations < alone.activations / 3
    by_tensor = footprint(_settings("tensor-parallel=2"), 2)
    assert alone.weights / 2 < by_tensor.weights < alone.weights * 0.6


def _refused(settings: TrainSettings, device: str, processes: int, free: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The refusal of a run with that much free memory; "" if it may start."""
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    try:
        check_training_memory(settings, device, processes)
    except RunError as error:
        return str(error)
    return ""


def test_a_run_that_fits_by_measurement_starts_and_one_beyond_the_bound_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = json.loads(Path("benchmarks/results/planner.json").read_text())["cases"]
    highest = sorted(cases, key=lambda case: case["ratio"])[-3:]
    assert all(case["ratio"] > 1 for case in highest)
    for case in highest:
        settings, processes = settings_of(case), case["processes"]
        assert not _refused(settings, "cuda", processes, case["measured_bytes"], monkeypatch)
        certain = footprint(settings, processes).total * 90 // 100
        assert not _refused(settings, "cuda", processes, certain, monkeypatch)
        words = _refused(settings, "cuda", processes, certain - 1, monkeypatch)
        assert re.search(
            r"estimate of .* activations\) is at most 10 % too high, needs at least .* are free; take", words
        )


def test_a_copy_for_checkpoints_counts_on_a_cpu_where_pytorch_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings("")
    certain = footprint(settings, 1).total * 90 // 100
    copy = 8 * settings.model.num_parameters  # weights and Muon's moments in float32
    monkeypatch.setattr(estimates, "_KEEPS_COPIES", True)
    assert not _refused(settings, "cpu", 1, certain + copy, monkeypatch)
    assert "copy for a checkpoint" in _refused(settings, "cpu", 1, certain + copy - 1, monkeypatch)
    assert not _refused(settings, "cuda", 1, certain, monkeypatch)
    assert not _refused(dataclasses.replace(settings, async_checkpoints=False), "cpu", 1, certain, monkeypatch)
    split = _settings("data-parallel=fsdp")
    assert not _refused(split, "cpu", 2, footprint(split, 2).total, monkeypatch)
    monkeypatch.setattr(estimates, "_KEEPS_COPIES", False)
    assert not _refused(settings, "cpu", 1, certain, monkeypatch)


def test_processes_share_the_memory_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, total = _settings(""), footprint(_settings(""), 1).total
    assert not _refused(settings, "cpu", 1, 2 * total, monkeypatch)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert not _refused(settings, "cuda", 3, 2 * total, monkeypatch)
    words = _refused(settings, "cpu", 3, 2 * total, monkeypatch)
    assert re.search(r"in each of 3 processes, and .* are free; take a smaller --batch-size", words)


def test_gradients_of_an_extension_take_the_memory_that_its_activations_leave() -> None:
    config = LlamaConfig(hidden_size=64, num_hidden_layers=3, vocab_size=97)
    for length, has_room in ((8, False), (65536, True)):
        one, two = (ExtensionSettings(model="model", context_length=length, gradient_accumulation=n) for n in (1, 2))
        weights = 4 * 1_000_000
        step, several = (extension_footprint(settings, config, 1_000_000) for settings in (one, two))
        assert (step.activations + step.loss > weights) is has_room
        assert step.total == 3 * weights + max(weights, step.activations + step.loss)
        assert several.total == 4 * weights + step.activations + step.loss


def test_the_check_of_a_run_takes_no_step() -> None:
    steps: list[object] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: steps.append(optimizer))
    try:
        check_training_memory(_settings("context-length=77"), "cpu", 1)
    finally:
        hook.remove()
    assert not steps


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is free")
def test_freed_blocks_are_returned_where_there_is_no_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, module = _settings(""), "dilated_attention_pytorch.estimate.memory"
    calls: list[bool] = []
    monkeypatch.setattr(f"{module}.return_freed_blocks", lambda: calls.append(True))
    needed = 5 * footprint(settings, 1).total
    for free, device, found in ((needed, "cpu", 0), (needed - 1, "cuda", 0), (needed - 1, "cpu", 1)):
        monkeypatch.setattr(f"{module}.free_memory", lambda device, free=free: free)
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        check_training_memory(settings, device, 1)
        assert len(calls) == found
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(f"{module}.free_memory", lambda device: needed)
    check_training_memory(settings, "cpu", 2)
    assert len(calls) == 2


def test_rows_of_other_processes_are_there_while_attention_is_computed_alone() -> None:
    # So many tokens to choose from that the loss has the peak, where no rows are under way.
    shared = _settings("context-parallel=2 model.vocab-size=40000 tokenizer=tokens precision=float32")
    found, alone = (
        footprint(shared, 2),
        footprint(_settings("model.vocab-size=40000 tokenizer=tokens precision=float32"), 2),
    )
    assert found.loss > 0
    assert found.exchange == alone.exchange == found.weights


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_split_weights_are_never_whole_in_one_process(precision: str) -> None:
    words = "context-length=64 optimizer=adamw-bf16 data-parallel=fsdp model.num-layers=24 model.embed-dim=128"
    given = _settings(f"{words} precision={precision}")
    deep = dataclasses.replace(given, model=dataclasses.replace(given.model, gradient_checkpointing=True))
    found, block = footprint(deep, 8), 4 * deep.model.num_parameters // 24
    # This process's eighth of weights, gradients and moments, and at most three blocks: two that are gathered and one's
    # gradients.
    assert found.states + found.temporaries < 12 * deep.model.num_parameters // 8 + 3 * block


@pytest.mark.parametrize("optimizer", ["muon", "adamw-bf16"])
def test_what_the_optimizer_has_for_a_moment_is_split_as_the_weights_are(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where the processor does not multiply bfloat16, Muon iterates in float32, in twice the memory.
    monkeypatch.setattr("dilated_attention_pytorch.estimate.memory.multiplies_bfloat16", lambda device: True)
    # Weights that are far more than a text of 8 tokens makes of them, so that the peak is in the optimizer.
    words = f"optimizer={optimizer} model.embed-dim=4096 model.ffn-dim=16384 context-length=8 batch-size=1"
    model = _settings(words).model
    found = footprint(_settings(f"{words} data-parallel=fsdp"), 64)
    # The gradients of a block are whole until they are scattered.
    assert found.temporaries < 3 * 4 * model.num_parameters // model.num_layers
    # Muon gathers a matrix for its step, whose gradient and moment are then whole too.
    alone = footprint(_settings(words), 1).temporaries
    assert (alone < found.temporaries < alone + 3 * 4 * 4096 * 32768 + 1) is (optimizer == "muon")
    assert (alone > found.temporaries) is (optimizer != "muon")


@pytest.mark.parametrize("spread", ["", "data-parallel=fsdp", "tensor-parallel=2"])
def test_a_step_of_several_batches_has_all_gradients_beside_the_activations(
    spread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"{spread} model.embed-dim=256 model.ffn-dim=1024 batch-size=16 optimizer=adamw-bf16"
    one, two, four = (_settings(f"{words} gradient-accumulation={number}".strip()) for number in (1, 2, 4))
    processes = 2 if spread else 1
    alone, several = footprint(one, processes), footprint(four, processes)
    assert several == footprint(two, processes)
    assert several.gradients > alone.gradients
    assert several.total > alone.total
    # A run is refused for them.
    certain = several.total * 90 // 100
    assert not _refused(one, "cuda", processes, certain - 1, monkeypatch)
    assert "are free; take a smaller" in _refused(four, "cuda", processes, certain - 1, monkeypatch)


def test_documents_take_the_memory_of_a_row_of_all_tokens_of_their_batch() -> None:
    documents = _settings("packing=documents batch-size=1 max-tokens=1500")
    assert footprint(documents, 1) == footprint(_settings("batch-size=1 context-length=1500"), 1)
    few = dataclasses.replace(documents, max_batch_size=3)
    assert footprint(few, 1) == footprint(_settings("batch-size=1 context-length=768"), 1)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "gpu" else []) for name in PRESETS]
)
def test_blocks_that_are_recomputed_take_less(name: str) -> None:
    settings = PRESETS[name]()
    kept, recomputed = (
        dataclasses.replace(settings, model=dataclasses.replace(settings.model, gradient_checkpointing=choice))
        for choice in (False, True)
    )
    assert footprint(recomputed, 1).activations < footprint(kept, 1).activations
    assert footprint(recomputed, 1).optimizer == footprint(kept, 1).optimizer
