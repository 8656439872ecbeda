"""The local and the transient-global attention of LongT5's encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.ops import AttentionOutput, Scores, attend_with_lse, merge
from dilated_attention_pytorch.patterns import Pattern, local_window

from .layer import SparseLayer, check_no_weights, every_pair
from .rows import choose_rows

_PARTS = ("q", "k", "v", "o", "relative_attention_bias", "global_relative_attention_bias", "global_input_layer_norm")


class LongT5Replacement(SparseLayer):
    """LongT5's local or transient-global attention (arXiv 2112.07916, section 3.1).

    A token attends to the tokens ``|p - t| <= radius``, and in transient-global attention to the sum of every block
    of tokens, normalised. T5's bias by distance is added, for sums by the distance in blocks. Rows of padding have
    results of their own.
    """

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    relative_attention_bias: nn.Embedding
    global_relative_attention_bias: nn.Embedding
    global_input_layer_norm: nn.Module

    def __init__(self, replaced: Any, config: Any) -> None:
        super().__init__(replaced, _PARTS, num_heads=replaced.n_heads, dropout=replaced.dropout)
        self.has_globals = "global_input_layer_norm" in dict(replaced.named_children())
        self.global_block_size = replaced.global_block_size if self.has_globals else 0
        self.has_bias = replaced.has_relative_attention_bias
        self.max_distance = replaced.relative_attention_max_distance
        self.window = local_window(replaced.local_radius, replaced.local_radius)

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Attend as the replaced layer does.

        Args:
            hidden_states: ``[B, N, E]``.
            mask: ``[B, N]``, 0 for padding; or that of local attention, ``[B, 1, blocks, block, 3 * block]``.
            position_bias: None in the first layer, in others what the first returned.
            output_attentions: must be False.

        Returns:
            ``[B, N, E]``, and the biases by distance ``[1, H, 2 W + 1]``, or ``[2, H, 2 W + 1]`` with those of sums.
        """
        check_no_weights("LongT5 layer", output_attentions)
        if position_bias is None:
            position_bias = self._biases()
        # In the mask of local attention a token sees itself, and padding does not.
        tokens = mask != 0 if mask.dim() == 2 else mask.diagonal(mask.shape[-2], dim1=-2, dim2=-1).flatten(1)
        tokens = tokens[:, : hidden_states.shape[1]]
        q = self.heads(self.q, hidden_states)
        partials = [self._attend(q, hidden_states, self.window, ~tokens, Scores(distance_bias=position_bias[0]))]
        if self.has_globals and hidden_states.shape[1] >= self.global_block_size:
            partials.append(self._attend_to_sums(q, hidden_states, tokens, position_bias[1]))
        return self.o(merge(partials).out.flatten(2)), position_bias

    def _biases(self) -> Tensor:
        if not self.has_bias:
            raise ValueError("position_bias must be what the model's first layer returned, got None")
        tables = [self.relative_attention_bias.weight]
        if self.has_globals:
            tables.append(self.global_relative_attention_bias.weight)
        biases = [Scores.t5(table, self.max_distance, is_bidirectional=True).distance_bias for table in tables]
        return torch.stack([bias for bias in biases if bias is not None])

    def _attend_to_sums(self, q: Tensor, hidden_states: Tensor, tokens: Tensor, bias: Tensor) -> AttentionOutput:
        """Attention to the sums of blocks. The tokens after the last whole block belong to that block."""
        size, rows = self.global_block_size, tokens.shape[1]
        num_blocks = rows // size
        block = torch.arange(rows, device=q.device) // size
        last = tokens[:, size - 1 :: size].sum(dim=1, keepdim=True) - 1
        own = torch.minimum(block, last).masked_fill(~tokens, -1)
        absent = block[: num_blocks * size : size] > own.amax(dim=1, keepdim=True)
        sums = hidden_states.new_zeros(len(q), num_blocks + 1, hidden_states.shape[2])
        target = own.masked_fill(own < 0, num_blocks).unsqueeze(-1).expand_as(hidden_states)
        sums = self.global_input_layer_norm(sums.scatter_add(1, target, hidden_states)[:, :num_blocks])

        # The rows of a block have one distance from a sum: they are query heads of one row, [B, blocks, H * size, D].
        blocks = q[:, : num_blocks * size].unflatten(1, (num_blocks, size)).transpose(2, 3).flatten(2, 3)
        of_blocks = self._attend(
            blocks,
            sums,
            every_pair(num_blocks),
            absent,
            Scores(distance_bias=bias.repeat_interleave(size, dim=0)),
        )
        out, lse = (each.unflatten(2, (-1, size)).transpose(2, 3).flatten(1, 2) for each in of_blocks)
        rest = rows - num_blocks * size
        out = nn.functional.pad(out, (0, 0, 0, 0, 0, rest))
        lse = nn.functional.pad(lse, (0, 0, 0, rest), value=float("-inf"))

        chosen = choose_rows(tokens & (block > last))
        number = chosen.positions.shape[1]
        if number:
            distance = torch.arange(num_blocks, device=q.device) - last
            by_key = bias[:, distance.clamp(-self.max_distance, self.max_distance) + self.max_distance]
            of_rest = self._attend(
                chosen.take(q), sums, every_pair(num_blocks, number), absent, Scores(key_bias=by_key.permute(1, 2, 0))
            )
            out, lse = chosen.put(out, of_rest.out), chosen.put(lse, of_rest.lse)
        return AttentionOutput(out, lse)

    def _attend(
        self, query: Tensor, states: Tensor, pattern: Pattern, hidden: Tensor, scores: Scores
    ) -> AttentionOutput:
        key, value = self.heads(self.k, states), self.heads(self.v, states)
        return attend_with_lse(
            query, key, value, pattern, scale=1.0, key_padding_mask=hidden, dropout_p=self.dropout_p, scores=scores
        )
