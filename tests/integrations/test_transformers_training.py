"""Models under a pattern: saved and loaded, packed, checkpointed, compiled, with dropout, in Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from dilated_attention_pytorch import DilatedPattern, global_tokens, local_window
from dilated_attention_pytorch.integrations import BoundedCache, register, set_pattern
from integrations.tiny_models import ARCHITECTURES, DECODERS, PATTERN, close, draw, logits, tiny

register()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_pattern_is_saved_and_loaded_with_the_model(name: str, tmp_path: Path) -> None:
    model, tokens = set_pattern(tiny(name), PATTERN).float(), draw(1, 50)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="dilated")
    assert again.config.dilated_attention == model.config.dilated_attention
    with torch.no_grad():
        again.set_attn_implementation("sdpa")
        assert not torch.allclose(logits(again, name, tokens), logits(model, name, tokens), atol=1e-3)
        again.set_attn_implementation("dilated")
        torch.testing.assert_close(logits(again, name, tokens), logits(model, name, tokens), rtol=1e-3, atol=1e-3)


def test_a_configuration_may_say_the_pattern_in_words() -> None:
    words = "DilatedPattern([8, 35], [1, 3]) + local_window(5) + global_tokens(2)"
    model = tiny("llama", dilated_attention={"pattern": words})
    same = set_pattern(tiny("llama"), PATTERN + local_window(5) + global_tokens(2))
    by_layer = tiny("llama", dilated_attention={"pattern": [words, words]})
    tokens = draw(2, 50)
    close(model(tokens).logits, same(tokens).logits)
    close(by_layer(tokens).logits, same(tokens).logits)


@pytest.mark.parametrize("name", DECODERS)
def test_packed_rows_are_sequences_of_their_own(name: str) -> None:
    model = set_pattern(tiny(name), PATTERN)
    lengths, tokens = (17, 1, 40, 5), draw(2, 63)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(tokens, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(part).logits for part in tokens.split(lengths, dim=1)], dim=1)
    close(packed, alone)
    boundaries = torch.tensor([0, 17, 18, 58, 63], dtype=torch.int32)
    for use_cache in (False, True):
        given = model(
            tokens[:1],
            position_ids=positions,
            cu_seq_lens_q=boundaries,
            cu_seq_lens_k=boundaries,
            max_length_q=40,
            max_length_k=40,
            use_cache=use_cache,
        ).logits
        close(given, alone[:1])


def test_packed_rows_that_cannot_be_told_apart_are_refused() -> None:
    model, tokens = set_pattern(tiny("llama", num_hidden_layers=1), PATTERN), draw(1, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="pass use_cache=False"):
        model(tokens, position_ids=positions)
    with pytest.raises(ValueError, match="must say what position_ids say"):
        model(tokens, position_ids=positions, cu_seq_lens_q=torch.tensor([0, 2, 6], dtype=torch.int32), use_cache=False)
    boundaries = torch.tensor([0, 3, 6], dtype=torch.int32)
    packed = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries.clone(), "use_cache": False}
    other = {"cu_seq_lens_k": torch.tensor([0, 2, 6], dtype=torch.int32)}
    with pytest.raises(ValueError, match=r"must be the same boundaries.*got \[0, 3, 6\] and \[0, 2, 6\]"):
        model(tokens, position_ids=positions, **packed | other)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    close(*(call(tokens, position_ids=positions, **packed).logits for call in (compiled, model)))
    with pytest.raises(RuntimeError, match="must be the same boundaries"):
        compiled(tokens, position_ids=positions, **packed | other)
    with pytest.raises(ValueError, match=r"must rise by 1 from token to token, .* got a step of 2"):
        model(tokens, position_ids=torch.arange(0, 12, 2)[None])


@pytest.mark.parametrize("way", ["plain", "checkpoints", "padded steps", "bounded cache"])
def test_autocast_computes_in_its_dtype_as_with_sdpa(way: str) -> None:
    # Without the float64 norms of the other tests: a rotation in float32 makes query and key wider than value.
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=48,
        intermediate_size=53,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        use_cache=way == "bounded cache",
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model, tokens = set_pattern(LlamaForCausalLM(config), DilatedPattern([64], [1])).eval(), draw(2, 40)
    mask = torch.ones_like(tokens)
    if way == "padded steps":
        mask[0, :7] = 0
    if way == "checkpoints":
        model.train().activation_checkpointing_enable()

    def call() -> Tensor:
        if way == "plain":
            return model(tokens).logits
        if way == "checkpoints":
            return torch.autograd.grad(model(tokens, labels=tokens).loss, model.lm_head.weight)[0]
        cache = BoundedCache(model.config) if model.config._attn_implementation == "dilated" else DynamicCache()
        with torch.no_grad():
            steps = [
                model(part, attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True).logits
                for part, stop in ((tokens[:, :38], 38), (tokens[:, 38:39], 39), (tokens[:, 39:], 40))
            ]
        return torch.cat(steps, 1)[mask.bool()]

    found = []
    for implementation in ("dilated", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(call().float())
    assert (found[0] - found[1]).abs().max() <= 0.03 * found[1].abs().max()


def test_a_window_that_a_model_keeps_to_itself_is_not_overlooked() -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    model = set_pattern(tiny("Qwen2Moe", **window), PATTERN)
    with pytest.raises(NotImplementedError, match="sliding window of 8 tokens in the configuration"):
        model(draw(1, 20))


def test_a_bounded_cache_is_not_for_another_attention() -> None:
    model = set_pattern(tiny("llama"), PATTERN)
    cache = BoundedCache(model.config)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r'the model has "sdpa": call model.set_attn_implementation\("dilated"\)'):
        BoundedCache(model.config)
    with torch.no_grad():
        model(draw(1, 9), past_key_values=cache)
        with pytest.raises(RuntimeError, match="saw 9 tokens in layer 0, and its attention 0"):
            model(draw(1, 9), past_key_values=cache)


def losses_and_gradients(model: Any, tokens: Tensor, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(seed)
    loss = model(tokens, labels=tokens).loss
    return loss, list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing_also_under_dropout(name: str, reentrant: bool) -> None:
    model = set_pattern(tiny(name, attention_dropout=0.3, use_cache=False), PATTERN).train()
    tokens = draw(2, 50)
    loss, gradients = losses_and_gradients(model, tokens)
    assert loss != losses_and_gradients(model, tokens, seed=1)[0]
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    # A checkpoint of this kind works in backward() only.
    torch.manual_seed(0)
    again = model(tokens, labels=tokens).loss
    again.backward()
    close(again, loss)
    for parameter, gradient in zip([p for p in model.parameters() if p.requires_grad], gradients, strict=True):
        close(parameter.grad, gradient)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_one_graph_under_the_compiler_equals_eager(name: str) -> None:
    model = set_pattern(tiny(name, use_cache=False, num_hidden_layers=1), PATTERN)
    mask = torch.ones(3, 41, dtype=torch.int64)
    mask[1, :7] = 0
    mask[2, 30:] = 0
    compiled, tokens = torch.compile(model, fullgraph=True, backend="aot_eager"), draw(3, 41)
    found = []
    for call in (compiled, model):
        out = call(tokens, attention_mask=mask).logits[mask.bool()]
        found.append((out, torch.autograd.grad(out.sin().sum(), model.get_input_embeddings().weight)[0]))
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)
    # The compiler cannot know that nothing is padded.
    close(compiled(tokens, attention_mask=torch.ones_like(mask)).logits, model(tokens).logits)


def test_under_the_compiler_packed_rows_need_their_boundaries() -> None:
    model = set_pattern(tiny("llama", use_cache=False, num_hidden_layers=1), PATTERN)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    close(compiled(draw(1, 6), position_ids=torch.arange(6)[None]).logits, model(draw(1, 6)).logits)
    with pytest.raises(RuntimeError, match="pass cu_seq_lens_q"):
        compiled(draw(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


def test_trainer_trains_and_evaluates(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = set_pattern(tiny("llama", initializer_range=0.02), DilatedPattern([8, 32], [1, 4])).float()
    texts = [{"input_ids": row, "labels": row} for row in draw(1, 1).repeat(16, 40) + torch.arange(40) % 5]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        activation_checkpointing=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=texts, eval_dataset=texts)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.5 * before
