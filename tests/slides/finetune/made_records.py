"""Records of fine-tunings that never ran."""

from __future__ import annotations

import torch

from dilated_attention_pytorch.slides.finetune.labels import Task
from dilated_attention_pytorch.slides.finetune.metrics import metrics
from dilated_attention_pytorch.slides.finetune.page import FinetuneRecord, RunRecord

CLASSES: dict[str, tuple[str, ...]] = {
    "binary": ("normal", "tumour"),
    "classification": ("<b>0", "1 & 2", "3", "4"),
    "multilabel": ("er", "pr", "her2"),
    "regression": ("age", "tmb"),
    "survival": ("months", "dead"),
}


def made_record(kind: str, *, folds: int = 3, seeds: int = 1, cases: int = 40) -> FinetuneRecord:
    """A record of a task, or of a classification in two classes; maps are there for every other case."""
    task: Task = "classification" if kind == "binary" else kind  # type: ignore[assignment]
    classes = CLASSES[kind]
    runs = []
    for fold in range(1, folds + 1):
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(fold)
            number = 1 if task == "survival" else len(classes)
            if task == "classification":
                targets = torch.randint(number, (cases,), generator=generator)
                truth = 2 * torch.nn.functional.one_hot(targets, number).float()
            elif task == "survival":
                time = torch.rand(cases, generator=generator) * 60
                targets = torch.stack([time.round(), (torch.rand(cases, generator=generator) < 0.6).float()], 1)
                truth = -time[:, None] / 20
            else:
                truth = torch.randn(cases, number, generator=generator)
                targets = (truth > 0).float() if task == "multilabel" else truth * torch.tensor([10.0, 300.0]) + 50
            generator.manual_seed(100 * fold + seed)
            scores = truth + torch.randn(cases, number, generator=generator)
            scores = scores * torch.tensor([10.0, 300.0]) + 50 if task == "regression" else scores
            names = [f"case {fold}-{index}" for index in range(cases)]
            patients = [f"p{fold}-{index // 2}" for index in range(cases)]
            epochs = [
                {"epoch": e, "loss": 2 / e + fold / 10, **metrics(task, scores + 4 / e, targets)} for e in range(1, 7)
            ]
            maps = {name: f"maps/{name}.png" for name in names[::2]}
            runs.append(RunRecord(fold, seed, epochs, 4, names, patients, scores, targets, maps))
    return FinetuneRecord(
        task, classes, {"checkpoint": "slide_encoder.pth", "epochs": 6, "learning_rate": 2.5e-4}, runs
    )
