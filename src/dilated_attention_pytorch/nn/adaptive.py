"""Block-sparse attention whose key blocks a small learned scorer chooses per sample, head and query block."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.legacy.keywords import answers_old_keywords
from dilated_attention_pytorch.ops import attend_blocks, attend_with_lse, merge
from dilated_attention_pytorch.ops.call import Call
from dilated_attention_pytorch.ops.validation import check_call, check_dropout, check_scale, check_size
from dilated_attention_pytorch.patterns import Pattern, local_window
from dilated_attention_pytorch.precision import without_autocast

from .block_scorer import BlockScorer, BlockSelection


class AdaptiveBlockAttention(nn.Module):
    """Attention in which every query block sees its own key block and the k - 1 others that a scorer ranks highest.

    With the log-gate ``e[i, j]`` of :class:`BlockScorer` and the kept blocks J(i), one softmax

        O[p] = sum_(j in J(i)) sum_(t in block j) exp(s[p, t] + e[i, j]) v[t] / (the same without v)

    for the rows p of query block i, ``s = scale * q . k``; :func:`attend_blocks` computes it exactly. The gate of the
    own block is 1 and the others are relative to it: a constant in all gates of a row would cancel in the softmax, and
    this anchor lets the loss reach every parameter of the scorer. With ``pattern`` the counts add: one softmax over the
    keys of the chosen blocks and of the pattern together, in which a pair that is in both counts for both.

    The chosen blocks and their gates depend on one sample and one key/value head alone; the query heads of a key/value
    head share the blocks, so that their keys are gathered once. Ties go to the first block.

    Causal: only blocks that end before the query block begins can be chosen (within the own block, a row sees its own
    position and those before), and the pooled queries are the ``query_block_size`` rows that end with the *first* row
    of the query block, on which all of its rows may depend. No output depends on a later position. A question within a
    query block therefore chooses blocks for the next one; with ``query_block_size=1`` every row chooses by its own
    query. Not causal: all other blocks can be chosen, by the queries of the block itself.

    Args:
        num_heads: number of query heads H.
        head_dim: head dimension D.
        num_kv_heads: number of key/value heads G, which divides H; None = H.
        blocks_per_query: number k of blocks that a query block sees, including its own, at least 2; all if fewer exist.
        block_size: positions of a key block; the last one may be ragged.
        query_block_size: rows that share a choice, which divides ``block_size``; None = ``block_size``. The work is the
            same for every size; small ones gather the same keys more often.
        scorer_dim: width of the scorer's projections.
        pattern: a static pattern in addition to the chosen blocks.
        dropout: probability of dropping a merged attention probability, in training only.
        softmax_scale: scale of the scores, also of the scorer's; None = ``1 / sqrt(D)``.
        device, dtype: of the scorer's parameters.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or range, or sizes do not divide.

    >>> from dilated_attention_pytorch.nn import AdaptiveBlockAttention
    >>> attention = AdaptiveBlockAttention(4, 16, num_kv_heads=2, blocks_per_query=4, block_size=32)
    >>> q, k, v = (torch.randn(2, 500, heads, 16) for heads in (4, 2, 2))
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([2, 500, 4, 16])
    >>> attention.select(q, k, is_causal=True).blocks[0, 0, :2].tolist()
    [[0, -1, -1, -1], [1, 0, -1, -1]]
    """

    @answers_old_keywords
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        blocks_per_query: int = 8,
        block_size: int = 64,
        query_block_size: int | None = None,
        scorer_dim: int = 32,
        pattern: Pattern | None = None,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        query_block_size = block_size if query_block_size is None else query_block_size
        for name, number in (
            ("num_heads", num_heads),
            ("head_dim", head_dim),
            ("num_kv_heads", num_kv_heads),
            ("block_size", block_size),
            ("query_block_size", query_block_size),
            ("scorer_dim", scorer_dim),
        ):
            check_size(name, number)
        check_size("blocks_per_query", blocks_per_query, least=2)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads: got {num_kv_heads} of {num_heads} heads")
        if block_size % query_block_size:
            raise ValueError(
                "query_block_size must divide block_size, so that a query block lies in one key block: got "
                f"{query_block_size} and {block_size}"
            )
        if pattern is not None and not isinstance(pattern, Pattern):
            raise TypeError(
                "pattern must be a Pattern such as local_window(127) + global_tokens(4), or None, "
                f"got {pattern!r} of type {type(pattern).__name__}"
            )
        check_dropout("dropout", dropout)
        check_scale("softmax_scale", softmax_scale)
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.blocks_per_query = blocks_per_query
        self.block_size = block_size
        self.query_block_size = query_block_size
        self.pattern = pattern
        self.dropout = dropout
        self.softmax_scale = softmax_scale
        self.scorer = BlockScorer(
            num_heads, num_kv_heads, head_dim, block_size, query_block_size, scorer_dim, device=device, dtype=dtype
        )

    def reset_parameters(self) -> None:
        """Draw the scorer's parameters again."""
        self.scorer.reset_parameters()

    def select(
        self,
        query: Tensor,
        key: Tensor,
        is_causal: bool = False,
        *,
        query_offset: int = 0,
        key_padding_mask: Tensor | None = None,
    ) -> BlockSelection:
        """The blocks that a call with these arguments attends to, and their log-gates; see :meth:`forward`.

        Returns:
            :class:`BlockSelection`: ``blocks`` and ``log_gates`` of ``[B, G, ceil(N / query_block_size), kept]`` with
            ``kept = min(blocks_per_query, key blocks)``. The gates are differentiable.
        """
        self._check(query, key, key, is_causal, query_offset, key_padding_mask)
        scale = 1.0 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale
        with without_autocast(query.device.type):
            selection: BlockSelection = self.scorer(
                query,
                key,
                self.blocks_per_query,
                scale=scale,
                is_causal=is_causal,
                query_offset=query_offset,
                key_padding_mask=key_padding_mask,
            )
        return selection

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        query_offset: int = 0,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Query ``[B, N, H, D]``, key and value ``[B, M, G, D]``, result ``[B, N, H, D]``.

        Args:
            query, key, value: rows of one sequence: the keys from position 0 on, the queries from ``query_offset`` on.
            is_causal: a query attends only to keys at or before its own position.
            query_offset: position of the first query row, a multiple of ``query_block_size``.
            key_padding_mask: bool ``[B, M]``, True = ignore. Neither the keys nor the queries of these positions are
                pooled, and a block of only such positions is not chosen.

        Raises:
            TypeError, ValueError: an argument is of the wrong type, shape, dtype or range; queries beyond the keys.
            NotImplementedError: a causal slab with ``query_block_size > 1``, whose choice depends on queries before it.
        """
        self._check(query, key, value, is_causal, query_offset, key_padding_mask)
        blocks, log_gates = self.select(
            query, key, is_causal, query_offset=query_offset, key_padding_mask=key_padding_mask
        )
        dropout_p = self.dropout if self.training else 0.0
        chosen = attend_blocks(
            query,
            key,
            value,
            blocks,
            log_gates,
            block_size=self.block_size,
            query_block_size=self.query_block_size,
            is_causal=is_causal,
            scale=self.softmax_scale,
            query_offset=query_offset,
            key_padding_mask=key_padding_mask,
            dropout_p=dropout_p,
            heads_first=False,
        )
        if self.pattern is None:
            return chosen.out
        static = attend_with_lse(
            query,
            key,
            value,
            self.pattern,
            is_causal=is_causal,
            scale=self.softmax_scale,
            query_offset=query_offset,
            key_padding_mask=key_padding_mask,
            dropout_p=dropout_p,
            heads_first=False,
        )
        return merge([chosen, static]).out

    def density(self, sequence_length: int, *, is_causal: bool = False) -> float:
        """Fraction of dense attention's pairs that a call computes, static pattern included: the sum of counts / pairs.

        Exact, except that a last block of fewer than ``block_size`` positions counts as whole where it can be chosen.
        Under a causal mask it is divided by the ``N (N + 1) / 2`` pairs of dense causal attention.

        Raises:
            ValueError: a length below 1.

        >>> AdaptiveBlockAttention(1, 16, blocks_per_query=8, block_size=64).density(4096)
        0.125
        """
        check_size("sequence_length", sequence_length)
        size = self.block_size
        blocks, others = -(-sequence_length // size), self.blocks_per_query - 1
        pairs = 0
        for block in range(blocks):
            rows = min(size, sequence_length - block * size)
            seen = min(others, block if is_causal else blocks - 1) * size
            pairs += rows * seen + (rows * (rows + 1) // 2 if is_causal else rows * rows)
        dense = sequence_length * (sequence_length + 1) // 2 if is_causal else sequence_length**2
        static = 0.0
        if self.pattern is not None:
            static = self.pattern.density(sequence_length, num_kv_heads=self.num_kv_heads, is_causal=is_causal)
        return pairs / dense + static

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, num_kv_heads={self.num_kv_heads}, "
            f"blocks_per_query={self.blocks_per_query}, block_size={self.block_size}, "
            f"query_block_size={self.query_block_size}, pattern={self.pattern}, dropout={self.dropout}"
        )

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        query_offset: int,
        key_padding_mask: Tensor | None,
    ) -> None:
        check_call(
            Call(
                query,
                key,
                value,
                key_padding_mask=key_padding_mask,
                pattern=self.pattern or local_window(0),
                is_causal=is_causal,
                scale=self.softmax_scale,
                query_offset=query_offset,
                dropout_p=self.dropout,
            )
        )
        for name, tensor, heads in (("query", query, self.num_heads), ("key", key, self.num_kv_heads)):
            if tuple(tensor.shape[2:]) != (heads, self.head_dim):
                raise ValueError(
                    f"{name} must be [batch, sequence, {heads}, {self.head_dim}] for this module's heads, got "
                    f"{tuple(tensor.shape)}"
                )
        if query_offset + query.shape[1] > key.shape[1]:
            raise ValueError(
                "a query block keeps its own key block, so queries must be rows of the keys' sequence: got "
                f"{query.shape[1]} queries from position {query_offset} on and {key.shape[1]} keys; pass all keys from "
                "position 0 on"
            )
        if query_offset % self.query_block_size:
            raise ValueError(
                f"query_offset must be a multiple of query_block_size {self.query_block_size}, got {query_offset}"
            )
        if is_causal and query_offset and self.query_block_size > 1:
            raise NotImplementedError(
                f"query_block_size={self.query_block_size} chooses by queries before the block, which a causal slab at "
                f"query_offset {query_offset} does not hold; make the module with query_block_size=1, or pass all rows"
            )
