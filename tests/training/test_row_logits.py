"""Losses and evaluations of models of transformers without their whole logits are those with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    TrainingArguments,
)

from dilated_attention_pytorch.models import token_loss
from dilated_attention_pytorch.training import ExtensionSettings
from dilated_attention_pytorch.training.row_logits import row_logits
from dilated_attention_pytorch.training.trainer import ExtensionTrainer
from training.runs import open_run

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **changes))


def test_models_that_do_more_to_their_logits_are_told_apart() -> None:
    assert row_logits(llama()) is not None
    assert row_logits(llama(tie_word_embeddings=True)) is not None
    assert row_logits(GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, is_decoder=True))) is not None
    # Scaled by 1/16, and capped.
    assert row_logits(CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.0625))) is None
    gemma = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, num_key_value_heads=1, final_logit_softcapping=0.1))
    assert row_logits(gemma) is None
    # A cap that fresh weights do not come near, and a loss beside that of the logits.
    far = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, num_key_value_heads=1, final_logit_softcapping=30.0))
    assert row_logits(far) is None
    experts = {"num_key_value_heads": 1, "num_local_experts": 4, "output_router_logits": True}
    assert row_logits(MixtralForCausalLM(MixtralConfig(**SIZES, **experts))) is None
    assert (
        row_logits(MixtralForCausalLM(MixtralConfig(**SIZES, **experts | {"output_router_logits": False}))) is not None
    )


@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_step_of_a_trainer_is_that_with_whole_logits(
    accumulated: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = llama(tie_word_embeddings=True).double().train()
    batches = [
        {"input_ids": torch.randint(50, (2, 37)), "labels": torch.randint(50, (2, 37))} for _ in range(accumulated)
    ]
    batches[0]["labels"][1, 5:] = -100
    args = TrainingArguments(str(tmp_path), use_cpu=True, gradient_accumulation_steps=accumulated, report_to=[])
    run = open_run(tmp_path)
    found = {}
    for name, parts in (("whole", None), ("rows", row_logits(model))):
        if name == "rows":
            monkeypatch.setattr(token_loss, "LOGITS_AT_ONCE", 50 * 7)
            monkeypatch.setattr(token_loss, "LEAST_ROWS", 1)
            assert parts is not None
        options: dict[str, Any] = {"training": batches, "evaluation": batches, "data_collator": None}
        settings = ExtensionSettings(model="model")
        trainer = ExtensionTrainer(settings=settings, model=model, args=args, run=run, **options)
        trainer.logits = parts
        trainer.current_gradient_accumulation_steps = accumulated
        model.zero_grad()
        items = torch.tensor(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches))
        losses = [trainer.training_step(model, batch, items) for batch in batches]
        grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        evaluated = trainer.prediction_step(model, batches[0], True)[0]
        found[name] = [torch.stack(losses), evaluated, *grads]
    for expected, value in zip(found["whole"], found["rows"], strict=True):
        # The model's own loss is computed in float32 whatever its weights are.
        torch.testing.assert_close(value, expected.to(value.dtype), atol=1e-5, rtol=1e-5)
