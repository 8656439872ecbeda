"""Models of transformers are planned from their configuration: the bytes of the real step, operations, the cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
)

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.data_sheets import sheet_of
from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate import Device, Generation
from dilated_attention_pytorch.estimate.pretrained import (
    PretrainedRun,
    operations,
    plan_pretrained,
    plan_pretrained_generation,
    pretrained_footprint,
    read_config,
    trace,
)
from dilated_attention_pytorch.integrations import BoundedCache, register, set_pattern

PATTERN = DilatedPattern([16, 64], [1, 2])
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
CONFIGS = [
    LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2),
    # A window in one of its layers.
    Gemma2Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=7),
    GPTNeoXConfig(**SIZES, num_attention_heads=4),
]
# Values of another width than keys.
LATENT = DeepseekV3Config(
    **SIZES,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=None,
    kv_lora_rank=12,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=12,
    first_k_dense_replace=2,
)


def _run(config: PreTrainedConfig, folder: Path) -> PretrainedRun:
    config.save_pretrained(folder)
    return PretrainedRun(config=read_config(folder), pattern=PATTERN, length=129, batch_size=2, precision="float32")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
@pytest.mark.parametrize("is_training", [True, False], ids=["step", "forward"])
def test_a_step_on_tensors_that_hold_nothing_has_the_bytes_of_the_real_one(
    config: PreTrainedConfig, is_training: bool, tmp_path: Path
) -> None:
    run = _run(config, tmp_path)
    fake, real = (
        max(sum(one.counts) for one in trace(run, is_training=is_training, is_fake=told)) for told in (True, False)
    )
    assert fake == real


@pytest.mark.parametrize("config", [*CONFIGS, LATENT], ids=lambda config: config.model_type)
def test_operations_are_those_that_pytorch_counts(config: PreTrainedConfig, tmp_path: Path) -> None:
    run = _run(config, tmp_path)
    register()
    model = set_pattern(AutoModelForCausalLM.from_config(run.config).eval(), PATTERN)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 129, dtype=torch.int64), use_cache=False)
    assert counter.get_total_flops() == 2 * operations(run, "forward")[0].of_text(129)
    plan = plan_pretrained(run, Device(sheet=sheet_of("A100 40 GB")), purpose="forward")
    assert plan.computed_flops == plan.model_flops == counter.get_total_flops()


@pytest.mark.parametrize("is_recomputing", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_a_step_has_the_operations_that_pytorch_counts(
    config: PreTrainedConfig, is_recomputing: bool, tmp_path: Path
) -> None:
    run = dataclasses.replace(_run(config, tmp_path), gradient_checkpointing=is_recomputing)
    register()
    model = set_pattern(AutoModelForCausalLM.from_config(run.config).train(), PATTERN)
    if is_recomputing:
        # transformers 5.23 gave it this name; before it was the other.
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    ids = torch.zeros(2, 129, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids, use_cache=False).loss.backward()
    plan = plan_pretrained(run, Device(sheet=sheet_of("A100 40 GB")))
    assert plan.computed_flops == counter.get_total_flops()
    assert plan.model_flops == 3 * 2 * operations(run, "forward")[0].of_text(129)


def test_a_chunk_of_a_prompt_has_the_logits_of_one_token(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "vocab_size": 5003}, num_attention_heads=4)
    generation = Generation(prompt=128, new_tokens=2)
    found = pretrained_footprint(_run(config, tmp_path), generation)
    assert found.of_batch < 4 * 128 * 5003


@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda config: config.model_type)
def test_the_cache_of_a_generation_has_the_bytes_that_were_planned(config: PreTrainedConfig, tmp_path: Path) -> None:
    run = _run(config, tmp_path)
    register()
    model = set_pattern(AutoModelForCausalLM.from_config(run.config).eval(), PATTERN)
    cache = BoundedCache(model.config)
    prompt = torch.full((2, 150), 5)  # 0 is padding for some
    model.generate(prompt, past_key_values=cache, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    generation = Generation(prompt=150, new_tokens=20)
    plan = plan_pretrained_generation(run, sheet_of("H200"), generation)
    assert plan.footprint.cache == cache.num_bytes
    assert (plan.tokens, plan.memory_bytes, plan.fits) == (2 * 20, 141 * 10**9, True)


def test_a_step_takes_what_adamw_keeps_and_more_than_a_forward_pass(tmp_path: Path) -> None:
    run = _run(CONFIGS[0], tmp_path)
    weights = 4 * sum(weight.numel() for weight in AutoModelForCausalLM.from_config(run.config).parameters())
    found = pretrained_footprint(run, "training")
    # Rotary frequencies are no weights, and are kept with them.
    assert found.weights == pytest.approx(weights, rel=0.01)
    assert found.optimizer == pytest.approx(2 * weights, rel=0.01)
    recomputed = dataclasses.replace(run, gradient_checkpointing=True)
    assert pretrained_footprint(recomputed, "training").total < found.total


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    wrong = {
        "{": "describes no model",
        "{}": "it has no model_type",
        "[]": "it has no model_type",
        '{"model_type": "zzz"}': "describes no model",
    }
    for text, message in wrong.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(RunError, match=message):
            read_config(tmp_path / "config.json")
    with pytest.raises(RunError, match="batch_size must be at least 1, got 0"):
        PretrainedRun(config=CONFIGS[0], pattern=PATTERN, length=8, batch_size=0)
    experts = PretrainedRun(config=MixtralConfig(**SIZES, num_local_experts=4), pattern=PATTERN, length=8)
    with pytest.raises(RunError, match=r"mixtral cannot be planned .* as with experts chosen by token; measure a step"):
        plan_pretrained(experts, Device(sheet=sheet_of("A100 40 GB")))
    run = PretrainedRun(config=CONFIGS[0], pattern=PATTERN, length=8, precision="bfloat16")
    with pytest.raises(RunError, match="V100 has no rate of it"):
        plan_pretrained(run, Device(sheet=sheet_of("V100")))
    with pytest.raises(RunError, match="V100 has no rate of it"):
        plan_pretrained_generation(run, sheet_of("V100"), Generation(prompt=8))
