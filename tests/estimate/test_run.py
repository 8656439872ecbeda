"""Operations of a step as PyTorch counts them, the longest text that fits, and plans that cannot be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from dilated_attention_pytorch.cli import main
from dilated_attention_pytorch.data_sheets import sheet_of
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate import Device, longest_context, measure, plan_run, seconds_of_steps
from dilated_attention_pytorch.estimate.flops import longnet_flops, step_work
from dilated_attention_pytorch.estimate.memory import footprint
from dilated_attention_pytorch.models import LongNetConfig, LongNetForCausalLM
from dilated_attention_pytorch.training import PRESETS, TrainSettings
from dilated_attention_pytorch.training.data.documents import packed
from dilated_attention_pytorch.training.stages import StageSettings
from dilated_attention_pytorch.training.zero import ZERO_STAGES


def _settings(model: dict[str, Any], **changes: Any) -> TrainSettings:
    sizes = {
        "embed_dim": 12, "num_layers": 3, "num_heads": 3, "segment_lengths": (16, 64), "dilation_rates": (1, 4),
        "layer_segment_shifts": (0, 5),
    }  # fmt: skip
    config = LongNetConfig(**{**sizes, **model})
    given = {"context_length": 211, "batch_size": 2, "tokenizer": Path("tokens"), "optimizer": "adamw", **changes}
    return dataclasses.replace(PRESETS["tiny"](), model=config, **given)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"activation": "gelu", "num_kv_heads": 1},
        {"gradient_checkpointing": True, "checkpoint_every": 2, "head_gates": True, "key_convolution": 3},
        {"vocab_size": 20011, "gradient_checkpointing": True},
        {"gradient_checkpointing": True, "dropout": 0.1},
    ],
    ids=["plain", "other model", "recomputed with gates", "loss by blocks", "recomputed with dropout"],
)
def test_a_step_has_the_operations_that_pytorch_counts(model: dict[str, Any]) -> None:
    settings = _settings(model, gradient_accumulation=2)
    longnet = LongNetForCausalLM.from_longnet_config(settings.model).train()
    ids = torch.zeros(settings.batch_size, settings.context_length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        for _ in range(settings.gradient_accumulation):
            longnet(input_ids=ids, labels=ids, skip_logits=True).loss.backward()
    assert counter.get_total_flops() == step_work(settings).total


def test_a_step_with_drawn_windows_has_the_mean_operations_of_their_steps() -> None:
    def counted(before: int) -> int:
        longnet = LongNetForCausalLM.from_longnet_config(_windowed(before).model).train()
        ids = torch.zeros(2, 211, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            longnet(input_ids=ids, labels=ids, skip_logits=True).loss.backward()
        return counter.get_total_flops()

    # In 18 of 20 steps one of three sizes is drawn, 7 in two thirds of them.
    settings = _windowed(40, steps=20, random_local_windows=(7, 100, 7))
    expected = (18 * (2 * counted(7) + counted(100)) / 3 + 2 * counted(40)) / 20
    pair = 3 * 2 * 2 * (2 + 5 + 2) * 4  # of all layers, with recomputation
    assert expected - pair < step_work(settings).total <= expected
    own, drawn = (plan_run(one, 1, sheet_of("H200"), purpose="forward") for one in (_windowed(40), settings))
    assert (own.model_flops, own.footprint) == (drawn.model_flops, drawn.footprint)
    assert (
        plan_run(settings, 1, sheet_of("H200")).model_flops < plan_run(_windowed(100), 1, sheet_of("H200")).model_flops
    )


def _windowed(before: int, **changes: Any) -> TrainSettings:
    layers = {"segment_lengths": (), "dilation_rates": (), "layer_segment_shifts": (0,)}
    layers |= {"layer_patterns": (f"local_window({before}) + global_tokens(2)",), "gradient_checkpointing": True}
    return _settings(layers, **changes)


def test_a_step_is_all_its_batches_and_one_step_of_the_optimizer() -> None:
    one, three = (plan_run(_settings({}, gradient_accumulation=number), 1, sheet_of("H200")) for number in (1, 3))
    assert three.tokens == 3 * one.tokens == 3 * 2 * 211
    assert three.model_flops == 3 * one.model_flops
    assert three.computed_flops == 3 * one.computed_flops
    assert three.seconds.attention == pytest.approx(3 * one.seconds.attention)
    assert three.seconds.products == pytest.approx(3 * one.seconds.products)
    states = three.footprint
    assert three.seconds.optimizer == (2 * states.weights + states.gradients + 2 * states.optimizer) / 4.8e12
    alone = plan_run(_settings({}, gradient_accumulation=3), 1, sheet_of("H200"), purpose="forward")
    assert alone.tokens == one.tokens


def test_a_batch_of_documents_has_the_operations_of_the_longest_that_it_holds() -> None:
    settings = _settings({"gradient_checkpointing": True}, batch_size=1, packing="documents", max_tokens=500)
    longnet = LongNetForCausalLM.from_longnet_config(settings.model).train()
    row = packed([torch.zeros(length, dtype=torch.int64) for length in (211, 211, 78)])
    batch = {name: tensor if name == "cu_seqlens" else tensor[None] for name, tensor in row.items()}
    with FlopCounterMode(display=False) as counter:
        longnet(**batch, skip_logits=True).loss.backward()
    assert counter.get_total_flops() == step_work(settings).total
    plan = plan_run(settings, 1, sheet_of("H200"))
    assert plan.tokens == 500
    assert plan.model_flops == 3 * sum(map(longnet_flops(settings.model).of_text, (211, 211, 78)))
    # An evaluation takes rows of the context length.
    assert plan_run(settings, 1, sheet_of("H200"), purpose="forward").tokens == 211
    few = dataclasses.replace(settings, max_batch_size=2)
    assert plan_run(few, 1, sheet_of("H200")).tokens == 2 * 211
    assert plan_run(few, 1, sheet_of("H200")).footprint.activations < plan.footprint.activations


@pytest.mark.slow
def test_the_longest_text_of_a_run_on_documents_is_that_of_one_row() -> None:
    settings = _settings({"gradient_checkpointing": True}, batch_size=1)
    documents = dataclasses.replace(settings, packing="documents", max_tokens=500, max_batch_size=2)
    memory = 2 * footprint(documents, 1).total
    assert longest_context(documents, 1, memory) == longest_context(settings, 1, memory) > 500


def test_the_longest_text_fits_and_64_tokens_more_do_not() -> None:
    settings = _settings({"vocab_size": 20011, "gradient_checkpointing": True}, batch_size=1)
    needed = footprint(dataclasses.replace(settings, context_length=1000), 1).total
    memory = needed * 100 // 99
    longest = longest_context(settings, 1, memory)
    assert longest == 960 == (1000 - 1) // 64 * 64
    for length, fits in ((longest, True), (longest + 64, False)):
        assert (footprint(dataclasses.replace(settings, context_length=length), 1).total < needed) is fits
    assert longest_context(settings, 1, 1000) == 0


def test_processes_that_share_a_sequence_share_its_operations() -> None:
    sheet = sheet_of("A100 40 GB")
    alone = plan_run(_settings({}), 1, sheet)
    shared = plan_run(_settings({"num_heads": 2}, context_parallel=2), 4, sheet)
    assert shared.tokens == 2 * alone.tokens
    assert shared.footprint.activations < 0.6 * alone.footprint.activations
    whole = plan_run(_settings({"num_heads": 2}), 1, sheet)
    assert shared.computed_flops == 2 * whole.computed_flops
    for plan, share in ((shared, 0.5), (whole, 1.0)):
        computing = plan.seconds.products + plan.seconds.attention
        assert computing == pytest.approx(share * whole.computed_flops / 312e12, rel=1e-12)
    assert whole.model_flops < whole.computed_flops


def test_zero_is_planned_without_torchrun_and_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    whole = plan_run(_settings({}), 4, sheet_of("H200")).footprint
    parts = {
        stage: plan_run(_settings({}, data_parallel=stage), 4, sheet_of("H200")).footprint for stage in ZERO_STAGES
    }
    parameters = whole.weights // 4
    # Weights of 4 bytes and, for AdamW, a copy and two moments: whole, or a fourth.
    assert [part.weights for part in parts.values()] == [4 * parameters, 4 * parameters, parameters]
    assert [part.gradients for part in parts.values()] == [4 * parameters, parameters, parameters]
    assert [part.optimizer for part in parts.values()] == [3 * parameters] * 3


def test_plans_that_cannot_be_are_refused() -> None:
    for changes, processes, message in (
        ({}, 0, "a run takes at least 1 process, got 0"),
        ({"context_parallel": 4}, 6, "context"),
        ({"precision": "bfloat16"}, 1, r"V100 has no rate of it; take one of float16, float32"),
    ):
        with pytest.raises(RunError, match=message):
            plan_run(_settings({}, **changes), processes, sheet_of("V100"))


def test_a_plan_of_another_model_does_not_read_the_stages_of_a_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(vocab_size=256, **sizes).save_pretrained(tmp_path)
    line = f"plan --preset hybrid --model {tmp_path} --context-length 16384 --pattern local_window(63) --hardware H200"
    main(line.split())
    assert "16,384 tokens in a step" in capsys.readouterr().out


def test_the_page_on_training_has_the_share_of_attention_of_the_presets() -> None:
    shares = []
    for name in ("hybrid", "cpu"):
        flops = longnet_flops(PRESETS[name]().model)
        shares += [f"{1 - flops.per_token * length / flops.of_text(length):.0%}" for length in (8192, 32768)]
    a, b, c, d = (share.replace("%", " %") for share in shares)
    page = " ".join((Path(__file__).parents[2] / "docs" / "training.md").read_text().split())
    assert f"attention is {a} of the operations at 8,192 bytes, {b} at 32,768 (`cpu`: {c}, {d})" in page


def test_steps_of_every_stage_are_planned_with_its_windows_and_patterns() -> None:
    device = Device(sheet=sheet_of("H200"))
    run = dataclasses.replace(PRESETS["cpu"](), steps=30, batch_size=2, precision="float32")
    plan = plan_run(run, 1, device)
    assert seconds_of_steps(run, 1, device, plan) == 30 * plan.seconds.total
    stages = StageSettings(
        lengths=(512, 8192),
        windows=(4, 1),
        fractions=(0.7, 0.3),
        patterns=("DilatedPattern([512], [1])", "DilatedPattern([8192], [1])"),
    )
    expected = 0.0
    for steps, length, batch in ((21, 512, 8), (9, 8192, 2)):
        model = dataclasses.replace(run.model, segment_lengths=(length,), dilation_rates=(1,))
        alone = dataclasses.replace(run, model=model, context_length=length, batch_size=batch)
        expected += steps * plan_run(alone, 1, device).seconds.total
    assert seconds_of_steps(dataclasses.replace(run, stages=stages), 1, device, plan) == pytest.approx(expected)


@pytest.mark.parametrize(("own", "drawn"), [(4095, 31), (31, 4095)])
def test_steps_of_every_stage_are_planned_with_the_windows_that_they_draw(own: int, drawn: int) -> None:
    device = Device(sheet=sheet_of("H200"))
    stages = StageSettings(lengths=(512, 8192), windows=(4, 1), fractions=(0.7, 0.3))
    model = LongNetConfig(embed_dim=64, num_layers=2, num_heads=2, layer_patterns=(f"local_window({own})",))
    run = dataclasses.replace(PRESETS["hybrid"](), model=model, steps=40, stages=stages, random_local_windows=(drawn,))
    expected, by_step = 0.0, run.stages_by_step
    for step in range(40):
        stage, patterns = by_step.at(step), by_step.patterns_at(step) or (model.pattern(0),)
        alone = dataclasses.replace(
            run,
            model=dataclasses.replace(model, layer_patterns=(repr(patterns[0]),)),
            context_length=stages.lengths[stage],
            batch_size=stages.windows[stage],
            stages=StageSettings(),
            random_local_windows=(),
        )
        expected += plan_run(alone, 1, device).seconds.total
    assert seconds_of_steps(run, 1, device, plan_run(run, 1, device)) == pytest.approx(expected)


def test_the_command_prints_and_writes_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    main(["plan", "--preset", "tiny", "--hardware", "RTX 4090", "--precision", "float32", "--output-file", str(file)])
    printed, written = capsys.readouterr().out, json.loads(file.read_text())
    expected = footprint(dataclasses.replace(PRESETS["tiny"](), precision="float32"), 1)
    assert written["footprint"] == dataclasses.asdict(expected)
    assert written["total_bytes"] == expected.total
    assert "fits, with 23." in printed
    assert "20 steps take at least " in printed
    settings = dataclasses.replace(PRESETS["tiny"](), precision="float32")
    assert written["seconds_of_run"] == 20 * plan_run(settings, 1, sheet_of("RTX 4090")).seconds.total


def test_without_a_device_the_command_plans_for_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "matrix_product_rate", lambda device, dtype: 1e9)
    words = "plan --preset tiny --device cpu --precision float32 --for forward --output"
    main([*words.split(), str(tmp_path / "forward.json")])
    printed, written = capsys.readouterr().out, json.loads((tmp_path / "forward.json").read_text())
    assert "at the rates of this machine; a real one takes more" in printed
    assert written["hardware"] == "this machine"
    attention = 2 * longnet_flops(PRESETS["tiny"]().model).attention(256)
    assert written["seconds"]["products"] == pytest.approx((written["computed_flops"] - attention) / 1e9)
    LlamaConfig(vocab_size=97, hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path)
    words = f"plan --device cpu --model {tmp_path} --pattern local_window(3) --context-length 64 --precision float32"
    main([*words.split(), "--output", str(tmp_path / "llama.json")])
    assert json.loads((tmp_path / "llama.json").read_text())["hardware"] == "this machine"


def test_the_command_plans_a_generation_without_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    words = "plan --preset tiny --hardware H200 --precision float32 --for generation --prompt 100 --new-tokens 4"
    main([*words.split(), "--output", str(file)])
    written = json.loads(file.read_text())
    assert (written["purpose"], written["tokens"], written["fits"]) == ("generation", 2 * 4, True)
    assert "seconds" not in written
    printed = capsys.readouterr().out
    assert "key/value cache" in printed
    assert "seconds of the generation" not in printed
    assert "8 new tokens in the generation; its seconds are not predicted: time `dilated-attention generate`" in printed
