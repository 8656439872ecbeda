"""What fine-tuning writes: weights, predictions and metrics of a run, and metrics and page of all runs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from dilated_attention_pytorch.output import replacing, write_text

from . import page
from .labels import Labels
from .metrics import metrics
from .model import SlideModel
from .page import FinetuneRecord, RunRecord

RUN_NAME, WEIGHTS_NAME, PREDICTIONS_NAME = "run.json", "model.safetensors", "predictions.csv"
METRICS_NAME, MAPS_NAME = "metrics.json", "maps"


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a file of safetensors atomically."""
    with replacing(path) as staged:
        # safetensors' own function for files raises no OSError on a full disk, and lets the owner alone read them.
        staged.write_bytes(save(tensors, metadata))


def write_weights(model: SlideModel, folder: Path, standard: tuple[Tensor, Tensor] | None) -> None:
    """Write the weights of a run.

    Args:
        model: the trained model, whose classifier changes.
        folder: the run's folder.
        standard: mean and deviation of the targets of a regression. They go into the classifier, so that its scores
            are in the units of the targets.
    """
    if standard is not None:
        linear = model.classifier[0]
        assert isinstance(linear, nn.Linear)
        mean, deviation = (values.to(linear.weight.device) for values in standard)
        with torch.no_grad():
            linear.weight.mul_(deviation[:, None])
            linear.bias.mul_(deviation).add_(mean)
    write_tensors(folder / WEIGHTS_NAME, model.state_dict())


def write_run(
    folder: Path,
    labels: Labels,
    *,
    about: Mapping[str, Any],
    parts: Mapping[str, tuple[Sequence[int], Tensor]],
) -> None:
    """Write predictions.csv and run.json of a finished run, run.json last.

    Args:
        folder: the run's folder.
        labels: the cases.
        about: what else run.json says: fold, seed, epochs and the like.
        parts: by name, the cases of a part and their scores ``[n, K]``.
    """
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    names, _ = _columns(labels, labels.targets[:0], torch.empty(0, labels.num_outputs))
    writer.writerow(["case", "patient", "split", *names])
    for part, (cases, scores) in parts.items():
        _, rows = _columns(labels, labels.targets[list(cases)], scores)
        for case, row in zip(cases, rows, strict=True):
            writer.writerow([labels.cases[case].name, labels.cases[case].patient, part, *row])
    write_text(folder / PREDICTIONS_NAME, table.getvalue())
    results = {
        part: {
            "metrics": metrics(labels.task, scores, labels.targets[list(cases)]),
            "cases": [labels.cases[case].name for case in cases],
            "scores": scores.tolist(),
        }
        for part, (cases, scores) in parts.items()
    }
    write_text(folder / RUN_NAME, _json({**about, "results": results}))


def _columns(labels: Labels, targets: Tensor, scores: Tensor) -> tuple[list[str], list[list[Any]]]:
    """Names and rows of scores, probabilities and targets."""
    classes = labels.classes
    if labels.task == "survival":
        return ["log_risk", "time", "event"], torch.cat((scores, targets), dim=1).tolist()
    if labels.task == "regression":
        names = [f"{what}_{name}" for what in ("prediction", "target") for name in classes]
        return names, torch.cat((scores, targets), dim=1).tolist()
    names = [f"{what}_{name}" for what in ("score", "probability") for name in classes]
    if labels.task == "multilabel":
        values = torch.cat((scores, scores.sigmoid()), dim=1).tolist()
        rows = [[*row, *target] for row, target in zip(values, targets.long().tolist(), strict=True)]
        return [*names, *(f"target_{name}" for name in classes)], rows
    values = torch.cat((scores, scores.softmax(dim=1)), dim=1).tolist()
    return [*names, "target"], [[*row, classes[one]] for row, one in zip(values, targets.tolist(), strict=True)]


def summarise(output: Path, folders: Sequence[Path], labels: Labels, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Write metrics.json and the page of all runs; returns the contents of metrics.json."""
    record = FinetuneRecord(
        labels.task, labels.classes, settings, [_record_of(output, folder, labels) for folder in folders]
    )
    found = page.results(record)
    runs = [
        {"fold": run.fold, "seed": run.seed, "best_epoch": run.best_epoch, "test": of_test}
        for run, of_test in zip(record.runs, found.runs, strict=True)
    ]
    pooled = {name: {"value": of.value, "low": of.low, "high": of.high} for name, of in found.pooled.items()}
    values = {
        "task": labels.task,
        "classes": list(labels.classes),
        "runs": runs,
        "mean": found.mean,
        "deviation": found.deviation,
        "pooled": pooled,
    }
    write_text(output / METRICS_NAME, _json(values))
    page.write_page(output, record, found)
    return values


def _record_of(output: Path, folder: Path, labels: Labels) -> RunRecord:
    run = json.loads((folder / RUN_NAME).read_text(encoding="utf-8"))
    test, number = run["results"]["test"], {case.name: index for index, case in enumerate(labels.cases)}
    cases = [number[name] for name in test["cases"]]
    # An undefined metric is null in JSON.
    epochs = [{name: math.nan if value is None else value for name, value in of.items()} for of in run["epochs"]]
    return RunRecord(
        fold=run["fold"],
        seed=run["seed"],
        epochs=epochs,
        best_epoch=run["best_epoch"],
        names=test["cases"],
        patients=[labels.cases[case].patient for case in cases],
        scores=torch.tensor(test["scores"]),
        targets=labels.targets[cases],
        maps={name: path for name in test["cases"] if (path := _map_of(output, folder, labels, number[name]))},
    )


def _map_of(output: Path, folder: Path, labels: Labels, case: int) -> str:
    """The path of a case's first map relative to the output folder, "" if there is none."""
    path = folder / MAPS_NAME / f"{labels.cases[case].slides[0]}.png"
    return path.relative_to(output).as_posix() if path.is_file() else ""


def _json(values: Any) -> str:
    """JSON, with null for what is not a number: a metric that is not defined."""
    return json.dumps(_without_nan(values), indent=1) + "\n"


def _without_nan(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _without_nan(value) for name, value in values.items()}
    if isinstance(values, list):
        return [_without_nan(value) for value in values]
    return None if isinstance(values, float) and math.isnan(values) else values
