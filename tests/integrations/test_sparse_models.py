"""Longformer, LED, BigBird, BigBird-Pegasus, LongT5 and Pegasus-X equal themselves with their attention replaced."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention_pytorch.integrations import replace_sparse_attention

ROWS, VOCABULARY = 61, 97
_ENCODER = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 47,
    "initializer_range": 0.3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 1030,
}
_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 47,
    "decoder_ffn_dim": 53,
    "init_std": 0.3,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 47,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "local_radius": 6,
    "global_block_size": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 11,
    "decoder_start_token_id": 1,
}


class Family(NamedTuple):
    prefix: str
    sizes: dict[str, Any]
    layers: tuple[str, ...]
    """Names of the layers that are replaced."""
    is_seq2seq: bool = False
    has_global_mask: bool = False


FAMILIES = {
    "longformer": Family(
        "Longformer",
        {**_ENCODER, "attention_window": [8, 4]},
        ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self"),
        has_global_mask=True,
    ),
    "led": Family(
        "LED",
        {
            **_SEQ2SEQ,
            "attention_window": 8,
            "max_encoder_position_embeddings": 128,
            "max_decoder_position_embeddings": 16,
        },
        ("encoder.layers.0.self_attn.longformer_self_attn", "encoder.layers.1.self_attn.longformer_self_attn"),
        is_seq2seq=True,
        has_global_mask=True,
    ),
    "big_bird": Family(
        "BigBird",
        {**_ENCODER, "block_size": 4, "num_random_blocks": 2},
        ("encoder.layer.0.attention", "encoder.layer.1.attention"),
    ),
    "bigbird_pegasus": Family(
        "BigBirdPegasus",
        {**_SEQ2SEQ, "block_size": 4, "num_random_blocks": 3, "max_position_embeddings": 128},
        ("encoder.layers.0.self_attn", "encoder.layers.1.self_attn"),
        is_seq2seq=True,
    ),
    "longt5_local": Family(
        "LongT5",
        {**_T5, "encoder_attention_type": "local"},
        tuple(f"encoder.block.{block}.layer.0.LocalSelfAttention" for block in range(2)),
        is_seq2seq=True,
    ),
    "longt5": Family(
        "LongT5",
        {**_T5, "encoder_attention_type": "transient-global"},
        tuple(f"encoder.block.{block}.layer.0.TransientGlobalSelfAttention" for block in range(2)),
        is_seq2seq=True,
    ),
    "pegasus_x": Family(
        "PegasusX",
        {**_SEQ2SEQ, "block_size": 8, "num_global_tokens": 5, "stagger_local_blocks": True},
        ("encoder.layers.0.self_attn", "encoder.layers.1.self_attn"),
        is_seq2seq=True,
    ),
}


def tiny(name: str, kind: str = "Model", **changes: Any) -> Any:
    """A model of one family in evaluation mode; equal weights for equal calls."""
    family = FAMILIES[name]
    config = getattr(transformers, f"{family.prefix}Config")(
        vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, **family.sizes | changes
    )
    torch.manual_seed(3)
    return getattr(transformers, f"{family.prefix}{kind}")(config).eval()


def replaced(model: nn.Module) -> Any:
    ours = copy.deepcopy(model)
    replace_sparse_attention(ours)
    return ours


def inputs(name: str, rows: int = ROWS) -> dict[str, Tensor]:
    """Three texts: one whole, one padded after its tokens and one padded before them; two have global tokens."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.ones(3, rows, dtype=torch.int64)
    mask[1, rows * 2 // 3 :] = 0
    mask[2, :5] = 0
    call = {"input_ids": torch.randint(3, VOCABULARY, (3, rows), generator=generator), "attention_mask": mask}
    if FAMILIES[name].is_seq2seq:
        call["decoder_input_ids"] = torch.randint(3, VOCABULARY, (3, 7), generator=generator)
    if FAMILIES[name].has_global_mask:
        global_tokens = torch.zeros_like(mask)
        global_tokens[0, [0, 17, 33, 34, rows - 1]] = 1
        global_tokens[1, [2, rows - 2]] = 1
        call["global_attention_mask"] = global_tokens
    return call


def results(model: Any, call: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Encoder states, the model's states, and the gradient of every parameter."""
    model.zero_grad()
    result = model(**call)
    states = {"out": result.last_hidden_state}
    if "encoder_last_hidden_state" in result:
        states["encoder"] = result.encoder_last_hidden_state
        if type(model).__name__ == "LongT5Model":  # its rows of padding may differ
            states["encoder"] = states["encoder"] * call["attention_mask"].unsqueeze(-1)
    generator = torch.Generator().manual_seed(7)
    losses = [
        (state * torch.randn(state.shape, generator=generator, dtype=state.dtype)).sum() for state in states.values()
    ]
    torch.stack(losses).sum().backward()
    return states | {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None], tolerance: float) -> None:
    """States to an absolute tolerance, gradients to one of the largest entry of all gradients."""
    assert ours.keys() == theirs.keys()
    gradients = [
        float(theirs[name].abs().max()) for name in theirs.keys() - {"out", "encoder"} if theirs[name] is not None
    ]
    for name, expected in theirs.items():
        got = ours[name]
        assert (got is None) == (expected is None), name
        if got is not None and expected is not None:
            scale = 1.0 if name in ("out", "encoder") else max(gradients)
            error = (got - expected).abs().max().item()
            assert error <= tolerance * scale, f"{name} is off by {error}, of {scale}"


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_replaced_model_gives_the_outputs_and_all_gradients_of_the_original(name: str, is_training: bool) -> None:
    """In training BigBird draws random blocks, some of which count twice."""
    model = tiny(name).train(is_training)
    assert_equal(results(replaced(model), inputs(name)), results(model, inputs(name)), 1e-5)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("name", ["big_bird", "bigbird_pegasus", "pegasus_x"])
def test_the_two_differ_by_rounding_alone(name: str, is_training: bool) -> None:
    """The other families compute their softmax in float32 whatever the dtype."""
    model = tiny(name).train(is_training).double()
    assert_equal(results(replaced(model), inputs(name)), results(model, inputs(name)), 1e-12)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", ["longformer", "led"])
def test_without_a_global_token_the_results_are_equal_too(name: str, is_padded: bool) -> None:
    """The projections of global tokens then have no gradient in either."""
    call = inputs(name)
    del call["global_attention_mask"]
    if not is_padded:
        del call["attention_mask"]
    model = tiny(name)
    assert_equal(results(replaced(model), call), results(model, call), 1e-5)


def test_the_random_blocks_at_a_length_of_the_paper_are_the_original_s() -> None:
    model = tiny("big_bird", block_size=16, num_hidden_layers=1, max_position_embeddings=1200).train()
    call = inputs("big_bird", 1024)
    assert_equal(results(replaced(model), call), results(model, call), 1e-5)


@pytest.mark.parametrize(("rows", "block"), [(20, 4), (13, 16), (61, 7)])
@pytest.mark.parametrize("is_padded", [False, True])
def test_texts_of_any_length_have_the_sums_of_longt5_s_blocks(rows: int, block: int, is_padded: bool) -> None:
    """A whole number of blocks, fewer rows than a block, and blocks that are no power of two."""
    model, call = tiny("longt5", global_block_size=block), inputs("longt5", rows)
    if not is_padded:
        del call["attention_mask"]
    with torch.no_grad():
        expected, got = (each(**call).last_hidden_state for each in (model, replaced(model)))
    torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-5)


def test_a_layer_of_longt5_without_a_bias_of_its_own_needs_the_first_layer_s() -> None:
    layer = replaced(tiny("longt5")).encoder.block[1].layer[0].TransientGlobalSelfAttention
    with pytest.raises(ValueError, match="position_bias must be what the model's first layer returned, got None"):
        layer(torch.randn(1, 9, 32), torch.ones(1, 9))


def test_a_short_input_makes_big_bird_dense_until_it_is_told_otherwise() -> None:
    model = tiny("big_bird").double()
    ours, call = replaced(model), inputs("big_bird")
    short = {key: tensor[:, 17:40] for key, tensor in call.items()}
    with torch.no_grad():
        sparse = ours(**call).last_hidden_state
        for each in (model, ours):
            each(**short)
        torch.testing.assert_close(ours(**short).last_hidden_state, model(**short).last_hidden_state)
        dense = ours(**call).last_hidden_state
        torch.testing.assert_close(dense, model(**call).last_hidden_state)
        assert not torch.allclose(dense, sparse, atol=1e-2)
        ours.set_attention_type("block_sparse")
        torch.testing.assert_close(ours(**call).last_hidden_state, sparse, rtol=0.0, atol=0.0)


def test_drawing_random_blocks_leaves_numpy_s_state() -> None:
    model = replaced(tiny("big_bird").train())
    np.random.seed(11)
    expected = np.random.random()
    np.random.seed(11)
    model(**inputs("big_bird"))
    assert np.random.random() == expected


def test_a_layer_of_longformer_takes_any_number_of_rows() -> None:
    """Against one dense softmax: windows that do not divide the length, which the original refuses."""
    model = tiny("longformer", attention_window=[6, 4])
    layer = replaced(model).encoder.layer[0].attention.self
    states = torch.randn(2, 35, 32, generator=torch.Generator().manual_seed(1))
    kinds = torch.zeros(2, 35)
    kinds[0, [3, 30]], kinds[1, 20:] = 1.0, -1.0
    masks = {"is_index_masked": kinds < 0, "is_index_global_attn": kinds > 0, "is_global_attn": True}
    with pytest.raises(AssertionError):
        model.encoder.layer[0].attention.self(states, kinds, **masks)

    def heads(project: nn.Linear) -> Tensor:
        return project(states).unflatten(-1, (4, 8)).transpose(1, 2)

    place = torch.arange(35)
    near = (place[:, None] - place).abs() <= 3
    visible = ((near & (kinds == 0)[:, None]) | (kinds > 0)[:, None])[:, None]
    local = nn.functional.scaled_dot_product_attention(*map(heads, (layer.query, layer.key, layer.value)), visible)
    everything = nn.functional.scaled_dot_product_attention(
        *map(heads, (layer.query_global, layer.key_global, layer.value_global)), (kinds >= 0)[:, None, None]
    )
    expected = torch.where((kinds > 0)[:, None, :, None], everything, local)
    expected = torch.where((kinds < 0)[:, None, :, None], 0.0, expected).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(states, kinds, **masks)[0], expected, rtol=0.0, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """The most elements that a tensor has which an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def call_of_layer(name: str, rows: int) -> tuple[Callable[[Any], Any], str]:
    states = torch.randn(1, rows, 32, requires_grad=True)
    ones, zeros = torch.ones(1, rows), torch.zeros(1, rows)
    if name == "longformer":
        kinds = zeros.clone()
        kinds[0, 0] = 1.0
        return lambda layer: layer(states, kinds, kinds < 0, kinds > 0, True), "encoder.layer.0.attention.self"
    if name == "pegasus_x":
        return lambda layer: layer(states, states[:, :5], zeros), "encoder.layers.0.self_attn"
    if name == "longt5":
        return lambda layer: layer(states, ones), "encoder.block.0.layer.0.TransientGlobalSelfAttention"
    blocks = ones.view(1, rows // 16, 16)
    near = torch.cat([blocks[:, 1:-3], blocks[:, 2:-2], blocks[:, 3:-1]], dim=2)
    masks = {
        "band_mask": torch.einsum("blq,blk->blqk", blocks[:, 2:-2], near)[:, None],
        "from_mask": ones.view(1, 1, rows, 1),
        "to_mask": ones.view(1, 1, 1, rows),
        "from_blocked_mask": blocks,
        "to_blocked_mask": blocks,
    }
    return lambda layer: layer(states, **masks), "encoder.layer.0.attention"


_LARGER_BLOCKS = {"big_bird": {"block_size": 16}, "longt5": {"global_block_size": 16}}


@pytest.mark.parametrize("name", ["longformer", "big_bird", "longt5", "pegasus_x"])
def test_no_tensor_of_a_layer_has_more_numbers_than_the_states_and_a_few(name: str) -> None:
    """In transformers BigBird's layers make tensors of ``[B, H, N, N]``, those of LongT5 of ``[B, H, N, N / 16]``."""
    rows = 1600
    call, layer = call_of_layer(name, rows)
    with LargestTensor() as largest:
        call(replaced(tiny(name, **_LARGER_BLOCKS.get(name, {}))).get_submodule(layer))[0].sum().backward()
    assert largest.elements <= 40 * rows


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_and_their_names_are_the_original_s(name: str) -> None:
    model = tiny(name)
    before = dict(model.named_parameters())
    names, state = list(before), list(model.state_dict())
    assert replace_sparse_attention(model) == FAMILIES[name].layers
    assert list(model.state_dict()) == state
    assert [key for key, _ in model.named_parameters()] == names
    assert all(parameter is before[key] for key, parameter in model.named_parameters())
    tiny(name).load_state_dict(model.state_dict())
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_drops_probabilities_at_its_own_rate_in_training_alone(name: str) -> None:
    """No other part of the model has dropout here. BigBird's layers have it where they are dense."""
    is_big_bird = name in ("big_bird", "bigbird_pegasus")
    model, call = tiny(name, **{"attention_type": "original_full"} if is_big_bird else {}), inputs(name)
    for layer in map(model.get_submodule, FAMILIES[name].layers):
        if is_big_bird:
            layer.self.dropout = nn.Dropout(0.5).eval()
        else:
            layer.dropout = 0.5
    ours = replaced(model)

    def states() -> Tensor:
        output = ours(**call)
        return output.get("encoder_last_hidden_state", output.last_hidden_state)

    with torch.no_grad():
        torch.testing.assert_close(states(), states(), rtol=0.0, atol=0.0)
        ours.train()
        torch.manual_seed(0)
        assert not torch.allclose(states(), states(), atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_weights_are_refused_and_hidden_states_are_not(name: str) -> None:
    model, call = replaced(tiny(name)), inputs(name)
    with torch.no_grad():
        model(**call, output_hidden_states=True)
        with pytest.raises(NotImplementedError, match="output_attentions must be False"):
            model(**call, output_attentions=True)
        for module in model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                module.config.output_attentions = True
        with pytest.raises(NotImplementedError, match="output_attentions must be False"):
            model(**call)


def test_what_cannot_be_replaced_is_left_and_named() -> None:
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got str"):
        replace_sparse_attention("allenai/longformer-base-4096")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing was replaced: Linear has no sparse attention layer"):
        replace_sparse_attention(nn.Linear(3, 3))
    model = tiny("longformer")
    with pytest.raises(ValueError, match="model must contain its attention layers, got one layer"):
        replace_sparse_attention(model.encoder.layer[0].attention.self)
    model.encoder.layer[1].attention.self.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"encoder.layer.1.attention.self \(LongformerSelfAttention\).* it has hooks"):
        replace_sparse_attention(model)
    assert type(model.encoder.layer[0].attention.self).__name__ == "LongformerSelfAttention"
    decoder = tiny("big_bird", "ForCausalLM", is_decoder=True, attention_type="original_full")
    with pytest.raises(ValueError, match="it is in a decoder, whose attention is dense and causal"):
        replace_sparse_attention(decoder)


def test_masks_and_lengths_that_a_layer_cannot_take_are_refused() -> None:
    full = replaced(tiny("big_bird", attention_type="original_full"))
    of_pairs = torch.ones(ROWS, ROWS).tril().log().expand(3, 1, ROWS, ROWS)
    layer, states = full.encoder.layer[0].attention, torch.randn(3, ROWS, 32)
    with pytest.raises(NotImplementedError, match="attention_mask must be the same for every query"):
        layer(states, of_pairs)
    with pytest.raises(NotImplementedError, match="encoder_hidden_states must be None in a replaced BigBird layer"):
        layer(states, encoder_hidden_states=states)
    sparse = replaced(tiny("big_bird")).encoder.layer[0].attention
    with pytest.raises(ValueError, match="a multiple of 4 rows, at least 20, got 61"):
        sparse(states, from_mask=torch.ones(3, 1, ROWS, 1), to_mask=torch.ones(3, 1, 1, ROWS))


def test_a_tiny_loss_step_of_a_task_model_is_the_original_s() -> None:
    """The replacement goes through a head: the answers of a question are global tokens in Longformer."""
    model = tiny("longformer", "ForQuestionAnswering")
    ours, call = replaced(model), {"input_ids": inputs("longformer")["input_ids"]}
    call["input_ids"][:, [9, 21, 22]] = 2  # separators, from which the model makes its global tokens
    losses = []
    for each in (ours, model):
        loss = each(**call, start_positions=torch.tensor([1, 5, 9]), end_positions=torch.tensor([2, 8, 30])).loss
        loss.backward()
        losses.append(loss.item())
    assert math.isclose(losses[0], losses[1], rel_tol=1e-5)
