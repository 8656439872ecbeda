"""Modules that choose their segments: equal to attention under what they chose, with one set of weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dilated_attention_pytorch import MultiheadDilatedAttention, attend, core
from dilated_attention_pytorch.nn import DynamicDilatedAttention, DynamicMultiheadDilatedAttention
from dilated_attention_pytorch.selection import (
    DynamicSegmentSelector,
    Hardware,
    Profile,
    SegmentSelectionConfig,
)

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
CONFIG = SegmentSelectionConfig(min_segment_size=4, max_segment_size=64)
HARDWARE = Hardware.of_architecture("CPU", free_bytes=8 << 30)


def selector(config: SegmentSelectionConfig = CONFIG) -> DynamicSegmentSelector:
    return DynamicSegmentSelector(config, hardware=HARDWARE, profile=Profile(()))


def small(**options: object) -> DynamicDilatedAttention:
    return DynamicDilatedAttention(selector=selector(), **options)  # type: ignore[arg-type]


def test_it_is_attention_under_the_selected_pattern_for_every_shape() -> None:
    longer = selector(SegmentSelectionConfig(min_segment_size=4, max_segment_size=128))
    attention = DynamicDilatedAttention(selector=longer, softmax_scale=0.3, offset_rule="block", segment_shift=3)
    seen = set()
    for rows, batch, is_causal in ((1, 1, False), (23, 2, True), (100, 1, False), (61, 1, True), (100, 1, False)):
        q = torch.randn(batch, rows, 6, 5, dtype=torch.float64)
        k, v = (torch.randn(batch, rows, 2, 5, dtype=torch.float64) for _ in range(2))
        pattern = attention.selector.select(
            rows, batch, 6, 5, torch.float64, "cpu", 2, is_causal=is_causal, offset_rule="block", segment_shift=3
        )
        expected = attend(q, k, v, pattern, is_causal=is_causal, scale=0.3)
        torch.testing.assert_close(attention(q, k, v, is_causal), expected, rtol=0, atol=0)
        assert attention.pattern == pattern
        assert attention.get_current_configuration() == (pattern.segment_lengths, pattern.dilation_rates)
        assert (attention.segment_lengths, attention.dilation_rates) == attention.get_current_configuration()
        seen.add(pattern.segment_lengths)
    assert len(seen) >= 3


def test_masks_documents_and_offsets_reach_the_attention() -> None:
    attention = small()
    q = torch.randn(1, 30, 2, 4)
    mask = torch.zeros(1, 30, dtype=torch.bool)
    mask[:, 20:] = True
    documents = torch.tensor([0, 11, 30], dtype=torch.int32)
    for options in ({"key_padding_mask": mask}, {"cu_seqlens": documents}, {"query_offset": 40, "key_offset": 40}):
        out = attention(q, q, q, True, **options)
        torch.testing.assert_close(out, attend(q, q, q, attention.pattern, is_causal=True, **options))  # type: ignore[arg-type]
    assert max(attention.segment_lengths) == 64  # 70 positions, offsets included


def test_training_and_evaluation_choose_alike_and_dropout_is_off_in_evaluation() -> None:
    attention = small(dropout=0.5)
    q = torch.randn(1, 50, 2, 4)
    dropped, chosen = attention(q, q, q), attention.pattern
    exact = attention.eval()(q, q, q)
    assert attention.pattern == chosen
    assert not torch.allclose(dropped, exact)
    torch.testing.assert_close(exact, attend(q, q, q, chosen))


def test_weights_are_those_of_the_module_with_fixed_segments_for_any_length() -> None:
    dynamic = DynamicMultiheadDilatedAttention(24, 6, num_kv_heads=2, sub_layernorm=True, selector=selector())
    fixed = MultiheadDilatedAttention(24, 6, [4], [1], num_kv_heads=2, sub_layernorm=True)
    assert {n: w.shape for n, w in dynamic.state_dict().items()} == {n: w.shape for n, w in fixed.state_dict().items()}
    fixed.load_state_dict(dynamic.state_dict())
    for rows in (1, 40, 63):
        x = torch.randn(2, rows, 24)
        out, weights = dynamic(x, x, x, is_causal=True)
        assert weights is None
        q, k, v = (part(x).unflatten(-1, (-1, 4)) for part in (fixed.q_proj, fixed.k_proj, fixed.v_proj))
        heads = attend(q, k, v, dynamic.pattern, is_causal=True)
        assert fixed.inner_layernorm is not None
        expected = fixed.out_proj(fixed.inner_layernorm(heads.flatten(-2)))
        torch.testing.assert_close(out, expected)
        assert dynamic.get_current_configuration() == dynamic.attention.get_current_configuration()


@pytest.mark.skipif(TORCH < (2, 12), reason="PyTorch 2.11 does not trace the choice of segments")
def test_one_graph_for_every_shape_and_the_configuration_is_that_of_the_call() -> None:
    attention = small()
    calls: list[int] = []
    select = attention.selector.select

    def counted(sequence_length: int, *args: object, **options: object) -> object:
        calls.append(sequence_length)
        return select(sequence_length, *args, **options)  # type: ignore[arg-type]

    attention.selector.select = counted  # type: ignore[method-assign, assignment]
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    found = []
    for rows in (20, 33, 20, 50, 33):
        q = torch.randn(1, rows, 2, 4, requires_grad=True)
        out = compiled(q, q, q, True)
        found.append(attention.get_current_configuration())
        pattern = select(rows, 1, 2, 4, torch.float32, "cpu", is_causal=True)
        assert found[-1] == (pattern.segment_lengths, pattern.dilation_rates)
        expected = attend(q, q, q, pattern, is_causal=True)
        torch.testing.assert_close(out, expected)
        (grad,), (wanted,) = (torch.autograd.grad(x.sin().sum(), q) for x in (out, expected))
        torch.testing.assert_close(grad, wanted)
    assert set(calls) == {20, 33, 50}
    assert len(calls) <= 4  # no selection in a call that was traced before


@pytest.mark.skipif(TORCH < (2, 12), reason="PyTorch 2.11 does not trace the choice of segments")
def test_the_multihead_module_compiles_too() -> None:
    attention = DynamicMultiheadDilatedAttention(8, 2, selector=selector())
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for rows in (9, 21):
        x = torch.randn(1, rows, 8)
        torch.testing.assert_close(compiled(x, x, x)[0], attention(x, x, x)[0])


def test_factories_make_them() -> None:
    attention = core.create_dilated_attention("dynamic", selector_config=CONFIG, dropout=0.1)
    assert isinstance(attention, DynamicDilatedAttention)
    assert attention.selector.config == CONFIG
    policy = SegmentSelectionConfig()
    multihead = core.create_multihead_dilated_attention("dynamic", embed_dim=8, num_heads=2, selector=selector(policy))
    x = torch.randn(1, 7, 8)
    assert multihead(x, x, x)[0].shape == x.shape
    assert multihead.segment_lengths == (512,)
    assert "min_segment_size=512" in repr(multihead)
    assert multihead.eval()(x[:, :0], x[:, :0], x[:, :0])[0].shape == (1, 0, 8)


def test_the_default_is_the_machine_as_it_is() -> None:
    attention = DynamicMultiheadDilatedAttention(8, 2)
    chooser = attention.attention.selector
    hardware, profile = chooser.machine("cpu")
    assert (hardware.kind, profile) == ("cpu", Profile(()))
    x = torch.randn(1, 7, 8)
    if chooser.config.memory_budget(hardware.free_bytes) < 1 << 20:  # a container with little left
        with pytest.raises(ValueError, match="no segments fit the memory budget"):
            attention(x, x, x)
    else:
        assert attention(x, x, x)[0].shape == x.shape
        assert attention.segment_lengths == (512,)


Q = torch.randn(1, 8, 6, 4)
WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: small().get_current_configuration(), RuntimeError, "there was none yet; call the module first"),
    (lambda: small().pattern, RuntimeError, "call the module first"),
    (lambda: DynamicDilatedAttention(CONFIG, selector=selector()), ValueError, "selector_config or selector, got both"),
    (lambda: DynamicDilatedAttention(selector=CONFIG), TypeError, "a DynamicSegmentSelector or None, got Segment"),  # type: ignore[arg-type]
    (
        lambda: DynamicDilatedAttention([512]),
        TypeError,
        r"selector_config must be a SegmentSelectionConfig or None, got \[512\] of type list",
    ),  # type: ignore[arg-type]
    (lambda: DynamicDilatedAttention(dropout=1.0), ValueError, "below 1, got 1.0"),
    (lambda: small(tail="cut")(Q, Q, Q), ValueError, "got 'cut'"),
    (lambda: small()(Q[0], Q, Q), ValueError, "query must have 4 dimensions"),
    (lambda: small()(Q, Q[:, :, :4], Q[:, :, :4]), ValueError, "must divide the 6 heads, got 4"),
    (lambda: small()(Q.long(), Q.long(), Q.long()), TypeError, "got torch.int64"),
    (
        lambda: DynamicDilatedAttention(selector=selector(SegmentSelectionConfig(min_free_memory_gb=9)))(Q, Q, Q),
        ValueError,
        "no segments fit the memory budget",
    ),
    (
        lambda: core.create_dilated_attention("dynamic", segment_lengths=[4]),
        TypeError,
        "DynamicAttentionConfig has no field segment_lengths; its fields are selector_config, dropout",
    ),
    (lambda: core.create_dilated_attention(), TypeError, "DilatedAttentionConfig needs segment_lengths and dilation"),
]


@pytest.mark.parametrize("wrong", range(len(WRONG)), ids=lambda index: WRONG[index][2][:40])
def test_a_wrong_call_is_named_with_what_came_and_what_to_do(wrong: int) -> None:
    call, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        call()
