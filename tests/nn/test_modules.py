"""The modules: a drop-in for nn.MultiheadAttention that equals it where the pattern is dense."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import MultiheadDilatedAttention, attend
from dilated_attention_pytorch.nn import DilatedAttention

WIDTH, HEADS, ROWS = 30, 5, 23
DENSE = ([64], [1])


def pair(**options: object) -> tuple[nn.MultiheadAttention, MultiheadDilatedAttention]:
    """PyTorch's module and ours with its weights, in float64."""
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = MultiheadDilatedAttention(WIDTH, HEADS, *DENSE, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(*rows_and_widths: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.randn(2, n, e, dtype=torch.float64, requires_grad=True) for n, e in rows_and_widths]


def fused(names: list[str], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of query, key and value joined, in PyTorch's order: weight and bias of the three, then of the output."""
    found = dict(zip(names, tensors, strict=True))
    order = ["q_proj.weight", "q_proj.bias", "out_proj.weight", "out_proj.bias"]
    return [
        torch.cat([found[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")])
        if name.startswith("q_proj")
        else found[name]
        for name in order
        if name in found
    ]


@pytest.mark.parametrize("bias", [True, False])
def test_self_attention_equals_pytorch_with_its_weights(bias: bool) -> None:
    theirs, ours = pair(bias=bias)
    (x,) = inputs((ROWS, WIDTH))
    padding = torch.zeros(2, ROWS, dtype=torch.bool)
    padding[1, 15:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(ROWS, dtype=torch.float64)
    float_padding = torch.zeros(2, ROWS, dtype=torch.float64).masked_fill(padding, float("-inf"))
    for here, there in (
        ({}, {}),
        ({"key_padding_mask": padding}, {"key_padding_mask": padding}),
        ({"key_padding_mask": float_padding}, {"key_padding_mask": padding}),
        ({"is_causal": True}, {"attn_mask": causal}),
        ({"is_causal": True, "attn_mask": causal}, {"attn_mask": causal}),
        ({"attn_mask": causal}, {"attn_mask": causal}),
        ({"is_causal": True, "attn_mask": causal.bool()}, {"attn_mask": causal}),
    ):
        expected, _ = theirs(x, x, x, need_weights=False, **there)
        got, weights = ours(x, x, x, **here)
        assert weights is None
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        parameters = [x, *theirs.parameters()]
        wanted = torch.autograd.grad(expected.sin().sum(), parameters)
        of_x, *grads = torch.autograd.grad(got.sin().sum(), [x, *ours.parameters()])
        grads = [of_x, *fused([name for name, _ in ours.named_parameters()], grads)]
        for grad, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("widths", [{}, {"kdim": 7, "vdim": 11}])
def test_cross_attention_equals_pytorch_with_its_weights(widths: dict[str, int]) -> None:
    theirs, ours = pair(**widths)
    query, key, value = inputs((ROWS, WIDTH), (41, widths.get("kdim", WIDTH)), (41, widths.get("vdim", WIDTH)))
    expected, _ = theirs(query, key, value, need_weights=False)
    torch.testing.assert_close(ours(query, key, value)[0], expected, rtol=0, atol=1e-12)


def heads_of(module: MultiheadDilatedAttention, x: torch.Tensor) -> list[torch.Tensor]:
    parts = (module.q_proj, module.k_proj, module.v_proj)
    return [part(x).unflatten(-1, (-1, module.head_dim)) for part in parts]


@pytest.mark.parametrize("widths", [{}, {"kdim": 7}, {"kdim": 7, "vdim": 11}])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_of_pytorch_load_strictly_and_with_assign(widths: dict[str, int], assign: bool) -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **widths)
    ours = MultiheadDilatedAttention(WIDTH, HEADS, *DENSE, **widths, device="meta" if assign else None)
    holder = nn.ModuleDict({"attention": ours})
    holder.load_state_dict({f"attention.{name}": w for name, w in theirs.state_dict().items()}, assign=assign)
    query, key, value = (torch.randn(2, ROWS, width) for width in (WIDTH, ours.kdim, ours.vdim))
    expected, _ = theirs(query, key, value, need_weights=False)
    torch.testing.assert_close(ours(query, key, value)[0], expected)
    storages = [parameter.untyped_storage().data_ptr() for parameter in ours.parameters()]
    assert len(set(storages)) == len(storages)  # safetensors saves no shared memory


def test_a_fused_state_dict_of_other_sizes_raises_as_every_other() -> None:
    ours = MultiheadDilatedAttention(24, 6, *DENSE, num_kv_heads=2)
    weights = nn.MultiheadAttention(24, 6).state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for in_proj_weight: its 72 rows must be the \[24, 8, 8\]"):
        ours.load_state_dict(weights)
    weights.pop("in_proj_bias")
    weights["in_proj_weight"] = torch.zeros(40, 24)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"q_proj.bias\""):
        ours.load_state_dict(weights)
    result = ours.load_state_dict(weights, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["q_proj.bias", "k_proj.bias", "v_proj.bias"], [])


def test_it_stands_in_a_transformer_encoder_layer_in_training_and_in_eval() -> None:
    """PyTorch's fused path for eval would compute dense attention from the parameters without calling the module."""
    layer = nn.TransformerEncoderLayer(24, 6, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = MultiheadDilatedAttention(24, 6, [4], [2], dtype=torch.float64)
    (x,) = inputs((ROWS, 24))
    trained = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), trained.detach(), rtol=0, atol=1e-13)
        x = layer.norm1(x + layer.self_attn(x, x, x)[0])
        expected = layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))
    torch.testing.assert_close(trained.detach(), expected, rtol=0, atol=1e-13)


def test_grouped_query_heads_share_their_key_and_value_heads() -> None:
    ours = MultiheadDilatedAttention(24, 6, [16, 32], [1, 3], num_kv_heads=2, dtype=torch.float64)
    (x,) = inputs((ROWS, 24))
    q, k, v = heads_of(ours, x)
    assert q.shape == (2, ROWS, 6, 4)
    assert k.shape == v.shape == (2, ROWS, 2, 4)
    torch.testing.assert_close(ours(x, x, x)[0], ours.out_proj(attend(q, k, v, ours.pattern).flatten(-2)))


def test_the_sub_layernorm_normalises_the_heads_before_the_output_projection() -> None:
    ours = MultiheadDilatedAttention(24, 6, [16], [2], sub_layernorm=True, dtype=torch.float64)
    (x,) = inputs((ROWS, 24))
    heads = attend(*heads_of(ours, x), ours.pattern).flatten(-2)
    expected = ours.out_proj(torch.nn.functional.layer_norm(heads, (24,)))
    torch.testing.assert_close(ours(x, x, x)[0], expected)


def test_magneto_gain_scales_value_and_output_projections_only() -> None:
    gain = 1.7

    def bounds(module: MultiheadDilatedAttention) -> list[float]:
        parts = (module.q_proj, module.k_proj, module.v_proj, module.out_proj)
        return [part.weight.abs().max().item() for part in parts]

    torch.manual_seed(3)
    plain = bounds(MultiheadDilatedAttention(64, 4, *DENSE))
    torch.manual_seed(3)
    scaled = bounds(MultiheadDilatedAttention(64, 4, *DENSE, gain=gain))
    ratios = [b / a for a, b in zip(plain, scaled, strict=True)]
    torch.testing.assert_close(torch.tensor(ratios), torch.tensor([1.0, 1.0, gain, gain]))


def test_dropout_is_off_in_eval_and_the_pattern_is_readable() -> None:
    module = DilatedAttention([8, 16], [1, 2], dropout=0.5)
    assert (module.segment_lengths, module.dilation_rates) == ((8, 16), (1, 2))
    q = torch.randn(1, 20, 2, 4)
    exact = attend(q, q, q, module.pattern)
    assert not torch.allclose(module(q, q, q), exact)
    assert torch.equal(module.eval()(q, q, q), exact)
    multihead = MultiheadDilatedAttention(8, 2, [8, 16], [1, 2])
    assert (multihead.segment_lengths, multihead.dilation_rates) == ((8, 16), (1, 2))


def test_scale_shift_and_offsets_reach_the_attention() -> None:
    q, k, v = (torch.randn(1, 20, 2, 4, dtype=torch.float64) for _ in range(3))
    module = DilatedAttention([8], [2], softmax_scale=0.3, segment_shift=3, offset_rule="block")
    got = module(q, k, v, True, query_offset=5, key_offset=5)
    torch.testing.assert_close(
        got, attend(q, k, v, module.pattern, is_causal=True, scale=0.3, query_offset=5, key_offset=5)
    )
    assert module.pattern.segment_shift == 3
    assert module.pattern.offset_rule == "block"
