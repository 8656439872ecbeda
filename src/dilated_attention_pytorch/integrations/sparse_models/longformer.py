"""The sliding window and the global tokens of Longformer and LED."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dilated_attention_pytorch.ops import attend, attend_with_lse, merge
from dilated_attention_pytorch.patterns import local_window

from .layer import SparseLayer, check_no_weights, every_pair
from .rows import choose_rows

_PROJECTIONS = ("query", "key", "value", "query_global", "key_global", "value_global")


class LongformerReplacement(SparseLayer):
    """Longformer's self-attention (arXiv 2004.05150, section 3.1), also that of LED's encoder.

    A row attends to the local keys ``|p - t| <= w`` and to the keys of all global tokens, in one softmax. A global
    token attends to every key, with projections of its own. Masked keys are absent, and masked rows are 0.
    """

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    query_global: nn.Linear
    key_global: nn.Linear
    value_global: nn.Linear

    def __init__(self, replaced: Any, config: Any) -> None:
        super().__init__(replaced, _PROJECTIONS, num_heads=replaced.num_heads, dropout=replaced.dropout)
        self.window = local_window(replaced.one_sided_attn_window_size, replaced.one_sided_attn_window_size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        is_index_masked: Tensor,
        is_index_global_attn: Tensor,
        is_global_attn: bool,
        output_attentions: bool = False,
    ) -> tuple[Tensor]:
        """Attend as the replaced layer does; the number of rows need not be a multiple of the window.

        Args:
            hidden_states: ``[B, N, E]``.
            attention_mask: ``[B, N]``, 0 for a local token, positive for a global one, negative for a masked one.
            is_index_masked, is_index_global_attn: bool ``[B, N]``, where ``attention_mask`` is negative or positive.
            is_global_attn: whether there is a global token.
            output_attentions: must be False.
        """
        check_no_weights("Longformer layer", output_attentions)
        q, k, v = (self.heads(project, hidden_states) for project in (self.query, self.key, self.value))
        local = attend_with_lse(
            q, k, v, self.window, key_padding_mask=is_index_masked | is_index_global_attn, dropout_p=self.dropout_p
        )
        if not is_global_attn:
            return (local.out.masked_fill(is_index_masked[:, :, None, None], 0.0).flatten(2),)
        chosen, pairs = choose_rows(is_index_global_attn), every_pair(hidden_states.shape[1])
        of_global_keys = attend_with_lse(
            q, chosen.take(k), chosen.take(v), pairs, key_padding_mask=chosen.are_padding, dropout_p=self.dropout_p
        )
        out = merge([local, of_global_keys]).out.masked_fill(is_index_masked[:, :, None, None], 0.0)
        of_global_rows = attend(
            self.heads(self.query_global, chosen.take(hidden_states)),
            self.heads(self.key_global, hidden_states),
            self.heads(self.value_global, hidden_states),
            pairs,
            key_padding_mask=is_index_masked,
            dropout_p=self.dropout_p,
        )
        return (chosen.put(out, of_global_rows).flatten(2),)
