"""``replace_attention``: what it replaces, what it leaves, and what stays the same."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dilated_attention_pytorch import DilatedPattern, local_window
from dilated_attention_pytorch.integrations import MultiheadReplacement, QkvReplacement, replace_attention
from integrations.plain_models import (
    DILATED,
    ROWS,
    Attention,
    VisionTransformer,
    encoder,
    vision_transformer,
)
from support.drawn import pattern_of

COVERING = DilatedPattern([ROWS], [1])


@pytest.mark.parametrize("kind", ["encoder", "widths", "vision"])
def test_state_dicts_exchange_and_parameters_are_the_same_objects_in_the_same_order(kind: str) -> None:
    model: nn.Module = {
        "encoder": lambda: encoder(),
        "widths": lambda: nn.Sequential(nn.MultiheadAttention(12, 3, kdim=5, vdim=7, bias=False)),
        "vision": lambda: VisionTransformer(15, 3, 12, 3, 2, qk_norm=True, scale_norm=True),
    }[kind]()
    dense, before, names = copy.deepcopy(model), list(model.parameters()), list(model.state_dict())
    modes = [module.training for module in model.eval().modules()]
    replace_attention(model, local_window(5, 5), separate_keys=True)
    assert not any(modes)
    assert not any(module.training for module in model.modules())
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in before]
    assert list(model.state_dict()) == names
    dense.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(copy.deepcopy(dense).state_dict(), strict=True)


def test_an_optimizer_made_before_goes_on() -> None:
    model = encoder()
    dense = copy.deepcopy(model)
    x, weight = torch.randn(2, 3, ROWS, 12, dtype=torch.float64)
    for one in (model, dense):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        for step in range(3):
            if step == 1 and one is model:
                replace_attention(one, COVERING)
            optimizer.zero_grad()
            (one(x) * weight).sum().backward()
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), dense.state_dict(), rtol=1e-8, atol=1e-8)


def test_a_layer_in_two_places_stays_one_layer() -> None:
    layer = nn.MultiheadAttention(12, 3, batch_first=True)
    model = nn.ModuleList([nn.ModuleDict({"a": layer}), nn.ModuleDict({"b": layer})])
    report = replace_attention(model, COVERING)
    assert [one.name for one in report.replaced] == ["0.a", "1.b"]
    assert model[0]["a"] is model[1]["b"]
    assert len(list(model.parameters())) == 4


def test_a_function_chooses_the_pattern_of_each_layer() -> None:
    model = VisionTransformer(15, 3, 12, 3, 3)
    chosen = {"blocks.0.attn": local_window(3, 3), "blocks.2.attn": COVERING}
    report = replace_attention(model, lambda name, module: chosen.get(name))
    assert {layer.name: layer.pattern for layer in report.replaced} == chosen
    assert [(layer.name, layer.reason) for layer in report.left] == [
        ("blocks.1.attn", "pattern(name, module) returned None for it")
    ]
    assert isinstance(model.blocks[1].attn, Attention)


def table_bias() -> nn.Module:
    block = Attention(12, 3)
    block.relative_position_bias_table = nn.Parameter(torch.zeros(9, 3))
    return block


class ChannelAttention(Attention):
    """As in DaViT: the same parts, but the channels attend to each other."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.joined(((q * self.scale).transpose(-1, -2) @ k).softmax(-1).matmul(v.transpose(-1, -2)).mT)


class GridAttention(Attention):
    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return super().forward(x)


class ImageAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, dim = x.shape
        return super().forward(x.view(batch, height * width, dim)).view(x.shape)


class ShoutingAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda *_: None)
    return layer


def wrapped(layer: nn.Module) -> nn.Module:
    layer.forward = lambda x: x
    return layer


class OtherParameter(nn.Parameter):
    """As of a library that quantises or shards."""


def with_other_parameter() -> nn.Module:
    layer = nn.MultiheadAttention(12, 3)
    layer.in_proj_weight = OtherParameter(layer.in_proj_weight.data)
    return layer


def without_heads() -> nn.Module:
    block = Attention(12, 3)
    del block.num_heads
    return block


def with_convolution() -> nn.Module:
    block = Attention(12, 3)
    block.qkv = nn.Conv2d(12, 36, 1)
    return block


LEFT = {
    "add_bias_kv": (lambda: nn.MultiheadAttention(12, 3, add_bias_kv=True), "add_bias_kv"),
    "add_zero_attn": (lambda: nn.MultiheadAttention(12, 3, add_zero_attn=True), "add_zero_attn"),
    "subclass": (lambda: ShoutingAttention(12, 3), "its own forward"),
    "kdim": (lambda: nn.MultiheadAttention(12, 3, kdim=5), "separate_keys=True replaces it"),
    "parametrized": (
        lambda: parametrizations.spectral_norm(nn.MultiheadAttention(12, 3), "in_proj_weight"),
        "parametrizations",
    ),
    "hooks": (lambda: hooked(nn.MultiheadAttention(12, 3)), "it has hooks"),
    "wrapped": (lambda: wrapped(nn.MultiheadAttention(12, 3)), "replace before wrapping"),
    "sharded": (with_other_parameter, "its parameters are of the class OtherParameter"),
    "dropout": (lambda: nn.MultiheadAttention(12, 3, dropout=1.0), "its dropout is 1.0"),
    "position bias": (table_bias, "unknown parts: relative_position_bias_table"),
    "channels": (lambda: ChannelAttention(12, 3), "it computes something else"),
    "argument": (lambda: GridAttention(12, 3), "its forward takes size"),
    "image": (lambda: ImageAttention(12, 3), "a trial of its forward"),
    "block with hooks": (lambda: hooked(Attention(12, 3)), "it has hooks"),
    "no num_heads": (without_heads, "its num_heads must be a positive integer, got None"),
    "convolution": (with_convolution, "its qkv is a Conv2d"),
    "replaced": (lambda: MultiheadReplacement(nn.MultiheadAttention(12, 3), COVERING), "under a pattern already"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_replaced_is_left_and_the_report_says_why(name: str) -> None:
    make, reason = LEFT[name]
    layer = make()
    model = nn.ModuleDict({"other": nn.MultiheadAttention(12, 3), "layer": layer})
    report = replace_attention(model, COVERING)
    assert model["layer"] is layer
    assert [one.name for one in report.replaced] == ["other"]
    (left,) = report.left
    assert left.name == "layer"
    assert reason in left.reason
    assert f"  layer ({type(layer).__name__}): {left.reason}" in str(report).splitlines()


def test_where_nothing_is_replaced_the_error_says_what_was_looked_for_and_nothing_changed() -> None:
    with pytest.raises(
        ValueError,
        match=r"looked for nn.MultiheadAttention and for blocks with .* found none; for a model of transformers call",
    ):
        replace_attention(nn.Linear(3, 3), COVERING)
    with pytest.raises(ValueError, match=r"found only\n  0 \(MultiheadAttention\): add_zero_attn"):
        replace_attention(nn.Sequential(nn.MultiheadAttention(12, 3, add_zero_attn=True)), COVERING)
    with pytest.raises(ValueError, match=r"the model itself .* write MultiheadReplacement\(model, pattern\)"):
        replace_attention(nn.MultiheadAttention(12, 3), COVERING)
    with pytest.raises(ValueError, match=r"the model itself .* write QkvReplacement\(model, pattern\)"):
        replace_attention(Attention(12, 3), COVERING)
    model = encoder()
    kept = model.layers[0].self_attn
    answers: list[Any] = [COVERING, "local"]
    with pytest.raises(TypeError, match=r"must return a pattern or None, got 'local' of type str for layers.1.self_a"):
        replace_attention(model, lambda name, module: answers.pop(0))
    assert model.layers[0].self_attn is kept
    with pytest.raises(TypeError, match=r"pattern must be a pattern such as .* got \[4\] of type list"):
        replace_attention(model, [4])
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got list"):
        replace_attention([model], COVERING)
    with pytest.raises(TypeError, match=r"replaced must be an nn.MultiheadAttention, got Linear"):
        MultiheadReplacement(nn.Linear(3, 3), COVERING)


@pytest.mark.parametrize("kind", ["encoder", "vision"])
def test_it_is_copied_pickled_and_converted(kind: str) -> None:
    if kind == "encoder":
        model, x = encoder().eval(), torch.randn(2, ROWS, 12, dtype=torch.float64)
    else:
        model, x, _ = vision_transformer()
    replace_attention(model, pattern_of(DILATED))
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), expected, rtol=0, atol=0)
    single = copy.deepcopy(model).to(torch.float32)
    torch.testing.assert_close(single(x.float()).double(), expected, rtol=1e-3, atol=1e-3)
    half = copy.deepcopy(model).to(torch.bfloat16)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.float()(x.float()).isfinite().all()


def test_dropout_of_the_attention_is_active_in_training_only() -> None:
    x = torch.randn(2, ROWS, 12)
    layer = MultiheadReplacement(nn.MultiheadAttention(12, 3, dropout=0.5, batch_first=True), COVERING)
    block = QkvReplacement(Attention(12, 3, attn_drop=0.5), COVERING)
    calls = {layer: lambda: layer(x, x, x)[0], block: lambda: block(x)}
    for module, call in calls.items():
        assert module.dropout == 0.5
        dropped = torch.stack([call() for _ in range(200)])
        assert (dropped[0] - dropped[1]).abs().max() > 0.01
        module.eval()
        assert torch.equal(call(), call())
        # Dropout keeps the mean: within five standard errors.
        error = dropped.std(0) / 200**0.5
        assert ((dropped.mean(0) - call()).abs() < 5 * error).all()
    layer.train().dropout = 0.0
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
