"""The transformers model is the same model: saving, loading, training and sampling change nothing it computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

transformers = pytest.importorskip("transformers")

from dilated_attention_pytorch.models import (  # noqa: E402
    LongNetCache,
    LongNetForCausalLM,
    token_loss,
)
from dilated_attention_pytorch.models import causal_lm as causal_lm_module  # noqa: E402
from models.wrapping import config  # noqa: E402

# transformers 5.23 calls these activation_checkpointing; the names before it are those of every version 5.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*` is deprecated:FutureWarning")


@pytest.fixture
def model(make_config: Any) -> LongNetForCausalLM:
    return LongNetForCausalLM.from_longnet_config(make_config()).double().eval()


STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 13},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 2},
}


def generate(model: LongNetForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(7)
    return model.generate(ids, max_new_tokens=25, pad_token_id=0, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generation_with_the_cache_equals_generation_without(model: LongNetForCausalLM, strategy: str) -> None:
    prompt = torch.randint(1, 29, (2, 19))
    cached = generate(model, prompt, **STRATEGIES[strategy])
    assert torch.equal(cached, generate(model, prompt, use_cache=False, **STRATEGIES[strategy]))
    assert cached.shape == (2, 44)


def test_a_prompt_may_be_read_in_chunks(model: LongNetForCausalLM) -> None:
    prompt = torch.randint(1, 29, (2, 19))
    chunked = generate(model, prompt, do_sample=False, prefill_chunk_size=7)
    assert torch.equal(chunked, generate(model, prompt, do_sample=False))


@pytest.mark.parametrize("strategy", ["greedy", "beams"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_padded_prompts_give_what_each_gives_alone(model: LongNetForCausalLM, strategy: str, use_cache: bool) -> None:
    starts, ids = [13, 0, 7], torch.randint(1, 29, (3, 31))
    mask = torch.stack([(torch.arange(31) >= start).long() for start in starts])
    options = {"use_cache": use_cache, **STRATEGIES[strategy]}
    together = generate(model, ids * mask, attention_mask=mask, **options)
    for row, start in enumerate(starts):
        alone = generate(model, ids[row : row + 1, start:], **options)
        assert torch.equal(together[row, start:], alone[0])


def test_a_saved_model_has_a_card_and_one_of_the_user_stays(model: LongNetForCausalLM, tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    model.save_pretrained(str(tmp_path), is_main_process=False)
    assert not card.exists()
    model.save_pretrained(str(tmp_path))
    assert "AutoModelForCausalLM.from_pretrained('.')" in card.read_text()
    card.write_text("mine")
    model.save_pretrained(tmp_path)
    assert card.read_text() == "mine"


def test_saving_and_loading_changes_no_bit(make_config: Any, tmp_path: Path) -> None:
    for tie_embeddings in (True, False):
        model = LongNetForCausalLM.from_longnet_config(make_config(tie_embeddings=tie_embeddings)).eval()
        folder = tmp_path / str(tie_embeddings)
        model.save_pretrained(folder)
        assert (folder / "model.safetensors").exists()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        assert type(loaded) is LongNetForCausalLM
        assert loaded.config.to_longnet_config() == make_config(tie_embeddings=tie_embeddings)
        saved, read = model.state_dict(), loaded.state_dict()
        assert saved.keys() == read.keys()
        assert all(torch.equal(saved[name], read[name]) for name in saved)
        ids = torch.randint(29, (1, 31))
        assert torch.equal(model(ids).logits, loaded(ids).logits)
        again = tmp_path / f"{tie_embeddings}-again"
        loaded.save_pretrained(again)
        assert json.loads((folder / "config.json").read_text()) == json.loads((again / "config.json").read_text())


def test_loading_in_bfloat16_rounds_the_weights(model: LongNetForCausalLM, tmp_path: Path) -> None:
    model.float().save_pretrained(tmp_path)
    loaded = LongNetForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name].bfloat16(), weight) for name, weight in loaded.named_parameters())


def test_a_configuration_takes_the_names_of_transformers() -> None:
    config = causal_lm_module.LongNetCausalLMConfig(hidden_size=96, num_hidden_layers=3, num_attention_heads=4)
    assert (config.embed_dim, config.num_layers, config.hidden_size) == (96, 3, 96)
    with pytest.raises(ValueError, match="num_heads must divide"):
        causal_lm_module.LongNetCausalLMConfig(hidden_size=97)


def test_the_loss_is_that_of_the_next_token(model: LongNetForCausalLM) -> None:
    ids = torch.randint(29, (2, 31))
    labels = ids.clone()
    labels[0, 20:] = -100
    output = model(ids, labels=labels)
    expected = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected, atol=1e-13, rtol=0)
    summed = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=17).loss, summed / 17, atol=1e-13, rtol=0)
    assert model(ids, logits_to_keep=3).logits.shape == (2, 3, 29)
    assert torch.equal(model(ids, return_dict=False)[0], output.logits)


def test_shift_labels_are_labels_shifted_before(model: LongNetForCausalLM) -> None:
    ids = torch.randint(29, (2, 31))
    targets = token_loss.next_tokens(ids)
    assert targets[:, -1].tolist() == [-100, -100]
    assert torch.equal(model(ids, shift_labels=targets).loss, model(ids, labels=ids).loss)
    rows = torch.tensor([3, 4, 17, 30])

    def attend_to_itself(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> torch.Tensor:
        return value.repeat_interleave(query.shape[2] // key.shape[2], dim=2)

    # Rows by themselves, at their own positions: nothing in the model but its attention knows of the others.
    model.model.attention = attend_to_itself
    parts = model(ids[:, rows], shift_labels=targets[:, rows], position_ids=rows).loss
    logits = model(ids).logits[:, rows]
    torch.testing.assert_close(
        parts, functional.cross_entropy(logits.flatten(0, 1), targets[:, rows].flatten()), atol=1e-13, rtol=0
    )
    with pytest.raises(ValueError, match=r"shift_labels must have the shape \(2, 31\)"):
        model(ids, shift_labels=targets[:, 1:])


def test_the_loss_in_blocks_is_the_loss(model: LongNetForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(29, (2, 31))
    whole = model(ids, labels=ids).loss
    grads = torch.autograd.grad(whole, list(model.parameters()))
    monkeypatch.setattr(token_loss, "LOGITS_AT_ONCE", 29 * 11)
    monkeypatch.setattr(token_loss, "LEAST_ROWS", 1)
    blocks = model(ids, labels=ids).loss
    torch.testing.assert_close(blocks, whole, atol=1e-13, rtol=0)
    for grad, expected in zip(torch.autograd.grad(blocks, list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_without_logits_the_loss_is_the_same_and_no_more_than_a_block_of_them_is_there(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LongNetForCausalLM.from_longnet_config(config(tie_embeddings=tied)).double()
    ids = torch.randint(29, (2, 31))
    whole = model(ids, labels=ids, num_items_in_batch=17).loss
    grads = torch.autograd.grad(whole, list(model.parameters()))
    monkeypatch.setattr(token_loss, "LOGITS_AT_ONCE", 29 * 11)
    monkeypatch.setattr(token_loss, "LEAST_ROWS", 1)
    there: list[int] = []
    model.model.head.register_forward_hook(lambda module, args, logits: there.append(logits.numel()))
    output = model(ids, labels=ids, num_items_in_batch=17, skip_logits=True)
    assert output.logits is None
    torch.testing.assert_close(output.loss, whole, atol=1e-13, rtol=0)
    for grad, expected in zip(torch.autograd.grad(output.loss, list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-12, rtol=0)
    # Six blocks forward and again backward.
    assert len(there) == 12
    assert max(there) == 29 * 11
    with pytest.raises(ValueError, match="skip_logits returns only a loss"):
        model(ids, skip_logits=True)


def test_many_blocks_do_not_round_the_gradient_of_the_output_matrix_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast every block's part of it is in bfloat16: their sum is in float32, as with whole logits."""
    torch.manual_seed(0)
    matrix = torch.nn.Linear(32, 50, bias=False)
    hidden, targets = torch.randn(1, 2048, 32) + 0.5, torch.randint(50, (1, 2048))
    monkeypatch.setattr(token_loss, "LEAST_ROWS", 1)
    exact = torch.autograd.grad(token_loss.token_loss(matrix(hidden), targets), matrix.weight)[0]
    for at_once in (1 << 22, 50 * 64, 50 * 2):
        monkeypatch.setattr(token_loss, "LOGITS_AT_ONCE", at_once)
        with torch.autocast("cpu", torch.bfloat16):
            loss = token_loss.token_loss_of_hidden(hidden, matrix, 50, targets)
        grad = torch.autograd.grad(loss, matrix.weight)[0]
        assert float((grad - exact).norm() / exact.norm()) < 0.005


class Rows(torch.utils.data.Dataset):
    """Rows whose second half carries no labels, in different numbers, so that means of means would be wrong."""

    def __init__(self) -> None:
        ids = torch.randint(29, (12, 31), generator=torch.Generator().manual_seed(1))
        labels = ids.clone()
        for row in range(12):
            labels[row, 5 + 2 * row :] = -100
        self.items = [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.items[index]


def train(make_config: Any, folder: Path, **options: Any) -> Any:
    torch.manual_seed(11)
    model = LongNetForCausalLM.from_longnet_config(make_config()).double()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        seed=3,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=False,
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    return trainer


def test_trainer_takes_steps_and_accumulates_like_a_large_batch(make_config: Any, tmp_path: Path) -> None:
    large = train(make_config, tmp_path / "large", per_device_train_batch_size=4)
    small = train(
        make_config,
        tmp_path / "small",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
    )
    assert large.state.global_step == small.state.global_step == 3
    for a, b in zip(large.model.parameters(), small.model.parameters(), strict=True):
        # Adam divides by the root of the second moment: rounding of a gradient near zero is magnified.
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert large.evaluate()["eval_loss"] < 3.3  # log 29 = 3.37


def test_what_it_cannot_do_is_said(model: LongNetForCausalLM) -> None:
    prompt = torch.randint(1, 29, (1, 5))
    with pytest.raises(NotImplementedError, match=r"cache_implementation must be None.*'static'"):
        model.generate(prompt, max_new_tokens=3, cache_implementation="static")
    with pytest.raises(TypeError, match="LongNetCache, got DynamicCache"):
        model.generate(prompt, max_new_tokens=3, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="padded on the left"):
        model.generate(prompt, max_new_tokens=3, attention_mask=torch.tensor([[1, 1, 1, 1, 0]]))
    with pytest.raises(ValueError, match=r"labels must have the shape \(1, 5\)"):
        model(prompt, labels=prompt[:, 1:])
    with pytest.raises(NotImplementedError, match=r"torch\.no_grad"):
        model(prompt, use_cache=True)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        with pytest.raises(ValueError, match=r"assisted generation is not supported with.* LongNetForCausalLM"):
            model.generate(prompt, max_new_tokens=3, **options)
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=29, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    with pytest.raises(NotImplementedError, match="a LongNetCache cannot roll back tokens"):
        other.generate(prompt, max_new_tokens=3, assistant_model=model)


def test_generation_goes_on_from_a_given_cache(model: LongNetForCausalLM) -> None:
    prompt, cache = torch.randint(1, 29, (1, 19)), LongNetCache(model.model.config)
    first = generate(model, prompt, do_sample=False, past_key_values=cache)
    second = generate(model, first, do_sample=False, past_key_values=cache)
    assert torch.equal(second, generate(model, first, do_sample=False))
