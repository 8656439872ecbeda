"""A slide encoder with a linear classifier, its losses, and the learning rates of its layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilated_attention_pytorch.slides.encoder import SlideEncoder

from .labels import Task

Loss = Callable[[Tensor, Tensor], Tensor]
"""Scores ``[n, K]`` and targets of n cases to their mean loss."""
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "out_proj")
_LAYER = re.compile(r"\bencoder\.layers\.(\d+)\.")


class SlideModel(nn.Module):
    """The scores of a case: ``W [norm(s_l1); norm(s_l2); ...] + b`` with s_l the pooled state after layer l.

    The names of the weights are those of GigaPath's ``ClassificationHead``: ``slide_encoder.*``, ``classifier.0.*``.

    Args:
        encoder: the slide encoder; None for a classifier of vectors that are given.
        width: width of one layer's vector.
        layers: layers whose vectors are read, 0 to L.
        num_scores: scores K.

    Source: prov-gigapath/prov-gigapath, ``gigapath/classification_head.py``.
    """

    def __init__(self, encoder: SlideEncoder | None, width: int, layers: Sequence[int], num_scores: int) -> None:
        super().__init__()
        self.slide_encoder = encoder
        self.layers = list(layers)
        self.classifier = nn.Sequential(nn.Linear(len(layers) * width, num_scores))

    def vectors(self, features: Tensor, grid: Tensor) -> Tensor:
        """What the classifier reads of one case, ``[1, len(layers) E]``. Layers above the last one read do not run.

        Args:
            features: ``[N, C]`` of the tiles of all its slides.
            grid: ``[N, 2]``, each tile's position on its own slide, in tiles.
        """
        assert self.slide_encoder is not None
        read = max(self.layers)
        pooled: Tensor = self.slide_encoder(features[None], grid[None], tile_size=1, num_layers=read)[1]
        return pooled[:, self.layers].flatten(1)

    def forward(self, features: Tensor, grid: Tensor) -> Tensor:
        """The scores ``[1, K]`` of one case; see :meth:`vectors`."""
        scores: Tensor = self.classifier(self.vectors(features, grid))
        return scores


def parameter_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Groups of trained parameters for an optimizer, with the learning rates and weight decay of GigaPath's program.

    The learning rate of layer k (from 1) of L is ``learning_rate * layer_decay^(L + 1 - k)``, that of the class token
    ``learning_rate * layer_decay^(L + 1)``; that of all others, among them the projection of the features, is
    ``learning_rate``. Parameters of one dimension have no weight decay.

    Source: prov-gigapath/prov-gigapath, ``finetune/utils.py``, ``param_groups_lrd`` and ``get_layer_id``.
    """
    names = [name for name, _ in model.named_parameters()]
    last = max((int(found[1]) for found in map(_LAYER.search, names) if found), default=-1) + 2
    groups: dict[tuple[int, bool], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer = _LAYER.search(name)
            depth = 0 if "cls_token" in name else int(layer[1]) + 1 if layer else last
            groups.setdefault((depth, parameter.dim() > 1), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": learning_rate * layer_decay ** (last - depth),
            "weight_decay": weight_decay if is_decayed else 0.0,
        }
        for (depth, is_decayed), parameters in groups.items()
    ]


def add_adapters(model: SlideModel, rank: int) -> None:
    """Train low-rank adapters at the projections of the attention instead of the encoder's weights.

    An adapted projection is ``W x + 2 B A x`` with A ``[rank, E]`` and B ``[E, rank]``, which is 0 at the beginning.
    Source: peft; Hu et al. 2021, arXiv 2106.09685.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(LORA_MODULES))
    assert model.slide_encoder is not None
    model.slide_encoder = get_peft_model(model.slide_encoder, config)  # type: ignore[assignment]


def merge_adapters(model: SlideModel, folder: Path) -> None:
    """Write the adapters to a folder, as peft does, and add them to the weights of the encoder."""
    adapted: Any = model.slide_encoder
    adapted.save_pretrained(str(folder))
    model.slide_encoder = adapted.merge_and_unload()


def loss_of(task: Task, targets: Tensor, *, is_weighted: bool) -> Loss:
    """The loss of a task.

    - classification: cross entropy; with weights ``N / (C n_c)`` for class c, whose mean over the training cases is 1.
    - multilabel: binary cross entropy; with weights ``(N - n_k) / n_k`` for the presence of label k.
    - regression: squared error of standardised targets (``(y - mean) / deviation`` over the training cases).
    - survival: :func:`cox_loss`.

    Args:
        task: the task.
        targets: of the training cases, as in :class:`.labels.Labels`.
        is_weighted: whether classes are weighted.
    """
    if task == "survival":
        return cox_loss
    if task == "regression":
        mean, deviation = standard(targets)
        return lambda scores, of: functional.mse_loss(scores, (of - mean.to(of)) / deviation.to(of))
    if task == "multilabel":
        positive = targets.sum(dim=0).clamp(min=1)
        weight = (len(targets) - targets.sum(dim=0)).clamp(min=1) / positive if is_weighted else None
        return lambda scores, of: functional.binary_cross_entropy_with_logits(
            scores, of, pos_weight=None if weight is None else weight.to(scores)
        )
    counts = targets.bincount()
    weights = len(targets) / (len(counts) * counts.clamp(min=1)) if is_weighted else None
    return lambda scores, of: functional.cross_entropy(
        scores, of, weight=None if weights is None else weights.to(scores), reduction="none"
    ).mean()


def standard(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each column ``[N, K]``; a constant column has the deviation 1."""
    deviation = targets.std(dim=0, correction=0)
    return targets.mean(dim=0), torch.where(deviation > 0, deviation, 1.0)


def cox_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The negative log partial likelihood of the Cox model, per event, with ties after Breslow.

    ``-1/E sum_{i: event} (s_i - log sum_{j: t_j >= t_i} exp s_j)`` over the cases of the call, with s the log risks
    and t the times; 0 without an event.

    Args:
        scores: ``[n, 1]``.
        targets: ``[n, 2]``, time and event.

    Source: Cox 1972; Breslow 1974.
    """
    risks, (times, events) = scores[:, 0], targets.unbind(dim=1)
    is_at_risk = times[None] >= times[:, None]  # [i, j]: j is observed when i ends
    log_sums = risks.expand(len(risks), -1).masked_fill(~is_at_risk, -torch.inf).logsumexp(dim=1)
    return ((log_sums - risks) * events).sum() / events.sum().clamp(min=1)
