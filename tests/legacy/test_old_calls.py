"""The public calls of the first package of this name, rebuilt, and those of its successor: they run, and are exact."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dilated_attention_pytorch
from dilated_attention_pytorch import core, local_window, parallel
from dilated_attention_pytorch.cli.command import COMMANDS, _parse
from dilated_attention_pytorch.legacy import table
from dilated_attention_pytorch.nn import AdaptiveBlockAttention, MultiheadPatternAttention, PatternAttention
from support.oracle import Groups, dense_attention, dense_counts

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from dilated_attention_pytorch.dilated_attention import DilatedAttention, MultiheadDilatedAttention
    from dilated_attention_pytorch.improved_dilated_attention import ImprovedDilatedAttention
    from dilated_attention_pytorch.improved_multihead_dilated_attention import ImprovedMultiheadDilatedAttention
    from dilated_attention_pytorch.long_net import LongNet, LongNetLM
    from dilated_attention_pytorch.ring_improved_distributed_dilated_attention import (
        RingAdvancedDistributedDilatedAttention,
    )
    from dilated_attention_pytorch.transformer import DilatedTransformerDecoderLayer, DilatedTransformerEncoderLayer

ROWS = 17
EXACT = {"rtol": 0.0, "atol": 1e-12}
PATTERNS = [((4,), (1,)), ((4, 8, 16), (1, 2, 4)), ((2, 4, 8), (1, 2, 4))]
KINDS = list(itertools.product((1, 2), ("relu", "gelu"), (True, False)))


def randomized(module: nn.Module) -> Any:
    """The module in float64, no parameter of which is at its start."""
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.2)
    return module


def oracle(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], rates: tuple[int, ...], causal: bool) -> Tensor:
    shape = q.shape[1], k.shape[1], k.shape[2]
    counts = dense_counts(Groups(lengths, rates), *shape, is_causal=causal, batch=len(q))
    return dense_attention(q, k, v, *counts, q.shape[-1] ** -0.5)[0]


def attended(attention: Any, query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """What a multihead module gives, by its weights and dense arithmetic."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (
        functional.linear(x, part.weight, part.bias).unflatten(-1, (attention.num_heads, -1))
        for x, part in zip((query, key, key), parts, strict=True)
    )
    out = oracle(q, k, v, attention.segment_lengths, attention.dilation_rates, causal).flatten(-2)
    return attention.out_proj(attention.inner_layernorm(out))


def encoded(layer: DilatedTransformerEncoderLayer, x: Tensor, causal: bool) -> Tensor:
    x = x + attended(layer.self_attn, layer.norm1(x), layer.norm1(x), causal)
    return x + layer.linear2(layer.activation(layer.linear1(layer.norm2(x))))


def decoded(layer: DilatedTransformerDecoderLayer, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
    x = x + attended(layer.self_attn, layer.norm1(x), layer.norm1(x), causal)
    x = x + attended(layer.multihead_attn, layer.norm2(x), memory, causal)
    return x + layer.linear2(layer.activation(layer.linear1(layer.norm3(x))))


def through(net: LongNet, x: Tensor, causal: bool) -> Tensor:
    memory = x
    for layer in net.encoder:
        memory = encoded(layer, memory, causal)
    memory = net.encoder_norm(memory)
    for layer in net.decoder:
        x = decoded(layer, x, memory, causal)
    return net.decoder_norm(x)


@pytest.mark.parametrize(("lengths", "rates"), PATTERNS)
@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("is_causal", [True, False])
def test_dilated_attention_takes_the_first_package_s_calls(
    lengths: tuple[int, ...], rates: tuple[int, ...], heads: int, is_causal: bool
) -> None:
    attention = DilatedAttention(lengths, rates)
    x = torch.randn(1, ROWS, heads, 6, dtype=torch.float64)
    torch.testing.assert_close(
        attention(x, x, x, is_causal=is_causal), oracle(x, x, x, lengths, rates, is_causal), **EXACT
    )


def test_lengths_and_rates_that_differ_in_number_are_refused_as_there() -> None:
    for make in (DilatedAttention, lambda *pattern: MultiheadDilatedAttention(64, 4, *pattern)):
        with pytest.raises(ValueError, match="segment_lengths"):
            make((2, 4), (1,))


@pytest.mark.parametrize(("lengths", "rates"), PATTERNS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_multihead_dilated_attention_takes_the_first_package_s_calls(
    lengths: tuple[int, ...], rates: tuple[int, ...], is_causal: bool
) -> None:
    with pytest.warns(DeprecationWarning, match="is the old name; write"):
        attention = MultiheadDilatedAttention(
            embed_dim=24,
            num_heads=4,
            dilation_rates=rates,
            segment_lengths=lengths,
            dropout=0.0,
            bias=True,
            layer_norm=True,
            layer_norm_eps=1e-5,
            gamma_init=1.3,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
    attention = randomized(attention)
    assert (attention.gain, attention.inner_layernorm.eps) == (1.3, 1e-5)
    x = torch.randn(1, ROWS, 24, dtype=torch.float64)
    out, weights = attention(x, x, x, is_causal=is_causal)
    assert weights is None
    torch.testing.assert_close(out, attended(attention, x, x, is_causal), **EXACT)


def net_of(layers: int, activation: str) -> dict[str, Any]:
    """Sizes and activation of a network of the first package."""
    sizes = {"d_model": 24, "nhead": 4, "num_encoder_layers": layers, "num_decoder_layers": layers}
    return {**sizes, "dim_feedforward": 10, "activation": activation}


@pytest.mark.parametrize(("lengths", "rates"), PATTERNS[1:])
@pytest.mark.parametrize(("layers", "activation", "is_causal"), KINDS)
def test_long_net_is_its_layers_by_dense_arithmetic(
    lengths: tuple[int, ...], rates: tuple[int, ...], layers: int, activation: str, is_causal: bool
) -> None:
    options = {"dropout": 0.0, "device": torch.device("cpu"), "dtype": torch.float32}
    net = randomized(LongNet(segment_lengths=lengths, dilation_rates=rates, **net_of(layers, activation), **options))
    x = torch.randn(1, ROWS, 24, dtype=torch.float64)
    torch.testing.assert_close(net(x, is_causal=is_causal), through(net, x, is_causal), **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x, is_causal=is_causal), through(net, x, is_causal), **EXACT)


@pytest.mark.parametrize(("layers", "activation", "is_causal"), KINDS)
def test_long_net_lm_rotates_positions_into_its_embedding(layers: int, activation: str, is_causal: bool) -> None:
    pattern = {"segment_lengths": (4, 8, 16), "dilation_rates": (1, 2, 4)}
    net = randomized(LongNetLM(num_tokens=31, **pattern, **net_of(layers, activation)))
    tokens = torch.randint(31, (1, ROWS))
    embedded = net.token_embedding(tokens)
    angles = torch.arange(ROWS, dtype=torch.float64)[:, None] * 10000.0 ** -(torch.arange(12, dtype=torch.float64) / 12)
    turned = torch.complex(*embedded.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    x = embedded + torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(net(tokens, is_causal=is_causal), net.out(through(net.long_net, x, is_causal)), **EXACT)


def test_the_base_model_of_the_first_package_can_be_made() -> None:
    with torch.device("meta"):
        net = LongNetLM(num_tokens=10000)
    assert len(net.long_net.encoder) == len(net.long_net.decoder) == 12
    first, last = net.long_net.encoder[0].self_attn, net.long_net.decoder[-1].multihead_attn
    assert first.segment_lengths == (2048, 4096, 8192, 16384, 32768)
    assert first.gain == math.sqrt(math.log(3 * 12) * math.log(2 * 12) / 3)
    assert last.gain == math.sqrt(math.log(3 * 12))


def test_improved_classes_set_the_precision_of_float32_products() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        core.create_dilated_attention("auto", segment_lengths=[4], dilation_rates=[1], use_tf32=True)
        assert torch.get_float32_matmul_precision() == "high"
        ImprovedMultiheadDilatedAttention(8, 2, segment_lengths=[4], dilation_rates=[1], use_tf32=False)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


def test_improved_classes_take_their_old_positions_and_have_a_layernorm() -> None:
    torch.manual_seed(0)
    old = ImprovedMultiheadDilatedAttention(24, 4, [4, 16], [1, 3], 0.0, True)
    torch.manual_seed(0)
    new = dilated_attention_pytorch.MultiheadDilatedAttention(24, 4, [4, 16], [1, 3], sub_layernorm=True)
    x = torch.randn(2, 17, 24)
    assert torch.equal(old(x, x, x)[0], new(x, x, x)[0])
    # As the documents replace a layer in a loop over blocks.
    sizes = {name: getattr(new, name) for name in ("embed_dim", "num_heads", "segment_lengths", "dilation_rates")}
    again = ImprovedMultiheadDilatedAttention(**sizes, use_tf32=None)
    again.load_state_dict(new.state_dict())
    assert torch.equal(again(x, x, x)[0], new(x, x, x)[0])
    assert ImprovedMultiheadDilatedAttention(24, 4, [4], [1], 0.0, True, False).inner_layernorm is None
    norm = ImprovedMultiheadDilatedAttention(24, 4, [4], [1], 0.0, True, True, 1e-3).inner_layernorm
    assert norm is not None
    assert norm.eps == 1e-3
    assert ImprovedDilatedAttention([4, 16], [1, 3], 0.0, None).segment_lengths == (4, 16)


SIZES: dict[str, Any] = {"embed_dim": 24, "num_heads": 4, "segment_lengths": [4, 16], "dilation_rates": [1, 3]}


def test_enterprise_attention_carries_out_what_is_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    ring = RingAdvancedDistributedDilatedAttention(
        **SIZES,
        gamma_init=1.2,
        layer_norm_eps=1e-4,
        ring_size=1,
        sequence_parallel=True,
        data_parallel=False,
        zero_stage=None,
        compile_model=True,
        overlap_communication=True,
    )
    assert compiled == [ring]
    assert isinstance(ring, parallel.RingMultiheadDilatedAttention)
    assert (ring.gain, ring.inner_layernorm.eps) == (1.2, 1e-4)
    ring = randomized(ring)
    x = torch.randn(2, ROWS, 24, dtype=torch.float64)
    torch.testing.assert_close(ring(x, x, x)[0], attended(ring, x, x, False), **EXACT)
    assert RingAdvancedDistributedDilatedAttention(**SIZES, layer_norm=False).inner_layernorm is None
    with pytest.warns(DeprecationWarning, match="use_flash_attention=True of RingAdvanced.* changes nothing here"):
        RingAdvancedDistributedDilatedAttention(**SIZES, use_flash_attention=True)


def test_enterprise_attention_names_all_that_it_refuses_at_once() -> None:
    asked = {
        "model_parallel": True, "data_parallel": True, "use_deepspeed": True, "zero_stage": 3, "cpu_offload": True,
        "nvme_offload": True, "enable_fault_tolerance": True, "enable_monitoring": True, "auto_resume": True,
        "checkpoint_interval": 100, "use_8bit_optimizer": True, "sequence_parallel": False,
        "overlap_communication": False, "block_size": 1024, "bucket_size": 25, "communication_backend": "nccl",
        "profile_memory": True, "log_level": "INFO",
        "use_gradient_compression": True, "activation_checkpointing": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match="is attention alone") as raised:
        RingAdvancedDistributedDilatedAttention(**SIZES, **asked)
    _, *lines = str(raised.value).splitlines()
    assert sorted(line.split("=")[0].strip() for line in lines) == sorted(asked)
    assert all(line.partition(": ")[2] for line in lines)


def test_commands_that_sentences_name_are_commands() -> None:
    sections = [table.read()[name] for name in ("sentences", "of_training")]
    sentences = [text for section in sections for text in section.values()]
    sentences += [row["instead"] for part in ("of_speed", "unneeded") for row in table.read()[part]]
    commands = {part for sentence in sentences for part in sentence.split("`")[1::2] if part.startswith("dilated-")}
    assert len(commands) > 10
    for command in commands:
        if "--" in command:
            _parse(command.replace(" N", " 2").split()[1:])
        else:
            assert command.removeprefix("dilated-attention ") in COMMANDS


def test_functions_make_the_classes_of_their_names() -> None:
    pattern, sizes = {"segment_lengths": [4, 16], "dilation_rates": [1, 4]}, {"embed_dim": 24, "num_heads": 4}
    made = [
        (core.create_dilated_attention("ring", **pattern), parallel.RingDilatedAttention),
        (core.create_dilated_attention("distributed", **pattern), parallel.DistributedDilatedAttention),
        (core.create_dilated_attention("auto", **pattern), DilatedAttention),
        (core.create_dilated_attention("improved", [4, 16], [1, 4]), DilatedAttention),
        (core.create_dilated_attention("block_sparse", pattern=local_window(3)), PatternAttention),
        (core.create_multihead_dilated_attention("ring", **sizes, **pattern), parallel.RingMultiheadDilatedAttention),
        (core.create_multihead_dilated_attention("improved", 24, 4, [4, 16], [1, 4]), MultiheadDilatedAttention),
        (
            core.create_multihead_dilated_attention("block_sparse", **sizes, pattern=local_window(3)),
            MultiheadPatternAttention,
        ),
        (core.create_ring_attention(**pattern, ring_size=1), parallel.RingDilatedAttention),
        (core.create_ring_attention("standard", **pattern, **sizes), parallel.RingMultiheadDilatedAttention),
        (core.create_block_sparse_attention(local_window(3)), PatternAttention),
        (core.create_block_sparse_attention(local_window(3), **sizes), MultiheadPatternAttention),
        (core.create_adaptive_sparse_attention(num_heads=4, head_dim=6), AdaptiveBlockAttention),
    ]
    assert [type(module) for module, _ in made] == [kind for _, kind in made]
