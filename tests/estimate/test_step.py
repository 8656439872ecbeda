"""Passes on tensors that hold nothing have the memory of the passes themselves, to the byte, however deep and long."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention_pytorch.estimate.live_bytes import PARTS, Counts, LiveBytes, Moment
from dilated_attention_pytorch.estimate.memory import footprint, optimizer_bytes
from dilated_attention_pytorch.estimate.step import moments, trace_step
from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.autocast import autocast
from dilated_attention_pytorch.training.optimizer import build_optimizer


def _settings(model: dict[str, Any], **changes: Any) -> TrainSettings:
    sizes = {"embed_dim": 24, "num_layers": 3, "num_heads": 3, "segment_lengths": (64, 256), "dilation_rates": (1, 4)}
    config = LongNetConfig(**{**sizes, **model})
    given = {"context_length": 601, "batch_size": 2, "tokenizer": Path("tokens"), "precision": "float32", **changes}
    return dataclasses.replace(PRESETS["tiny"](), model=config, **given)


def _peaks(series: dict[tuple[str, int], list[Moment]]) -> dict[tuple[str, int], Counts]:
    return {phase: max((moment.counts for moment in found), key=sum) for phase, found in series.items()}


RECOMPUTED = {"gradient_checkpointing": True, "checkpoint_every": 2}
OTHERS = {
    "activation": "gelu", "num_kv_heads": 1, "dropout": 0.1, "tie_embeddings": False, "head_gates": True,
    "key_convolution": 3, "layer_rope_thetas": (0.0, 1e4), "layer_scale_lengths": (9, 0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "batches"),
    [
        ("float32", 1),
        ("bfloat16", 3),
        pytest.param("float32", 3, marks=pytest.mark.slow),
        pytest.param("bfloat16", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "model",
    [{}, RECOMPUTED, OTHERS, {"vocab_size": 20011}],
    ids=["plain", "recomputed", "other model", "loss by blocks"],
)
def test_every_phase_of_fake_passes_has_the_bytes_of_the_real_ones(
    model: dict[str, Any], batches: int, precision: str
) -> None:
    settings = _settings(model, precision=precision, gradient_accumulation=batches)
    assert _peaks(trace_step(settings)) == _peaks(trace_step(settings, is_fake=False))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-bf16", "muon"])
def test_a_step_of_the_optimizer_has_the_bytes_that_are_computed(optimizer: Any) -> None:
    """The state to the byte but for the counts of steps; what a step takes within a tenth of it and the states."""
    settings = _settings(OTHERS | {"embed_dim": 96, "vocab_size": 1009}, optimizer=optimizer)
    states, stepping = optimizer_bytes(settings)
    with LiveBytes() as live:
        model = LongNetForCausalLM.from_longnet_config(settings.model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        own = build_optimizer(model, settings)
        own.step()
        live.is_recording = True
        own.step()
    kept = [value for state in own.state.values() for value in state.values() if value.dim()]
    assert sum(value.nbytes for value in kept) == states
    most = max(sum(moment.counts) for moment in live.moments)
    assert 2 * 4 * settings.model.num_parameters + states + stepping == pytest.approx(most, rel=0.1)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [{}, OTHERS], ids=["plain", "other model"])
def test_what_is_kept_for_the_backward_pass_is_what_autograd_saves(model: dict[str, Any], precision: str) -> None:
    settings = _settings(model, precision=precision)
    planned = dict(zip(PARTS, trace_step(settings)["loss backward", 0][0].counts, strict=True))
    torch.manual_seed(0)
    longnet = LongNetForCausalLM.from_longnet_config(settings.model).train()
    ids = torch.zeros(settings.batch_size, settings.context_length, dtype=torch.int64)
    given = {tensor.untyped_storage().data_ptr() for tensor in (ids, *longnet.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    keeping = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with keeping, autocast(precision, "cpu"):
        loss = longnet(input_ids=ids, labels=ids, num_items_in_batch=ids.numel(), skip_logits=True).loss
    # Beside what is saved there is the loss, and the number that its gradient begins with.
    assert planned["activations"] + planned["loss"] == sum(saved.values()) + 2 * loss.element_size()


def _random_settings() -> Iterator[TrainSettings]:
    """Models and texts of which a trace takes a part, or all."""
    draw = random.Random(11)
    for _ in range(5):
        heads = draw.choice([1, 3])
        model = {
            "embed_dim": heads * draw.choice([8, 22]),
            "num_heads": heads,
            "num_layers": (layers := draw.randint(1, 13)),
            "vocab_size": draw.choice([256, 8209, 20011]),
            "gradient_checkpointing": True,
            "checkpoint_every": draw.choice([1, 3]),
            "layer_rope_thetas": draw.choice([(), (0.0, 1e4)])[:layers],
            "head_gates": draw.choice([False, True]),
            "key_convolution": draw.choice([1, 2]),
        }
        yield _settings(
            model,
            context_length=draw.randint(8, 5000),
            batch_size=draw.choice([1, 3]),
            precision=draw.choice(["float32", "bfloat16"]),
        )


def _of_long_lists() -> Iterator[TrainSettings]:
    """Models with more patterns or shifts than layers that are traced."""
    patterns = ("local_window(31)", "local_window(63)") * 2 + ("local_window(31)", "DilatedPattern([601], [1])")
    by_layer = {"layer_patterns": patterns, "segment_lengths": (), "dilation_rates": (), "num_layers": 12}
    yield _settings(by_layer, random_local_windows=(7, 15))
    yield _settings({"layer_segment_shifts": tuple(range(10)), "num_layers": 11, "layer_rope_thetas": (1e4, 0.0)})


@pytest.mark.parametrize("batches", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "settings", [*_random_settings(), *_of_long_lists()], ids=lambda one: f"{one.model.num_layers} layers"
)
def test_few_layers_and_blocks_of_the_loss_tell_of_many(settings: TrainSettings, batches: int) -> None:
    settings = dataclasses.replace(settings, gradient_accumulation=batches)
    of_few = max((moment.counts for moment in moments(settings)), key=sum)
    assert of_few == max(_peaks(trace_step(settings)).values(), key=sum)


def test_a_trillion_weights_and_a_billion_tokens_are_counted() -> None:
    model = {
        "vocab_size": 64000,
        "embed_dim": 20480,
        "num_layers": 200,
        "num_heads": 160,
        "gradient_checkpointing": True,
        "segment_lengths": (2048, 1 << 30),
        "dilation_rates": (1, 1 << 20),
    }
    settings = _settings(model, context_length=10**9, batch_size=1, optimizer="adamw")
    weights = settings.model.num_parameters
    assert weights > 10**12
    found = footprint(settings, 1)
    assert found.weights == 4 * weights
    assert found.optimizer == 8 * weights
    # The input of every block, and of one block all that its backward pass reads.
    assert found.activations > 4 * 20480 * 10**9 * 200
