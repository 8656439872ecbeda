"""What a run records of itself: operations counted exactly, rates, memory, and what its restarts cost."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import DilatedPattern, LongNetConfig, LongNetLM, local_window
from dilated_attention_pytorch.estimate.flops import longnet_flops, pretrained_flops, training_flops
from dilated_attention_pytorch.integrations import set_pattern
from dilated_attention_pytorch.training import resume, train
from dilated_attention_pytorch.training.callbacks import Metrics, read_metrics
from dilated_attention_pytorch.training.faults import cost_of_faults, note_fault
from dilated_attention_pytorch.training.measures import WorkDone, matrix_product_rate, peak_memory
from dilated_attention_pytorch.training.stages import Stages, StageSettings
from training.runs import quiet, stopped_run, tiny_settings, write_texts


@pytest.mark.parametrize(("activation", "tied"), [("swiglu", True), ("gelu", False)])
def test_a_forward_pass_has_the_operations_that_pytorch_counts(activation: Any, tied: bool) -> None:
    config = LongNetConfig(
        vocab_size=11,
        embed_dim=12,
        num_layers=3,
        num_heads=6,
        num_kv_heads=3,
        ffn_dim=20,
        activation=activation,
        segment_lengths=[13, 40],
        dilation_rates=[1, 3],
        layer_segment_shifts=(0, 5),
        tie_embeddings=tied,
    )
    with FlopCounterMode(display=False) as counter:
        LongNetLM(config)(torch.randint(11, (2, 37)))
    assert counter.get_total_flops() == 2 * longnet_flops(config).of_text(37)


def test_a_dense_training_step_has_three_times_the_operations_of_its_forward_pass() -> None:
    # One segment as long as the text is causal dense attention, whose pairs PyTorch's backward counts 5 products of.
    config = LongNetConfig(
        vocab_size=11, embed_dim=12, num_layers=2, num_heads=2, ffn_dim=20, segment_lengths=[19], dilation_rates=[1]
    )
    model, tokens = LongNetLM(config), torch.randint(11, (1, 19))
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.cross_entropy(model(tokens)[0], tokens[0]).backward()
    pairs = 2 * 2 * (19 * 20 // 2)
    assert longnet_flops(config).of_text(19) == 2 * config.num_matrix_weights * 19 + 4 * 6 * pairs
    recomputed = 2 * 6 * pairs
    assert counter.get_total_flops() - recomputed == training_flops(longnet_flops(config), Stages((19,), (1,), (1,)), 1)


def test_a_stage_has_the_operations_of_its_windows_and_its_pattern() -> None:
    config = LongNetConfig(embed_dim=12, num_layers=2, num_heads=2, segment_lengths=[64], dilation_rates=[1])
    narrow = dataclasses.replace(config, segment_lengths=[8], dilation_rates=[2])
    own, of_first = (tuple(each.pattern(layer) for layer in range(2)) for each in (config, narrow))
    stages = Stages((16, 64), (3, 7), (4, 1), patterns=(of_first, own))
    found = training_flops(longnet_flops(config), stages, 5)
    expected = 3 * 4 * longnet_flops(narrow).of_text(16) + 2 * longnet_flops(config).of_text(64)
    assert found == 3 * expected


def test_steps_with_drawn_windows_have_the_operations_of_their_windows() -> None:
    config = LongNetConfig(
        embed_dim=12,
        num_layers=3,
        num_heads=2,
        layer_patterns=("local_window(15)", "local_window(3) + global_tokens(2)"),
    )
    settings = dataclasses.replace(
        tiny_settings(Path("x")),
        model=config,
        context_length=64,
        steps=37,
        stages=StageSettings(lengths=(16, 64)),
        random_local_windows=(1, 40),
    )
    stages, flops = settings.stages_by_step, longnet_flops(config)

    def of_step(step: int) -> int:
        patterns = stages.patterns_at(step) or [config.pattern(layer) for layer in range(3)]
        length, windows = (16, 4) if step < 19 else (64, 1)
        positions = torch.arange(length)
        pairs = sum(int(pattern.counts(positions, positions, 2, is_causal=True).sum()) for pattern in patterns)
        return 3 * windows * (2 * config.num_matrix_weights * length + 4 * 6 * pairs)

    for step in (0, 1, 19, 20, 33, 34, 37):
        assert training_flops(flops, stages, step) == sum(map(of_step, range(step)))


_WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {}),
        ("Gemma3Text", _WINDOWS),
        ("GptOss", {**_WINDOWS, "num_local_experts": 5, "num_experts_per_tok": 2}),
        ("Llama4Text", {"layer_types": ["chunked_attention", *["full_attention"] * 2], "attention_chunk_size": 20}),
    ],
)
def test_a_pretrained_model_is_counted_as_pytorch_counts_it_at_any_length(name: str, changes: dict[str, Any]) -> None:
    sizes = {"vocab_size": 23, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "head_dim": 4}
    config: Any = getattr(transformers, f"{name}Config")(
        **sizes, num_attention_heads=6, num_key_value_heads=3, pad_token_id=0, **changes
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    set_pattern(model, DilatedPattern([8, 32], [1, 3]) + local_window(5))
    flops = pretrained_flops(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(23, (1, 53)), use_cache=False)
    assert counter.get_total_flops() == flops.of_text(53)


def test_rates_are_those_of_the_steps_between() -> None:
    work = WorkDone(tokens_after=(100).__mul__, bytes_after=lambda step: 450.0 * step, flops_after=(10**9).__mul__)
    assert work.rates(3, 7, 2.0, 8e9) == {"tokens_per_second": 200, "bytes_per_second": 900, "mfu": 0.25}


def test_steps_without_their_batches_are_no_work() -> None:
    amounts = [0, 3, 7, 20, 110, 1000]  # of steps that differ, as those of documents do
    sums = [sum(amounts[: done + 1]) for done in range(len(amounts))]
    whole = WorkDone(
        tokens_after=sums.__getitem__, bytes_after=lambda done: 4.5 * sums[done], flops_after=sums.__getitem__
    )
    work = whole.without({2, 4})
    assert [work.tokens_after(done) for done in range(6)] == [0, 3, 3, 23, 23, 1023]
    assert work.rates(1, 4, 2.0, 5.0) == {"tokens_per_second": 10, "bytes_per_second": 45, "mfu": 2.0}
    assert work.rates(1, 2, 2.0, 5.0) == {"tokens_per_second": 0, "bytes_per_second": 0, "mfu": 0.0}
    assert whole.without(()).rates(0, 5, 2.0, 5.0) == whole.rates(0, 5, 2.0, 5.0)


def test_the_rate_of_a_machine_is_positive_and_memory_holds_what_was_taken() -> None:
    assert matrix_product_rate(torch.device("cpu"), torch.float32) > 1e8
    held = torch.ones(1 << 24)
    assert peak_memory(torch.device("cpu")) > held.nbytes


def test_every_entry_of_the_loss_says_how_fast_how_much_memory_and_how_often(tmp_path: Path) -> None:
    run = train(tiny_settings(write_texts(tmp_path / "texts")), tmp_path / "run", quiet()).run
    begun, *entries = read_metrics(run)
    assert begun.keys() == {"step", "seconds", "matrix_product_flops", "steps"}
    assert (begun["step"], begun["seconds"]) == (0, 0.0)
    flops = 2 * training_flops(longnet_flops(tiny_settings(tmp_path).model), Stages((256,), (9,), (1,)), 1)
    losses = [entry for entry in entries if "loss" in entry]
    assert len(losses) == 4
    for entry in losses:
        assert entry["loss"] / 0.6931471805599453 == pytest.approx(entry["bits_per_byte"], rel=1e-6)
        # A step has 2 windows of 256 bytes, so both rates give the time of a step.
        expected = entry["tokens_per_second"] / 512 * flops / begun["matrix_product_flops"]
        assert entry["mfu"] == pytest.approx(expected, rel=2e-3)
        assert entry["bytes_per_second"] == entry["tokens_per_second"]
        assert entry["peak_memory_bytes"] > 1 << 26
        assert (entry["restarts"], entry["seconds_lost"]) == (0, 0.0)


def test_a_log_that_is_taken_up_has_no_step_twice(tmp_path: Path) -> None:
    def take_up(step: int) -> list[float]:
        work = WorkDone(tokens_after=int, bytes_after=float, flops_after=int)
        Metrics(tmp_path, step, steps=9, work=work, device=torch.device("cpu"), matrix_product_flops=1e9, receivers=())
        return [entry["step"] for entry in read_metrics(tmp_path)]

    assert take_up(0) == [0]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step in (2, 4, 6):
            file.write(json.dumps({"step": step, "seconds": 3.0 * step, "bits_per_byte": 2.0}) + "\n")
    assert take_up(4) == [0, 2, 4, 4]
    assert take_up(4) == [0, 2, 4, 4]  # nothing was done in between
    begun = {"step": 4, "seconds": 12.0, "matrix_product_flops": 1e9, "steps": 9}
    assert read_metrics(tmp_path)[-1] == begun


def test_a_run_that_went_on_after_a_fault_has_one_entry_a_step_and_says_what_it_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_settings(write_texts(tmp_path / "texts"), log_steps=1, eval_steps=9)
    run = stopped_run(monkeypatch, settings, tmp_path / "run", 5).run
    note_fault(run, "failed", step=6, reason="of a test")
    resume(run, quiet())
    entries = [entry for entry in read_metrics(run) if "loss" in entry]
    assert [entry["step"] for entry in entries] == list(range(1, 10))
    cost = cost_of_faults(run)
    assert cost.restarts == 1
    assert [entry["restarts"] for entry in entries] == 6 * [0] + 3 * [1]
    assert [entry["seconds_lost"] for entry in entries] == 6 * [0.0] + 3 * [cost.seconds_lost]
