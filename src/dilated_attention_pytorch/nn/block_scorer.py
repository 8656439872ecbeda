"""The scorer that chooses the key blocks of every query block."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilated_attention_pytorch.precision import accumulation_dtype

_SCORES_AT_ONCE = 1 << 22
"""Largest number of block scores that are ranked at a time."""


class BlockSelection(NamedTuple):
    """The key blocks that a scorer chose for every query block, the block's own first, and their log-gates.

    ``blocks`` is int64 ``[B, G, query blocks, kept]``, -1 where there are fewer blocks; ``log_gates`` has the same
    shape, float32 (float64 for float64 inputs), 0 for the own block.
    """

    blocks: Tensor
    log_gates: Tensor


class BlockScorer(nn.Module):
    """Scores of key blocks for query blocks, from pooled queries and keys.

        q~ = sum_p softmax_p(u_q . q[p]) q[p],   k~ = sum_t softmax_t(u_k . k[t]) k[t]
        e[i, j] = scale * mean_h (A_h q~[i, h]) . (C k~[j])

    The sums run over the rows of a block, the mean over the query heads of a key/value head. Initially u = 0, so that
    pooling is the mean, and A = C is a random projection: e approximates the score of a mean query and a mean key.

    The parameters are ``query_pool [H, D]`` and ``key_pool [G, D]`` (u; None where a block is one row), and
    ``query_map [H, D, d]`` and ``key_map [G, D, d]`` (A and C), where d is ``scorer_dim``.

    Args:
        num_heads, num_kv_heads, head_dim: H, G and D.
        block_size, query_block_size: number of positions of a key block, and of a query block, which must divide it.
        scorer_dim: width d of the projections.
        device, dtype: device and dtype of the parameters. Scores are computed in float32 (float64 for float64 inputs).
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        query_block_size: int,
        scorer_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.query_block_size = query_block_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.query_map = parameter(num_heads, head_dim, scorer_dim)
        self.key_map = parameter(num_kv_heads, head_dim, scorer_dim)
        self.query_pool = parameter(num_heads, head_dim) if query_block_size > 1 else None
        self.key_pool = parameter(num_kv_heads, head_dim) if block_size > 1 else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set pooling to the mean, and one random orthonormal projection for a key/value head and its query heads."""
        for pool in (self.query_pool, self.key_pool):
            if pool is not None:
                nn.init.zeros_(pool)
        heads, width, scorer_dim = self.key_map.shape
        projection = torch.empty(heads, width, scorer_dim, dtype=torch.float32, device=self.key_map.device)
        for head in projection:
            nn.init.orthogonal_(head, gain=math.sqrt(max(1.0, width / scorer_dim)))
        _write(self.key_map, projection)
        _write(self.query_map, projection.repeat_interleave(self.query_map.shape[0] // heads, 0))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        num_blocks: int,
        *,
        scale: float,
        is_causal: bool,
        query_offset: int,
        key_padding_mask: Tensor | None,
    ) -> BlockSelection:
        """Choose the own block and the best others, ``num_blocks`` in all; see :class:`AdaptiveBlockAttention`."""
        rows, keys = query.shape[1], key.shape[1]
        hidden_queries = (
            None if key_padding_mask is None else key_padding_mask[:, query_offset : query_offset + query.shape[1]]
        )
        size, query_size = self.block_size, self.query_block_size
        # All rows of a causal query block share one choice, so it may depend only on queries up to the block's first.
        queries = _pooled(query, self.query_pool, query_size, hidden_queries, ahead=query_size - 1 if is_causal else 0)
        pooled_keys = _pooled(key, self.key_pool, size, key_padding_mask)
        dtype, kv_heads = queries.dtype, key.shape[2]
        queries = (queries @ self.query_map.to(dtype)).unflatten(1, (kv_heads, -1)).mean(2) * scale
        pooled_keys = pooled_keys @ self.key_map.to(dtype)
        own = (torch.arange(-(-rows // query_size), device=query.device) * query_size + query_offset) // size
        empty = None
        if key_padding_mask is not None:
            padded = functional.pad(key_padding_mask, (0, -keys % size), value=True)
            empty = padded.unflatten(1, (-1, size)).all(-1)[:, None, None]
        best = max(0, min(num_blocks, pooled_keys.shape[2]) - 1)
        chosen = _best(queries.detach(), pooled_keys.detach(), own, best, empty, is_causal=is_causal)
        index = chosen.clamp(min=0).flatten(2).unsqueeze(-1).expand(-1, -1, -1, pooled_keys.shape[-1])
        chosen_keys = pooled_keys.gather(2, index).unflatten(2, chosen.shape[2:])
        log_gates = (queries.unsqueeze(3) * chosen_keys).sum(-1).masked_fill(chosen < 0, 0.0)
        own = own[:, None].expand(*chosen.shape[:3], 1)
        return BlockSelection(torch.cat([own, chosen], -1), functional.pad(log_gates, (1, 0)))


def _write(parameter: nn.Parameter, values: Tensor) -> None:
    """Copy ``values`` into a parameter; where it is sharded, those of the first process."""
    if type(parameter.data) is not Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
    parameter.copy_(values)


def _pooled(x: Tensor, pool: Tensor | None, size: int, hidden: Tensor | None, *, ahead: int = 0) -> Tensor:
    """Pool rows ``[B, N, heads, D]`` in blocks that begin ``ahead`` rows earlier: ``[B, heads, ceil(N / size), D]``.

    Hidden rows (bool ``[B, N]``), and those before the first and after the last, are ignored; an empty block gives 0.
    """
    batch, rows = x.shape[:2]
    dtype = accumulation_dtype(x.dtype)
    if hidden is None:
        hidden = torch.zeros(batch, rows, dtype=torch.bool, device=x.device)
    blocks = -(-rows // size)
    ahead = min(ahead, blocks * size)  # 0 if there are no rows
    after = blocks * size - rows - ahead
    x = functional.pad(x.to(dtype).masked_fill(hidden[:, :, None, None], 0.0), (0, 0, 0, 0, ahead, after))
    hidden = functional.pad(hidden, (ahead, after), value=True).unflatten(1, (blocks, size)).unsqueeze(-1)
    x = x.unflatten(1, (blocks, size))
    logits = x.new_zeros(x.shape[:-1]) if pool is None else (x * pool.to(dtype)).sum(-1)
    weights = torch.softmax(logits.masked_fill(hidden, torch.finfo(dtype).min), dim=2).masked_fill(hidden, 0.0)
    return torch.einsum("bnsh,bnshd->bhnd", weights, x)


def _best(queries: Tensor, keys: Tensor, own: Tensor, best: int, empty: Tensor | None, *, is_causal: bool) -> Tensor:
    """The ``best`` blocks by score without the own one; ties go to the first block, -1 where there are fewer."""
    number = torch.arange(keys.shape[2], device=keys.device)
    step = max(1, _SCORES_AT_ONCE // max(1, queries.shape[0] * queries.shape[1] * keys.shape[2]))
    chosen_blocks = []
    for start in range(0, max(1, queries.shape[2]), step):
        rows = slice(start, start + step)
        mine = own[rows].unsqueeze(-1)
        excluded = number >= mine if is_causal else number == mine
        excluded = excluded[None, None] if empty is None else excluded | empty
        scores = (queries[:, :, rows] @ keys.mT).masked_fill(excluded, float("-inf"))
        order = torch.sort(scores, dim=-1, descending=True, stable=True)
        chosen = order.indices[..., :best]
        chosen_blocks.append(chosen.masked_fill(order.values[..., :best] == float("-inf"), -1))
    return torch.cat(chosen_blocks, dim=2)
