"""``nn.MultiheadAttention`` under a pattern, alone and in encoders, gives dense attention with the pattern's counts."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dilated_attention_pytorch import DilatedPattern
from dilated_attention_pytorch.integrations import MultiheadReplacement, replace_attention
from integrations.plain_models import (
    CAUSAL,
    DILATED,
    HOLES,
    ROWS,
    assert_equal,
    encoder,
    padding,
    results,
    with_oracle,
)
from support.drawn import DENSE, examples, groups, pattern_of
from support.oracle import Groups

COVERING = DilatedPattern([ROWS], [1])


def masks(kind: str, x: Tensor, batch_first: bool) -> tuple[dict[str, Any], Tensor]:
    """Arguments of an encoder's forward, and weights of a loss that leave padded rows out."""
    weight = torch.randn_like(x)
    options: dict[str, Any] = {}
    if "padded" in kind:
        padded = padding([ROWS, 9, 17])
        options["src_key_padding_mask"] = padded
        weight[padded if batch_first else padded.T] = 0.0
    if "causal" in kind:
        options["mask"] = CAUSAL(ROWS, dtype=x.dtype)
    return options, weight


@pytest.mark.parametrize("kind", ["whole", "padded", "causal", "padded and causal"])
@pytest.mark.parametrize(
    ("norm_first", "batch_first"), [(False, True), (True, True), (False, False)], ids=["post", "pre", "sequence_first"]
)
@pytest.mark.parametrize("pattern", [COVERING, pattern_of(DILATED)], ids=["covering", "dilated"])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_an_encoder_under_a_pattern_gives_pytorchs_with_the_counts_as_mask(
    pattern: DilatedPattern, kind: str, norm_first: bool, batch_first: bool
) -> None:
    model = encoder(norm_first=norm_first, batch_first=batch_first)
    heads = model.layers[0].self_attn.num_heads
    x = torch.randn((3, ROWS, 12) if batch_first else (ROWS, 3, 12), dtype=torch.float64)
    options, weight = masks(kind, x, batch_first)
    counts = pattern.counts(torch.arange(ROWS), torch.arange(ROWS), heads, is_causal="causal" in kind)
    log_counts = counts.double().log().repeat(3, 1, 1)  # [B * H, N, N]
    expected = results(model, x, weight, **{**options, "mask": log_counts})
    replace_attention(model, pattern)
    assert_equal(results(model, x, weight, **options), expected)


@examples(40)
@given(st.data())
def test_a_drawn_encoder_equals_the_oracle(data: st.DataObject) -> None:
    rows, batch = data.draw(st.sampled_from([1, 7, 63, 100, 257])), data.draw(st.integers(1, 3))
    heads, head_dim = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 2, 3, 5]))
    batch_first, is_causal = data.draw(st.booleans()), data.draw(st.booleans())
    drawn = data.draw(groups("ragged", DENSE))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    layer = nn.TransformerEncoderLayer(
        heads * head_dim,
        heads,
        7,
        0.0,
        batch_first=batch_first,
        norm_first=data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
        dtype=torch.float64,
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn((batch, rows, heads * head_dim) if batch_first else (rows, batch, heads * head_dim)).double()
    options: dict[str, Any] = {"mask": CAUSAL(rows, dtype=torch.float64) if is_causal else None}
    if data.draw(st.booleans()):
        options["src_key_padding_mask"] = (
            torch.zeros(batch, rows)
            .masked_fill(torch.rand(batch, rows) < data.draw(st.sampled_from([0.1, 0.5, 1.0])), float("-inf"))
            .double()
        )
    weight = torch.randn_like(x)
    expected = results(with_oracle(model, drawn), x, weight, **options)
    replace_attention(model, pattern_of(drawn))
    assert_equal(results(model, x, weight, **options), expected)


@examples(40)
@given(st.data())
def test_a_drawn_layer_called_by_itself_equals_the_oracle(data: st.DataObject) -> None:
    rows, heads, head_dim = data.draw(st.sampled_from([1, 7, 31, 100])), *data.draw(st.sampled_from([(3, 5), (2, 4)]))
    dim, batch = heads * head_dim, data.draw(st.integers(1, 3))
    kdim, vdim = data.draw(st.sampled_from([(dim, dim), (7, 11), (dim, 11), (7, dim)]))
    is_single, batch_first = data.draw(st.booleans()), data.draw(st.booleans())
    drawn = data.draw(groups("ragged", DENSE))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(
                dim,
                heads,
                bias=data.draw(st.booleans()),
                kdim=kdim,
                vdim=vdim,
                batch_first=batch_first,
                dtype=torch.float64,
            )
        }
    )
    shape = (rows,) if is_single else (batch, rows) if batch_first else (rows, batch)
    query, key, value = (torch.randn(*shape, width).double().requires_grad_() for width in (dim, kdim, vdim))
    if kdim == dim and data.draw(st.booleans()):
        key = query
    if vdim == kdim and data.draw(st.booleans()):
        value = key
    options = {"is_causal": data.draw(st.booleans())}
    if data.draw(st.booleans()):
        options["key_padding_mask"] = torch.rand(rows if is_single else (batch, rows)) < 0.3
    weight = torch.randn(*shape, dim)
    oracle = with_oracle(model, drawn)
    replace_attention(model, pattern_of(drawn), separate_keys=True)
    found = []
    for layer in (model["attention"], oracle["attention"]):
        out, weights = layer(query, key, value, **options)
        assert weights is None
        inputs = list({id(x): x for x in (query, key, value, *layer.parameters())}.values())
        found.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seen", [DILATED, HOLES], ids=["dilated", "with rows that see nothing"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_fused_fast_path_is_never_taken(monkeypatch: pytest.MonkeyPatch, seen: Groups, is_causal: bool) -> None:
    model = encoder(dtype=torch.float32).eval()
    for layer in model.layers:
        layer.self_attn.in_proj_weight.data *= 3  # so that the patterns matter
    x = torch.randn(3, ROWS, 12)
    options = {"mask": CAUSAL(ROWS)} if is_causal else {}
    calls = []
    fused = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: (calls.append(1), fused(*args))[1])
    with torch.no_grad():
        dense = model(x, **options)
        assert len(calls) == 2  # it would be taken: by both layers
        expected = with_oracle(model, seen)(x, **options)
        replace_attention(model, pattern_of(seen))
        out = model(x, **options)
    assert len(calls) == 2
    torch.testing.assert_close(out, expected)
    assert (out - dense).abs().max() > 0.1


def test_an_encoder_that_would_make_nested_tensors_of_padded_rows_gives_the_right_rows() -> None:
    model = encoder().eval()
    x, padded = torch.randn(3, ROWS, 12, dtype=torch.float64), padding([ROWS, 9, 17])
    expected = with_oracle(model, DILATED)
    expected.use_nested_tensor = False
    by_hand = copy.deepcopy(model)
    report = replace_attention(model, pattern_of(DILATED))
    assert report.nested_tensors_off == ("",)
    assert "use_nested_tensor off: the model itself" in str(report)
    for layer in by_hand.layers:
        layer.self_attn = MultiheadReplacement(layer.self_attn, pattern_of(DILATED))
    with torch.no_grad():
        out = model(x, src_key_padding_mask=padded)
        torch.testing.assert_close(out, expected(x, src_key_padding_mask=padded), rtol=1e-10, atol=1e-10)
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(NotImplementedError, match="use_nested_tensor = False"),
        ):
            by_hand(x, src_key_padding_mask=padded)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_padded_batch_equals_its_rows_alone(is_causal: bool) -> None:
    model = encoder().eval()
    replace_attention(model, pattern_of(HOLES))
    x, lengths = torch.randn(3, ROWS, 12, dtype=torch.float64), [ROWS, 9, 1]
    out = model(x, src_key_padding_mask=padding(lengths), is_causal=is_causal)
    for row, length in enumerate(lengths):
        alone = model(x[row : row + 1, :length], is_causal=is_causal)[0]
        torch.testing.assert_close(out[row, :length], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_cross_attention_of_a_decoder_layer_is_left(batch_first: bool) -> None:
    model = nn.Transformer(12, 2, 1, 2, 17, 0.0, batch_first=batch_first, dtype=torch.float64)
    source, target = torch.randn(2, 11, 12, dtype=torch.float64), torch.randn(2, ROWS, 12, dtype=torch.float64)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    expected = model(source, target, tgt_mask=CAUSAL(ROWS, dtype=torch.float64))
    report = replace_attention(model, COVERING)
    assert [layer.name for layer in report.replaced] == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.1.self_attn",
    ]
    assert [layer.name for layer in report.left] == [f"decoder.layers.{i}.multihead_attn" for i in range(2)]
    assert "cross-attention of an nn.TransformerDecoderLayer" in str(report)
    out = model(source, target, tgt_mask=CAUSAL(ROWS, dtype=torch.float64))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    out = model(source, target, tgt_is_causal=True)  # without a mask
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_is_causal_makes_every_call_causal() -> None:
    x = torch.randn(3, ROWS, 12, dtype=torch.float64)
    model = encoder()
    expected = with_oracle(model, DILATED)(x, is_causal=True)
    replace_attention(model, pattern_of(DILATED), is_causal=True)
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


X = torch.zeros(2, ROWS, 12)
WRONG_CALLS = {
    "weights": ((X, X, X), {"need_weights": True}, NotImplementedError, "need_weights=True asks for"),
    "window": ((X, X, X), {"attn_mask": torch.ones(ROWS, ROWS).triu(5)}, NotImplementedError, "attn_mask can only be"),
    "no mask": (
        (X, X, X),
        {"attn_mask": torch.zeros(ROWS, ROWS, dtype=torch.bool), "is_causal": True},
        NotImplementedError,
        "attn_mask can only be the causal mask",
    ),
    "mask of heads": ((X, X, X), {"attn_mask": torch.zeros(6, ROWS, ROWS)}, NotImplementedError, r"got \(6, 23, 23\)"),
    "weighted": ((X, X, X), {"key_padding_mask": torch.ones(2, ROWS)}, ValueError, r"must hold only 0 \(keep\)"),
    "padding": ((X, X, X), {"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)}, ValueError, r"got \(2, 5\)"),
    "cross": ((X, X[:, :5], X[:, :5]), {}, NotImplementedError, "key must be the same tensor as query"),
    "width": ((X[..., :5],) * 3, {}, ValueError, r"query must be \[batch, sequence, 12\].* got shape \(2, 23, 5\)"),
    "dimensions": ((X[None],) * 3, {}, ValueError, "query must be"),
    "value": ((X, X, X[0]), {}, ValueError, "value must be"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_call_that_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    inputs, options, error, message = WRONG_CALLS[name]
    layer = MultiheadReplacement(nn.MultiheadAttention(12, 3, batch_first=True), pattern_of(DILATED))
    with pytest.raises(error, match=message):
        layer(*inputs, **options)
    layer.separate_keys = True
    with pytest.raises(NotImplementedError, match="got 23 queries and 5 keys, which is cross-attention"):
        layer(X, X[:, :5], X[:, :5])


def test_the_value_may_be_another_tensor() -> None:
    dense = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    query, value = torch.randn(2, 2, ROWS, 12, dtype=torch.float64)  # as in DETR: positions in query and key alone
    out, _ = MultiheadReplacement(dense, COVERING)(query, query, value)
    torch.testing.assert_close(out, dense(query, query, value)[0], rtol=1e-10, atol=1e-10)


def test_one_product_projects_query_key_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, w, b=None: widths.append(w.shape[0]) or linear(x, w, b))
    for batch_first in (True, False):
        layer = MultiheadReplacement(nn.MultiheadAttention(12, 3, batch_first=batch_first), COVERING)
        widths.clear()
        layer(X, X, X)
        assert widths == [36, 12]


def test_a_compiled_encoder_is_one_graph_with_the_same_result() -> None:
    model = encoder()
    model.layers = model.layers[:1]
    replace_attention(model, pattern_of(DILATED))
    x, weight = torch.randn(2, 3, ROWS, 12, dtype=torch.float64)
    options = {"mask": CAUSAL(ROWS, dtype=torch.float64), "src_key_padding_mask": padding([ROWS, 9, 17]).double()}
    options["src_key_padding_mask"].masked_fill_(options["src_key_padding_mask"] == 1, float("-inf"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = results(model, x, weight, is_causal=True, **options)
    actual = results(compiled, x, weight, is_causal=True, **options)
    assert_equal({name.removeprefix("_orig_mod."): tensor for name, tensor in actual.items()}, expected)
    with pytest.raises(RuntimeError, match="attn_mask can only be the causal mask"):
        compiled(x, is_causal=True, **{**options, "mask": torch.zeros(ROWS, ROWS, dtype=torch.float64)})
