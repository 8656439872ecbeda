"""One HTML page of a fine-tuning: metrics, curves, and the cases that were predicted worst."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import torch
from sklearn.metrics import confusion_matrix, roc_curve
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from dilated_attention_pytorch.html_page import COLORS, LAYOUT, MISSING, Html, drawn, page, table
from dilated_attention_pytorch.installation import importing
from dilated_attention_pytorch.output import write_text

from .labels import Task
from .metrics import (
    BEST,
    RESAMPLES,
    Interval,
    discordance,
    kaplan_meier,
    log_odds,
    metrics,
    why_undefined,
    with_intervals,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PAGE_NAME = "report.html"
_WORST = 20
"""Cases in the table of the worst."""
_TITLES = {
    "auroc": "AUROC",
    "average_precision": "Average precision",
    "balanced_accuracy": "Balanced accuracy",
    "accuracy": "Accuracy",
    "f1": "F1",
    "kappa": "Kappa",
    "quadratic_kappa": "Quadratic kappa",
    "pearson_r": "Pearson r",
    "r2": "R\u00b2",
    "mae": "Mean absolute error",
    "c_index": "C-index",
}


@dataclass(frozen=True)
class RunRecord:
    """One run: a fold with a seed."""

    fold: int
    """From 1."""
    seed: int
    epochs: Sequence[Mapping[str, float]]
    """Of every epoch ``"epoch"`` (from 1), ``"loss"`` of training, and the validation metrics by their names."""
    best_epoch: int
    """The epoch whose weights made the test scores."""
    names: Sequence[str]
    """Names of the test cases."""
    patients: Sequence[str]
    scores: Tensor
    """Of the test cases, as :func:`.metrics.metrics` takes them."""
    targets: Tensor
    maps: Mapping[str, str] = field(default_factory=dict)
    """Links, relative to the page, to the heat maps of test cases by name."""

    @property
    def title(self) -> str:
        return f"fold {self.fold}, seed {self.seed}"


@dataclass(frozen=True)
class FinetuneRecord:
    """What the page shows."""

    task: Task
    classes: Sequence[str]
    settings: Mapping[str, Any]
    runs: Sequence[RunRecord]


class Results(NamedTuple):
    """The test metrics of all runs."""

    runs: list[dict[str, float]]
    """Of each run."""
    mean: dict[str, float]
    """Over the runs that define a metric."""
    deviation: dict[str, float]
    """Standard deviation over these runs; NaN of fewer than two."""
    pooled: dict[str, Interval]
    """Of all test cases of all runs together, with intervals by bootstrap over patients."""


def results(record: FinetuneRecord, *, resamples: int = RESAMPLES, seed: int = 0) -> Results:
    """Compute the test metrics of a record; ``resamples`` and ``seed`` as in :func:`.metrics.with_intervals`."""
    of_runs = [metrics(record.task, run.scores, run.targets) for run in record.runs]
    mean, deviation = {}, {}
    for name in of_runs[0]:
        defined = [found[name] for found in of_runs if not math.isnan(found[name])]
        mean[name] = statistics.fmean(defined) if defined else math.nan
        deviation[name] = statistics.stdev(defined) if len(defined) > 1 else math.nan
    patients = [patient for run in record.runs for patient in run.patients]
    pooled = with_intervals(record.task, *_pooled(record), patients, resamples=resamples, seed=seed)
    return Results(of_runs, mean, deviation, pooled)


def write_page(folder: Path, record: FinetuneRecord, found: Results | None = None) -> Path:
    """Write ``report.html`` into ``folder`` atomically, and return its path. The page needs no network access.

    Args:
        folder: folder of the page, from which the links to heat maps start.
        record: one run or more.
        found: the results, if they are computed already.

    Raises:
        ImportError: plotly is missing; the message says how to install it.
        ValueError: see :func:`.metrics.metrics`.
    """
    with importing("the page of a fine-tuning", "finetune"):
        import plotly.graph_objects  # noqa: F401
    path = folder / PAGE_NAME
    write_text(path, page(f"Fine-tuning: {record.task}", _parts(record, results(record) if found is None else found)))
    return path


def _pooled(record: FinetuneRecord) -> tuple[Tensor, Tensor]:
    return torch.cat([run.scores for run in record.runs]), torch.cat([run.targets for run in record.runs])


def _parts(record: FinetuneRecord, found: Results) -> Iterator[str]:
    cases = len({name for run in record.runs for name in run.names})
    patients = len({patient for run in record.runs for patient in run.patients})
    yield f"<p>Runs: {len(record.runs)}. Test cases: {cases:,}, of {patients:,} patients.</p>"
    yield "<h2>Test metrics</h2>" + _table_of_metrics(record, found)
    yield "<p>The last two lines take the test cases of all runs together. "
    yield "The interval is that of a bootstrap over patients, between percentiles.</p>"
    for sentence in _undefined(record, found):
        yield f"<p>{html.escape(sentence)}</p>"
    yield "<h2>Charts</h2><main>"
    yield drawn(_over_epochs(record, "loss"), "loss", "Training loss")
    best = BEST[record.task]
    if any(best in epoch for run in record.runs for epoch in run.epochs):
        yield drawn(_over_epochs(record, best), "validation", f"Validation: {_TITLES[best]}")
    yield from _of_task(record)
    yield "</main>"
    yield f"<h2>Test cases predicted worst</h2>{_worst(record)}"
    settings = [(name, [str(value)]) for name, value in record.settings.items()]
    yield f"<h2>Settings</h2>{table(['value'], settings)}"


def _table_of_metrics(record: FinetuneRecord, found: Results) -> str:
    names = list(found.mean)
    rows = [
        (run.title, [str(run.best_epoch), f"{len(run.names):,}", *(_number(of_run[name]) for name in names)])
        for run, of_run in zip(record.runs, found.runs, strict=True)
    ]
    for title, values in (
        ("mean of the runs", [_number(found.mean[name]) for name in names]),
        ("standard deviation", [_number(found.deviation[name]) for name in names]),
        ("all test cases", [_number(found.pooled[name].value) for name in names]),
        ("95% interval", [f"{_number(found.pooled[n].low)} to {_number(found.pooled[n].high)}" for n in names]),
    ):
        rows.append((title, ["", "", *values]))
    return table(["best epoch", "cases", *(_TITLES[name] for name in names)], rows)


def _number(value: float) -> str:
    if math.isnan(value):
        return MISSING
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def _undefined(record: FinetuneRecord, found: Results) -> Iterator[str]:
    for run in record.runs:
        reason = why_undefined(record.task, run.targets, record.classes)
        if reason is not None:
            yield f"{run.title}: {reason}"
    undefined = [f"{one.undefined:,} for {_TITLES[name]}" for name, one in found.pooled.items() if one.undefined]
    if undefined:
        yield f"Resamples that do not define a metric are left out: {', '.join(undefined)}."


def _over_epochs(record: FinetuneRecord, name: str) -> Figure:
    """A logged value over the epochs, with a larger mark at the epoch that was chosen."""
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for index, run in enumerate(record.runs):
        points = [(epoch["epoch"], epoch[name]) for epoch in run.epochs if name in epoch]
        sizes = [11 if epoch == run.best_epoch else 5 for epoch, _ in points]
        figure.add_trace(
            Scatter(
                x=[epoch for epoch, _ in points],
                y=[value for _, value in points],
                name=run.title,
                line={"color": COLORS[index % len(COLORS)], "width": 1.5},
                mode="lines+markers",
                marker={"size": sizes},
            )
        )
    step = max(1, max(len(run.epochs) for run in record.runs) // 10)
    return _with_axes(figure, "epoch", "", hovermode="x unified").update_xaxes(dtick=step)


def _with_axes(figure: Figure, x: str, y: str, **layout: Any) -> Figure:
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, "hoverformat": ".4~g"}}
    return figure.update_layout({**LAYOUT, **axes, "hovermode": "closest", **layout})


def _of_task(record: FinetuneRecord) -> Iterator[str]:
    """The charts of a task."""
    scores, targets = _pooled(record)
    if record.task == "classification":
        counts = confusion_matrix(targets, scores.argmax(1), labels=range(len(record.classes)))
        yield drawn(_confusion(torch.from_numpy(counts), record.classes), "confusion", "Confusion matrix")
    if record.task in ("classification", "multilabel"):
        yield drawn(_roc(record), "roc", "ROC curves")
    if record.task == "survival":
        yield drawn(_survival(record), "survival", "Kaplan-Meier estimate above and below each run's median risk")
    if record.task == "regression":
        for index, name in enumerate(record.classes):
            yield drawn(_scatter(record, index), f"scatter-{index}", f"Predictions of {name}")


def _confusion(counts: Tensor, classes: Sequence[str]) -> Figure:
    from plotly.graph_objects import Figure, Heatmap

    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    text = [
        [f"{count:,}<br>{share:.0%}" for count, share in zip(*row, strict=True)]
        for row in zip(counts.tolist(), shares.tolist(), strict=True)
    ]
    names = [html.escape(name) for name in classes]
    number = list(range(len(names)))
    look = {"colorscale": "Blues", "zmin": 0, "zmax": 1, "showscale": False, "hoverinfo": "skip"}
    figure = Figure(Heatmap(z=shares.tolist(), text=text, texttemplate="%{text}", **look))
    ticks = {"tickvals": number, "ticktext": names, "showgrid": False, "zeroline": False}
    figure = _with_axes(figure, "prediction", "target", showlegend=False)
    return figure.update_layout(xaxis=ticks, yaxis={**ticks, "autorange": "reversed", "automargin": True})


def _roc(record: FinetuneRecord) -> Figure:
    """A curve for each run of two classes, or for each class against the others, or label, of all runs.

    Where all cases or none are positive, there is no curve.
    """
    from plotly.graph_objects import Figure, Scatter

    scores, targets = _pooled(record)
    curves = []
    if record.task == "multilabel":
        curves = [(name, scores[:, k], targets[:, k] > 0) for k, name in enumerate(record.classes)]
    elif len(record.classes) == 2:
        curves = [(run.title, log_odds(run.scores)[:, 1], run.targets == 1) for run in record.runs]
    else:
        curves = [(name, log_odds(scores)[:, k], targets == k) for k, name in enumerate(record.classes)]
    figure = Figure(
        Scatter(x=[0, 1], y=[0, 1], mode="lines", line={"color": "#9ca3af", "dash": "dot"}, showlegend=False)
    )
    for index, (name, score, is_positive) in enumerate(curves):
        if is_positive.all() or not is_positive.any():
            continue
        false, true, _ = roc_curve(is_positive, score, drop_intermediate=False)
        line = {"color": COLORS[index % len(COLORS)], "width": 1.5}
        figure.add_trace(Scatter(x=false.tolist(), y=true.tolist(), name=html.escape(name), mode="lines", line=line))
    return _with_axes(figure, "false positive rate", "true positive rate")


def _survival(record: FinetuneRecord) -> Figure:
    from plotly.graph_objects import Figure, Scatter

    is_high = torch.cat([run.scores[:, 0] > run.scores[:, 0].median() for run in record.runs])
    _, targets = _pooled(record)
    figure = Figure()
    for index, (name, chosen) in enumerate((("low risk", ~is_high), ("high risk", is_high))):
        times, alive = kaplan_meier(targets[chosen])
        line = {"color": COLORS[index], "width": 1.5, "shape": "hv"}
        title = f"{name} ({int(chosen.sum()):,} cases)"
        figure.add_trace(Scatter(x=times.tolist(), y=alive.tolist(), name=title, mode="lines", line=line))
    return _with_axes(figure, "time", "share without event").update_layout(yaxis={"range": [0, 1.02]})


def _scatter(record: FinetuneRecord, column: int) -> Figure:
    from plotly.graph_objects import Figure, Scatter

    _, targets = _pooled(record)
    ends = [targets[:, column].min().item(), targets[:, column].max().item()]
    figure = Figure(Scatter(x=ends, y=ends, mode="lines", line={"color": "#9ca3af", "dash": "dot"}, showlegend=False))
    for index, run in enumerate(record.runs):
        figure.add_trace(
            Scatter(
                x=run.targets[:, column].tolist(),
                y=run.scores[:, column].tolist(),
                name=run.title,
                mode="markers",
                marker={"color": COLORS[index % len(COLORS)], "size": 6, "opacity": 0.7},
                text=[html.escape(name) for name in run.names],
            )
        )
    return _with_axes(figure, "target", "prediction")


_MEASURES: Mapping[Task, str] = {
    "classification": "cross-entropy",
    "multilabel": "mean cross-entropy of the labels",
    "regression": "mean error in standard deviations of the targets",
    "survival": "share of its pairs in the wrong order",
}


def _worst(record: FinetuneRecord) -> str:
    """The test cases with the largest errors."""
    errors = [
        (error, index, run)
        for run in record.runs
        for index, error in enumerate(_errors(record, run).tolist())
        if not math.isnan(error)
    ]
    errors.sort(key=lambda found: -found[0])
    head = ["patient", "run", "target", "prediction", _MEASURES[record.task], "heat map"]
    rows = []
    for error, index, run in errors[:_WORST]:
        name = run.names[index]
        link = Html(f'<a href="{html.escape(quote(run.maps[name]))}">open</a>') if name in run.maps else MISSING
        rows.append((name, [run.patients[index], run.title, *_described(record, run, index), _number(error), link]))
    return table(head, rows)


def _errors(record: FinetuneRecord, run: RunRecord) -> Tensor:
    """The error of each test case, ``[N]``."""
    scores = run.scores.double()
    if record.task == "classification":
        return cross_entropy(scores, run.targets, reduction="none")
    if record.task == "survival":
        return discordance(scores[:, 0], run.targets)
    targets = run.targets.double()
    if record.task == "multilabel":
        return binary_cross_entropy_with_logits(scores, targets, reduction="none").mean(1)
    deviation = _pooled(record)[1].double().std(0, correction=0).clamp(min=torch.finfo(torch.float64).tiny)
    return ((scores - targets).abs() / deviation).mean(1)


def _described(record: FinetuneRecord, run: RunRecord, index: int) -> tuple[str, str]:
    """Target and prediction of a test case, as text."""
    score, target, classes = run.scores[index], run.targets[index], record.classes
    if record.task == "classification":
        shares = score.double().softmax(0)
        best = int(shares.argmax())
        return classes[int(target)], f"{classes[best]} ({shares[best]:.0%})"
    if record.task == "multilabel":
        return (
            ", ".join(name for name, value in zip(classes, target.tolist(), strict=True) if value > 0) or MISSING,
            ", ".join(f"{name} {p:.0%}" for name, p in zip(classes, score.double().sigmoid().tolist(), strict=True)),
        )
    if record.task == "survival":
        time, event = target.tolist()
        return f"{'event' if event else 'censored'} at {time:g}", f"log-risk {score.item():.3g}"
    return ", ".join(f"{value:.4g}" for value in target.tolist()), ", ".join(f"{value:.4g}" for value in score.tolist())
