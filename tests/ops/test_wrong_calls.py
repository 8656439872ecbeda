"""Wrong calls, each with the message it gets: the argument, what was expected, what came, what to do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilated_attention_pytorch import (
    DilatedPattern,
    LongNetCache,
    LongNetConfig,
    LongNetLM,
    MultiheadDilatedAttention,
    attend,
    create_dilated_attention,
    create_multihead_dilated_attention,
    dilated_attention,
    merge,
    parallel,
)
from dilated_attention_pytorch.kernels.select import refusal, select
from dilated_attention_pytorch.nn import DilatedAttention

P = DilatedPattern([4, 8], [1, 2])
Q, K = torch.zeros(1, 6, 4, 8), torch.zeros(1, 6, 2, 8)
X = torch.zeros(1, 6, 8)
START = torch.tensor(0)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def mha(**options: Any) -> MultiheadDilatedAttention:
    return MultiheadDilatedAttention(
        **{"embed_dim": 8, "num_heads": 2, "segment_lengths": [4], "dilation_rates": [1], **options}
    )


def with_cache_of(attention: Any = attend, **changes: Any) -> object:
    """A model called with the cache of a configuration that differs by ``changes``."""
    sizes: dict[str, Any] = {
        "embed_dim": 8,
        "num_layers": 1,
        "num_heads": 2,
        "segment_lengths": [4],
        "dilation_rates": [1],
    }
    model = LongNetLM(LongNetConfig(**sizes), attention=attention).eval()
    with torch.no_grad():
        return model(torch.zeros(1, 3, dtype=torch.int64), cache=LongNetCache(LongNetConfig(**{**sizes, **changes})))


TABLE: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: DilatedPattern([4, 8], [1]), ValueError,
     "segment_lengths and dilation_rates pair up, so they must be equally long: got 2 segment lengths [4, 8] and 1"),
    (lambda: DilatedPattern([], []), ValueError, "segment_lengths must hold at least one integer, got an empty list"),
    (lambda: DilatedPattern([0], [1]), ValueError, "segment_lengths must hold integers of at least 1, got 0 in [0]"),
    (lambda: DilatedPattern([4], [-1]), ValueError, "dilation_rates must hold integers of at least 1, got -1 in [-1]"),
    (lambda: DilatedPattern([4.0], [1]), TypeError, "segment_lengths must hold integers, got 4.0 of type float"),
    (lambda: DilatedPattern(4, [1]), TypeError, "segment_lengths must be a list or tuple of integers, got 4"),
    (lambda: DilatedPattern("48", [1]), TypeError, "segment_lengths must be a list or tuple of integers, got '48'"),
    (lambda: DilatedPattern([4], [1], segment_shift=-3), ValueError, "segment_shift must hold integers of at least 0, got -3"),
    (lambda: DilatedPattern([4], [1], offset_rule="random"), ValueError, 'offset_rule must be "modulo" or "block", got \'random\''),
    (lambda: DilatedPattern([4], [1], tail="padded"), ValueError, 'tail must be "ragged" or "zero_padded", got \'padded\''),
    (lambda: attend(Q, K, K, P, is_causal=True, query_offset=ints(3)), TypeError,
     "query_offset must be an integer, or an int64 tensor without dimensions, got a tensor of torch.int32 of shape (1,)"),
    (lambda: attend(Q, K, K, P, is_causal=True, query_offset=START.to("meta")), ValueError,
     "query_offset, a tensor, must be on query's device cpu, got meta; a position that the host knows is passed as an"),
    (lambda: attend(Q, K, K, P, query_offset=START), NotImplementedError,
     "rows of the buffer behind the position are not seen: pass is_causal=True, or query_offset as an integer"),
    (lambda: attend(Q, K, K, P, is_causal=True, query_offset=START, cu_seqlens=ints(0, 6)), NotImplementedError,
     "query_offset as a tensor does not go with cu_seqlens: pass query_offset as an integer"),
    (lambda: attend(Q, K, K, P, is_causal=True, query_offset=START, dropout_p=0.1), NotImplementedError,
     "query_offset as a tensor does not go with dropout_p: pass query_offset as an integer"),
    (lambda: attend(Q, K, K, DilatedPattern([4], [2], tail="zero_padded"), is_causal=True, query_offset=START),
     NotImplementedError, 'query_offset as a tensor does not go with tail="zero_padded": pass query_offset as an'),
    (lambda: attend(Q, K[:, :4], K[:, :4], P, is_causal=True, key_offset=1, query_offset=START), ValueError,
     "between 0 and key_offset + M - N: got 6 rows of query, and 4 rows of key at 1"),
    (lambda: attend(Q, K, K, P, is_causal=True, query_offset=START, impl="aten"), NotImplementedError,
     'impl="aten" plans a call on the host and needs the value of query_offset, got a tensor: pass query_offset as an'),
    (lambda: attend(Q, K, K, P, is_causal=True, key_offset=START), TypeError, "key_offset must be an integer position"),
    (lambda: attend(Q[0], K, K, P), ValueError, "query must have 4 dimensions [batch, sequence, heads, head_dim], got shape (6, 4, 8)"),
    (lambda: attend(Q.numpy(), K, K, P), TypeError, "query must be a tensor, got ndarray"),
    (lambda: attend(Q.int(), K, K, P), TypeError, "query must be float16, bfloat16, float32 or float64, got torch.int32"),
    (lambda: attend(Q, K.half(), K, P), TypeError, "query is torch.float32, got key torch.float16; convert with key.to(query.dtype)"),
    (lambda: attend(Q, K, K.to("meta"), P), ValueError, "query is on cpu, got value on meta"),
    (lambda: attend(Q, K, K[:, :5], P), ValueError, "key is (1, 6, 2, 8), got value (1, 5, 2, 8)"),
    (lambda: attend(Q, K.repeat(3, 1, 1, 1), K.repeat(3, 1, 1, 1), P), ValueError, "query has 1, got key 3"),
    (lambda: attend(Q, K[..., :5], K[..., :5], P), ValueError, "query has 8, got key 5"),
    (lambda: attend(Q, K.repeat(1, 1, 2, 1)[:, :, :3], K.repeat(1, 1, 2, 1)[:, :, :3], P), ValueError,
     "got 4 query heads and 3 key/value heads"),
    (lambda: attend(Q, K, K, [4, 8]), TypeError, "pattern must be a Pattern such as DilatedPattern([2048, 4096], [1, 2]), got [4, 8]"),
    (lambda: attend(Q, K, K, P, scale=float("nan")), ValueError, "scale must be a finite number or None for 1 / sqrt(D), got nan"),
    (lambda: attend(Q, K, K, P, scale="1"), ValueError, "scale must be a finite number or None for 1 / sqrt(D), got '1'"),
    (lambda: attend(Q, K, K, P, is_causal="no"), TypeError, "is_causal must be True or False, got 'no' of type str"),
    (lambda: attend(Q, K, K, P, dropout_p=None), ValueError, "dropout_p must be a probability of at least 0 and below 1, got None"),
    (lambda: attend(Q, K, K, P, query_offset=None), TypeError, "query_offset must be an integer position, got None of type NoneType"),
    (lambda: merge(Q), TypeError, "merge needs a list of pairs (out, lse) as attend_with_lse returns them, got"),
    (lambda: merge([Q, Q]), TypeError, "merge needs a list of pairs (out, lse)"),
    (lambda: mha(num_heads=2.0), TypeError, "num_heads must be an integer, got 2.0 of type float"),
    (lambda: mha()(X[0, 0], X, X, is_causal=True, attn_mask=torch.zeros(6, 6)), ValueError, "query must be [batch, sequence, 8], got shape (8,)"),
    (lambda: with_cache_of(segment_lengths=[5]), ValueError, "make it from this model's configuration: LongNetCache(model.config)"),
    (lambda: with_cache_of(attention=lambda *_, **__: None), NotImplementedError, "call the model without a cache"),
    (lambda: attend(Q, K, K, P, dropout_p=1.0), ValueError, "dropout_p must be a probability of at least 0 and below 1, got 1.0"),
    (lambda: attend(Q, K, K, P, query_offset=-1), ValueError, "query_offset is the absolute position of the slab's first row, at least 0, got -1"),
    (lambda: attend(Q, K, K, P, key_offset=1.5), TypeError, "key_offset must be an integer position, got 1.5 of type float"),
    (lambda: attend(Q, K, K, P, key_padding_mask=torch.zeros(1, 6)), TypeError, "key_padding_mask must be a bool tensor with True where a key is to be ignored, got torch.float32"),
    (lambda: attend(Q, K, K, P, key_padding_mask=torch.zeros(6, 1).bool()), ValueError, "shape [B, M] = (1, 6) of key, got (6, 1)"),
    (lambda: attend(Q, K, K, P, cu_seqlens=torch.tensor([0, 6])), TypeError, "cu_seqlens must be an int32 tensor [documents + 1], got torch.int64"),
    (lambda: attend(Q, K, K, P, cu_seqlens=ints(6)), ValueError, "at least 2 boundaries, got shape (1,)"),
    (lambda: attend(Q, K, K, P, cu_seqlens=ints(0, 5)), ValueError, "cu_seqlens must run from 0 to the number of rows 6, got 0 to 5"),
    (lambda: attend(Q, K, K, P, cu_seqlens=ints(0, 4, 2, 6)), ValueError, "cu_seqlens must not decrease, got [0, 4, 2, 6]"),
    (lambda: attend(Q, K, K, P, cu_seqlens=ints(0, 4, 2, 6), impl="reference"), ValueError, "cu_seqlens must not decrease"),
    (lambda: attend(Q, K, K, P, cu_seqlens=ints(0, 6), query_offset=3), ValueError, "got 6 query rows at 3 and 6 key rows at 0"),
    (lambda: attend(Q, K, K, P, impl="flash"), ValueError, "impl must be one of 'auto', 'triton', 'native', 'aten', 'reference', got 'flash'"),
    (lambda: attend(Q.double(), K.double(), K.double(), P, impl="triton"), NotImplementedError, "impl='triton' cannot compute this call: the Triton kernels accumulate in float32; impl=\"aten\" and impl=\"reference\" compute in float64"),
    (lambda: attend(*(torch.zeros(1, 3, 1, 264),) * 3, P, impl="triton"), NotImplementedError, "up to 256 wide, got 264; use impl=\"aten\""),
    (lambda: attend(Q, K, K, P, cu_seqlens=ints(0, 5), impl="triton"), ValueError, "cu_seqlens must run from 0 to the number of rows 6, got 0 to 5"),
    (lambda: attend(Q, K, K, P, cu_seqlens=ints(0, 6).to("meta")), ValueError, "cu_seqlens must be on the CPU or on query's device cpu, got meta"),
    (lambda: dilated_attention(Q, K, K, [4], [1], tail="zero_padded", key_offset=2), NotImplementedError, 'use tail="ragged" for slabs'),
    (lambda: dilated_attention(Q, K, K, [4], [1], tail="zero_padded", key_padding_mask=torch.zeros(1, 6).bool()), NotImplementedError, "pack the sequences with cu_seqlens instead"),
    (lambda: DilatedAttention([4], [1], dropout=-0.1), ValueError, "dropout must be a probability of at least 0 and below 1, got -0.1"),
    (lambda: DilatedAttention([1, 2], [2048, 4096]), ValueError, "segment_lengths come first and dilation_rates second, and no rate of a module is larger than its segment: got rate 2048 for segment length 1 in segment_lengths [1, 2] and dilation_rates [2048, 4096]; other packages take them in the other order"),
    (lambda: DilatedAttention([4, 6], [1, 7]), ValueError, "got rate 7 for segment length 6 in segment_lengths [4, 6] and dilation_rates [1, 7]"),
    (lambda: MultiheadDilatedAttention(8, 2, [1, 2], [8, 16]), ValueError, "segment_lengths come first and dilation_rates second"),
    (lambda: create_dilated_attention(segment_lengths=[1, 2], dilation_rates=[8, 16]), ValueError, "segment_lengths come first and dilation_rates second"),
    (lambda: create_multihead_dilated_attention(embed_dim=8, num_heads=2, segment_lengths=[1, 2], dilation_rates=[8, 16]), ValueError, "segment_lengths come first and dilation_rates second"),
    (lambda: parallel.ParallelDilatedAttention([1, 2], [8, 16]), ValueError, "segment_lengths come first and dilation_rates second"),
    (lambda: parallel.RingMultiheadDilatedAttention(8, 2, [1, 2], [8, 16]), ValueError, "segment_lengths come first and dilation_rates second"),
    (lambda: LongNetConfig(embed_dim=8, num_layers=1, num_heads=1, segment_lengths=[1], dilation_rates=[4]), ValueError, "segment_lengths come first and dilation_rates second"),
    (lambda: parallel.RingDilatedAttention([4], [1], ring_size=8)(Q, K, K), ValueError, "ring_size must be the number of ranks that share the sequence, 1 here, got 8; start the program with torchrun --nproc-per-node 8 and torch.distributed.init_process_group(), pass mesh= for another set of ranks, or leave ring_size out"),
    (lambda: parallel.RingMultiheadDilatedAttention(8, 2, [4], [1], ring_size=2)(X, X, X), ValueError, "ring_size must be the number of ranks that share the sequence, 1 here, got 2"),
    (lambda: parallel.RingDilatedAttention([4], [1], ring_size=0), ValueError, "ring_size must be at least 1, got 0"),
    (lambda: parallel.RingDilatedAttention([4], [1], ring_size=2.0), TypeError, "ring_size must be an integer, got 2.0 of type float"),
    (lambda: parallel.ParallelDilatedAttention([4], [1], sequence_length=12)(Q, K, K), ValueError, "sequence_length must be the rows of the whole sequence, which one process holds all of: got 12 and 6 rows of query"),
    (lambda: mha(num_heads=3), ValueError, "num_heads must divide embed_dim: got 3 heads and embed_dim 8"),
    (lambda: mha(num_kv_heads=3), ValueError, "num_kv_heads must divide num_heads: got 3 of 2 heads"),
    (lambda: mha()(X, X, X, need_weights=True), NotImplementedError, "pass need_weights=False"),
    (lambda: mha()(X, X, X, attn_mask=torch.ones(6, 6).bool()), NotImplementedError, "pass is_causal=True for it, key_padding_mask for padding, cu_seqlens for packed documents"),
    (lambda: mha()(X, X, X, is_causal=True, attn_mask=torch.zeros(6, 6).bool()), NotImplementedError, "attn_mask can only be the causal mask"),
    (lambda: mha()(X, X, X, key_padding_mask=torch.full((1, 6), -1.0)), ValueError, "must hold only 0 (keep) and -inf (ignore)"),
    (lambda: mha()(X[0], X, X), ValueError, "query must be [batch, sequence, 8], got shape (6, 8)"),
    (lambda: create_dilated_attention("fastest", segment_lengths=[4], dilation_rates=[1]), ValueError, "attention_type must be one of 'auto', 'standard', 'improved', 'ring', 'distributed', 'block_sparse', 'dynamic', 'adaptive', got 'fastest'"),
    (lambda: LongNetConfig.from_dict({"embed_dim": 8, "num_layers": 1, "num_heads": 1, "segment_lengths": [4], "dilation_rates": [1], "windows": 3}), ValueError, "windows"),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(TABLE)))
def test_a_wrong_call_says_what_was_expected_what_came_and_what_to_do(row: int) -> None:
    call, kind, message = TABLE[row]
    with pytest.raises(kind) as raised:
        call()
    assert message in str(raised.value)


def test_every_refusal_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert refusal("aten", cpu, torch.bfloat16, 64) is None
    assert refusal("reference", torch.device("xpu"), torch.float32, 64) is None
    assert "Apple's GPUs have no float64: use float32" in str(refusal("aten", torch.device("mps"), torch.float64, 64))
    assert "not torch.int8" in str(refusal("reference", cpu, torch.int8, 64))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "for NVIDIA and AMD GPUs, not for 'cpu' tensors" in str(refusal("triton", cpu, torch.bfloat16, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert 'this GPU has 7.5; use impl="aten"' in str(refusal("triton", cuda, torch.bfloat16, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert refusal("triton", cuda, torch.bfloat16, 64) is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName="gfx90a:xnack-"))
    assert "for the AMD GPUs gfx942 and gfx950, this one is gfx90a" in str(refusal("triton", cuda, torch.bfloat16, 64))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install triton" in str(refusal("triton", cuda, torch.bfloat16, 64))


def test_auto_takes_our_own_kernels_where_they_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability[0])
    monkeypatch.setattr("dilated_attention_pytorch.kernels.select.trusts_triton", lambda *subject: True)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert select("auto", cuda, torch.bfloat16, 64) == "triton"
    assert select("auto", cuda, torch.float64, 64) == "aten"
    assert select("auto", cuda, torch.bfloat16, 512) == "aten"
    assert select("auto", cpu, torch.float64, 64) == "aten"
    assert select("auto", cpu, torch.bfloat16, 257) == "aten"
    is_native = refusal("native", cpu, torch.bfloat16, 64) is None
    assert select("auto", cpu, torch.bfloat16, 64) == ("native" if is_native else "aten")
    capability[0] = (7, 0)
    assert select("auto", cuda, torch.float16, 64) == "aten"
    with pytest.raises(NotImplementedError, match=r"this GPU has 7\.0"):
        select("triton", cuda, torch.float16, 64)


@pytest.mark.parametrize("name", ["gfx942:sramecc+:xnack-", "gfx950"])
def test_an_amd_gpu_computes_with_our_kernels_where_they_are_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=name))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    cuda = torch.device("cuda")
    assert select("triton", cuda, torch.bfloat16, 64) == "triton"
    assert select("auto", cuda, torch.bfloat16, 64) == "aten"
    assert "accumulate in float32" in str(refusal("triton", cuda, torch.float64, 64))
    assert "up to 256 wide" in str(refusal("triton", cuda, torch.bfloat16, 512))
    assert "segments of one length" in str(refusal("triton", cuda, torch.bfloat16, 64, is_segmented=True))
