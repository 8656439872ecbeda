"""The block-sparse attention of BigBird and BigBird-Pegasus."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.integrations.parts import NotReplaceable, check_unwrapped
from dilated_attention_pytorch.ops import attend, attend_blocks
from dilated_attention_pytorch.precision import accumulation_dtype
from dilated_attention_pytorch.tracing import require

from .layer import SparseLayer, check_no_weights, every_pair

_LENGTHS_OF_THE_PAPER = (1024, 3072, 4096)
"""Lengths with another rule for random blocks."""


class BigBirdReplacement(SparseLayer):
    """BigBird's self-attention (arXiv 2007.14062, section 2) in an encoder, ``block_sparse`` or ``original_full``.

    Rows of the first and last block attend to every key. Another block attends to both, to itself and its neighbours,
    and to the layer's random blocks; a block that is random and near counts as often as it is listed. As in
    transformers, random blocks are drawn in training only: in eval each of them is the first block.
    """

    self: Any
    output: nn.Module

    def __init__(self, replaced: Any, config: Any) -> None:
        if config.is_decoder:
            raise NotReplaceable("it is in a decoder, whose attention is dense and causal; replace an encoder alone")
        super().__init__(replaced, ("self", "output"), num_heads=replaced.self.num_attention_heads)
        check_unwrapped(replaced.self)
        self.config, self.seed, self.attention_type = config, replaced.seed, replaced.attention_type
        # BigBird's output has the residual connection, that of BigBird-Pegasus does not.
        self.has_residual = type(replaced).__name__ == "BigBirdAttention"
        self._set_attention_type = type(replaced).set_attention_type

    def set_attention_type(self, value: str, **options: Any) -> None:
        """Choose ``"block_sparse"`` or ``"original_full"``, as the model does for a short input."""
        self._set_attention_type(self, value, **options)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        from_mask: Tensor | None = None,
        to_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend as the replaced layer does.

        Args:
            hidden_states: ``[B, N, E]``; under ``block_sparse`` N is a multiple of the block size.
            attention_mask: under ``original_full`` None or ``[B, 1, N, N]`` with equal rows, negative for padding.
            from_mask, to_mask: under ``block_sparse`` ``[B, 1, N, 1]`` and ``[B, 1, 1, N]``, 0 for padding.
            output_attentions: must be False.
            options: masks that follow from ``to_mask``, and what only a decoder has, which must be None.
        """
        check_no_weights("BigBird layer", output_attentions or self.config.output_attentions)
        for name in ("encoder_hidden_states", "past_key_values"):
            if options.get(name) is not None:
                raise NotImplementedError(
                    f"{name} must be None in a replaced BigBird layer, which is an encoder's, got "
                    f"{type(options[name]).__name__}"
                )
        layer = self.self
        q, k, v = (self.heads(project, hidden_states) for project in (layer.query, layer.key, layer.value))
        if self.attention_type == "block_sparse":
            assert from_mask is not None
            assert to_mask is not None
            heads = self._block_sparse(q, k, v, to_mask[:, 0, 0] == 0) * from_mask.transpose(1, 2).to(q.dtype)
        else:
            dropout_p = layer.dropout.p if self.training else 0.0
            hidden = None if attention_mask is None else _padding(attention_mask)
            heads = attend(q, k, v, every_pair(q.shape[1]), key_padding_mask=hidden, dropout_p=dropout_p)
        residual = (hidden_states,) if self.has_residual else ()
        return self.output(heads.flatten(2), *residual), None

    def _block_sparse(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        size, rows = self.config.block_size, q.shape[1]
        if rows % size or rows < 5 * size:
            raise ValueError(
                f"block-sparse attention needs a multiple of {size} rows, at least {5 * size}, got {rows}: call the "
                "model, which pads, or set_attention_type('original_full')"
            )
        blocks, log_gates = _visible_blocks(self.self, rows // size, q)
        middle = attend_blocks(
            q[:, size:-size],
            k,
            v,
            blocks.expand(len(q), -1, -1, -1),
            None if log_gates is None else log_gates.expand(len(q), *blocks.shape),
            block_size=size,
            query_offset=size,
            key_padding_mask=hidden,
        )
        ends = torch.cat([q[:, :size], q[:, -size:]], dim=1)
        first, last = attend(ends, k, v, every_pair(rows), key_padding_mask=hidden).chunk(2, dim=1)
        return torch.cat([first, middle.out, last], dim=1)


def _visible_blocks(layer: Any, num_blocks: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Key blocks of all query blocks but the first and last, ``[H, num_blocks - 2, k]``, and their log-gates ``[k]``.

    -1 stands for none. The log-gates are None where every block counts once for each time that it is listed.
    """
    own = torch.arange(1, num_blocks - 1)[:, None]
    near = own + torch.arange(-1, 2)
    near = near.masked_fill((near == 0) | (near == num_blocks - 1), -1)
    ends = torch.tensor([0, num_blocks - 1]).expand(num_blocks - 2, 2)
    listed = torch.cat([ends, near], dim=1).expand(layer.num_attention_heads, -1, -1)
    random = _random_blocks(layer, num_blocks)
    if random.any():
        return torch.cat([listed, random], dim=2).to(like.device), None
    # In eval all random blocks are the first block, which then counts once more for each.
    log_gates = torch.zeros(listed.shape[-1], dtype=accumulation_dtype(like.dtype))
    log_gates[0] = math.log1p(random.shape[-1])
    return listed.to(like.device), log_gates.to(like.device)


def _random_blocks(layer: Any, num_blocks: int) -> Tensor:
    """The layer's random key blocks ``[H, num_blocks - 2, r]``, by its own functions and seed.

    These draw from NumPy's global state, which is restored.
    """
    import numpy as np

    size, heads, number = layer.block_size, layer.num_attention_heads, layer.num_random_blocks
    rows = num_blocks * size
    state = np.random.get_state()
    try:
        if layer.training:
            np.random.seed(layer.seed)
        if rows in _LENGTHS_OF_THE_PAPER:
            longest = layer.max_seqlen
            drawn = [
                layer._bigbird_block_rand_mask(longest, longest, size, size, number, last_idx=1024)[: num_blocks - 2]
                for _ in range(heads)
            ]
        else:
            ends, numbers = layer._get_rand_attn_plan(rows, size, number)
            drawn = layer._bigbird_block_rand_mask_with_head(rows, rows, size, size, heads, ends, numbers)
    finally:
        np.random.set_state(state)
    return torch.from_numpy(np.stack(drawn)).long()


def _padding(attention_mask: Tensor) -> Tensor:
    """The padding bool ``[B, N]`` in a mask ``[B, 1, N, N]``."""
    require(
        (attention_mask == attention_mask[:, :, :1]).all(),
        NotImplementedError,
        "attention_mask must be the same for every query of a BigBird encoder, got one that differs between queries: "
        "pass the padding as [batch, tokens]",
    )
    return attention_mask[:, 0, 0] < 0
