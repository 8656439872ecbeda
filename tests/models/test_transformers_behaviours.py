"""LongNet's classes behave as transformers expects of a causal language model and of its base model.

The behaviours are those that the common tests of transformers check; docs/transformers.md lists what is refused.
"""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from dilated_attention_pytorch.installation import install_command  # noqa: E402
from dilated_attention_pytorch.models import LongNetLM  # noqa: E402
from dilated_attention_pytorch.models.causal_lm import (  # noqa: E402
    LongNetCausalLMConfig,
    LongNetForCausalLM,
    LongNetModel,
)

pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")


def make_config(**changes: Any) -> LongNetCausalLMConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 29,
        "embed_dim": 24,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 3,
        "ffn_dim": 37,
        "segment_lengths": [4, 12],
        "dilation_rates": [1, 3],
        "layer_rope_thetas": [0.0, 1e4],
        "layer_scale_lengths": [5, 0],
        "head_gates": True,
        "key_convolution": 3,
    }
    return LongNetCausalLMConfig(**{**sizes, **changes})


def make_model(**changes: Any) -> LongNetForCausalLM:
    torch.manual_seed(0)
    return LongNetForCausalLM(make_config(**changes)).eval()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 29, shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)


def spread(model: nn.Module) -> dict[str, float]:
    return {name: weight.std().item() for name, weight in model.named_parameters() if weight.dim() == 2}


# Weights


def test_a_new_model_has_longnets_own_initialisation() -> None:
    # Wide, so that a deviation is known to a few percent.
    config = make_config(embed_dim=192, ffn_dim=211, tie_embeddings=False)
    expected = {f"model.{name}": value for name, value in spread(LongNetLM(config.to_longnet_config())).items()}

    class Outer(transformers.PreTrainedModel):  # type: ignore[misc]
        config_class = LongNetCausalLMConfig

        def __init__(self, config: LongNetCausalLMConfig) -> None:
            super().__init__(config)
            self.inner = LongNetForCausalLM(config)
            self.post_init()

    for model in (LongNetForCausalLM(config), Outer(config).inner):
        actual = spread(model)
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
            assert value == pytest.approx(expected[name], rel=0.05), name


@pytest.mark.parametrize("lost", [
    "model.head.weight", "model.layernorm.weight", "model.blocks.0.attention.inner_layernorm.weight",
    "model.blocks.1.attention.k_proj.weight", "model.blocks.0.feed_forward.inner_layernorm.bias",
    "model.blocks.1.feed_forward.in_proj.weight", "model.embedding.weight", "model.blocks.0.head_gates.proj.weight",
    "model.blocks.1.key_convolution.weight",
])  # fmt: skip
def test_a_weight_that_the_file_lacks_is_drawn_and_no_other(lost: str, tmp_path: Path) -> None:
    model = make_model(tie_embeddings=False)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)  # no weight has the value of an initialisation
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[lost]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, report = LongNetForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == {lost}
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]) == (name != lost), name
    drawn = loaded.get_parameter(lost)
    assert drawn.isfinite().all()
    assert drawn.mean().abs() < 0.2 or torch.equal(drawn, torch.ones_like(drawn))


def test_an_embedding_that_the_file_lacks_is_drawn_and_tied(tmp_path: Path) -> None:
    model = make_model(tie_embeddings=True)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.embedding.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, report = LongNetForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == {"model.embedding.weight", "model.head.weight"}
    assert loaded.model.head.weight is loaded.model.embedding.weight
    assert loaded.model.embedding.weight.std().item() == pytest.approx(1 / math.sqrt(24), rel=0.15)


def test_a_head_that_becomes_its_own_leaves_the_embedding(tmp_path: Path) -> None:
    model = make_model(tie_embeddings=True)
    model.save_pretrained(tmp_path)
    for name in ("tie_embeddings", "tie_word_embeddings"):
        loaded = LongNetForCausalLM.from_pretrained(tmp_path, **{name: False})
        assert loaded.config.tie_embeddings is loaded.config.tie_word_embeddings is False
        assert torch.equal(loaded.model.embedding.weight, model.model.embedding.weight)
        assert not torch.equal(loaded.model.head.weight, loaded.model.embedding.weight)
        assert loaded.model.head.weight.std().item() == pytest.approx(1 / math.sqrt(24), rel=0.15)


def test_a_size_that_differs_is_drawn_and_no_other(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = LongNetForCausalLM.from_pretrained(tmp_path, vocab_size=31, ignore_mismatched_sizes=True)
    for name, weight in loaded.state_dict().items():
        if name in ("model.embedding.weight", "model.head.weight"):
            assert weight.shape == (31, 24)
        else:
            assert torch.equal(weight, model.state_dict()[name])


@pytest.mark.parametrize("tied", [True, False])
def test_a_larger_vocabulary_keeps_rows_and_tie(tied: bool) -> None:
    model = make_model(tie_embeddings=tied)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.resize_token_embeddings(31)
    model.post_init()
    assert model.config.vocab_size == model.model.config.vocab_size == 31
    assert (model.model.head.weight is model.model.embedding.weight) is tied
    for name, weight in model.state_dict().items():
        assert torch.equal(weight[:29] if weight.shape[0] == 31 else weight, before[name]), name
    assert model(draw(2, 13)).logits.shape == (2, 13, 31)


def test_saving_in_parts_and_a_copy_change_no_bit(tmp_path: Path) -> None:
    model, ids = make_model(), draw(2, 13)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for again in (LongNetForCausalLM.from_pretrained(tmp_path), copy.deepcopy(model)):
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_the_base_model_is_the_model_without_its_output_matrix(tmp_path: Path) -> None:
    for tied in (True, False):
        model, ids = make_model(tie_embeddings=tied), draw(2, 13)
        model.save_pretrained(tmp_path / "model")
        base, report = transformers.AutoModel.from_pretrained(tmp_path / "model", output_loading_info=True)
        assert type(base) is LongNetModel
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        hidden = base(ids).last_hidden_state
        assert torch.equal(hidden, model(ids, output_hidden_states=True).hidden_states[-1])
        assert torch.equal(base.forward(ids, return_dict=False)[0], hidden)
        base.save_pretrained(tmp_path / "base")
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert torch.equal(whole.model(ids, hidden_only=True), hidden)


def test_the_base_model_shares_the_weights_and_gives_hidden_states() -> None:
    """TRL calls ``model.base_model(..., use_cache=False)`` and applies the output embeddings itself."""
    model, ids = make_model(), draw(2, 13)
    for _ in range(2):
        output = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        assert torch.equal(model.get_output_embeddings()(output.last_hidden_state), model(ids).logits)
        assert len(model.base_model(ids, output_hidden_states=True).hidden_states) == 3
        assert len(model(ids, output_hidden_states=True).hidden_states) == 3
    base = model.base_model
    assert base.model is model.model
    assert model.base_model is base
    assert "_base" not in dict(model.named_modules())
    for mode in (True, False):
        assert model.train(mode).base_model.training is mode
    model.model = copy.deepcopy(model.model)
    assert model.base_model.model is model.model
    twin = copy.deepcopy(model)
    assert twin.base_model.model is twin.model
    close(torch.export.export(model, (ids,)).module()(ids).logits, model(ids).logits)


def test_the_base_model_draws_its_parameters_anew() -> None:
    base = LongNetModel(make_config())
    drawn = {name: weight for name, weight in base.named_parameters() if weight.dim() >= 2 and "gates" not in name}
    before = {name: weight.clone() for name, weight in drawn.items()}
    base.model.reset_parameters()
    assert not any(torch.equal(weight, before[name]) for name, weight in base.named_parameters() if name in before)


def test_the_first_call_of_generate_has_no_cache_yet() -> None:
    """PEFT adds the tokens of a prompt in the call without one."""
    model, seen = make_model(), []
    model.register_forward_pre_hook(
        lambda module, args, inputs: seen.append(inputs.get("past_key_values") is None), with_kwargs=True
    )
    model.generate(draw(2, 5), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert seen == [True, False, False]


def test_importing_models_imports_no_transformers_and_auto_classes_know_the_classes() -> None:
    code = (
        "import sys, dilated_attention_pytorch.models as models\n"
        "assert 'transformers' not in sys.modules\n"
        "sys.modules['transformers'] = None\n"
        "try: models.LongNetForCausalLM\n"
        "except ImportError as error: print(error)\n"
        "del sys.modules['transformers']\n"
        "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM\n"
        "config = AutoConfig.for_model('longnet-dilated', embed_dim=16, num_heads=2, num_layers=1)\n"
        "print(type(AutoModel.from_config(config)).__name__, type(AutoModelForCausalLM.from_config(config)).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    missing, classes = done.stdout.splitlines()
    assert install_command("train") in missing
    assert classes.split() == ["LongNetModel", "LongNetForCausalLM"]


# Configuration


def test_a_configuration_survives_files_copies_and_aliases(tmp_path: Path) -> None:
    config = make_config(tie_word_embeddings=False, pad_token_id=0, output_hidden_states=True)
    assert config.tie_embeddings is False
    config.save_pretrained(tmp_path)
    for again in (
        LongNetCausalLMConfig.from_pretrained(tmp_path),
        LongNetCausalLMConfig.from_dict(config.to_dict()),
        LongNetCausalLMConfig.from_json_file(tmp_path / "config.json"),
        copy.deepcopy(config),
        transformers.AutoConfig.from_pretrained(tmp_path),
    ):
        assert again.to_longnet_config() == config.to_longnet_config()
        assert (again.pad_token_id, again.output_hidden_states, again.tie_word_embeddings) == (0, True, False)
    for alias, name in config.attribute_map.items():
        assert getattr(config, alias) == getattr(config, name)
        setattr(config, alias, getattr(config, name))
    # PEFT reads these names from the dictionary.
    assert [config.to_dict()[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")] == [
        24,
        2,
        6,
    ]
    assert LongNetCausalLMConfig().to_longnet_config().num_layers == 4


# Calls


def test_embeddings_of_tokens_give_the_logits_of_the_tokens() -> None:
    model, ids = make_model(), draw(2, 13)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(inputs_embeds=embeds, **options), model.generate(ids, **options)[:, 13:])


def test_positions_that_restart_are_documents() -> None:
    model, ids = make_model(), draw(1, 31)
    positions = torch.cat([torch.arange(length) for length in (7, 1, 23)])
    documents = torch.tensor([5] * 7 + [0] + [5] * 23)
    bounds = torch.tensor([0, 7, 8, 31], dtype=torch.int32)
    alone = torch.cat([model(part).logits for part in ids.split([7, 1, 23], dim=1)], dim=1)
    for packed in (
        {"position_ids": positions},
        {"position_ids": positions[None]},
        {"position_ids": positions[None], "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 23},
        {"cu_seq_lens_q": bounds, "seq_idx": documents[None], "max_length_k": 23},
        {"position_ids": positions, "seq_idx": documents},
        {"seq_idx": documents[None]},
        {"cu_seqlens": bounds},
    ):
        close(model(ids, **packed).logits, alone)
    twice = ids.expand(2, -1)
    close(model(twice, position_ids=positions.expand(2, -1)).logits, alone.expand(2, -1, -1))
    close(model(ids, seq_idx=torch.full((1, 31), 3)).logits, model(ids).logits)


@pytest.mark.parametrize("given", ["cu_seq_lens", "seq_idx"])
def test_packed_documents_are_one_graph_under_the_compiler(given: str) -> None:
    model, ids = make_model(num_layers=1), draw(1, 13)
    bounds = torch.tensor([0, 4, 13], dtype=torch.int32)
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone(), "max_length_q": 9, "max_length_k": 9}
    other = {"cu_seq_lens_k": torch.tensor([0, 5, 13], dtype=torch.int32)}
    if given == "seq_idx":
        packed = {"cu_seqlens": bounds, "seq_idx": (torch.arange(13) >= 4).int()[None]}
        other = {"seq_idx": (torch.arange(13) >= 5).int()[None]}
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    close(compiled(ids, **packed).logits, model(ids, cu_seqlens=bounds).logits)
    with pytest.raises(RuntimeError, match=r"must be the same boundaries|seq_idx must change"):
        compiled(ids, **packed | other)


def test_scores_that_grow_with_the_position_need_positions_from_0_on() -> None:
    model, ids = make_model(layer_scale_lengths=(4, 0)), draw(2, 13)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    close(model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()], expected)
    close(model(ids, position_ids=torch.arange(13)).logits, model(ids).logits)
    for given in ({"position_ids": torch.arange(100, 113)}, {"position_ids": torch.arange(13), "attention_mask": mask}):
        with pytest.raises(NotImplementedError, match="position_ids must begin at 0 in a model with layer_scale_len"):
            model(ids, **given)
    with torch.no_grad():
        cache = model(ids[:, :9], use_cache=True).past_key_values
        later = model(ids[:, 9:], past_key_values=cache, position_ids=torch.arange(9, 13)[None]).logits
    close(later, model(ids).logits[:, 9:])


def test_positions_of_padded_rows_and_rows_from_any_position_on() -> None:
    model, ids = make_model(layer_scale_lengths=()), draw(2, 13)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = model(ids, attention_mask=mask).logits
    for positions in ((mask.cumsum(1) - 1).clamp(min=0), torch.arange(13).expand(2, -1)):
        close(model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()], expected[mask.bool()])
    close(model(ids, position_ids=torch.arange(100, 113)).logits, model(ids).logits)


@pytest.mark.parametrize(("call", "error", "said"), [
    (lambda m, x: m(x, position_ids=torch.arange(13) * 2), NotImplementedError,
     r"count on by 1, or restart at 0.*; got 2 after 0 in column 1 of row 0"),
    (lambda m, x: m(x, position_ids=torch.tensor([0, 1, 2, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16])), NotImplementedError,
     "no place for gaps"),
    (lambda m, x: m(x, position_ids=torch.arange(13) % 5, attention_mask=torch.ones_like(x)), NotImplementedError,
     "packed without attention_mask"),
    (lambda m, x: m(x, position_ids=torch.arange(12)), ValueError, r"position_ids must be of shape \(2, 13\), got"),
    (lambda m, x: m(x, cu_seqlens=torch.tensor([0, 4, 13], dtype=torch.int32), position_ids=torch.arange(13)),
     NotImplementedError, "restart at 0 where cu_seqlens begin a document; got 4 after 3 in column 4 of row 0"),
    (lambda m, x: m(x, cu_seqlens=torch.tensor([0, 4, 13]).int(), cu_seq_lens_k=torch.tensor([0, 5, 13]).int()),
     ValueError, r"cu_seqlens and cu_seq_lens_k must be the same boundaries.*got \[0, 4, 13\] and \[0, 5, 13\]"),
    (lambda m, x: m(x, cu_seq_lens_q=torch.tensor([0, 4, 13]).int(), cu_seq_lens_k=torch.tensor([0, 13]).int()),
     ValueError, "cu_seq_lens_q and cu_seq_lens_k must be the same boundaries.*got 2 and 1 documents"),
    (lambda m, x: m(x, cu_seqlens=[0, 13]), TypeError, "cu_seqlens must be an int32 tensor.*got list"),
    (lambda m, x: m(x, cu_seqlens=[0, 13], position_ids=torch.arange(13)), TypeError, "int32 tensor.*got list"),
    (lambda m, x: m.model(x, cu_seqlens=[0, 13]), TypeError, "cu_seqlens must be an int32 tensor.*got list"),
    (lambda m, x: m(x, attention_mask=torch.ones(2, 1, 13, 13), position_ids=torch.arange(13)), ValueError,
     r"attention_mask must have the shape \(2, 13\)"),
    (lambda m, x: m(x, attention_mask=torch.ones(2, 9), position_ids=torch.arange(13)), ValueError,
     r"attention_mask must have the shape \(2, 13\)"),
    (lambda m, x: m(x, position_ids=torch.arange(13) % 4, seq_idx=torch.zeros(2, 13)), NotImplementedError,
     "seq_idx must change where the documents.*got 0 after 0 in column 4 of row 0"),
    (lambda m, x: m(x, seq_idx=torch.tensor([[0] * 13, [0] * 9 + [1] * 4])), NotImplementedError,
     "seq_idx must change at the same columns in every row; got 1 after 0 in column 9 of row 1"),
    (lambda m, x: m(x, seq_idx=torch.arange(13), attention_mask=torch.ones_like(x)), NotImplementedError,
     "attention_mask and cu_seqlens exclude each other"),
    (lambda m, x: m(x, seq_idx=torch.arange(12)), ValueError, r"seq_idx must be of shape \(2, 13\), got \(12,\)"),
    (lambda m, x: m(x, seq_idx=[0] * 13), TypeError, "seq_idx must be a tensor.*got list"),
    (lambda m, x: m.base_model(x, shift_labels=x), TypeError, "LongNetModel.forward has no argument shift_labels"),
    (lambda m, x: m(x, labels=x[:, [0, 5]], logits_to_keep=torch.tensor([0, 5])), ValueError, "pass shift_labels"),
    (lambda m, x: m.generate(x, use_cache=False, prefill_chunk_size=4, max_new_tokens=2), ValueError,
     "through a cache, got use_cache=False"),
    (lambda m, x: make_config(hidden_size=32), ValueError, "embed_dim and hidden_size are one field, got embed_dim=24"),
    (lambda m, x: LongNetCausalLMConfig.from_dict({**m.config.to_dict(), "num_layers": 3}), ValueError,
     "num_layers=3 and num_hidden_layers=2: .*change both"),
    (lambda m, x: m(x, output_attentions=True), NotImplementedError, "N x M attention weights"),
    (lambda m, x: m(x, token_type_ids=x), TypeError, "has no argument token_type_ids: leave it out"),
    (lambda m, x: m(x, past_key_values=transformers.DynamicCache()), TypeError, "LongNetCache.*got DynamicCache"),
    (lambda m, x: m(x, inputs_embeds=torch.zeros(2, 13, 24)), ValueError, "exclude each other"),
    (lambda m, x: m(inputs_embeds=torch.zeros(2, 13, 23)), ValueError, r"\[batch, sequence, 24\], got"),
    (lambda m, x: m(), ValueError, r"input_ids \[.*: got neither"),
    (lambda m, x: m.generate(x, output_attentions=True, return_dict_in_generate=True, max_new_tokens=2),
     NotImplementedError, "N x M attention weights"),
    (lambda m, x: torch.export.export(m, (x,), {"attention_mask": torch.ones_like(x)}), NotImplementedError,
     "attention_mask.*torch.export"),
])  # fmt: skip
def test_what_is_refused_is_said(
    call: Callable[[LongNetForCausalLM, Tensor], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        call(make_model(), draw(2, 13))


def test_a_shard_of_rows_has_no_numbers_of_documents() -> None:
    model, ids = make_model(), draw(2, 13)
    model.model.attention = lambda query, key, value, pattern, **_: query
    with pytest.raises(NotImplementedError, match=r"seq_idx of a rank's rows .* pass cu_seqlens"):
        model(ids, seq_idx=ids)


def test_positions_go_on_after_the_tokens_in_the_cache() -> None:
    model, ids = make_model(), draw(1, 13)
    with torch.no_grad():
        first = model(ids[:, :9], use_cache=True)
        cache = first.past_key_values
        with pytest.raises(NotImplementedError, match="after those in the cache"):
            model(ids[:, 9:], past_key_values=cache, position_ids=torch.arange(4))
        later = model(ids[:, 9:], past_key_values=cache, position_ids=torch.arange(9, 13)[None]).logits
        close(torch.cat([first.logits, later], dim=1), model(ids).logits)


@pytest.mark.parametrize("make", [LongNetForCausalLM, LongNetModel])
def test_hidden_states_are_the_inputs_of_the_blocks_and_the_last_output(make: Any) -> None:
    model, ids = make(make_config()).eval(), draw(2, 13)
    plain = model(ids)
    assert plain.hidden_states is None
    states = model(ids, output_hidden_states=True, output_attentions=False).hidden_states
    assert [tuple(state.shape) for state in states] == [(2, 13, 24)] * 3
    close(states[0], model.get_input_embeddings()(ids) * math.sqrt(24))
    assert torch.equal(states[-1], model.model(ids, hidden_only=True))
    model.config.output_hidden_states = True
    assert all(map(torch.equal, model(ids).hidden_states, states))
    assert model(ids, output_hidden_states=False).hidden_states is None
    model(ids).hidden_states[1].sum().backward()
    assert model.model.blocks[0].attention.q_proj.weight.grad is not None


def test_generation_returns_hidden_states_and_scores() -> None:
    model = make_model()
    output = model.generate(
        draw(2, 5), max_new_tokens=3, do_sample=False, pad_token_id=0, output_hidden_states=True, output_scores=True,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    assert len(output.scores) == len(output.logits) == len(output.hidden_states) == 3
    assert [len(states) for states in output.hidden_states] == [3] * 3
    assert output.hidden_states[0][0].shape == (2, 5, 24)


def test_logits_of_chosen_positions_and_tuples() -> None:
    model, ids = make_model(), draw(2, 13)
    logits = model(ids).logits
    assert torch.equal(model(ids, logits_to_keep=torch.tensor([0, 7, 12])).logits, logits[:, [0, 7, 12]])
    assert torch.equal(model(ids, logits_to_keep=2).logits, logits[:, -2:])
    rows = torch.tensor([0, 7])
    chosen = model(ids, logits_to_keep=rows, shift_labels=ids[:, rows + 1]).loss
    close(chosen, nn.functional.cross_entropy(logits[:, rows].flatten(0, 1), ids[:, rows + 1].flatten()))
    loss, again = model(ids, labels=ids, return_dict=False)
    assert torch.equal(again, logits)
    assert torch.equal(loss, transformers.loss.loss_utils.ForCausalLMLoss(logits, ids, 29))
    with torch.no_grad():
        assert len(model(ids, use_cache=True, return_dict=False)) == 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_blocks_give_the_gradients(use_reentrant: bool) -> None:
    model, ids = make_model(num_layers=3).train(), draw(2, 13)
    expected = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    calls: list[int] = []
    for layer, block in enumerate(model.model.blocks):
        block.register_forward_pre_hook(lambda *args, layer=layer: calls.append(layer))
    model.enable_input_require_grads()
    for every, recomputed in ((1, [0, 1, 2]), (2, [0, 2])):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant}, every_n_layers=every)
        assert model.is_activation_checkpointing
        calls.clear()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        assert sorted(calls[3:]) == recomputed
        for weight, reference in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(weight.grad, reference, atol=1e-6, rtol=1e-5)
    model.gradient_checkpointing_disable()
    assert not model.is_activation_checkpointing


def test_switching_checkpoints_leaves_the_blocks_of_the_configuration() -> None:
    config = make_config().to_longnet_config()
    config.checkpoint_every = 2
    model = LongNetForCausalLM.from_longnet_config(config)
    model.gradient_checkpointing_enable()
    assert model.model.config.checkpoint_every == 2
    model.gradient_checkpointing_disable()
    assert model.model.config.checkpoint_every == 2


def test_a_collator_of_packed_rows_trains_on_documents(tmp_path: Path) -> None:
    documents = [{"input_ids": draw(length, seed=length).tolist()} for length in (5, 9, 3, 7)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    model = make_model()
    batch = collate(documents)
    assert batch["input_ids"].shape == (1, 24)
    losses = [
        model(torch.tensor([one["input_ids"]]), labels=torch.tensor([one["input_ids"]]), num_items_in_batch=20).loss
        for one in documents
    ]
    close(model(**batch).loss, sum(losses))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, report_to="none", use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=documents, eval_dataset=documents,
        data_collator=transformers.DataCollatorWithFlattening(),
    )  # fmt: skip
    trainer.train()
    assert math.isfinite(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_exporter_of_transformers_exports_the_model(dynamic: bool) -> None:
    exporter = pytest.importorskip("transformers.exporters.exporter_dynamo")
    model, ids = make_model(), draw(2, 13)
    expected = model(ids).logits
    settings = transformers.exporters.configs.DynamoConfig(dynamic=dynamic)
    program = exporter.DynamoExporter().export(model, {"input_ids": ids}, settings).program
    close(program.module()(input_ids=ids).logits, expected)
