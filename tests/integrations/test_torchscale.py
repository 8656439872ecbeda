"""Adopted layers compute what torchscale's do; state dicts exchange; what torchscale leaves out works."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dilated_attention_pytorch import DilatedPattern, attend
from dilated_attention_pytorch.integrations import AdoptedDilatedAttention, adopt
from integrations.adopting import adopted, assert_equal, draw, results
from integrations.torchscale_layer import DilatedAttention, Encoder, layer
from support.drawn import examples

SLIDE_ENCODER = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])


LENGTHS = st.sampled_from([1, 2, 7, 31, 63, 64, 65, 100, 127, 257])


@st.composite
def drawn_layers(draw: st.DrawFn) -> dict[str, Any]:
    """A layer and a call of it; two in a hundred are long."""
    kind = draw(st.integers(0, 99))
    length = draw(LENGTHS if kind < 40 else st.integers(1, 300) if kind < 98 else st.sampled_from([1009, 1523, 3000]))
    num_groups = draw(st.integers(1, 4))
    sizes = st.one_of(st.integers(1, length + 40), st.integers(1, 40), st.sampled_from([4, 16, 64]))
    ratios = st.one_of(st.integers(1, 7), st.sampled_from([1, 2, 4]))
    if length > 300:  # the dense layer computes every segment at its full length, one after the other
        sizes, ratios = st.integers(length // 5, length + 40), st.integers(2, 7)
    pairs = draw(st.lists(st.tuples(sizes, ratios), min_size=num_groups, max_size=num_groups))
    if draw(st.booleans()):  # as in every published configuration
        pairs = [(w + -w % r, r) for w, r in pairs]
    return {
        "length": length,
        "batch": draw(st.integers(1, 2)) if length <= 300 else 1,
        "lengths": [w for w, _ in pairs],
        "ratios": [r for _, r in pairs],
        "num_heads": draw(st.sampled_from([1, 2, 3, 5, 7])) if length <= 300 else 2,
        "head_dim": draw(st.sampled_from([2, 4, 6])),
        "subln": draw(st.booleans()),
        "xpos_scale_base": draw(st.sampled_from([None, None, 512, 64 if length <= 100 else 1000])),
        "is_causal": draw(st.booleans()),
        "as_strings": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**20)),
    }


@given(drawn_layers())
@examples(80, is_shrunk=False)
def test_an_adopted_layer_equals_torchscale_s_in_output_and_gradients(case: dict[str, Any]) -> None:
    torch.manual_seed(case["seed"])
    theirs = layer(
        case["lengths"],
        case["ratios"],
        embed_dim=case["num_heads"] * case["head_dim"],
        num_heads=case["num_heads"],
        subln=case["subln"],
        xpos_scale_base=case["xpos_scale_base"],
    )
    theirs.merge_has_gradient = True
    is_displaced = any(w < case["length"] and w % r for w, r in zip(case["lengths"], case["ratios"], strict=True))
    theirs.rows_in_place = is_displaced
    copied = copy.deepcopy(theirs)
    if case["as_strings"]:
        copied.args.segment_length, copied.args.dilated_ratio = str(case["lengths"]), str(case["ratios"])
    ours = adopt(copied)
    x, grad_out = torch.randn(2, case["batch"], case["length"], theirs.embed_dim, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = results(ours, x, grad_out, is_causal=case["is_causal"])
    assert bool(caught) == is_displaced
    assert_equal(out, results(theirs, x, grad_out, is_causal=case["is_causal"]))


def test_the_slide_encoder_s_pattern_needs_its_zero_padding(figure: Any) -> None:
    theirs = layer(*SLIDE_ENCODER, embed_dim=768, num_heads=16)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            theirs.get_submodule(name).weight.copy_(torch.eye(768))
            theirs.get_submodule(name).bias.zero_()
        q, k, v = draw(3, 1, 1069, 768)
        expected, _ = theirs(q, k, v)
        moved = (adopted(theirs, tail="ragged")(q, k, v)[0] - expected).abs().amax(-1)
        difference = float((adopted(theirs)(q, k, v)[0] - expected).abs().max())
    assert difference < 1e-13
    num_moved = int((moved > 1e-10).sum())
    assert num_moved == 813
    figure("slide encoder at 1,069 rows, rows that leaving out the zero padding moves", f"{num_moved} of 1069")
    figure("slide encoder at 1,069 rows, by at most", f"{float(moved.max()):.2f}")
    figure("slide encoder at 1,069 rows, largest difference with it", f"{difference:.0e}")


def test_only_the_gradient_of_the_merge_weights_differs_from_the_published_layer_s() -> None:
    theirs = layer([8, 64], [1, 4], embed_dim=12, num_heads=3)
    x, grad_out = draw(2, 2, 61, 12)
    ours = results(adopted(theirs), x, grad_out)
    published = results(theirs, x, grad_out)
    assert_equal(ours[:1], published[:1])
    assert (ours[1] - published[1]).abs().max() > 1e-3


def test_state_dicts_exchange_both_ways() -> None:
    torch.manual_seed(1)
    before = Encoder([layer([8, 32], [1, 2], embed_dim=12, num_heads=2, subln=True, xpos_scale_base=512)] * 1)
    other = copy.deepcopy(before)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    saved, keys = before.state_dict(), list(before.state_dict())
    objects = dict(before.named_parameters())
    assert adopt(before) is before
    assert list(before.state_dict()) == keys
    assert {"layers.0.self_attn.xpos.scale", "layers.0.self_attn.inner_attn_ln.weight"} < set(keys)
    assert all(objects[name] is parameter for name, parameter in before.named_parameters())
    other.load_state_dict(before.state_dict())
    ours = adopt(copy.deepcopy(other))
    ours.load_state_dict(saved)
    x = draw(1, 70, 12)
    torch.testing.assert_close(ours(x), other(x), rtol=0, atol=1e-12)


def test_an_optimizer_made_before_goes_on_and_copies_and_pickles_compute_the_same() -> None:
    model = Encoder([layer([8, 32], [1, 2], embed_dim=12, num_heads=2, xpos_scale_base=512) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adopt(model)
    x = draw(1, 33, 12)
    before = model(x)
    model(x).square().mean().backward()
    optimizer.step()
    after = model(x)
    assert (after - before).abs().max() > 1e-4
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(same(x), after, rtol=0, atol=0)


def test_a_shared_layer_is_replaced_wherever_it_stands() -> None:
    shared = layer([8], [2], embed_dim=4, num_heads=2)
    model = adopt(Encoder([shared, layer([8], [2], embed_dim=4, num_heads=2), shared]))
    first, second, third = (block.self_attn for block in model.layers)
    assert first is third
    assert all(isinstance(attention, AdoptedDilatedAttention) for attention in (first, second))


def test_a_layer_alone_is_returned_as_a_new_one_in_its_mode() -> None:
    old = layer([8], [2], embed_dim=4, num_heads=2).eval()
    new = adopt(old)
    assert isinstance(new, AdoptedDilatedAttention)
    assert new.q_proj is old.q_proj
    assert not new.training
    assert "block" in repr(new)


@pytest.mark.parametrize(("dtype", "ulps"), [(torch.float32, 64), (torch.bfloat16, 8), (torch.float16, 8)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale_base", [None, 512])
def test_a_layer_in_less_precision_is_near_the_same_one_in_float64(
    dtype: torch.dtype, ulps: int, is_causal: bool, scale_base: float | None
) -> None:
    # Rounded to storage: input, projections, turned heads, probabilities, two outputs. Sums of float32 have 257 terms.
    theirs = layer([32, 128], [1, 4], embed_dim=28, num_heads=7, subln=True, xpos_scale_base=scale_base).to(dtype)
    ours = adopted(theirs)
    theirs.double()
    if theirs.xpos is not None:
        theirs.xpos.scale = (torch.arange(0, 4, 2) + 1.6).double() / 5.6
    x = draw(2, 257, 28).to(dtype)
    out, _ = ours(x, x, x, is_causal=is_causal)
    assert out.dtype == dtype
    expected, _ = theirs(*[x.double()] * 3, is_causal=is_causal)
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error < ulps * torch.finfo(dtype).eps


@pytest.mark.parametrize("tail", ["zero_padded", "ragged"])
@pytest.mark.parametrize("scale_base", [None, 512])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side", ["left", "between"])
def test_a_padded_sequence_equals_it_alone(tail: str, scale_base: float | None, is_causal: bool, side: str) -> None:
    ours = adopted(layer([16, 64], [1, 4], embed_dim=12, num_heads=3, xpos_scale_base=scale_base), tail=tail)
    rows, lengths = 100, [100, 63, 7, 1]
    kept = torch.zeros(4, rows, dtype=torch.bool)
    for sequence, length in enumerate(lengths):
        places = torch.arange(rows - length, rows)
        if side == "between":
            places = torch.randperm(rows, generator=torch.Generator().manual_seed(sequence))[:length].sort().values
        kept[sequence, places] = True
    x, grad_out = draw(2, 4, rows, 12)
    grad_out = grad_out * kept[..., None]
    together = results(ours, x, grad_out, is_causal=is_causal, key_padding_mask=~kept)
    gradients = [torch.zeros_like(gradient) for gradient in together[2:]]
    for sequence, mask in enumerate(kept):
        alone = results(ours, x[sequence, mask][None], grad_out[sequence, mask][None], is_causal=is_causal)
        assert_equal([part[sequence, mask] for part in together[:2]], [part[0] for part in alone[:2]])
        gradients = [total + part for total, part in zip(gradients, alone[2:], strict=True)]
    assert_equal(together[2:], gradients)


def test_a_mask_of_everything_gives_rows_without_attention() -> None:
    theirs = layer([16], [2], embed_dim=6, num_heads=3, subln=True)
    x = draw(1, 9, 6)
    out, _ = adopted(theirs)(x, x, x, key_padding_mask=torch.ones(1, 9, dtype=torch.bool))
    torch.testing.assert_close(out, theirs.out_proj(theirs.inner_attn_ln(torch.zeros_like(x))), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("scale_base", "is_causal"), [(None, False), (None, True), (512, False), (512, True), (2, True)]
)
def test_a_packed_sequence_equals_it_alone(scale_base: float | None, is_causal: bool) -> None:
    ours = adopted(layer([16, 1200], [1, 4], embed_dim=12, num_heads=3, xpos_scale_base=scale_base))
    lengths = [63, 1, 0, 100, 7] if scale_base != 2 else [63, 1100, 0, 7]
    ends = [0, *itertools.accumulate(lengths)]
    x, grad_out = draw(2, 2, ends[-1], 12)
    together = results(ours, x, grad_out, is_causal=is_causal, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
    for start, end in itertools.pairwise(ends):
        if start < end:
            alone = results(ours, x[:, start:end], grad_out[:, start:end], is_causal=is_causal)
            assert_equal([part[:, start:end] for part in together[:2]], alone[:2])


@pytest.mark.parametrize("scale_base", [None, 512, 1])
@pytest.mark.parametrize("prompt", [0, 1, 37])
def test_step_by_step_equals_the_whole_sequence(scale_base: float | None, prompt: int) -> None:
    ours = adopted(layer([16, 64], [1, 4], embed_dim=12, num_heads=3, xpos_scale_base=scale_base))
    x = draw(2, 101, 12)
    whole, _ = ours(x, x, x, is_causal=True)
    state: dict[str, Tensor] = {}
    outs = []
    if prompt:
        first = x[:, :prompt]
        causal = torch.full((prompt, prompt), -math.inf, dtype=x.dtype).triu(1)
        outs.append(ours(first, first, first, state, attn_mask=causal, is_first_step=True, is_causal=True)[0])
    for start, stop in [(prompt, 95), (95, 96), (96, 97), (97, 101)]:
        chunk = x[:, start:stop]
        if stop == 96:  # torchscale reorders the states in beam search
            state = {name: tensor.flip(0) for name, tensor in state.items()}
            outs.append(ours(chunk.flip(0), chunk.flip(0), chunk.flip(0), state, is_causal=True)[0].flip(0))
            state = {name: tensor.flip(0) for name, tensor in state.items()}
        else:
            # Decoders pass the mask of the whole prefix.
            mask = torch.zeros(2, stop, dtype=torch.bool)
            outs.append(ours(chunk, chunk, chunk, state, key_padding_mask=mask, is_causal=True)[0])
    with pytest.raises(NotImplementedError, match="decode sequences of one length together"):
        ours(chunk, chunk, chunk, state, key_padding_mask=torch.ones(2, 105, dtype=torch.bool), is_causal=True)
    assert_equal([torch.cat(outs, dim=1)], [whole])
    assert state["prev_key"].shape == state["prev_value"].shape == (2, 3, 101, 4)


def test_dropout_is_active_in_training_only() -> None:
    theirs = layer([16, 64], [1, 4], embed_dim=12, num_heads=3, dropout=0.5)
    ours = adopted(theirs)
    x = draw(1, 64, 12)
    ours.eval()
    assert_equal([ours(x, x, x)[0]], [theirs(x, x, x)[0]])
    ours.train()
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    ours.dropout_module.p = 0.0
    assert_equal([ours(x, x, x)[0]], [theirs(x, x, x)[0]])


def test_displaced_rows_are_put_in_place_with_one_warning_for_each_layer_and_pair() -> None:
    theirs = layer([5, 7, 16], [2, 3, 4], embed_dim=12, num_heads=3)
    ours, x = adopted(theirs), draw(1, 48, 12)
    ours(x[:, :5], x[:, :5], x[:, :5])  # one segment: all rows are where they belong
    with pytest.warns(UserWarning, match="the authors' code shifts") as caught:
        out, _ = ours(x, x, x)
    places = [str(warning.message).partition(" j rows")[0] for warning in caught]
    assert [place.partition("segment j of ")[2] for place in places] == ["5 rows by 1", "7 rows by 2"]
    ours(x, x, x)
    published, _ = theirs(x, x, x)
    theirs.rows_in_place = True
    assert_equal([out], [theirs(x, x, x)[0]])
    assert (out - published).abs().max() > 1e-2
    adopted(theirs, tail="ragged")(x, x, x)  # made to train anew: no other values to warn of


def test_under_autocast_a_layer_computes_in_its_dtype() -> None:
    ours = adopted(layer([16, 64], [1, 4], embed_dim=12, num_heads=3, xpos_scale_base=512)).float()
    x = draw(1, 64, 12).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = ours(x, x, x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), ours(x, x, x)[0], rtol=0, atol=8 * torch.finfo(torch.bfloat16).eps)


def with_child(name: str, child: nn.Module) -> DilatedAttention:
    made = layer([8], [2], embed_dim=4, num_heads=2)
    made.add_module(name, child)
    return made


def with_attribute(name: str, value: Any, **settings: Any) -> DilatedAttention:
    made = layer([8], [2], embed_dim=4, num_heads=2, **settings)
    setattr(made, name, value)
    return made


def with_hook() -> DilatedAttention:
    made = layer([8], [2], embed_dim=4, num_heads=2)
    made.register_forward_hook(lambda *_: None)
    return made


def with_scale(scale: Tensor) -> DilatedAttention:
    made = layer([8], [2], embed_dim=8, num_heads=2, xpos_scale_base=512)
    made.xpos.scale = scale
    return made


REFUSED = [
    (lambda: with_child("q_proj", nn.ModuleDict({"A": nn.Linear(4, 4), "B": nn.Linear(4, 4)})), "multiway"),
    (lambda: with_attribute("encoder_decoder_attention", True), "encoder_decoder_attention"),
    (lambda: layer([8], [2], embed_dim=4, num_heads=2, seq_parallel=True), "seq_parallel"),
    (lambda: with_child("gate", nn.Linear(4, 4)), "it has gate"),
    (lambda: with_attribute("bias", nn.Parameter(torch.zeros(4))), "it has bias"),
    (with_hook, "it has hooks, which would be lost"),
    (lambda: with_child("dropout_module", nn.AlphaDropout()), "got AlphaDropout"),
    (lambda: with_scale(torch.ones(2)), "xpos.scale is not"),
    (lambda: with_scale(torch.ones(3)), "one scale for each pair"),
    (lambda: layer([8, 9], [2], embed_dim=4, num_heads=2), "equally long"),
    (lambda: layer("[8,", "[2]", embed_dim=4, num_heads=2), "not a list of integers"),
    (lambda: layer("8 * 2", "[2]", embed_dim=4, num_heads=2), "are not a valid pattern"),
    (lambda: layer([8.0], [2], embed_dim=4, num_heads=2), "must hold integers"),
    (lambda: with_attribute("num_heads", 3), "num_heads must divide embed_dim"),
    (lambda: with_attribute("num_heads", None), "integers embed_dim and num_heads"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_layer_that_cannot_be_honoured_is_named_before_anything_is_replaced(make: Any, message: str) -> None:
    model = Encoder([layer([8], [2], embed_dim=4, num_heads=2), make()])
    with pytest.raises((NotImplementedError, ValueError), match=r"layer 'layers\.1\.self_attn'") as raised:
        adopt(model)
    assert message in str(raised.value)
    assert not any(isinstance(module, AdoptedDilatedAttention) for module in model.modules())


def test_a_layer_that_something_wraps_or_scales_in_its_own_way_is_refused() -> None:
    for name, value, message in (
        ("forward", lambda *args: None, "its forward was set on the instance"),
        ("scaling", 1.0, "its scaling is 1.0"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            adopt(Encoder([with_attribute(name, value)]))


def test_a_model_without_such_layers_is_told_what_was_looked_for() -> None:
    with pytest.raises(ValueError, match=r"q_proj, k_proj, v_proj and out_proj .* args.segment_length"):
        adopt(nn.TransformerEncoderLayer(8, 2))
    plain = with_attribute("args", SimpleNamespace(segment_length=None, dilated_ratio=None))
    with pytest.raises(ValueError, match="found no layer"):
        adopt(Encoder([plain]))
    model = adopt(Encoder([with_attribute("args", {"segment_length": [8], "dilated_ratio": "[2]"})]))
    with pytest.raises(ValueError, match="1 layers of it are adopted already"):
        adopt(model)
    with pytest.raises(TypeError, match="got list"):
        adopt([model])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tail must be"):
        adopt(Encoder([layer([8], [2], embed_dim=4, num_heads=2)]), tail="padded")  # type: ignore[arg-type]


X = torch.zeros(2, 5, 4)
NO_MASK = torch.zeros(2, 5, dtype=torch.bool)
WRONG = [
    ({"rel_pos": X}, NotImplementedError, "rel_pos adds a bias"),
    ({"attn_mask": torch.zeros(5, 5), "is_causal": True}, NotImplementedError, "can only be the causal mask"),
    ({"attn_mask": torch.full((5, 5), -math.inf).triu(1)}, NotImplementedError, "with is_causal=False"),
    ({"key_padding_mask": NO_MASK.float()}, ValueError, "got torch.float32 [2, 5]"),
    ({"key_padding_mask": NO_MASK[:, :4]}, ValueError, "got torch.bool [2, 4]"),
    (
        {"key_padding_mask": ~NO_MASK, "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)},
        NotImplementedError,
        "leave the padding out",
    ),
    ({"key_padding_mask": ~NO_MASK, "incremental_state": {}, "is_causal": True}, NotImplementedError, "one length"),
    ({"cu_seqlens": torch.tensor([0, 5])}, TypeError, "int32"),
    ({"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)}, ValueError, "number of rows 5"),
    ({"incremental_state": {}}, NotImplementedError, "needs is_causal=True"),
    (
        {"incremental_state": {}, "is_causal": True, "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)},
        NotImplementedError,
        "without packing",
    ),
    ({"is_first_step": True}, ValueError, "needs an incremental_state"),
    (
        {"incremental_state": {"prev_key": torch.zeros(2, 2, 3, 2)}, "is_first_step": True, "is_causal": True},
        ValueError,
        "holds 3 positions",
    ),
    ({"key": X[:, :3]}, ValueError, "key must have the shape (2, 5, 4) of query"),
    ({"query": X[..., :3]}, ValueError, "query must be [batch, sequence, 4]"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_what_a_call_cannot_honour_is_refused_by_name(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    ours = adopt(layer([8], [2], embed_dim=4, num_heads=2).float())
    with pytest.raises(kind) as raised:
        ours(**{"query": X, "key": X, "value": X, **options})
    assert message in str(raised.value)


def test_dense_attention_of_torchscale_stays_as_it_is() -> None:
    """It has the same projections and the same args; what the two classes have besides tells them apart."""

    class MultiheadAttention(DilatedAttention):
        def attention_ops(self) -> None: ...

    class RealDilatedAttention(MultiheadAttention):
        def gathering(self) -> None: ...

    def made(kind: type[DilatedAttention], **options: Any) -> DilatedAttention:
        args = layer([8], [2], embed_dim=4, num_heads=2).args
        return kind(args, 4, 2, **options).double()

    cross = made(MultiheadAttention, self_attention=False, encoder_decoder_attention=True)
    model = adopt(Encoder([made(MultiheadAttention), made(RealDilatedAttention), cross]))
    kinds = [type(block.self_attn).__name__ for block in model.layers]
    assert kinds == ["MultiheadAttention", "AdoptedDilatedAttention", "MultiheadAttention"]
    with pytest.raises(ValueError, match="found no layer"):
        adopt(Encoder([made(MultiheadAttention)]))


@pytest.mark.parametrize("lengths", [list(np.array([16, 64])), "[np.int64(16), np.int64(64)]", "[16, 64]", (16, 64)])
def test_segment_lengths_may_be_numbers_of_numpy(lengths: Any) -> None:
    ours = adopted(layer(lengths, [1, 4], embed_dim=12, num_heads=3))
    assert ours.pattern.segment_lengths == (16, 64)
    assert all(type(length) is int for length in ours.pattern.segment_lengths)


def test_a_padding_mask_may_hold_integers() -> None:
    ours = adopt(layer([8], [2], embed_dim=4, num_heads=2).float())
    mask = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]])
    expected, _ = ours(x := draw(2, 5, 4).float(), x, x, key_padding_mask=mask.bool())
    for dtype in (torch.int64, torch.uint8):
        assert torch.equal(ours(x, x, x, key_padding_mask=mask.to(dtype))[0], expected)


def test_an_empty_padding_mask_changes_nothing_as_torchscale_always_passes_one() -> None:
    ours = adopt(layer([8], [2], embed_dim=4, num_heads=2).float())
    x = draw(2, 5, 4).float()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x, key_padding_mask=NO_MASK)[0])


def test_a_layer_with_a_dropout_of_its_own_keeps_it() -> None:
    made = with_attribute("dropout", 0.5)
    del made.dropout_module
    ours = adopt(made)
    x = draw(1, 64, 4)
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    ours.eval()
    pattern = DilatedPattern([8], [2], offset_rule="block", tail="zero_padded")
    q, k, v = (ours.get_submodule(f"{name}_proj")(x).unflatten(-1, (2, 2)) for name in "qkv")
    assert_equal([ours(x, x, x)[0]], [ours.out_proj(attend(q, k, v, pattern).flatten(-2))])


def test_a_compiled_layer_is_one_graph_and_equal() -> None:
    ours = adopt(layer([16, 64], [1, 4], embed_dim=12, num_heads=3, subln=True, xpos_scale_base=512))
    x, grad_out = draw(2, 2, 33, 12)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    assert_equal(results(compiled, x, grad_out), results(ours, x, grad_out))


@torch.no_grad()
def test_a_compiled_layer_takes_a_padding_mask() -> None:
    ours = adopt(layer([16, 64], [1, 4], embed_dim=12, num_heads=3))
    x, mask = draw(2, 33, 12), torch.arange(33) >= torch.tensor([[33], [20]])
    out, _ = torch.compile(ours, backend="eager")(x, x, x, key_padding_mask=mask)
    assert_equal([out], [ours(x, x, x, key_padding_mask=mask)[0]])
