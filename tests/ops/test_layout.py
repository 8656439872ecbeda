"""The order of the axes: SDPA's on request, and tensors whose axes look swapped are refused at every entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import (
    DilatedPattern,
    attend,
    attend_with_lse,
    dilated_attention,
    models,
    parallel,
    slides,
)
from dilated_attention_pytorch import nn as nn_package
from dilated_attention_pytorch.integrations import MultiheadReplacement, QkvReplacement
from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.nn import (
    AdaptiveBlockAttention,
    DilatedAttention,
    DynamicDilatedAttention,
    DynamicMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    MultiheadPatternAttention,
    PatternAttention,
)
from dilated_attention_pytorch.ops import attend_blocks

PATTERN = DilatedPattern([16, 64], [1, 4])
BLOCKS = torch.zeros(2, 100, 1, 1, dtype=torch.int64)

ENTRIES: dict[str, Callable[..., Any]] = {
    "attend": lambda x, **keywords: attend(x, x, x, PATTERN, **keywords),
    "attend_with_lse": lambda x, **keywords: attend_with_lse(x, x, x, PATTERN, **keywords).out,
    "dilated_attention": lambda x, **keywords: dilated_attention(x, x, x, [16], [1], **keywords),
    "attend_blocks": lambda x, **keywords: attend_blocks(x, x, x, BLOCKS, block_size=8, **keywords).out,
    "PatternAttention": lambda x, **keywords: PatternAttention(PATTERN)(x, x, x, **keywords),
    "DilatedAttention": lambda x, **keywords: DilatedAttention([16], [1])(x, x, x, **keywords),
    "DynamicDilatedAttention": lambda x, **keywords: DynamicDilatedAttention()(x, x, x, **keywords),
    "ParallelDilatedAttention": lambda x, **keywords: parallel.ParallelDilatedAttention([16], [1])(x, x, x, **keywords),
    "RingDilatedAttention": lambda x, **keywords: parallel.RingDilatedAttention([16], [1])(x, x, x, **keywords),
}
REMEDY = r"8 rows and 100 heads\. If they are .* pass heads_first=True\. If 100 heads are meant, pass heads_first=False"


@pytest.mark.parametrize("entry", ENTRIES)
def test_heads_before_the_sequence_are_refused_with_the_remedy(entry: str) -> None:
    swapped = torch.randn(2, 8, 100, 16)  # [batch, heads, sequence, head_dim]
    with pytest.raises(ValueError, match=REMEDY):
        ENTRIES[entry](swapped)


def test_grouped_heads_before_the_sequence_are_refused() -> None:
    q, k = torch.randn(2, 8, 100, 4), torch.randn(2, 2, 100, 4)
    with pytest.raises(ValueError, match="pass heads_first=True"):
        attend(q, k, k, PATTERN)


@pytest.mark.parametrize("entry", ENTRIES)
def test_heads_first_is_the_same_call_with_transposed_tensors(entry: str) -> None:
    x = torch.randn(2, 8, 100, 16, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 8, 100, 16, dtype=torch.float64)
    meant = ENTRIES[entry](x, heads_first=False)
    (grad_of_meant,) = torch.autograd.grad(meant, x, grad)
    transposed = ENTRIES[entry](x.transpose(1, 2).contiguous(), heads_first=True)
    (grad_of_transposed,) = torch.autograd.grad(transposed, x, grad.transpose(1, 2))
    torch.testing.assert_close(transposed.transpose(1, 2), meant, rtol=0, atol=1e-13)
    torch.testing.assert_close(grad_of_transposed, grad_of_meant, rtol=0, atol=1e-13)


def test_heads_first_returns_what_sdpa_returns() -> None:
    x = torch.randn(2, 3, 50, 16, dtype=torch.float64)  # [batch, heads, sequence, head_dim]
    out, lse = attend_with_lse(x, x, x, DilatedPattern([50], [1]), is_causal=True, heads_first=True)
    dense = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.testing.assert_close(out, dense, rtol=0, atol=1e-14)
    scores = (x @ x.mT / 4).masked_fill(torch.ones(50, 50).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((1, 32), (1, 32)),  # the first token of a text
        ((1, 128), (1, 128)),
        ((5, 128), (5, 8)),  # a short prompt of a model with many heads
        ((8, 64), (8, 64)),
        ((1, 512), (1, 1)),
        ((1, 128), (4000, 8)),  # one decoding step
        ((3, 200), (300, 200)),  # a slab of a sequence
        ((64, 64), (64, 64)),
        ((200, 200), (200, 200)),
        ((0, 4), (0, 4)),
    ],
)
def test_ordinary_calls_are_computed(queries: tuple[int, int], keys: tuple[int, int]) -> None:
    q, k = torch.randn(1, *queries, 4), torch.randn(1, *keys, 4)
    attend(q, k, k, PATTERN, query_offset=max(0, keys[0] - queries[0]))


class Qkv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = 65, nn.Linear(260, 780), nn.Linear(260, 260)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 65, 4)).permute(2, 0, 3, 1, 4)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


CONFIG = LongNetConfig(embed_dim=260, num_layers=1, num_heads=65, segment_lengths=[16], dilation_rates=[1])
IDS = torch.zeros(2, 5, dtype=torch.int64)
PADDED = torch.tensor([[1] * 5, [0] * 2 + [1] * 3])
X = torch.randn(2, 5, 260)


def slide_embeddings() -> torch.Tensor:
    config = slides.SlideEncoderConfig(feature_dim=3, embed_dim=260, num_layers=1, num_heads=65, ffn_dim=8)
    return slides.SlideEncoder(config)(torch.randn(2, 5, 3), torch.zeros(2, 5, 2)).layers[:, 0, None].expand(2, 5, 260)


KNOW_THEIR_HEADS: dict[str, Callable[[], torch.Tensor]] = {
    "MultiheadPatternAttention": lambda: MultiheadPatternAttention(260, 65, PATTERN)(X, X, X)[0],
    "MultiheadDilatedAttention": lambda: MultiheadDilatedAttention(260, 65, [16], [1])(X, X, X)[0],
    "DynamicMultiheadDilatedAttention": lambda: DynamicMultiheadDilatedAttention(260, 65)(X, X, X)[0],
    "AdaptiveBlockAttention": lambda: AdaptiveBlockAttention(65, 4, scorer_dim=4)(
        *(X.unflatten(2, (65, 4)) for _ in range(3))
    ).flatten(2),
    "MultiheadReplacement": lambda: MultiheadReplacement(nn.MultiheadAttention(260, 65, batch_first=True), PATTERN)(
        X, X, X, need_weights=False
    )[0],
    "QkvReplacement": lambda: QkvReplacement(Qkv(), PATTERN)(X),
    "LongNetLM": lambda: models.LongNetLM(CONFIG).hidden_states(IDS),
    "LongNetLM with padding": lambda: models.LongNetLM(CONFIG).hidden_states(IDS, attention_mask=PADDED),
    "LongNetEncoder": lambda: models.LongNetEncoder(CONFIG)(IDS),
    "LongNetEncoder with padding": lambda: models.LongNetEncoder(CONFIG)(IDS, attention_mask=PADDED),
    "LongNetEncoderDecoder": lambda: models.LongNetEncoderDecoder(CONFIG, CONFIG)(IDS, IDS)[:, :, :1].expand(X.shape),
    "LongNetEncoderDecoder with padding": lambda: models.LongNetEncoderDecoder(CONFIG, CONFIG)(
        IDS, IDS, attention_mask=PADDED, decoder_attention_mask=PADDED
    )[:, :, :1].expand(X.shape),
    "SlideEncoder": slide_embeddings,
}


@pytest.mark.parametrize("module", KNOW_THEIR_HEADS)
def test_modules_that_know_their_heads_take_sequences_of_any_length(module: str) -> None:
    assert KNOW_THEIR_HEADS[module]().shape == X.shape


def test_every_module_that_knows_its_heads_is_among_these() -> None:
    named = {name.split()[0] for name in KNOW_THEIR_HEADS} | set(ENTRIES)
    of_models = {name for name in models.__all__ if "LongNet" in name or name.startswith("SlideEnc")}
    others = {
        "Linear",
        "LongNetCache",
        "LongNetCausalLMConfig",
        "LongNetConfig",
        "LongNetForCausalLM",
        "SlideEncoderConfig",
    }
    assert {*nn_package.__all__, *of_models} - others <= named


def test_the_length_of_one_process_is_that_of_the_rows_in_either_order() -> None:
    x = torch.randn(1, 4, 40, 8)  # [batch, heads, sequence, head_dim]
    attention = parallel.ParallelDilatedAttention([16], [1], sequence_length=40)
    torch.testing.assert_close(
        attention(x, x, x, heads_first=True).mT, attention(*[x.transpose(1, 2)] * 3).permute(0, 2, 3, 1)
    )
    with pytest.raises(ValueError, match="got 40 and 4 rows of query"):
        attention(x, x, x)


def test_unequal_lengths_with_the_heads_first_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"got 1 query heads and 200 key/value heads; .*\.transpose\(1, 2\)"):
        attend(torch.randn(1, 8, 1, 4), torch.randn(1, 8, 200, 4), torch.randn(1, 8, 200, 4), PATTERN)


@pytest.mark.parametrize("value", [1, "yes"])
def test_heads_first_is_true_false_or_none(value: object) -> None:
    x = torch.randn(1, 8, 2, 4)
    with pytest.raises(TypeError, match=f"heads_first must be True, False or None, got {value!r}"):
        attend(x, x, x, PATTERN, heads_first=value)


def test_a_compiled_call_is_one_graph() -> None:
    compiled = torch.compile(lambda x: attend(x, x, x, PATTERN, heads_first=True), fullgraph=True, backend="eager")
    x = torch.randn(1, 4, 150, 8)
    torch.testing.assert_close(compiled(x), attend(x, x, x, PATTERN, heads_first=True))
