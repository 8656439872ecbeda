"""The trainer of context extension runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.models.token_loss import next_tokens, token_loss_of_hidden

from .extension_settings import ExtensionSettings
from .optimizer import build_adamw
from .row_logits import RowLogits
from .run_trainer import RunTrainer

_BETAS = (0.9, 0.999)


class ExtensionTrainer(RunTrainer):
    """A run of a causal language model of transformers in a run folder; made as :class:`RunTrainer` is."""

    settings: ExtensionSettings
    logits: RowLogits | None = None
    """The parts of the model, for the loss of a block of rows at a time; None where it has to compute all."""

    def memory_remedy(self) -> str:
        """See :meth:`RunTrainer.memory_remedy`."""
        return "start a new run with --gradient-checkpointing, or fewer --batch-tokens and more --gradient-accumulation"

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with weight decay on the parameters that transformers decays: neither biases nor norms."""
        if self.optimizer is None:
            assert self.model is not None
            decayed = set(self.get_decay_parameter_names(self.model))
            groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    groups[name in decayed].append(parameter)
            decays = {True: self.settings.weight_decay, False: 0.0}
            given = [{"params": groups[kind], "weight_decay": decays[kind]} for kind in (True, False)]
            self.optimizer = build_adamw(self.settings.optimizer, given, self.settings, _BETAS)
        return self.optimizer

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The mean cross-entropy of a batch's labels; the returned outputs hold no logits."""
        if self.logits is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        output = self.logits.output
        vocab_size = self.logits.vocab_size
        # accelerate applies autocast in the model's own forward, which is bypassed here.
        with self.accelerator.autocast():
            hidden = self.logits.hidden(inputs["input_ids"])
            loss = token_loss_of_hidden(hidden, output, vocab_size, next_tokens(inputs["labels"]), num_items_in_batch)
        return (loss, {"loss": loss}) if return_outputs else loss
