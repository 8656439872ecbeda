"""Logits of a transformers language model for selected rows, without materialising all logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.models.token_loss import next_tokens, token_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 16
"""Sequence length for comparing both ways of computing logits."""
_ROUNDING = 1e-4
"""Tolerance relative to the largest logit, for matrix products with different numbers of rows."""
_LARGE = 1000.0


@dataclass(frozen=True, slots=True)
class RowLogits:
    """Decoder and output matrix of a model whose logits are the output matrix times the last hidden state, per row."""

    decoder: nn.Module
    """Maps tokens to hidden states."""
    output: nn.Module
    """Maps hidden states to logits."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size."""
        weight = self.output.weight
        assert isinstance(weight, Tensor)
        return weight.shape[0]

    def hidden(self, tokens: Tensor) -> Tensor:
        """Hidden states ``[B, N, E]`` after the last layer and its norm."""
        states: Tensor = self.decoder(tokens, use_cache=False).last_hidden_state
        return states


def row_logits(model: PreTrainedModel) -> RowLogits | None:
    """The parts of ``model``; None if it transforms its logits further, such as soft-capping, or changes its loss.

    Both ways are computed for a short sequence and compared: logits, logits of hidden states scaled by 1,000,
    which reveals a cap, and the training loss, which may have additional terms.
    """
    decoder, output = model.base_model, model.get_output_embeddings()
    if decoder is model or output is None:
        return None
    parts = RowLogits(decoder, output)
    tokens = torch.arange(_TOKENS, device=output.weight.device)[None] % parts.vocab_size
    was_training = model.training
    try:
        model.eval()
        with torch.no_grad():
            for factor in (1.0, _LARGE):
                with _scaled_input(output, factor):
                    expected = model(tokens, use_cache=False).logits
                    computed = output(parts.hidden(tokens))
                if computed.shape != expected.shape or not _are_close(computed, expected):
                    return None
            loss = model(tokens, labels=tokens, use_cache=False).loss
            ours = token_loss(output(parts.hidden(tokens)), next_tokens(tokens))
            return parts if _are_close(ours, loss) else None
    except (AttributeError, TypeError, ValueError):
        return None  # the decoder has another calling convention
    finally:
        model.train(was_training)


@contextmanager
def _scaled_input(output: nn.Module, factor: float) -> Iterator[None]:
    handle = output.register_forward_pre_hook(lambda module, args: (args[0] * factor, *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def _are_close(computed: Tensor, expected: Tensor) -> bool:
    return bool((computed - expected).abs().max() <= _ROUNDING * expected.abs().max())
