"""Model evaluation by context length: bits per byte and recall."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import choose_device, machine, set_threads
from dilated_attention_pytorch.memory import is_out_of_memory
from dilated_attention_pytorch.output import check_new_file, write_text
from dilated_attention_pytorch.progress import progress_bar

from . import preflight
from .data.documents import documents_of, held_out_rows
from .data.windows import EvaluationWindows
from .eight_bit import Weights, import_torchao, make_small, weight_bytes
from .evaluated_model import EvaluatedModel, open_model
from .evaluation import binned, bits_of_tokens, chart, legend_above, predicted
from .recall import NEEDLE_LETTERS, Asked, Task, associations, needle
from .row_logits import RowLogits, row_logits
from .run_settings import LARGEST_SEED, LONGEST_TEXT, DeviceChoice, PlainPrecision, check_choice, check_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

RESULT_NAME = "eval.json"
_MOST_RECALL_TEXTS = 2**16
_SHORTEST = 256
"""Minimum length in tokens of recall texts, so that their words fit."""
_RESIDUES = 8
"""Different distances of a repeated string at each length, one after the other."""


@dataclass(kw_only=True, slots=True)
class EvalSettings:
    """Settings of a model evaluation.

    Raises:
        ValueError: a value is out of range.
    """

    data: tuple[Path, ...] = ()
    """Files or folders of text, as for `train`. Windows are taken from their held-out part. Default: the run's training
    data, or the source files of the running Python's standard library."""
    text_field: str = ""
    """Field or column of records that holds the text. Default: the run's own, or "text"."""
    context_lengths: tuple[int, ...] = ()
    """Context lengths in tokens, each measured on the same text. Default: 1024, 2048, ... (or from a quarter of the
    model's own length if that is less) up to twice its own length."""
    windows: int = 8
    """Held-out windows of the largest length."""
    recall_texts: int = 8
    """Texts per length and recall task; 0 leaves the recall tasks out."""
    precision: PlainPrecision = "auto"
    """Number format of the computation, as in training."""
    device: DeviceChoice = "auto"
    """"auto" takes a CUDA device if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves the number to PyTorch."""
    weight_format: Weights = "stored"
    """How the layers' matrices are stored. "int8" or "float8": in 8 bits (torchao). "stored": as in the file."""
    seed: int = 0
    """Seed of the strings, words and positions of the recall tasks."""

    def __post_init__(self) -> None:
        for name, least in (("windows", 1), ("recall_texts", 0), ("threads", 0), ("seed", 0)):
            check_number(self, name, least=least)
        check_number(self, "seed", most=LARGEST_SEED)
        check_number(self, "recall_texts", most=_MOST_RECALL_TEXTS)
        check_choice(self, "precision", get_args(PlainPrecision))
        check_choice(self, "weight_format", get_args(Weights))
        if any(length > LONGEST_TEXT for length in self.context_lengths):
            raise ValueError(
                f"context_lengths must be at most {LONGEST_TEXT:,} tokens, got {max(self.context_lengths)}"
            )
        if any(length < 16 for length in self.context_lengths) or len(set(self.context_lengths)) < len(
            self.context_lengths
        ):
            raise ValueError(
                f"context_lengths must be different numbers of at least 16 tokens, got {list(self.context_lengths)}"
            )


def evaluate_model(model: str, settings: EvalSettings, output: Path | None, console: Console) -> Path:
    """Evaluate a model, print the tables, and write ``output`` and a plot next to it.

    Args:
        model: a run folder, or a transformers model.
        settings: settings of the evaluation.
        output: new JSON file; None = ``eval.json`` in the folder.
        console: console for the tables.

    Returns:
        the path of the JSON file.

    Raises:
        RunError: a problem with the model, text, file or device; nothing is written.
    """
    preflight.check_packages("training")
    preflight.check_alone("eval", "start it without torchrun")
    file = output or (Path(model) / RESULT_NAME if Path(model).is_dir() else Path(RESULT_NAME))
    picture = file.with_suffix(".png")
    if picture == file:
        raise RunError(f"--output-file {file}: the figures are JSON, for example {file.with_suffix('.json')}")
    for path in (file, picture):
        check_new_file(path, "--output-file")
    device = choose_device(settings.device)
    precision = preflight.choose_precision(settings.precision, device)
    set_threads(settings.threads)
    if settings.weight_format != "stored":
        import_torchao(f"--weight-format {settings.weight_format}")
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    opened = open_model(model, device)
    make_small(opened.model, settings.weight_format)
    lengths = sorted(settings.context_lengths) or _lengths_up_to(2 * opened.own_length)
    for name, reason in opened.rejected.items():
        say(f"{name} is skipped, {opened.weights} is used instead: {reason}")
    held_out = _held_out(opened, settings, max(lengths), say)
    _check_length(model, opened, held_out.windows[0], precision)
    result = _measure(opened, settings, held_out, lengths, precision, console)
    result = {
        "model": model,
        "weights": opened.weights,
        "own_length": opened.own_length,
        "packing": "documents" if opened.reads_documents else "windows",
        "precision": precision,
        "weights_as": settings.weight_format,
        "weight_bytes": weight_bytes(opened.model),
        **result,
        "machine": machine(),
    }
    print_result(result, console)
    write_text(file, json.dumps(result, indent=1) + "\n")
    draw_result(result, picture)
    say(f"written: {file} and {picture}")
    return file


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """Held-out text for the evaluation."""

    windows: list[Tensor]
    """Tokens, int64 ``[N]`` each, across documents."""
    texts: list[Tensor]
    """Separately evaluated texts: the windows, or for a model trained on packed documents, as many rows' documents."""


def _held_out(opened: EvaluatedModel, settings: EvalSettings, length: int, say: Callable[[str], None]) -> _HeldOut:
    """Windows of ``length`` tokens, and rows of documents; for a mixture, from each source in proportion.

    Raises:
        RunError: there is less text than one window, or a token outside the model's vocabulary.
    """
    texts, weights = opened.held_out(settings.data, settings.text_field, say)
    least = min(map(len, texts))
    if least < length:
        raise RunError(
            f"--data holds out {least:,} tokens, fewer than one window of --context-lengths {length}; give more "
            f"text, or --context-lengths of at most {least}"
        )
    held_out = _HeldOut([], [])
    for text, weight in zip(texts, weights, strict=True):
        count = max(1, int(settings.windows * weight / sum(weights)))
        windows = EvaluationWindows(text, length, count)
        held_out.windows.extend(windows[index]["input_ids"] for index in range(len(windows)))
        if opened.reads_documents:
            rows = held_out_rows(text, length, count)
            held_out.texts.extend(document for row in rows for document in documents_of(row) if len(document) > 1)
    for tokens in (*held_out.windows, *held_out.texts):
        opened.check_tokens(tokens)
    return held_out if opened.reads_documents else _HeldOut(held_out.windows, held_out.windows)


def _check_length(model: str, opened: EvaluatedModel, window: Tensor, precision: str) -> None:
    """Raise :class:`RunError` unless the model can read a window longer than its own length."""
    if len(window) <= opened.own_length:
        return
    try:
        predicted(opened.model, row_logits(opened.model), window, precision)
    except (IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        # A learned position table is too short; token ids were checked before.
        reason = str(error).strip().partition("\n")[0]
        raise RunError(
            f"{model} cannot read {len(window):,} tokens ({reason}); give --context-lengths up to {opened.own_length}"
        ) from error


def _lengths_up_to(longest: int) -> list[int]:
    """Doubling lengths from 1,024, or from an eighth of the longest if that is less."""
    lengths = [max(16, min(1024, longest // 8))]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return lengths


def _measure(
    opened: EvaluatedModel,
    settings: EvalSettings,
    held_out: _HeldOut,
    lengths: Sequence[int],
    precision: str,
    console: Console,
) -> dict[str, Any]:
    tokens = sum(len(text) - 1 for text in held_out.texts)
    bytes_per_token = sum(opened.num_bytes(text[1:]) for text in held_out.texts) / tokens
    result: dict[str, Any] = {
        "windows": len(held_out.windows),
        "bytes_per_token": bytes_per_token,
        "bits_per_byte": {},
        "by_position": {},
    }
    for length in lengths:
        doing = f"reading {length:,} tokens"
        bits = bits_of_tokens(opened.model, held_out.texts, length, precision, console, doing)
        mean = torch.cat(bits).mean() / bytes_per_token
        if not bool(mean.isfinite()):
            raise RunError(f"{doing}, the model computes NaN or infinity in {precision}; try --precision float32")
        result["bits_per_byte"][str(length)] = mean.item()
        by_position = _by_position(bits, length - 1) / bytes_per_token
        result["by_position"][str(length)] = list(zip(*binned(by_position), strict=True))
    if settings.recall_texts:
        recalled = [length for length in lengths if length >= _SHORTEST]
        logits, total = row_logits(opened.model), 2 * len(recalled) * settings.recall_texts
        with progress_bar(console, "texts") as show:
            done = 0

            def look(task: Task) -> _Found:
                nonlocal done
                show(f"recall at {len(task.tokens):,} tokens", done, total)
                done += 1
                return _look(opened, logits, precision, task)

            result["needle"] = list(_needles(opened, settings, held_out.windows, recalled, look))
            result["associations"] = _associations(opened, settings, recalled, look)
    return result


def _by_position(bits: Sequence[Tensor], length: int) -> Tensor:
    """Mean bits by position in a chunk of ``length`` predicted tokens, up to the longest chunk."""
    pieces = [piece for of_text in bits for piece in of_text.split(length)]
    sums, counts = torch.zeros(2, max(map(len, pieces)), dtype=torch.float64)
    for piece in pieces:
        sums[: len(piece)] += piece
        counts[: len(piece)] += 1
    return sums / counts


def _needles(
    opened: EvaluatedModel,
    settings: EvalSettings,
    held_out: Sequence[Tensor],
    lengths: Sequence[int],
    look: Callable[[Task], _Found],
) -> Iterator[dict[str, float]]:
    """Bits per letter of a random string at its repetition and at its first occurrence, by distance.

    Under a dilation rate r a token sees only keys of its own residue: what came after a passage D tokens ago, only if
    r divides D - 1. So each text has another distance, at most ``_RESIDUES - 1`` tokens shorter than the first's.
    """
    for length in lengths:
        distance = length - 2 * NEEDLE_LETTERS - 64
        tasks = [
            needle(
                held_out[number % len(held_out)],
                distance - number % _RESIDUES,
                settings.seed + number,
                opened.tokens_of,
            )
            for number in range(settings.recall_texts)
        ]
        answers = [look(task) for task in tasks]
        yield {
            "distance": distance,
            "again": statistics.fmean(bits / asked.num_bytes for answer in answers for asked, bits, _ in answer.again),
            "first": statistics.fmean(
                answer.first / task.again[0].num_bytes for answer, task in zip(answers, tasks, strict=True)
            ),
        }


def _associations(
    opened: EvaluatedModel, settings: EvalSettings, lengths: Sequence[int], look: Callable[[Task], _Found]
) -> list[dict[str, float]]:
    """Values given their keys: fraction with every token the most likely, and bits per byte, by distance."""
    asked: list[tuple[Asked, float, bool]] = []
    for length in lengths:
        for number in range(settings.recall_texts):
            asked += look(associations(length, settings.seed + number, opened.tokens_of)).again
    rows = []
    for low, high in zip([0, *lengths], lengths, strict=False):
        of_range = [(one, bits, known) for one, bits, known in asked if low < one.distance <= high]
        if of_range:
            rows.append(
                {
                    "distance": statistics.fmean(one.distance for one, _, _ in of_range),
                    "asked": len(of_range),
                    "answered": statistics.fmean(known for _, _, known in of_range),
                    "bits_per_byte": statistics.fmean(bits / one.num_bytes for one, bits, _ in of_range),
                }
            )
    return rows


@dataclass(frozen=True, slots=True)
class _Found:
    again: list[tuple[Asked, float, bool]]
    """Bits of every repeated item, and whether each of its tokens was the most likely."""
    first: float
    """Bits of the first occurrence."""


def _look(opened: EvaluatedModel, parts: RowLogits | None, precision: str, task: Task) -> _Found:
    opened.check_tokens(task.tokens)
    seen = predicted(opened.model, parts, task.tokens, precision)

    def of(rows: tuple[int, int]) -> tuple[float, bool]:
        span = slice(rows[0] - 1, rows[1] - 1)  # the first token of a text is not predicted
        return seen.bits[span].sum().item(), bool(seen.is_likeliest[span].all())

    first = of(task.first)[0] if task.first[1] else 0.0
    return _Found([(asked, *of(asked.rows)) for asked in task.again], first)


def print_result(result: Mapping[str, Any], console: Console) -> None:
    """Print the tables of a result."""
    from rich.table import Table

    title = "held-out documents, each read alone" if result["packing"] == "documents" else "held-out text"
    table = Table("reading at most, tokens", "bits per byte", title=title, title_justify="left")
    for length, bits in result["bits_per_byte"].items():
        own = " (its own length)" if int(length) == result["own_length"] else ""
        table.add_row(f"{int(length):,}{own}", f"{bits:.4f}")
    console.print(table)
    if result.get("needle"):
        table = Table(
            "distance, tokens",
            "where it comes again",
            "where it came first",
            title_justify="left",
            title="bits per byte of random letters",
        )
        for row in result["needle"]:
            table.add_row(f"{row['distance']:,}", f"{row['again']:.3f}", f"{row['first']:.3f}")
        console.print(table)
    if result.get("associations"):
        table = Table(
            "distance, tokens, mean",
            "asked",
            "answered",
            "bits per byte",
            title_justify="left",
            title="second words of pairs, by their first",
        )
        for row in result["associations"]:
            table.add_row(
                f"{row['distance']:,.0f}", f"{row['asked']}", f"{row['answered']:.1%}", f"{row['bits_per_byte']:.3f}"
            )
        console.print(table)


def draw_result(result: Mapping[str, Any], file: Path) -> None:
    """Plot a result."""
    with chart(file, (9, 7.8)) as figure:
        by_length, by_position, by_needle, by_pair = figure.subplots(2, 2).flat
        lengths = {int(length): bits for length, bits in result["bits_per_byte"].items()}
        _draw(
            by_length, "tokens read at most", "bits per byte, held-out", {"": (list(lengths), list(lengths.values()))}
        )
        by_length.axvline(result["own_length"], color="black", linestyle="--", linewidth=1, label="own length")
        legend_above(by_length)
        curves = {
            f"reading {int(name):,}": tuple(zip(*points, strict=True)) for name, points in result["by_position"].items()
        }
        _draw(by_position, "position in the text, tokens", "bits per byte, held-out", curves)
        rows = result.get("needle", [])
        distances = [row["distance"] for row in rows]
        _draw(
            by_needle,
            "distance, tokens",
            "bits per byte of random letters",
            {
                "repeated": (distances, [row["again"] for row in rows]),
                "first": (distances, [row["first"] for row in rows]),
            },
        )
        rows = result.get("associations", [])
        answered = ([row["distance"] for row in rows], [row["answered"] for row in rows])
        _draw(by_pair, "distance, tokens", "share of second words predicted", {"": answered})
        by_pair.set_ylim(-0.03, 1.03)


def _draw(axes: Axes, x: str, y: str, curves: Mapping[str, Any]) -> None:
    for name, (positions, values) in curves.items():
        axes.plot(positions, values, marker="o", markersize=3, label=name or None)
    if any(curves):
        legend_above(axes)
    if any(positions for positions, _ in curves.values()):
        axes.set_xscale("log", base=2)
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
