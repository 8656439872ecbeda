"""Keywords of earlier packages: carried out under today's name with a warning, or refused by a sentence."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import MultiheadDilatedAttention, MultiheadPatternAttention, local_window, parallel
from dilated_attention_pytorch.legacy import table
from dilated_attention_pytorch.legacy.keywords import OFF
from dilated_attention_pytorch.nn import (
    AdaptiveBlockAttention,
    DilatedAttention,
    DynamicDilatedAttention,
    DynamicMultiheadDilatedAttention,
    PatternAttention,
)

MULTIHEAD: dict[str, Any] = {"embed_dim": 8, "num_heads": 2}
SEGMENTS: dict[str, Any] = {"segment_lengths": [4, 8], "dilation_rates": [1, 2]}
MADE: list[tuple[type, dict[str, Any]]] = [
    (DilatedAttention, SEGMENTS),
    (MultiheadDilatedAttention, {**MULTIHEAD, **SEGMENTS}),
    (PatternAttention, {"pattern": local_window(3)}),
    (MultiheadPatternAttention, {**MULTIHEAD, "pattern": local_window(3)}),
    (DynamicDilatedAttention, {}),
    (DynamicMultiheadDilatedAttention, MULTIHEAD),
    (AdaptiveBlockAttention, {"num_heads": 2, "head_dim": 4}),
    (parallel.ParallelDilatedAttention, SEGMENTS),
    (parallel.RingDilatedAttention, SEGMENTS),
    (parallel.HybridRingDilatedAttention, SEGMENTS),
    (parallel.HeadParallelDilatedAttention, SEGMENTS),
    (parallel.DistributedDilatedAttention, SEGMENTS),
    (parallel.RingMultiheadDilatedAttention, {**MULTIHEAD, **SEGMENTS}),
]
VALUES = {"dropout": 0.25, "sub_layernorm": True, "layernorm_eps": 1e-3, "gain": 1.5}


def takes(kind: type, keyword: str) -> bool:
    """Whether a class has a keyword today, by itself or by the classes that it hands its options to."""
    return any(keyword in inspect.signature(cls.__init__).parameters for cls in kind.__mro__)


@pytest.mark.parametrize(("kind", "arguments"), MADE, ids=lambda x: getattr(x, "__name__", ""))
def test_a_keyword_with_another_name_is_carried_out_or_refused(kind: type, arguments: dict[str, Any]) -> None:
    for old, today in table.read()["renamed"].items():
        value = VALUES[today]
        if not takes(kind, today):
            with pytest.raises(TypeError, match=f"{old} is {today} today"):
                kind(**arguments, **{old: value})
            continue
        with pytest.warns(DeprecationWarning, match=f"{old} is the old name; write {today}={value}"):
            module = kind(**arguments, **{old: value})
        wanted = kind(**arguments, **{today: value})
        assert str(module) == str(wanted)
        assert getattr(module, today, None) == getattr(wanted, today, None)
        with pytest.raises(TypeError, match=f"pass {today} alone, got both"):
            kind(**arguments, **{old: value, today: value})


@pytest.mark.parametrize(("kind", "arguments"), MADE, ids=lambda x: getattr(x, "__name__", ""))
def test_a_keyword_for_what_is_not_here_may_only_ask_for_nothing(kind: type, arguments: dict[str, Any]) -> None:
    for name, off in ((name, row["off"]) for row in table.read()["unneeded"] for name in row["keywords"]):
        if takes(kind, name):
            continue
        with pytest.warns(DeprecationWarning, match=f"{name}=.* is an old keyword that asks for nothing"):
            assert str(kind(**arguments, **{name: OFF[off][0]})) == str(kind(**arguments))
        asks = False if name == "batch_first" else 64
        with pytest.raises(ValueError, match=f"{name} of {kind.__name__} must be .* or left out, got {asks}: "):
            kind(**arguments, **{name: asks})


@pytest.mark.parametrize(("kind", "arguments"), MADE, ids=lambda x: getattr(x, "__name__", ""))
def test_a_keyword_that_changed_the_speed_alone_warns_and_works(kind: type, arguments: dict[str, Any]) -> None:
    for name in (name for row in table.read()["of_speed"] for name in row["keywords"]):
        assert not takes(kind, name)
        with pytest.warns(
            DeprecationWarning, match=rf"{name}=True of {kind.__name__} changes nothing here: .*leave it"
        ):
            assert str(kind(**arguments, **{name: True})) == str(kind(**arguments))


def test_a_keyword_of_a_parent_class_is_handed_on() -> None:
    ring = parallel.RingMultiheadDilatedAttention(**MULTIHEAD, **SEGMENTS, device="meta", dtype=torch.float64)
    assert (ring.q_proj.weight.device.type, ring.q_proj.weight.dtype) == ("meta", torch.float64)


def test_old_and_new_keywords_give_the_same_weights_and_results() -> None:
    torch.manual_seed(3)
    with pytest.warns(DeprecationWarning, match="old name"):
        old = MultiheadDilatedAttention(8, 2, [4, 8], [1, 2], layer_norm=True, layer_norm_eps=1e-4, gamma_init=1.5)
    torch.manual_seed(3)
    new = MultiheadDilatedAttention(8, 2, [4, 8], [1, 2], sub_layernorm=True, layernorm_eps=1e-4, gain=1.5)
    x = torch.randn(1, 13, 8)
    assert torch.equal(old(x, x, x)[0], new(x, x, x)[0])


def test_the_warning_points_at_the_call() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DilatedAttention([4], [1], attention_dropout=0.1)
        DilatedAttention([4], [1], op=None)
        parallel.RingMultiheadDilatedAttention(8, 2, [4], [1], layer_norm=True)
    assert [warning.filename for warning in caught] == [__file__] * 3


def test_a_keyword_that_no_package_had_is_python_s_own_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'wings'"):
        DilatedAttention([4], [1], wings=2)


def test_signatures_are_those_of_today() -> None:
    assert "attention_dropout" not in inspect.signature(DilatedAttention).parameters
    assert list(inspect.signature(DilatedAttention).parameters)[:3] == ["segment_lengths", "dilation_rates", "dropout"]


@pytest.mark.parametrize(
    "make",
    [
        lambda rates, lengths: MultiheadDilatedAttention(512, 8, rates, lengths),
        DilatedAttention,
        parallel.RingDilatedAttention,
        lambda rates, lengths: parallel.RingMultiheadDilatedAttention(512, 8, rates, lengths),
    ],
)
def test_rates_before_lengths_are_refused_with_the_right_call(make: Any) -> None:
    with pytest.raises(ValueError) as raised:
        make([1, 2, 4], [2048, 4096, 8192])
    said = str(raised.value)
    assert "segment_lengths come first and dilation_rates second" in said
    assert "other packages take them in the other order" in said
    right = said.partition("write ")[2].partition(" if that is meant")[0]
    assert eval(f"dict({right})") == {"segment_lengths": [2048, 4096, 8192], "dilation_rates": [1, 2, 4]}
