"""Configurations of attention modules: a module's keywords, checked when they are created, in a dict and in TOML."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import core, from_block_mask, local_window, nn, parallel, strided_blocks
from dilated_attention_pytorch.core import (
    AdaptiveAttentionConfig,
    DilatedAttentionConfig,
    DistributedAttentionConfig,
    DynamicAttentionConfig,
    MultiheadConfig,
    RingAttentionConfig,
    SparseAttentionConfig,
)
from dilated_attention_pytorch.installation import install_command
from dilated_attention_pytorch.selection import DynamicSegmentSelector, SegmentSelectionConfig

LENGTHS: dict[str, Any] = {"segment_lengths": [4, 16], "dilation_rates": [1, 4]}
SIZES: dict[str, Any] = {"embed_dim": 24, "num_heads": 4}
POLICY = SegmentSelectionConfig(min_segment_size=64, geometric_ratios=(2.0,), time_budget_ms=3.0)
# A configuration, its module, and values of which none is a default.
MADE: list[tuple[type[Any], Any, dict[str, Any]]] = [
    (
        DilatedAttentionConfig,
        nn.DilatedAttention,
        {**LENGTHS, "dropout": 0.25, "softmax_scale": 0.5, "offset_rule": "block", "tail": "zero_padded",
         "segment_shift": [1, 2], "impl": "aten"},
    ),
    (RingAttentionConfig, parallel.RingDilatedAttention, {**LENGTHS, "ring_size": 3, "layout": "zigzag", "sequence_length": 64}),
    (
        DistributedAttentionConfig,
        parallel.DistributedDilatedAttention,
        {**LENGTHS, "sequence_parallel": False, "model_parallel": True},
    ),
    (SparseAttentionConfig, nn.PatternAttention, {"pattern": local_window(3) + strided_blocks(4), "dropout": 0.5}),
    (DynamicAttentionConfig, nn.DynamicDilatedAttention, {"selector_config": POLICY, "segment_shift": [3, 4]}),
    (
        AdaptiveAttentionConfig,
        nn.AdaptiveBlockAttention,
        {"num_heads": 4, "head_dim": 6, "num_kv_heads": 2, "blocks_per_query": 3, "block_size": 16,
         "query_block_size": 8, "scorer_dim": 7, "pattern": local_window(3), "dtype": torch.bfloat16},
    ),
    (
        MultiheadConfig,
        nn.MultiheadPatternAttention,
        {**SIZES, "bias": False, "kdim": 5, "vdim": 7, "num_kv_heads": 2, "sub_layernorm": True, "layernorm_eps": 0.1,
         "gain": 2.0, "device": torch.device("cpu"), "dtype": torch.float64},
    ),
]  # fmt: skip
NAMES = [config.__name__ for config, _, _ in MADE]
# Keywords of a module that its configuration does not have: a ring has one strategy, and the pattern, its dropout, its
# scale and its implementation are those of the configuration beside MultiheadConfig.
APART = {
    RingAttentionConfig: {"strategy"},
    DistributedAttentionConfig: {"strategy"},
    MultiheadConfig: {"pattern", "dropout", "softmax_scale", "impl"},
}


def keywords_of(kind: type[Any]) -> dict[str, Any]:
    """The keywords of a module with their defaults, those that it hands on to its parents included."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        parameters = inspect.signature(base.__init__).parameters
        for name, parameter in list(parameters.items())[1:]:
            if parameter.kind is not parameter.VAR_KEYWORD:
                found.setdefault(name, parameter.default)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found


@pytest.mark.parametrize(("config", "module", "values"), MADE, ids=NAMES)
def test_the_fields_are_the_keywords_of_the_module_with_its_defaults(
    config: type[Any], module: type[Any], values: dict[str, Any]
) -> None:
    keywords = {name: value for name, value in keywords_of(module).items() if name not in APART.get(config, ())}
    assert {*config.names()} == {*keywords}
    required = {name for name, default in keywords.items() if default is inspect.Parameter.empty}
    assert {*config.required()} == required
    least = config(**{name: values[name] for name in required})
    assert all(getattr(least, name) == default for name, default in keywords.items() if name not in required)


@pytest.mark.parametrize(("config", "module", "values"), MADE, ids=NAMES)
def test_a_configuration_comes_back_from_a_dict_and_from_toml(
    config: type[Any], module: type[Any], values: dict[str, Any]
) -> None:
    made = config(**values)
    for again in (config.from_dict(made.to_dict()), config.from_toml(made.to_toml())):
        assert again == made
        assert again.keywords() == made.keywords()
    assert made != config(**{name: values[name] for name in config.required()})
    assert str(module(**made.keywords(), **config._besides)) == str(module(**values, **config._besides))


def test_text_of_a_file_stands_for_patterns_types_and_devices() -> None:
    config = AdaptiveAttentionConfig.from_toml(
        'num_heads = 2\nhead_dim = 4\npattern = "local_window(3)"\ndtype = "float64"\ndevice = "cpu"'
    )
    assert (config.pattern, config.dtype, config.device) == (local_window(3), torch.float64, torch.device("cpu"))
    mask = SparseAttentionConfig(pattern=from_block_mask(torch.eye(3, dtype=torch.bool)[None], 4))
    assert SparseAttentionConfig.from_toml(mask.to_toml()) == mask
    policy = {"selector_config": {"min_segment_size": 64, "geometric_ratios": [2.0], "time_budget_ms": 3.0}}
    assert DynamicAttentionConfig.from_dict(policy).selector_config == POLICY


WRONG = (None, "x", -1, 0, 1.5, True, [], object, math.nan)
"""Values that most fields refuse."""
VALID: dict[str, tuple[Any, ...]] = {
    "dropout": (0,),
    "softmax_scale": (None, -1, 0, 1.5),
    "segment_shift": (0,),
    "mesh": (None,),
    "ring_size": (None,),
    "sequence_length": (None,),
    "sequence_parallel": (True,),
    "model_parallel": (True,),
    "selector": (None,),
    "selector_config": (None,),
    "num_kv_heads": (None,),
    "query_block_size": (None,),
    "device": (None,),
    "dtype": (None,),
    "bias": (True,),
    "sub_layernorm": (True,),
    "kdim": (None,),
    "vdim": (None,),
    "layernorm_eps": (1.5,),
    "gain": (1.5,),
}


@pytest.mark.parametrize(("config", "module", "values"), MADE, ids=NAMES)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(
    config: type[Any], module: type[Any], values: dict[str, Any]
) -> None:
    least = {name: values[name] for name in config.required()}
    for name in config.names():
        valid = (*VALID.get(name, ()), *([None] if name == "pattern" and name not in least else []))
        for value in WRONG:
            if any(value is one for one in valid):
                assert getattr(config(**{**least, name: value}), name) is value
                continue
            with pytest.raises((TypeError, ValueError), match=name):
                config(**{**least, name: value})


def with_selector() -> DynamicAttentionConfig:
    return DynamicAttentionConfig(selector=DynamicSegmentSelector(POLICY))


DILATED = DilatedAttentionConfig(**LENGTHS)
# fmt: off
SENTENCES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: DilatedAttentionConfig(**LENGTHS, dropuot=0.1), TypeError, r"has no field dropuot; did you mean dropout\? Its fields are segment_lengths, dil"),  # type: ignore[call-arg]
    (lambda: DilatedAttentionConfig(**LENGTHS, wings=2), TypeError, "has no field wings; its fields are segment_lengths, dilation_rates, dropout"),  # type: ignore[call-arg]
    (lambda: DilatedAttentionConfig(dilation_rates=[1]), TypeError, "needs segment_lengths and dilation_rates, got no segment_lengths$"),  # type: ignore[call-arg]
    (lambda: DilatedAttentionConfig([4], [1]), TypeError, r"fields of DilatedAttentionConfig are given by name, segment_lengths, .*got \(\[4\], \[1\]\)"),  # type: ignore[misc]
    (lambda: DilatedAttentionConfig(segment_lengths=[1, 4], dilation_rates=[4, 16]), ValueError, "segment_lengths come first and dilation_rates second"),
    (lambda: DilatedAttentionConfig.from_dict({**LENGTHS, "dropuot": 0.1}), TypeError, "did you mean dropout"),
    (lambda: DilatedAttentionConfig.from_dict({1: 2}), TypeError, "has no field 1"),
    (lambda: DilatedAttentionConfig.from_dict([LENGTHS]), TypeError, "values must be a dict of fields of DilatedAttentionConfig, got"),  # type: ignore[arg-type]
    (lambda: DilatedAttentionConfig.from_toml("a ="), ValueError, "text must be TOML with the fields of DilatedAttentionConfig, got 'a ='"),
    (lambda: DilatedAttentionConfig.from_toml(b"a = 1"), TypeError, r"text must be TOML such as Path\(file\)\.read_text\(\) returns, got b'a"),  # type: ignore[arg-type]
    (lambda: SparseAttentionConfig(pattern="dense"), ValueError, "pattern: expected a sum of calls of DilatedPattern"),
    (lambda: SparseAttentionConfig(pattern="[1"), ValueError, r"pattern: '\[1' is not the spec of a pattern"),
    (lambda: DynamicAttentionConfig(selector_config={"min_segment_siz": 4}), TypeError, "selector_config has no field min_segment_siz; did you mean min_segment_size"),  # type: ignore[arg-type]
    (lambda: with_selector().to_dict(), ValueError, r"selector of DynamicAttentionConfig must be None to be written, .*write dataclasses\.replace\(config, selector=None\)"),
    (lambda: MultiheadConfig(embed_dim=30, num_heads=4), ValueError, "num_heads must divide embed_dim: got 4 heads and embed_dim 30"),
    (lambda: MultiheadConfig(**SIZES, dtype="int32"), ValueError, 'dtype must be a floating type such as "bfloat16" or torch.float32, or None, got \'int32\''),
    (lambda: MultiheadConfig(**SIZES, device="nowhere"), ValueError, 'device must be a device such as "cuda:0" or "cpu", or None, got \'nowhere\''),
    # The functions.
    (lambda: core.create_dilated_attention("auto", RingAttentionConfig(**LENGTHS)), TypeError, r"'auto' takes DilatedAttentionConfig\(\.\.\.\), or its fields by name, got RingAttentionConfig"),
    (lambda: core.create_dilated_attention("ring", DILATED), TypeError, r"'ring' takes RingAttentionConfig\(\.\.\.\)"),
    (lambda: core.create_dilated_attention("auto", LENGTHS), TypeError, "got dict"),  # type: ignore[arg-type]
    (lambda: core.create_dilated_attention("auto", DILATED, dropout=0.1), TypeError, "DilatedAttentionConfig holds all options, got dropout as well"),
    (lambda: core.create_dilated_attention("auto", DILATED, [1, 4]), TypeError, "holds all options, got dilation_rates as well"),
    (lambda: core.create_dilated_attention(DILATED), ValueError, "attention_type must be one of .*; lengths and rates, or a configuration, come after it"),  # type: ignore[arg-type]
    (lambda: core.create_dilated_attention(["auto"], **LENGTHS), ValueError, r"got \['auto'\]; lengths and rates"),  # type: ignore[arg-type]
    (lambda: core.create_multihead_dilated_attention("auto", MultiheadConfig(**SIZES), DILATED), TypeError, "configurations are given by name here: multihead_config="),  # type: ignore[arg-type]
    (lambda: core.create_multihead_dilated_attention("auto", **SIZES, **LENGTHS, biass=False), TypeError, r"attention with projections has no field biass; did you mean bias\?"),
    (lambda: core.create_multihead_dilated_attention("auto", **LENGTHS, multihead_config=DILATED), TypeError, r"multihead_config takes MultiheadConfig\(\.\.\.\)"),  # type: ignore[arg-type]
    (lambda: core.create_block_sparse_attention(local_window(3), embed_dim=8, multihead_config=MultiheadConfig(**SIZES)), TypeError, "MultiheadConfig holds all options, got embed_dim as well"),
    (lambda: core.create_adaptive_sparse_attention(4), TypeError, r"takes AdaptiveAttentionConfig\(\.\.\.\), or its fields by name, got int"),  # type: ignore[arg-type]
    (lambda: core.create_ring_attention("auto", **LENGTHS, ring_sze=3), TypeError, "RingAttentionConfig has no field ring_sze; did you mean ring_size"),
]
# fmt: on


@pytest.mark.parametrize("row", range(len(SENTENCES)))
def test_a_wrong_configuration_is_told_what_to_write(row: int) -> None:
    call, kind, message = SENTENCES[row]
    with pytest.raises(kind, match=message):
        call()


def test_old_keywords_are_fields_of_today_or_answered() -> None:
    with pytest.warns(DeprecationWarning, match=r"attention_dropout is the old name; write dropout=0\.25"):
        assert DilatedAttentionConfig(**LENGTHS, attention_dropout=0.25).dropout == 0.25  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="use_memory_pool=True of RingAttentionConfig changes nothing here"):
        RingAttentionConfig(**LENGTHS, use_memory_pool=True)  # type: ignore[call-arg]
    with pytest.raises(
        ValueError, match=r"sparsity_ratio of SparseAttentionConfig must be None or left out, got 0\.25"
    ):
        SparseAttentionConfig(sparsity_ratio=0.25)  # type: ignore[call-arg]


def test_checking_a_configuration_takes_no_memory() -> None:
    assert MultiheadConfig(embed_dim=2**22, num_heads=2**15).embed_dim == 2**22  # 64 TiB of weights


def test_toml_without_its_writer_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tomli_w", None)
    with pytest.raises(ImportError, match="to_toml needs tomli_w, not installed here") as raised:
        DILATED.to_toml()
    assert install_command("train") in str(raised.value)


def test_the_functions_make_of_a_configuration_what_they_make_of_its_fields() -> None:
    sparse, adaptive = SparseAttentionConfig(pattern=local_window(3)), AdaptiveAttentionConfig(num_heads=4, head_dim=6)
    ring, distributed = RingAttentionConfig(**LENGTHS), DistributedAttentionConfig(**LENGTHS)
    sizes = MultiheadConfig(**SIZES)
    pairs: list[tuple[Any, Any]] = [
        (core.create_dilated_attention("auto", DILATED), core.create_dilated_attention("auto", **LENGTHS)),
        (core.create_dilated_attention("ring", ring), core.create_dilated_attention("ring", **LENGTHS)),
        (
            core.create_dilated_attention("distributed", distributed),
            core.create_dilated_attention("distributed", **LENGTHS),
        ),
        (core.create_dilated_attention("block_sparse", sparse), core.create_block_sparse_attention("local_window(3)")),
        (core.create_dilated_attention("dynamic", DynamicAttentionConfig()), core.create_dilated_attention("dynamic")),
        (
            core.create_adaptive_sparse_attention(adaptive),
            core.create_adaptive_sparse_attention(num_heads=4, head_dim=6),
        ),
        (core.create_ring_attention("auto", ring), core.create_ring_attention(**LENGTHS)),
        (core.create_ring_attention(config=ring, **SIZES), core.create_ring_attention(**LENGTHS, **SIZES)),
        (
            core.create_block_sparse_attention(sparse, multihead_config=sizes),
            core.create_block_sparse_attention(local_window(3), **SIZES),
        ),
    ]
    for kind, attention in (("auto", DILATED), ("ring", ring), ("block_sparse", sparse)):
        by_fields = dataclasses.asdict(attention) if attention is not sparse else {"pattern": local_window(3)}
        pairs.append(
            (
                core.create_multihead_dilated_attention(kind, multihead_config=sizes, attention_config=attention),  # type: ignore[arg-type]
                core.create_multihead_dilated_attention(kind, **SIZES, **by_fields),  # type: ignore[arg-type]
            )
        )
    for of_configuration, of_fields in pairs:
        assert type(of_configuration) is type(of_fields)
        assert str(of_configuration) == str(of_fields)


def test_a_configuration_decides_the_result() -> None:
    config = DilatedAttentionConfig(**LENGTHS, softmax_scale=0.25, segment_shift=2)
    x = torch.randn(2, 41, 4, 6)
    expected = nn.DilatedAttention([4, 16], [1, 4], softmax_scale=0.25, segment_shift=2)(x, x, x, is_causal=True)
    assert torch.equal(core.create_dilated_attention("auto", config)(x, x, x, is_causal=True), expected)
    multihead = core.create_multihead_dilated_attention(
        "auto", multihead_config=MultiheadConfig(**SIZES, num_kv_heads=2, sub_layernorm=True), attention_config=config
    )
    assert (multihead.num_kv_heads, multihead.inner_layernorm is None) == (2, False)
    assert multihead.attention.softmax_scale == 0.25
