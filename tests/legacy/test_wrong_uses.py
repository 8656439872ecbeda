"""Uses that earlier packages take and this one does not, each with the sentence that it gets."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable

import pytest
import torch

import dilated_attention_pytorch as package
from dilated_attention_pytorch import LongNetConfig, MultiheadDilatedAttention, core, local_window, parallel
from dilated_attention_pytorch.legacy.attention import RingAdvancedDistributedDilatedAttention
from dilated_attention_pytorch.legacy.transformer import DilatedTransformerEncoderLayer, LongNet, LongNetLM
from dilated_attention_pytorch.models import LongNetEncoder, LongNetEncoderDecoder
from dilated_attention_pytorch.nn import AdaptiveBlockAttention, DilatedAttention, DynamicDilatedAttention
from dilated_attention_pytorch.selection import SegmentSelectionConfig

Q = torch.zeros(1, 6, 4, 8)
X = torch.zeros(1, 6, 32)
LENGTHS, RATES = [2048, 4096, 8192], [1, 2, 4]
PATTERN = {"segment_lengths": LENGTHS, "dilation_rates": RATES}
SIZES = {"embed_dim": 32, "num_heads": 4}


def take(module: str, name: str = "") -> object:
    """``from module import name``, or the module alone."""
    path = ".".join(part for part in ("dilated_attention_pytorch", module) if part)
    if name:
        exec(f"from {path} import {name}")
        return None
    return importlib.import_module(path)


Row = tuple[Callable[[], object], type[Exception], str]

# fmt: off
TABLE: list[Row] = [
    # The order of lengths and rates.
    (lambda: MultiheadDilatedAttention(512, 8, RATES, LENGTHS), ValueError, "other packages take them in the other order: write segment_lengths=[2048, 4096, 8192], dilation_rates=[1, 2, 4] if that is meant"),
    (lambda: DilatedAttention(RATES, LENGTHS), ValueError, "got rate 2048 for segment length 1 in segment_lengths [1, 2, 4] and dilation_rates [2048, 4096, 8192]"),
    (lambda: RingAdvancedDistributedDilatedAttention(32, 4, RATES, LENGTHS), ValueError, "segment_lengths come first and dilation_rates second"),
    (lambda: DilatedTransformerEncoderLayer(32, 4, RATES, LENGTHS), ValueError, "segment_lengths come first and dilation_rates second"),
    (lambda: LongNet(32, 4, 1, 1, 64, RATES, LENGTHS), ValueError, "segment_lengths come first and dilation_rates second"),
    (lambda: LongNetConfig(embed_dim=32, num_layers=1, num_heads=4, segment_lengths=RATES, dilation_rates=LENGTHS), ValueError, "write segment_lengths=[2048, 4096, 8192], dilation_rates=[1, 2, 4]"),
    # Keywords.
    (lambda: DilatedAttention(LENGTHS, RATES, attention_dropout=0.1, dropout=0.1), TypeError, "attention_dropout is the old name of dropout: pass dropout alone, got both"),
    (lambda: DilatedAttention(LENGTHS, RATES, attention_dropout=1.5), ValueError, "dropout must be a probability of at least 0 and below 1, got 1.5"),
    (lambda: DilatedAttention(LENGTHS, RATES, device="cuda"), ValueError, "device of DilatedAttention must be None or left out, got 'cuda': the module has no parameters"),
    (lambda: DilatedAttention(LENGTHS, RATES, dtype=torch.float16), ValueError, "the result has device and dtype of the inputs"),
    (lambda: parallel.RingDilatedAttention(LENGTHS, RATES, block_size=1024), ValueError, "kernels choose their tiles, and rows travel in shards"),
    (lambda: DilatedAttention(LENGTHS, RATES, layer_norm=True), TypeError, "layer_norm is sub_layernorm today, a keyword of modules with projections such as MultiheadDilatedAttention"),
    (lambda: DilatedAttention(LENGTHS, RATES, gamma_init=1.0), TypeError, "DilatedAttention has none: leave it out, got gamma_init=1.0"),
    (lambda: MultiheadDilatedAttention(32, 4, LENGTHS, RATES, layer_norm_eps=1e-5, layernorm_eps=1e-5), TypeError, "layer_norm_eps is the old name of layernorm_eps"),
    (lambda: DilatedAttention(LENGTHS, RATES, ring_size=4), ValueError, "parallel.RingDilatedAttention and parallel.RingMultiheadDilatedAttention take it"),
    (lambda: DynamicDilatedAttention(min_segment_size=1024), ValueError, "DynamicDilatedAttention(SegmentSelectionConfig(min_segment_size=1024)) takes it"),
    (lambda: MultiheadDilatedAttention(32, 4, LENGTHS, RATES, use_tf32=True), ValueError, 'torch.set_float32_matmul_precision("high") allows it'),
    (lambda: MultiheadDilatedAttention(32, 4, LENGTHS, RATES, batch_first=False), ValueError, "batch_first of MultiheadDilatedAttention must be True or left out, got False: the batch is the first axis here"),
    (lambda: MultiheadDilatedAttention(32, 4, LENGTHS, RATES, sparsity_ratio=0.9), ValueError, "packages that take one differ in what it means: PatternAttention(local_window(255) + global_tokens(4))"),
    (lambda: AdaptiveBlockAttention(4, 8, min_sparsity=0.1), ValueError, "blocks_per_query of AdaptiveBlockAttention says how many blocks a query sees"),
    (lambda: SegmentSelectionConfig(min_segment_size=8192, max_segment_size=1024), ValueError, "max_segment_size must be at least min_segment_size 8192, got 1024"),
    (lambda: DilatedAttention(LENGTHS, RATES, None, 0.1), TypeError, "positional arguments"),
    # Calls.
    (lambda: parallel.RingDilatedAttention(LENGTHS, RATES, ring_size=8)(Q, Q, Q), ValueError, "ring_size must be the number of ranks that share the sequence, 1 here, got 8; start the program with torchrun"),
    (lambda: MultiheadDilatedAttention(32, 4, LENGTHS, RATES)(X, X, X, need_weights=True), NotImplementedError, "attention weights, which attention under a pattern never forms; pass need_weights=False"),
    (lambda: MultiheadDilatedAttention(32, 4, LENGTHS, RATES)(X, X, X, attn_mask=torch.ones(6, 6).bool()), NotImplementedError, "from_block_mask as the pattern for any other mask"),
    (lambda: MultiheadDilatedAttention(32, 4, LENGTHS, RATES)(X, X, X, True), TypeError, "key_padding_mask must be a tensor or None, got True; the causal mask is is_causal=True, written by name"),
    (lambda: MultiheadDilatedAttention(32, 4, LENGTHS, RATES)(X, X, X, attn_mask=True), TypeError, "attn_mask must be a tensor or None, got True"),
    (lambda: MultiheadDilatedAttention(32, 4, LENGTHS, RATES)(X, None, None), TypeError, "key must be a tensor [batch, sequence, 32], got None; self-attention is attention(x, x, x)"),
    (lambda: LongNetEncoder({"embed_dim": 32}), TypeError, "config must be a LongNetConfig, such as"),
    (lambda: package.LongNetLM("configuration"), TypeError, "got 'configuration' of type str"),
    (lambda: LongNetEncoderDecoder(1, 2), TypeError, "encoder must be a LongNetConfig"),
    (lambda: DynamicDilatedAttention().get_current_configuration(), RuntimeError, "call the module first, or use selector.select(sequence_length, batch_size"),
    (lambda: LongNetLM(100, 30, 4), ValueError, "num_heads must divide embed_dim"),
    # Makers by name.
    (lambda: core.create_dilated_attention("hilbert", **PATTERN), ValueError, "positions are not reordered here, as dilation counts them"),
    (lambda: core.create_dilated_attention("block_sparse_ring", **PATTERN), ValueError, "blocks over several ranks are parallel.attend(query, key, value, pattern, mesh=mesh)"),
    (lambda: core.create_dilated_attention("ring_distributed", **PATTERN), ValueError, "got 'ring_distributed': it is \"ring\"; what is not attention"),
    (lambda: core.create_dilated_attention("improved_distributed", **PATTERN), ValueError, "it is \"distributed\""),
    (lambda: core.create_dilated_attention("auto"), TypeError, "DilatedAttentionConfig needs segment_lengths and dilation_rates, got no segment_lengths and no dilation_rates"),
    (lambda: core.create_dilated_attention([4], dilation_rates=[1]), ValueError, "got [4]; lengths and rates, or a configuration, come after it"),
    (lambda: core.create_multihead_dilated_attention("auto", multihead_config={}), TypeError, "DilatedAttentionConfig needs segment_lengths and dilation_rates, got no segment_lengths"),
    (lambda: core.create_multihead_dilated_attention("auto", **PATTERN), TypeError, "MultiheadConfig needs embed_dim and num_heads, got no embed_dim and no num_heads"),
    (lambda: core.create_multihead_dilated_attention("auto", **SIZES, **PATTERN, multihead_config={}), TypeError, "multihead_config takes MultiheadConfig(...), or its fields by name, got dict"),
    (lambda: core.create_ring_attention([4], **PATTERN), ValueError, 'implementation must be "auto", "standard" or "distributed", got [4]'),
    (lambda: core.create_multihead_dilated_attention("distributed", **SIZES, **PATTERN), ValueError, 'attention_type="ring" has, and `dilated-attention train --context-parallel N --heads-parallel N` splits heads'),
    (lambda: core.create_block_sparse_attention(0.9), TypeError, "pattern must be a pattern such as local_window(127) + global_tokens(4), got 0.9 of type float"),
    (lambda: core.create_block_sparse_attention(sparsity_ratio=0.9, pattern_type="local_window", **SIZES), ValueError, "sparsity_ratio of SparseAttentionConfig must be None or left out, got 0.9: a ratio or a name does not say which keys a query sees"),
    (lambda: core.create_block_sparse_attention(local_window(3), embed_dim=32), TypeError, "MultiheadConfig needs embed_dim and num_heads, got no num_heads"),
    (lambda: core.create_ring_attention("hilbert", **PATTERN), ValueError, "positions are not reordered here"),
    (lambda: core.create_ring_attention("block_sparse", **PATTERN), ValueError, 'implementation must be "auto", "standard" or "distributed", got \'block_sparse\': blocks over several ranks are parallel.attend'),
    (lambda: core.create_adaptive_sparse_attention(embed_dim=32, num_heads=4), TypeError, "project query, key and value before, and pass num_heads and head_dim"),
    # Attention of enterprises.
    (lambda: RingAdvancedDistributedDilatedAttention(32, 4, LENGTHS, RATES, checkpoint_interval=100, auto_resume=True), ValueError, "checkpoint_interval=100: `dilated-attention train --save-steps N`\n  auto_resume=True: `dilated-attention train --resume auto`"),
    (lambda: RingAdvancedDistributedDilatedAttention(32, 4, LENGTHS, RATES, model_parallel=True), ValueError, "model_parallel=True: mesh=init_device_mesh(device, (ring, heads)), whose second axis it splits"),
    (lambda: RingAdvancedDistributedDilatedAttention(32, 4, LENGTHS, RATES, teleport=True), TypeError, "RingAdvancedDistributedDilatedAttention has no option teleport"),
    # Imports.
    (lambda: take("", "StandardRingAttention"), ImportError, "write core.create_ring_attention(config=core.RingAttentionConfig(segment_lengths=[2048, 4096], dilation_rates=[1, 2]))"),
    (lambda: take("core", "DistributedConfig"), ImportError, "processes are started by torchrun, and `dilated-attention train` shards a model"),
    (lambda: take("core.memory_pool", "get_global_memory_pool"), ImportError, "dilated_attention_pytorch.core.memory_pool is not here: PyTorch's allocator does what memory pools did"),
    (lambda: take("utils.dynamic_segment_selector", "MemoryEstimator"), ImportError, "weighs memory, time and length of a call; its parts are not called alone"),
    (lambda: take("improved_distributed_dilated_attention", "DeepSpeedDilatedAttentionEngine"), ImportError, "DeepSpeed shards whole models, not attention"),
    (lambda: take("kernels.hilbert_attention_core"), ModuleNotFoundError, "positions are not put in Hilbert order here"),
    (lambda: take("", "BlockSparseRingDilatedAttention"), ImportError, "blocks over several ranks are a pattern too"),
    (lambda: take("long_net", "*"), ImportError, "dilated_attention_pytorch.long_net is an old module: import its names one by one, not *"),
    (lambda: package.HAS_FLASH_RING, ImportError, "no other package computes attention here"),
]
# fmt: on


@pytest.mark.parametrize("row", range(len(TABLE)))
def test_a_wrong_use_is_told_what_to_write(row: int) -> None:
    call, kind, message = TABLE[row]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(kind) as raised:
            call()
    assert message in str(raised.value)
