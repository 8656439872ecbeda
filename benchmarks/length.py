"""Does length pay? Bits per byte by how much of a text is read, for models of equal size and equal training compute.

    python -m benchmarks.length [--steps N] [--only NAME ...] [--folder FOLDER]

LongNets of the same sizes, with shifted keys, differ in their patterns: dense in windows of 1,024 tokens, a local
window of 1,024, LongNet's segments up to 8,192, these with a window, a window and dense attention in alternating
layers, dense in windows of 8,192. All but the first are trained in stages of 1,024, 4,096 and 8,192 tokens. The seventh
is LongNet in windows of 8,192 tokens from the start, the eighth LongNet without shifted keys. Each is trained by
`dilated-attention train` with as many operations (:mod:`.estimate.flops`: matrices per token, attention per pair) as
LongNet from the start in N steps of 8,192 tokens, and evaluated by `dilated-attention eval`.

The text has distant repetition: a document is all Python source of one transformers model, file after file, at least
32 KiB; often one file is made of parts of another. Tokens are those of a byte-level BPE trained on it.

The same command continues runs that were stopped. With --only, several processes can share the work; the last one to
finish writes the results.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console

from dilated_attention_pytorch.models import LongNetConfig
from dilated_attention_pytorch.output import replacing
from dilated_attention_pytorch.training import TrainSettings, train
from dilated_attention_pytorch.training.manifest import read_json
from dilated_attention_pytorch.training.model_evaluation import EvalSettings, evaluate_model
from dilated_attention_pytorch.training.stages import StageSettings

from .hybrids import flops_of, held_out_curve, slug
from .measured_code import digest
from .study import Study, run
from .study_texts import folder_texts, prepare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROPE_THETA = 1e6
"""Chosen so that half of a head's pairs still match by content at 8,192 tokens."""
SHORT, LONG = 1024, 8192
LENGTHS = (1024, 2048, 4096, 8192)
_REMEDY = "remove the folder and begin anew"


@dataclass(frozen=True, kw_only=True)
class Length(Study):
    """Settings."""

    steps: int = 400
    """Steps of LongNet from the start; the others take its operations."""
    only: tuple[str, ...] = ()
    """Names of the contestants to train in this process; default: all."""
    folder: Path = Path("runs/length")
    """Where the runs are kept, a folder for each state of the code."""
    package: str = "transformers.models"
    """The package whose source is the text."""
    width: int = 128
    """Width of the models."""
    layers: int = 2
    """Layers of the models."""
    vocab_size: int = 4096
    """Tokens of the tokenizer."""
    windows: int = 32
    """Held-out windows of 8,192 tokens."""
    recall_texts: int = 8
    """Texts of a row of the needle."""
    seed: int = 0
    """Seed of the trainings."""
    picture: Path = Path("docs/pictures/length.png")
    """File of the picture."""


class Contestant(NamedTuple):
    """Patterns of the layers, and the length of the training windows."""

    patterns: tuple[str, ...]
    length: int = LONG
    stages: tuple[int, ...] = ()
    shifted_keys: bool = True


LONGNET = ("DilatedPattern([1024, 2048, 8192], [1, 2, 4])",)
STAGES, FRACTIONS = (SHORT, 4096, LONG), (0.6, 0.2, 0.2)
"""Most steps use short windows: copying is learnt in them first, since a step has more texts."""
CONTESTANTS = {
    "dense, 1,024": Contestant(("DilatedPattern([1024], [1])",), SHORT),
    "window": Contestant(("local_window(1023)",), stages=STAGES),
    "LongNet": Contestant(LONGNET, stages=STAGES),
    "LongNet + window": Contestant(("local_window(511) + DilatedPattern([2048, 8192], [2, 4])",), stages=STAGES),
    "window, then dense": Contestant(("local_window(511)", "DilatedPattern([8192], [1])"), stages=STAGES),
    "dense, 8,192": Contestant(("DilatedPattern([8192], [1])",), stages=STAGES),
    "LongNet, long from the start": Contestant(LONGNET),
    "LongNet, own keys": Contestant(LONGNET, stages=STAGES, shifted_keys=False),
}


def settings_of(contestant: Contestant, texts: Path, tokenizer: Path, given: Length) -> TrainSettings:
    """Settings with as many steps as match the operations of LongNet's ``--steps``."""

    def settings(one: Contestant, steps: int) -> TrainSettings:
        model = LongNetConfig(
            vocab_size=given.vocab_size,
            embed_dim=given.width,
            num_layers=given.layers,
            num_heads=4,
            rope_theta=ROPE_THETA,
            shifted_keys=one.shifted_keys,
            layer_patterns=one.patterns,
        )
        return TrainSettings(
            model=model,
            data=(texts,),
            tokenizer=tokenizer,
            cache=given.folder / "cache",
            context_length=one.length,
            batch_size=LONG // one.length,
            stages=StageSettings(lengths=one.stages, fractions=FRACTIONS if one.stages else ()),
            steps=steps,
            learning_rate=3e-3,
            muon_learning_rate=0.03,
            warmup_fraction=0.05,
            seed=given.seed,
            threads=torch.get_num_threads(),
            precision="float32",
            device="cpu",
            log_steps=10,
            eval_steps=max(1, steps // 10),
            save_steps=max(1, steps // 5),
            eval_windows=4 * LONG // one.length,
            final_eval_windows=8 * LONG // one.length,
            quarter_files=1,
            sample_length=0,
        )

    budget = flops_of(settings(CONTESTANTS["LongNet, long from the start"], given.steps))
    a_thousand = settings(contestant, 1000)
    return settings(contestant, max(len(contestant.stages) or 1, round(1000 * budget / flops_of(a_thousand))))


def trained(name: str, settings: TrainSettings, given: Length) -> None:
    """Train a contestant, or continue its training, and evaluate it."""
    folder, console = given.folder / slug(name), Console()
    train(settings, folder, console, may_resume=True)
    if not (folder / "eval.json").exists():
        told = EvalSettings(
            context_lengths=LENGTHS,
            windows=given.windows,
            recall_texts=given.recall_texts,
            threads=torch.get_num_threads(),
        )
        evaluate_model(str(folder), told, None, console)


def collect(chosen: dict[str, TrainSettings], folder: Path) -> list[dict[str, Any]]:
    """Results of the runs, in the order of the contestants."""
    records = []
    for name, settings in chosen.items():
        found = read_json(folder / slug(name) / "eval.json", what="benchmark", remedy=_REMEDY)
        records.append(
            {
                "contestant": name,
                "layer_patterns": settings.model.layer_patterns,
                "shifted_keys": settings.model.shifted_keys,
                "context_length": settings.context_length,
                "stages": settings.stages.lengths,
                "steps": settings.steps,
                "flops": flops_of(settings),
                "tokens": settings.batch_size * settings.stages_by_step.tokens_after(settings.steps),
                "held_out_during_training": held_out_curve(folder / slug(name), settings),
                **{key: found[key] for key in ("bits_per_byte", "by_position", "needle", "associations")},
                "precision": found["precision"],
            }
        )
    return records


def chart(records: list[dict[str, Any]]) -> Figure:
    """Plots of results by length, position and distance, and over the training's operations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Text of 10 points in a width of 6.4 inches can be read on a phone too.
    figure = Figure(figsize=(6.4, 7.4), layout="constrained")
    FigureCanvasAgg(figure)
    by_length, by_position, by_distance, by_compute = figure.subplots(2, 2).flat
    for number, record in enumerate(records):
        style = {"color": f"C{number}", "marker": "o", "markersize": 3}
        by_length.plot([], [], label=record["contestant"], **style)
        by_length.plot(LENGTHS, [record["bits_per_byte"][str(length)] for length in LENGTHS], **style)
        places, bits = zip(*record["by_position"][str(max(LENGTHS))], strict=True)
        by_position.plot(places, bits, **style)
        distances, again = zip(*((row["distance"], row["again"]) for row in record["needle"]), strict=True)
        by_distance.plot(distances, again, **style)
        if record["contestant"].startswith("LongNet"):
            work, curve = zip(*record["held_out_during_training"], strict=True)
            by_compute.plot([one / 1e12 for one in work], curve, **style)
    labels = {
        by_length: ("tokens read at most", "bits per byte"),
        by_position: ("position in the text, tokens", "bits per byte"),
        by_distance: ("distance, tokens", "bits per letter of a repeated string"),
        by_compute: ("operations of the training, $10^{12}$", "bits per byte, reading 8,192"),
    }
    for axes, (x, y) in labels.items():
        if axes is not by_compute:
            axes.set_xscale("log", base=2)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def draw(records: list[dict[str, Any]], file: Path) -> None:
    """Write :func:`chart` as PNG."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as staged:
        chart(records).savefig(staged, dpi=140, format="png", pil_kwargs={"optimize": True})


def measure(given: Length) -> dict[str, Any]:
    """Train and evaluate the contestants.

    Raises:
        SystemExit: some are left to other processes.
    """
    given = replace(given, folder=given.folder / digest("training"))
    texts, tokenizer = prepare(given.folder, folder_texts(given.package), given.vocab_size)
    chosen = {name: settings_of(one, texts, tokenizer, given) for name, one in CONTESTANTS.items()}
    if given.tiny:
        chosen = {"LongNet": chosen["LongNet"]}
    for name in given.only or chosen:
        trained(name, chosen[name], given)
    missing = [name for name in chosen if not (given.folder / slug(name) / "eval.json").exists()]
    if missing:
        raise SystemExit(f"not measured yet: {', '.join(missing)}")
    records = collect(chosen, given.folder)
    draw(records, given.picture)
    return {
        "package": given.package,
        "rope_theta": ROPE_THETA,
        "vocab_size": given.vocab_size,
        "parameters": next(iter(chosen.values())).model.num_parameters,
        "width": given.width,
        "layers": given.layers,
        "seed": given.seed,
        "threads": torch.get_num_threads(),
        "windows": given.windows,
        "results": records,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        tiny = {
            "steps": 12,
            "folder": Path(scratch),
            "package": "torch.nn",
            "width": 32,
            "vocab_size": 512,
            "windows": 1,
            "recall_texts": 1,
            "picture": Path(scratch) / "length.png",
        }
        run(Length, measure, text=__doc__, name="length", group="training", tiny=tiny)
