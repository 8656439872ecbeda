"""What the processes of a run send in a step is what was planned, to the byte."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from benchmarks.sent_bytes import SentBytes, count_sent_bytes
from torch.nn.parallel import DistributedDataParallel

from dilated_attention_pytorch.estimate.exchange import exchanges
from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.distribution import Distribution
from ranks import run_ranks

_ROWS = 211


def _settings(model: dict[str, Any], **changes: Any) -> TrainSettings:
    config = LongNetConfig(
        **{
            "vocab_size": 256,
            "embed_dim": 24,
            "num_layers": 3,
            "num_heads": 4,
            "num_kv_heads": 2,
            "segment_lengths": (16, 64),
            "dilation_rates": (1, 4),
            **model,
        }
    )
    given = {"batch_size": 1, "context_length": _ROWS, "precision": "float32", **changes}
    return dataclasses.replace(PRESETS["tiny"](), model=config, **given)


def _step(settings: TrainSettings) -> SentBytes:
    """In a process: what it sends in the forward and backward passes of all batches of a step.

    accelerate's ``no_sync``, in which the trainer takes all batches but the last, has an effect with DDP alone.
    """
    distribution = Distribution(settings, "cpu")
    model = LongNetForCausalLM.from_longnet_config(settings.model).train()
    distribution.apply(model)
    wrapped = distribution.wrap(model)
    ids = torch.zeros(1, _ROWS, dtype=torch.int64)
    rows = distribution.rows({"input_ids": ids, "labels": ids})
    with count_sent_bytes() as sent:
        for left in reversed(range(settings.gradient_accumulation)):
            is_deferred = left and isinstance(wrapped, DistributedDataParallel)
            with wrapped.no_sync() if is_deferred else contextlib.nullcontext():
                wrapped(**rows, num_items_in_batch=_ROWS, skip_logits=True).loss.backward()
    return sent


def _steps(several: list[TrainSettings]) -> list[SentBytes]:
    return [_step(settings) for settings in several]


def test_drawn_windows_send_the_mean_of_what_each_of_them_sends() -> None:
    def rows(before: int, layout: str, **changes: Any) -> int:
        model = {"segment_lengths": (), "dilation_rates": (), "layer_patterns": (f"local_window({before})",)}
        settings = _settings(model, context_parallel=2, layout=layout, steps=20, **changes)
        return dict(exchanges(settings, 2))["rows"]

    # In 18 of 20 steps one of four sizes is drawn.
    sizes = (5, 80, 5, 21)
    found = rows(40, "zigzag", random_local_windows=sizes)
    expected = (18 * sum(rows(size, "zigzag") for size in sizes) + 2 * 4 * rows(40, "zigzag")) / 80
    assert expected - 3 < found <= expected  # three layers, each rounded down
    # A run has one layout, that of its own windows.
    assert (rows(200, "auto"), rows(5, "auto")) == (rows(200, "zigzag"), rows(5, "contiguous"))
    expected = (18 * rows(5, "zigzag") + 2 * rows(200, "zigzag")) / 20
    assert expected - 3 < rows(200, "auto", random_local_windows=(5,)) <= expected


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_step_sends_what_was_planned(processes: int) -> None:
    tied, recomputed = {"tie_embeddings": False}, {"gradient_checkpointing": True}
    patterns = ("local_window(7)", "DilatedPattern([211], [1])")
    unlike = {"segment_lengths": (), "dilation_rates": (), "layer_patterns": patterns}
    several = [
        _settings({}),
        _settings(recomputed, data_parallel="fsdp"),
        _settings(tied, data_parallel="fsdp"),
        _settings(recomputed, context_parallel=processes, strategy="ring"),
        _settings({"key_convolution": 3, **recomputed}, context_parallel=processes, strategy="gather"),
        _settings({"shifted_keys": True}, context_parallel=processes, strategy="ring", layout="zigzag"),
        _settings(unlike, context_parallel=processes),
        _settings({}, gradient_accumulation=3),
        _settings(recomputed, data_parallel="fsdp", gradient_accumulation=2),
        _settings({}, context_parallel=processes, strategy="ring", gradient_accumulation=2),
    ]
    by_rank = run_ranks(processes, _steps, several)
    for place, settings in enumerate(several):
        planned = {one.name: one.bytes for one in exchanges(settings, processes)}
        sent = [of_rank[place] for of_rank in by_rank]
        assert max(one.collectives for one in sent) == planned["weights and gradients"]
        assert max(one.rows for one in sent) == planned.get("rows", 0)
