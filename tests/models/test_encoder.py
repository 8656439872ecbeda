"""The encoder and the encoder-decoder are what their definitions say, written out densely, however rows are padded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention_pytorch import local_window
from dilated_attention_pytorch.models import LongNetConfig, LongNetEncoder, LongNetEncoderDecoder, LongNetLM
from dilated_attention_pytorch.models.blocks import magneto_gains
from models.dense import Dense
from support import oracle

TOLERANCE = 1e-11  # float64, a few hundred roundings; gradients are sums over all rows
MakeConfig = Callable[..., LongNetConfig]
WINDOW = {
    "segment_lengths": [],
    "dilation_rates": [],
    "layer_segment_shifts": [0],
    "layer_patterns": ["local_window(4, 6)"],
}


def tokens(*shape: int) -> Tensor:
    return torch.randint(29, shape)


def gradients_agree(model: torch.nn.Module, found: Tensor, expected: Tensor) -> None:
    """Of one random loss, for every parameter; those of the dense model are the same tensors.

    Where embeddings are given, the table is used by neither.
    """
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    loss, parameters = torch.randn_like(found), list(model.parameters())
    found_grads, expected_grads = (
        torch.autograd.grad((out * loss).sum(), parameters, allow_unused=True) for out in (found, expected)
    )
    for mine, want in zip(found_grads, expected_grads, strict=True):
        assert (mine is None) == (want is None)
        if mine is not None:
            torch.testing.assert_close(mine, want, atol=TOLERANCE, rtol=100 * TOLERANCE)


def with_drawn_norms(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters by name, LayerNorms moved off 1 and 0."""
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if name.endswith("weight") else 0.0, std=0.3)
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    "changes",
    [{}, {"offset_rule": "block", "num_kv_heads": 2}, {**WINDOW, "head_gates": True, "layer_rope_thetas": [0, 1e4]}],
    ids=str,
)
@pytest.mark.parametrize("takes_tokens", [True, False])
def test_the_encoder_equals_its_definition(
    takes_tokens: bool, changes: dict[str, Any], make_config: MakeConfig
) -> None:
    config = make_config(**changes)
    encoder = LongNetEncoder(config, has_embedding=takes_tokens).double().train()
    dense = Dense(config, with_drawn_norms(encoder))
    ids, vectors = tokens(1, 41), torch.randn(1, 41, 60, dtype=torch.float64)
    if takes_tokens:
        gradients_agree(encoder, encoder(ids), dense.states(dense.embedded(ids)))
        gradients_agree(encoder, encoder(inputs_embeds=encoder.embedding(ids)), dense.states(encoder.embedding(ids)))  # type: ignore[misc]
    else:
        gradients_agree(encoder, encoder(inputs_embeds=vectors), dense.states(vectors))


@pytest.mark.parametrize("cross", [None, (3, 5)])
def test_the_encoder_decoder_equals_its_definition(cross: tuple[int, int] | None, make_config: MakeConfig) -> None:
    of_source = make_config(head_gates=True)
    of_target = make_config(
        embed_dim=36 if cross is None else 60, tie_embeddings=False, head_gates=True, layer_scale_lengths=[6]
    )
    options = {} if cross is None else {"cross_pattern": local_window(*cross)}
    model = LongNetEncoderDecoder(of_source, of_target, **options).double()
    weights = with_drawn_norms(model)
    encoder, decoder = Dense(of_source, weights, "encoder."), Dense(of_target, weights)
    source, target = tokens(1, 31), tokens(1, 19)
    states = encoder.states(encoder.embedded(source))
    seen, no_padding = torch.ones(1, 3, 19, 31, dtype=torch.int64), torch.zeros(1, 3, 19, dtype=torch.int64)
    if cross is not None:
        seen, _ = oracle.dense_counts(oracle.Rule("window", cross), 19, 31, 3)
    x = decoder.embedded(target)
    for layer in range(2):
        x = decoder.block(layer, x, is_causal=True, states=states, seen=(seen, no_padding))
    gradients_agree(model, model(source, target), decoder.norm(x, "layernorm") @ weights["head.weight"].T)


RUNS = ((0, 23), (4, 23), (0, 17), (6, 18))


def mask_of(runs: tuple[tuple[int, int], ...], columns: int) -> Tensor:
    places = torch.arange(columns)
    return torch.stack([(places >= start) & (places < stop) for start, stop in runs]).int()


def test_padding_changes_no_state_and_no_gradient(make_config: MakeConfig) -> None:
    encoder = LongNetEncoder(make_config()).double()
    ids, mask = tokens(4, 23), mask_of(RUNS, 23)
    vectors = torch.randn(4, 23, 60, dtype=torch.float64, requires_grad=True)
    for inputs in ({"input_ids": ids}, {"inputs_embeds": vectors}):
        ((name, given),) = inputs.items()
        found = encoder(**inputs, attention_mask=mask)
        alone = [encoder(**{name: given[row : row + 1, a:b]})[0] for row, (a, b) in enumerate(RUNS)]
        real = torch.cat([found[row, a:b] for row, (a, b) in enumerate(RUNS)])
        gradients_agree(encoder, real, torch.cat(alone))
        assert bool((found[mask == 0] == 0).all())
        spoilt = given.detach().clone()
        spoilt[mask == 0] = 3 if name == "input_ids" else math.inf
        assert torch.equal(encoder(**{name: spoilt}, attention_mask=mask)[mask == 1], found[mask == 1])


@pytest.mark.parametrize("options", [{}, {"cross_pattern": local_window(2, 9)}], ids=["dense", "window"])
def test_padding_of_source_and_target_changes_no_logit(options: dict[str, Any], make_config: MakeConfig) -> None:
    model = LongNetEncoderDecoder(make_config(), make_config(), **options).double()
    targets = ((0, 9), (0, 13), (5, 13), (2, 11))
    source, target = tokens(4, 23), tokens(4, 13)
    masks = {"attention_mask": mask_of(RUNS, 23), "decoder_attention_mask": mask_of(targets, 13)}
    found = model(source, target, **masks)
    rows = enumerate(zip(RUNS, targets, strict=True))
    alone = [model(source[row : row + 1, a:b], target[row : row + 1, c:d])[0] for row, ((a, b), (c, d)) in rows]
    real = torch.cat([found[row, c:d] for row, (c, d) in enumerate(targets)])
    gradients_agree(model, real, torch.cat(alone))
    # Only the source is padded, or only the target.
    for name, mask in masks.items():
        found = model(source, target, **{name: mask})
        whole = name == "decoder_attention_mask"
        (a, b), (c, d) = ((0, 23), targets[2]) if whole else (RUNS[1], (0, 13))
        row = 2 if whole else 1
        expected = model(source[row : row + 1, a:b], target[row : row + 1, c:d])[0]
        torch.testing.assert_close(found[row, c:d], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_decoder_sees_no_later_target_and_all_of_the_source(make_config: MakeConfig) -> None:
    model = LongNetEncoderDecoder(make_config(), make_config()).double()
    source, target = tokens(1, 23), tokens(1, 13)
    states = model.encoder(source).detach().requires_grad_()
    logits = model.decode(target, states)
    changed = target.clone()
    changed[0, 8] = (target[0, 8] + 1) % 29
    assert torch.equal(model.decode(changed, states)[0, :8], logits[0, :8])
    (grad,) = torch.autograd.grad(logits[0, 0].square().sum(), states)
    assert bool((grad.abs().amax(-1) > 0).all())


def test_packed_documents_are_encoded_each_on_its_own(make_config: MakeConfig) -> None:
    encoder = LongNetEncoder(make_config()).double()
    ids, bounds = tokens(2, 40), [0, 11, 12, 40]
    found = encoder(ids, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    alone = [encoder(ids[:, a:b]) for a, b in itertools.pairwise(bounds)]
    torch.testing.assert_close(found, torch.cat(alone, 1), atol=TOLERANCE, rtol=TOLERANCE)


def test_recomputed_blocks_give_the_same_gradients(make_config: MakeConfig) -> None:
    config = make_config(gradient_checkpointing=True, checkpoint_every=1)
    model = LongNetEncoderDecoder(config, config).double().train()
    calls: list[int] = []
    for block in (*model.encoder.blocks, *model.blocks):
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    source, target, grads = tokens(2, 23), tokens(2, 13), []
    for is_recomputed in (True, False):
        model.gradient_checkpointing = model.encoder.gradient_checkpointing = is_recomputed
        calls.clear()
        grads.append(torch.autograd.grad(model(source, target).square().sum(), list(model.parameters())))
        assert len(calls) == (8 if is_recomputed else 4)
    for mine, want in zip(*grads, strict=True):
        torch.testing.assert_close(mine, want, atol=TOLERANCE, rtol=TOLERANCE)


def test_dropout_is_there_in_training_alone(make_config: MakeConfig) -> None:
    config = make_config(dropout=0.3, attention_dropout=0.3)
    model = LongNetEncoderDecoder(config, config)
    source, target = tokens(1, 23), tokens(1, 13)
    assert not torch.equal(model(source, target), model(source, target))
    model.eval()
    assert torch.equal(model(source, target), model(source, target))


def test_matrices_begin_with_the_gains_of_magneto(make_config: MakeConfig) -> None:
    gains = magneto_gains(12, 6)
    assert gains.decoder == math.sqrt(math.log(18))
    assert gains.encoder == math.sqrt(math.log(18) * math.log(24) / 3)
    model = LongNetEncoderDecoder(make_config(num_layers=12), make_config(num_layers=6))
    for gain, attention in (
        (gains.encoder, model.encoder.blocks[3].attention),
        (gains.decoder, model.blocks[2].attention),
        (gains.decoder, model.blocks[5].cross_attention),
    ):
        assert attention.gain == gain
        # Xavier-uniform of a square matrix: numbers up to gain * sqrt(3 / E).
        most = gain * math.sqrt(3 / 60)
        assert 0.95 * most < float(attention.out_proj.weight.detach().abs().max()) <= most * (1 + 1e-6)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({}, ValueError, r"input_ids \[.* or inputs_embeds \[batch, sequence, 60\]: got neither"),
    ({"input_ids": tokens(1, 5), "inputs_embeds": torch.zeros(1, 5, 60)}, ValueError, "exclude each other: got both"),
    ({"input_ids": torch.zeros(1, 5)}, ValueError, r"token numbers, got torch.float32 of shape \(1, 5\)"),
    ({"inputs_embeds": torch.zeros(1, 5, 59)}, ValueError, r"sequence, 60\], got .* shape \(1, 5, 59\)"),
    ({"input_ids": tokens(1, 5), "attention_mask": torch.ones(1, 4)}, ValueError, r"shape \(1, 5\) .*, got \(1, 4\)"),
    ({"input_ids": tokens(1, 3), "attention_mask": torch.tensor([[1, 0, 1]])}, NotImplementedError, "2 runs in row 0"),
    ({"input_ids": tokens(1, 3), "attention_mask": torch.zeros(1, 3)}, ValueError, "got none in row 0"),
    ({"input_ids": tokens(1, 0), "attention_mask": torch.ones(1, 0)}, ValueError, "got none in row 0"),
    ({"input_ids": tokens(1, 3), "attention_mask": torch.tensor([[1, 1, 0]]),
      "cu_seqlens": torch.tensor([0, 3], dtype=torch.int32)}, NotImplementedError, "exclude each other"),
])  # fmt: skip
def test_wrong_calls_of_the_encoder_are_named(
    arguments: dict[str, Tensor], error: type[Exception], message: str, make_config: MakeConfig
) -> None:
    with pytest.raises(error, match=message):
        LongNetEncoder(make_config())(**arguments)


@pytest.mark.parametrize("other", [-math.inf, torch.finfo(torch.float32).min, 2.0, 0.5, math.nan])
def test_a_mask_of_other_numbers_than_0_and_1_is_refused(other: float, make_config: MakeConfig) -> None:
    ids, mask = tokens(2, 5), torch.tensor([[1.0, 1, 1, 1, 1], [0, 0, 0, other, other]])
    message = "only 1 .real. and 0 .padding., got 2 other numbers in row 1; of an additive mask .* pass mask == 0"
    both = LongNetEncoderDecoder(make_config(), make_config())
    for call in (
        lambda: LongNetEncoder(make_config())(ids, attention_mask=mask),
        lambda: LongNetLM(make_config())(ids, attention_mask=mask),
        lambda: both(ids, ids, attention_mask=mask),
        lambda: both(ids, ids, decoder_attention_mask=mask),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_what_an_encoder_does_not_have_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match="no output matrix: leave tie_embeddings at True, got False"):
        LongNetEncoder(make_config(tie_embeddings=False))
    for wrong in ((True, False), (False, True)):
        with pytest.raises(NotImplementedError, match=r"shifted_keys is supported by .*LongNetLM only: .* got True"):
            LongNetEncoderDecoder(*(make_config(shifted_keys=is_shifted) for is_shifted in wrong))
    for field, value in (("key_convolution", 2), ("layer_scale_lengths", [9])):
        with pytest.raises(NotImplementedError, match=rf"{field} is supported by the causal LongNetLM only"):
            LongNetEncoder(make_config(**{field: value}))
    with pytest.raises(ValueError, match=r"has_embedding=False\): pass inputs_embeds, got input_ids"):
        LongNetEncoder(make_config(), has_embedding=False)(tokens(1, 5))
    model = LongNetEncoderDecoder(make_config(), make_config())
    with pytest.raises(ValueError, match=r"states must be \[2, source, 60\].*got shape \(1, 5, 60\)"):
        model.decode(tokens(2, 4), torch.zeros(1, 5, 60))
    with pytest.raises(ValueError, match=r"decoder_attention_mask must have the shape \(2, 4\).*got \(2, 5\)"):
        model(tokens(2, 5), tokens(2, 4), decoder_attention_mask=torch.ones(2, 5))
