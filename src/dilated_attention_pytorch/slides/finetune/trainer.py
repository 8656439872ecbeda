"""The training of one fold and seed, with checkpoints that are complete or absent."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments

from dilated_attention_pytorch.errors import RunError, first_line
from dilated_attention_pytorch.output import sync
from dilated_attention_pytorch.training.autocast import autocast
from dilated_attention_pytorch.training.checkpoint import STATE_NAME, clear, newest_intact
from dilated_attention_pytorch.training.manifest import verify_manifest, write_manifest

from .cases import CaseFiles
from .labels import Labels
from .metrics import BEST, metrics
from .model import SlideModel, loss_of, parameter_groups, standard
from .results import write_tensors
from .settings import FinetuneSettings
from .splits import CaseSplit

BEST_NAME = "best.safetensors"
"""All weights after the best epoch until now."""
_SLOWER = "lower --learning-rate or raise --warmup-epochs, with another --output"
_STAGING = ".unfinished"
"""Where earlier versions wrote checkpoints."""
_PICKLED = "training_args.bin"
"""Of transformers; nothing reads it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What the scores of cases are computed from."""

    labels: Labels
    files: CaseFiles | None
    """Tile features; None where vectors are given."""
    vectors: Tensor | None
    """``[cases, width]`` on the device, for a frozen encoder."""
    device: torch.device
    precision: str

    def scores(
        self, model: SlideModel, cases: Sequence[int], done: Callable[[int], None] = lambda tiles: None
    ) -> Tensor:
        """The scores ``[n, K]`` in float32.

        Of several cases with gradients, only the scores are kept; the backward pass computes one case after another
        again, so that the memory is that of one case.

        Args:
            model: the model.
            cases: numbers of the cases.
            done: called with the number of tiles of each case.
        """
        with autocast(self.precision, self.device.type):
            if self.vectors is not None:
                return model.classifier(self.vectors[list(cases)]).float()
            if len(cases) == 1 or not torch.is_grad_enabled():
                found = [self._scores_of(model, case, done) for case in cases]
            else:
                found = [checkpoint(self._scores_of, model, case, done, use_reentrant=False) for case in cases]
        return torch.cat(found).float()

    def _scores_of(self, model: SlideModel, case: int, done: Callable[[int], None]) -> Tensor:
        assert self.files is not None
        tiles = self.files.read(self.labels.cases[case])
        scores: Tensor = model(tiles.features.to(self.device), tiles.grid.to(self.device))
        done(tiles.num_tiles)
        return scores


class FinetuneTrainer(Trainer):
    """Trains on the cases of a split, and keeps the best epoch.

    Args:
        model: the model.
        inputs: the cases.
        split: numbers of the cases.
        settings: settings of the run.
        seed: seed of the run.
        folder: its folder.
        report: called with the tiles of a case that is computed, and the epoch (from 1).
    """

    def __init__(
        self,
        *,
        model: SlideModel,
        inputs: Inputs,
        split: CaseSplit,
        settings: FinetuneSettings,
        seed: int,
        folder: Path,
        report: Callable[[int, int], None],
    ) -> None:
        labels = inputs.labels
        # The loss of the Cox model compares the cases of a step; vectors are computed together.
        are_together = labels.task == "survival" or inputs.vectors is not None
        arguments = _arguments(settings, seed, folder, inputs.device, len(split.train), are_together=are_together)
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=list(split.train),
            eval_dataset=list(split.validation),
            data_collator=lambda cases: {"cases": torch.tensor(cases)},
        )
        self.remove_callback(PrinterCallback)
        self.inputs, self.split, self.settings, self.folder, self.report = inputs, split, settings, folder, report
        training = labels.targets[list(split.train)]
        self.loss = loss_of(labels.task, training, is_weighted=settings.class_weights)
        self.standard = standard(training) if labels.task == "regression" else None

    def run(self) -> list[dict[str, float]]:
        """Train to the end, from the last complete checkpoint if there is one, and load the weights of the best epoch.

        Returns:
            the epochs; see :func:`epochs_of`.
        """
        assert self.model is not None
        start, _ = newest_intact(self.folder, _verify)
        epochs = []
        if not (self.folder / BEST_NAME).is_file():
            start = None
        if start is not None:
            epochs = epochs_of(TrainerState.load_from_json(str(start / STATE_NAME)).log_history)
        if len(epochs) < self.settings.num_epochs and not self._is_late(epochs):
            self.train(resume_from_checkpoint=None if start is None else str(start))
            epochs = epochs_of(self.state.log_history)
        self.model.load_state_dict(load_file(self.folder / BEST_NAME))
        return epochs

    def _is_late(self, epochs: Sequence[dict[str, float]]) -> bool:
        """Whether the best epoch lies `patience` epochs back."""
        return len(epochs) - best_epoch(epochs, BEST[self.inputs.labels.task]) >= self.settings.patience

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW with the groups of :func:`.model.parameter_groups`."""
        if self.optimizer is None:
            assert self.model is not None
            settings = self.settings
            groups = parameter_groups(
                self.model,
                learning_rate=settings.rate,
                weight_decay=settings.weight_decay,
                layer_decay=settings.layer_decay,
            )
            self.optimizer = torch.optim.AdamW(groups, lr=settings.rate)
        return self.optimizer

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """The mean loss of the cases of a batch.

        Raises:
            RunError: it is not finite.
        """
        cases = inputs["cases"].tolist()
        epoch = int(self.state.epoch or 0) + 1
        scores = self.inputs.scores(model, cases, lambda tiles: self.report(tiles, epoch))
        loss = self.loss(scores, self.inputs.labels.targets[cases].to(scores.device))
        if not math.isfinite(loss.item()):
            first = self.inputs.labels.cases[cases[0]].name
            raise RunError(f"the loss is {loss.item()} in epoch {epoch} at case {first}; {_SLOWER}")
        return loss

    def predict_scores(self, cases: Sequence[int]) -> Tensor:
        """Scores ``[n, K]`` on the CPU, in the units of the targets.

        Raises:
            RunError: they are not finite.
        """
        assert isinstance(self.model, SlideModel)
        self.model.eval()
        with torch.no_grad():
            scores = self.inputs.scores(self.model, cases).cpu()
        if not bool(scores.isfinite().all()):
            raise RunError(f"scores are not finite after step {self.state.global_step}; {_SLOWER}")
        return scores if self.standard is None else scores * self.standard[1] + self.standard[0]

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Log the metrics of the validation part, and keep the weights if the epoch is the best one."""
        labels, cases = self.inputs.labels, list(self.split.validation)
        if cases:
            found = metrics(labels.task, self.predict_scores(cases), labels.targets[cases])
            self.log({f"eval_{name}": value for name, value in found.items()})
        epochs = epochs_of(self.state.log_history)
        if best_epoch(epochs, BEST[labels.task]) == len(epochs):
            assert self.model is not None
            write_tensors(self.folder / BEST_NAME, self.model.state_dict())
        self.control.should_training_stop |= self._is_late(epochs)
        return {}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint, its manifest last, and remove the one before. Without the manifest it is not read.

        Raises:
            RunError: it cannot be written.
        """
        target = self.folder / f"checkpoint-{self.state.global_step}"
        try:
            clear(target)  # what a killed command left
            super()._save_checkpoint(model, trial)
        except (RuntimeError, SafetensorError) as error:  # torch and safetensors raise no OSError on a full disk
            clear(target)
            raise RunError(
                f"the checkpoint of step {self.state.global_step} cannot be written to {self.folder} "
                f"({first_line(error)}); make room on the disk and run the same command again"
            ) from error
        (target / _PICKLED).unlink(missing_ok=True)
        write_manifest(target, [path.name for path in target.iterdir()], step=self.state.global_step)
        sync(self.folder)
        for path in self.folder.glob("checkpoint-*"):
            if path != target:
                clear(path)


def _verify(folder: Path) -> None:
    verify_manifest(folder, what="broken checkpoint", remedy="it is written again")


def remove_checkpoints(folder: Path) -> None:
    """Remove what a finished run does not need."""
    for path in (*folder.glob("checkpoint-*"), folder / _STAGING, folder / BEST_NAME):
        clear(path)


def epochs_of(history: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """By epoch: `epoch`, `loss`, `learning_rate`, and the metrics of the validation part."""
    epochs: dict[int, dict[str, float]] = {}
    for entry in history:
        number = round(entry["epoch"])
        values = epochs.setdefault(number, {"epoch": number})
        values |= {name: entry[name] for name in ("loss", "learning_rate") if name in entry}
        values |= {name.removeprefix("eval_"): value for name, value in entry.items() if name.startswith("eval_")}
    return [dict(sorted(epochs[number].items())) for number in sorted(epochs)]  # JSON of transformers sorts too


def best_epoch(epochs: Sequence[dict[str, float]], metric: str) -> int:
    """The epoch (from 1) with the greatest metric, the first of equals; the last one where no metric is defined."""
    values = [epoch.get(metric, math.nan) for epoch in epochs]
    defined = [value for value in values if not math.isnan(value)]
    return values.index(max(defined)) + 1 if defined else len(epochs)


def _arguments(
    settings: FinetuneSettings, seed: int, folder: Path, device: torch.device, cases: int, *, are_together: bool
) -> TrainingArguments:
    if device.type == "cpu":
        # accelerate imports DeepSpeed if installed, which warns on machines without a GPU unless told.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    per_step = settings.cases_per_step
    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=settings.num_epochs,
        per_device_train_batch_size=per_step if are_together else 1,
        gradient_accumulation_steps=1 if are_together else per_step,
        learning_rate=settings.rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(settings.warmup_epochs * math.ceil(cases / per_step)),
        max_grad_norm=0.0,
        use_cpu=device.type == "cpu",
        seed=seed,
        data_seed=seed,
        logging_strategy="epoch",
        logging_nan_inf_filter=False,
        eval_strategy="epoch",
        save_strategy="epoch",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
    )
    # A process uses one device; transformers would spread batches over all visible ones.
    args._n_gpu = min(1, args.n_gpu)
    return args
