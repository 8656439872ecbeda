"""The blocks and global tokens of Pegasus-X."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.ops import attend, attend_with_lse, merge
from dilated_attention_pytorch.patterns import DilatedPattern

from .layer import SparseLayer, check_no_weights, every_pair

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class PegasusXReplacement(SparseLayer):
    """The self-attention of Pegasus-X's encoder (arXiv 2208.04347).

    A token attends to the tokens of its block and to the global tokens; a global token attends to all. Masked keys are
    absent.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(self, replaced: Any, config: Any) -> None:
        super().__init__(replaced, _PROJECTIONS, num_heads=replaced.num_heads, dropout=replaced.dropout)
        self.config = config
        self.scale = replaced.scaling
        self.blocks = DilatedPattern([replaced.block_size], [1])

    def forward(
        self,
        token_hidden_states: Tensor,
        global_hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor, None]:
        """Attend as the replaced layer does; the last block may be ragged.

        Args:
            token_hidden_states: ``[B, N, E]``.
            global_hidden_states: ``[B, M, E]``.
            attention_mask: ``[B, N]``, negative for padding, else 0.
            output_attentions: must be False.
            options: arguments that the replaced layer does not read.

        Returns:
            the tokens' and the global tokens' new states, and None.
        """
        check_no_weights("Pegasus-X layer", output_attentions or self.config.output_attentions)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (self.heads(project, token_hidden_states) for project in projections)
        global_q, global_k, global_v = (self.heads(project, global_hidden_states) for project in projections)
        hidden = attention_mask < 0
        pairs = every_pair(q.shape[1] + global_q.shape[1])
        local = attend_with_lse(
            q, k, v, self.blocks, scale=self.scale, key_padding_mask=hidden, dropout_p=self.dropout_p
        )
        of_global_keys = attend_with_lse(q, global_k, global_v, pairs, scale=self.scale, dropout_p=self.dropout_p)
        of_global_rows = attend(
            global_q,
            torch.cat([global_k, k], dim=1),
            torch.cat([global_v, v], dim=1),
            pairs,
            scale=self.scale,
            key_padding_mask=nn.functional.pad(hidden, (global_q.shape[1], 0)),
            dropout_p=self.dropout_p,
        )
        tokens = merge([local, of_global_keys]).out
        return self.out_proj(tokens.flatten(2)), self.out_proj(of_global_rows.flatten(2)), None
