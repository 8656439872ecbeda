"""The model is what its definition says, however its rows are padded, packed, checkpointed or compiled."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dilated_attention_pytorch import attend
from dilated_attention_pytorch.models import LongNetConfig, LongNetLM
from dilated_attention_pytorch.models.previous_keys import rows_before
from models.dense import Dense

TOLERANCE = 1e-12  # float64, logits of order one, a few hundred roundings


LAYER_PATTERNS = ("local_window(8)", "local_window(3) + DilatedPattern([7, 23], [1, 3])")


def tokens(*shape: int) -> Tensor:
    return torch.randint(29, shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"layer_patterns replace segments: leave segment_lengths out, got \(7, 23\)"),
        ({"segment_lengths": ()}, r"leave dilation_rates out, got \(1, 3\)"),
        ({"segment_lengths": (), "dilation_rates": ()}, r"leave layer_segment_shifts out, got \(0, 5\)"),
    ],
)
def test_layer_patterns_beside_segments_are_refused(make_config: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(layer_patterns=["local_window(3)"], **changes)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("local_window(3)", "must be a list of patterns, got the string 'local_window\\(3\\)'"),
        (["window(3)"], "layer_patterns: expected a sum of calls of DilatedPattern, .* got 'window\\(3\\)'"),
        (["per_head([local_window(3)] * 2)"], "layer_patterns: per_head.*only per_head takes a list"),
        ([], "a model needs segment_lengths and dilation_rates, or layer_patterns: got neither"),
    ],
)
def test_layer_patterns_that_are_none_are_refused(make_config: Any, patterns: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(segment_lengths=(), dilation_rates=(), layer_segment_shifts=(0,), layer_patterns=patterns)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "gelu", "tie_embeddings": False, "num_kv_heads": None},
        {"segment_lengths": [11, 1000], "dilation_rates": [4, 7], "offset_rule": "block"},
        {"segment_lengths": [], "dilation_rates": [], "layer_segment_shifts": [0], "layer_patterns": LAYER_PATTERNS},
        {"shifted_keys": True},
    ],
)
def test_the_model_equals_a_dense_rendering_of_it(make_model: Any, changes: dict[str, Any]) -> None:
    model, ids = make_model(**changes), tokens(2, 61)
    for parameter in model.parameters():  # LayerNorms start at one and zero, which would hide a swapped pair
        parameter.data += 0.1 * torch.randn_like(parameter)
    dense = Dense(model.config, dict(model.named_parameters()))
    head = dense.weight("embedding.weight" if model.config.tie_embeddings else "head.weight")
    expected = dense.states(dense.embedded(ids), is_causal=True) @ head.T
    actual = model(ids)
    torch.testing.assert_close(actual, expected, atol=1e-11, rtol=0)
    gradients = torch.autograd.grad(actual.square().sum(), list(model.parameters()))
    references = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, atol=1e-9 * float(reference.abs().max()), rtol=0)


@pytest.mark.parametrize("shifted_keys", [False, True])
def test_changing_the_future_changes_nothing_before_it(make_model: Any, shifted_keys: bool) -> None:
    model, ids = make_model(shifted_keys=shifted_keys), tokens(2, 61)
    logits = model(ids)
    for position in (1, 7, 23, 40, 60):
        changed = ids.clone()
        changed[:, position:] = (changed[:, position:] + 1) % 29
        torch.testing.assert_close(model(changed)[:, :position], logits[:, :position], atol=0, rtol=0)
        assert not torch.equal(model(changed)[:, position], logits[:, position])


@pytest.mark.parametrize("shifted_keys", [False, True])
def test_a_padded_row_gives_what_it_gives_alone(make_model: Any, shifted_keys: bool) -> None:
    model, ids = make_model(shifted_keys=shifted_keys), tokens(5, 61)
    runs = [(0, 61), (13, 61), (0, 50), (3, 8), (13, 61)]
    mask = torch.zeros(5, 61, dtype=torch.int64)
    for row, (start, stop) in enumerate(runs):
        mask[row, start:stop] = 1
    logits = model(ids, attention_mask=mask)
    assert logits.isfinite().all()
    for row, (start, stop) in enumerate(runs):
        alone = model(ids[row : row + 1, start:stop])
        torch.testing.assert_close(logits[row, start:stop], alone[0], atol=TOLERANCE, rtol=0)
    grads = torch.autograd.grad((logits * mask.unsqueeze(-1)).square().sum(), list(model.parameters()))
    alone_loss = sum(model(ids[row : row + 1, a:b]).square().sum() for row, (a, b) in enumerate(runs))
    assert isinstance(alone_loss, Tensor)
    for grad, expected in zip(grads, torch.autograd.grad(alone_loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-10 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("shifted_keys", [False, True])
def test_packed_documents_give_what_they_give_alone(make_model: Any, shifted_keys: bool) -> None:
    model, ids = make_model(shifted_keys=shifted_keys), tokens(2, 61)
    boundaries = [0, 17, 17, 18, 61]
    logits = model(ids, cu_seqlens=torch.tensor(boundaries, dtype=torch.int32))
    for start, stop in itertools.pairwise(boundaries):
        if start < stop:
            torch.testing.assert_close(logits[:, start:stop], model(ids[:, start:stop]), atol=TOLERANCE, rtol=0)


def gradients(model: LongNetLM, ids: Tensor, forward: Any) -> list[Tensor]:
    torch.manual_seed(3)
    logits = forward(ids)
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_gives_the_same_gradients(make_model: Any, dropout: float) -> None:
    model, ids = make_model(dropout=dropout, attention_dropout=dropout, shifted_keys=True).train(), tokens(2, 61)
    expected = gradients(model, ids, model)
    model.gradient_checkpointing = True
    for gradient, reference in zip(gradients(model, ids, model), expected, strict=True):
        torch.testing.assert_close(gradient, reference, atol=0, rtol=0)


def test_every_so_manieth_block_is_computed_again_and_the_gradients_stay(make_model: Any) -> None:
    ids = tokens(2, 61)
    plain = make_model(num_layers=5).train()
    expected = gradients(plain, ids, plain)
    model = make_model(num_layers=5, gradient_checkpointing=True, checkpoint_every=2).train()
    model.load_state_dict(plain.state_dict())
    computed = [0] * 5
    for layer, block in enumerate(model.blocks):
        # Before, as a recomputation ends where all that is kept is there.
        block.register_forward_pre_hook(lambda *_, layer=layer: computed.__setitem__(layer, computed[layer] + 1))
    for gradient, reference in zip(gradients(model, ids, model), expected, strict=True):
        torch.testing.assert_close(gradient, reference, atol=0, rtol=0)
    assert computed == [2, 1, 2, 1, 2]
    model.gradient_checkpointing_disable()
    gradients(model, ids, model)
    assert computed == [3, 2, 3, 2, 3]
    model.gradient_checkpointing_enable()
    gradients(model, ids, model)
    assert computed == [5, 3, 5, 3, 5]


@pytest.mark.parametrize("gradient_checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_training_forward_compiles_as_one_graph(make_model: Any, gradient_checkpointing: bool) -> None:
    torch.compiler.reset()
    hybrid = {"head_gates": True, "key_convolution": 3, "layer_scale_lengths": [9, 0], "layer_rope_thetas": [0, 1e4]}
    model = make_model(gradient_checkpointing=gradient_checkpointing, **hybrid).train()
    ids = tokens(2, 61)
    expected = gradients(model, ids, model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for gradient, reference in zip(gradients(model, ids, compiled), expected, strict=True):
        torch.testing.assert_close(gradient, reference, atol=1e-12, rtol=0)


def test_low_precision_stays_within_its_rounding(make_model: Any) -> None:
    model, ids = make_model().float(), tokens(2, 61)
    with torch.no_grad():
        exact = model(ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            autocast = model(ids)
        weights = model.to(torch.bfloat16)(ids)
    assert autocast.dtype == weights.dtype == torch.bfloat16
    # Two blocks of about ten roundings of 2**-9 each on values of order one, adding up as a random walk; twice that.
    budget = 2 * math.sqrt(2 * 10) * 2**-9 * float(exact.std())
    assert (autocast - exact).square().mean().sqrt() < budget
    assert (weights - exact).square().mean().sqrt() < budget


def test_attention_comes_from_outside(make_model: Any) -> None:
    model, ids, patterns = make_model(), tokens(1, 31), []
    expected = model(ids)

    def dense(query: Tensor, key: Tensor, value: Tensor, pattern: Any, **options: Any) -> Tensor:
        patterns.append(pattern)
        return attend(query, key, value, pattern, impl="reference", **options)

    model.attention = dense
    torch.testing.assert_close(model(ids), expected, atol=TOLERANCE, rtol=0)
    assert patterns == [model.config.pattern(0), model.config.pattern(1)]


def test_positions_can_be_given(make_model: Any) -> None:
    model, ids = make_model(), tokens(1, 31)
    torch.testing.assert_close(model(ids, positions=torch.arange(31)), model(ids), atol=0, rtol=0)
    # Rotary positions are relative: a constant more changes nothing but rounding.
    torch.testing.assert_close(model(ids, positions=torch.arange(31) + 1000), model(ids), atol=1e-11, rtol=0)
    assert (model(ids, positions=2 * torch.arange(31)) - model(ids)).abs().max() > 1e-3


@pytest.mark.parametrize(("changes", "count"), [({"shifted_keys": True}, 1), ({"key_convolution": 3}, 2)])
def test_keys_of_several_rows_need_the_rows_before_a_shard(
    make_model: Any, changes: dict[str, Any], count: int
) -> None:
    model, ids, positions = make_model(**changes), tokens(1, 31), torch.arange(31)
    with pytest.raises(NotImplementedError, match=rf"read up to {count} rows before each row.*got positions"):
        model(ids, positions=positions)
    model.previous_rows = rows_before
    torch.testing.assert_close(model(ids, positions=positions), model(ids), atol=0, rtol=0)


def test_a_fresh_model_predicts_about_nothing() -> None:
    config = LongNetConfig(
        embed_dim=64, num_layers=6, num_heads=4, segment_lengths=[16, 64], dilation_rates=[1, 4], tie_embeddings=False
    )
    ids = torch.randint(256, (2, 257))
    with torch.no_grad():
        loss = functional.cross_entropy(LongNetLM(config)(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    # Logits of variance one about a target that they do not know: log V + 1/2.
    assert abs(float(loss) - math.log(256) - 0.5) < 0.2


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"input_ids": torch.rand(2, 5)}, ValueError, ["input_ids", "int64", "torch.float32"]),
        ({"input_ids": torch.zeros(5, dtype=torch.int64)}, ValueError, ["input_ids", "[batch, sequence]", "(5,)"]),
        ({"attention_mask": torch.ones(2, 4)}, ValueError, ["attention_mask", "(2, 5)", "(2, 4)"]),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1], [1] * 5])}, NotImplementedError, ["one run", "2 runs"]),
        ({"attention_mask": torch.tensor([[1] * 5, [0] * 5])}, ValueError, ["at least one real token", "row 1"]),
        (
            {"attention_mask": torch.ones(2, 5), "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)},
            NotImplementedError,
            ["attention_mask and cu_seqlens", "pass one"],
        ),
    ],
)
def test_what_is_wrong_is_said(make_model: Any, arguments: dict[str, Any], error: type, words: list[str]) -> None:
    with pytest.raises(error) as raised:
        make_model()(**{"input_ids": tokens(2, 5), **arguments})
    assert all(word in str(raised.value) for word in words), str(raised.value)
