"""Does length pay? Language models of equal size and equal operations that differ in what a token attends to.

    python -m benchmarks.hybrids [--steps N] [--only NAME ...] [--text code|made] [--seeds N ...]

Models of 6 layers, with a convolution of 3 over keys, have 3.7 million weights, or 3.1 million for the text "made",
whose vocabulary is smaller. They differ in the patterns of their layers: dense attention over 8,192 tokens, or in
windows of 1,024; a local window of 128 or 1,024; LongNet's segments, with and without a window; and hybrids, in which
every third layer looks far, without positions and with scores that grow with the position, and the others have windows
of 128, in three of four steps of 8. The far layers of a hybrid are dense or dilated, or choose 8 blocks of 64 keys by
content. Three more hybrids, on the text "made" alone, differ in one part each: windows of 128 in all steps, a gate per
head, or rotary positions in the far layers. Each model is trained by `dilated-attention train` with as many operations
(:mod:`.estimate.flops`: matrices per token, attention per pair) as dense attention over 8,192 tokens takes in N steps,
in stages of 128, 1,024, 4,096 and 8,192 tokens, and evaluated by `dilated-attention eval`.

Two texts. "code": all Python source of a package, a text per folder, at least 32 KiB; often one file is made of parts
of another; tokens of a byte-level BPE trained on it. "made": pairs of a key and a value, a token each; a text gives
every key one value, and what is measured is how many values are predicted, by the distance to where they stood last.

The results of each run are written when it ends, and runs with results, of any code, are left out: the same command
goes on where it was stopped, also inside a run of today's code.
"""

from __future__ import annotations

import json
import math
import random
import string
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from dilated_attention_pytorch import DilatedPattern, Pattern, attend
from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.estimate.flops import longnet_flops, training_flops
from dilated_attention_pytorch.models import LongNetConfig, LongNetLM, causal_lm
from dilated_attention_pytorch.nn import AdaptiveBlockAttention
from dilated_attention_pytorch.output import replacing
from dilated_attention_pytorch.patterns import pattern_from_expression
from dilated_attention_pytorch.training import TrainSettings, train
from dilated_attention_pytorch.training.evaluated_model import open_model
from dilated_attention_pytorch.training.manifest import read_json
from dilated_attention_pytorch.training.model_evaluation import EvalSettings, evaluate_model
from dilated_attention_pytorch.training.stages import StageSettings

from .measured_code import code, digest
from .study import Study, run
from .study_texts import folder_texts, prepare
from .tables import by_contestant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Text = Literal["code", "made"]
KEYS = [first + second for first in string.ascii_lowercase[:20] for second in string.ascii_lowercase]
VALUES = [first + second for first in "ABCD" for second in string.ascii_lowercase[:16]]
MADE_VOCAB = 257 + 24 + len(KEYS) + len(VALUES)
"""Tokens of the text "made": bytes, a separator, a space with a first letter, and a space with a word."""
LEAST_RANK = 4
"""A key that comes again is at least the fourth to last of those that came before."""


@dataclass(frozen=True, kw_only=True)
class Hybrids(Study):
    """Settings."""

    text: Text | None = None
    """The text to train on; default: both, one after the other."""
    length: int = 8192
    """Tokens of a text. The patterns are those for 8,192, scaled."""
    steps: int = 700
    """Steps of dense attention over 8,192 tokens; the others take its operations."""
    only: tuple[str, ...] = ()
    """Names of the contestants to train; default: all."""
    seeds: tuple[int, ...] = ()
    """Seeds of the contestants; default: 0 for all, then 1 and 2 for those that have more."""
    folder: Path = Path("runs/hybrids")
    """Where the texts are kept, and unfinished runs in a folder for each state of the code."""
    package: str = "transformers.models"
    """The package whose source is the text "code"."""
    documents: int = 1200
    """Texts of "made"."""
    width: int = 192
    """Width of the models."""
    vocab_size: int = 4096
    """Tokens of the tokenizer of "code"."""
    windows: int = 32
    """Held-out windows of the length."""
    recall_texts: int = 8
    """Texts of a row of the recall tasks."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to train: in float32 on a CPU, in bfloat16 on a GPU."""
    picture: Path = Path("docs/pictures/hybrids.png")
    """File of the picture."""


class Contestant(NamedTuple):
    """A model."""

    patterns: tuple[str, ...]
    """Patterns of the layers, cycled."""
    fields: dict[str, Any]
    """Other fields of the model."""
    drawn: tuple[int, ...] = ()
    """Sizes of local windows of which a step draws one."""
    is_short: bool = False
    """Whether it is trained on the shortest windows only."""
    has_more_seeds: bool = False
    """Whether it is trained from three seeds on the text "code"."""
    is_of_made: bool = False
    """Whether it is trained on the text "made" alone."""


DENSE, CONTENT = "dense, 8,192", "hybrid, far blocks by content"
BLOCKS = 8
"""Blocks that a query sees in a layer that chooses them."""
LAYERS, HEADS = 6, 6
FAR_THETA = 1e6
"""Base of rotary positions in layers that look far: a third of a head's pairs turn by less than 1 in 8,192 tokens."""
_READ = {"what": "benchmark", "remedy": "remove the folder and begin anew"}


def stand_ins(length: int) -> tuple[str, str]:
    """Segments with about as many pairs as blocks of ``length / 128`` keys, one for each layer that chooses them.

    They stand for these layers in a configuration, which has patterns alone.
    """
    size = length // 128
    segment = 2 * (BLOCKS - 1) * size + size
    return f"DilatedPattern([{segment}], [1])", f"DilatedPattern([{segment + 1}], [1])"


class ContentAttention(nn.Module):
    """Attention of a model with :data:`CONTENT`: its far layers choose blocks, the others have their patterns."""

    def __init__(self, config: LongNetConfig) -> None:
        super().__init__()
        assert config.num_kv_heads is not None
        far = [pattern_from_expression(one) for one in config.layer_patterns[2::3]]
        head_dim = config.embed_dim // config.num_heads
        assert isinstance(far[0], DilatedPattern)
        size = far[0].segment_lengths[0] // (2 * BLOCKS - 1)  # of the first of `stand_ins`
        self.choosing = nn.ModuleDict(
            {
                str(index): AdaptiveBlockAttention(
                    config.num_heads, head_dim, blocks_per_query=BLOCKS, block_size=size, query_block_size=size // 4
                )
                for index in range(len(far))
            }
        )
        self.index_of = {pattern: str(index) for index, pattern in enumerate(far)}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, *, is_causal: bool, **options: Any
    ) -> Tensor:
        """See :func:`attend`."""
        if pattern in self.index_of:
            chosen: Tensor = self.choosing[self.index_of[pattern]](query, key, value, is_causal)
            return chosen
        return attend(query, key, value, pattern, is_causal=is_causal, heads_first=False, **options)


class ContentLM(LongNetLM):
    """A :class:`LongNetLM` with :class:`ContentAttention`."""

    def __init__(self, config: LongNetConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.attention = ContentAttention(config)


def contestants(length: int = 8192) -> dict[str, Contestant]:
    """The contestants by name, for texts of ``length`` tokens; other lengths than 8,192 scale the patterns."""
    short = length // 8
    first, second = stand_ins(length)
    dense, near = f"DilatedPattern([{length}], [1])", f"local_window({length // 64 - 1})"
    nearest = max(0, length // 1024 - 1)
    drawn = (nearest, nearest, nearest, length // 64 - 1)
    dilated = f"{near} + DilatedPattern([{length // 4}, {length}], [2, 4]{{}})"
    longnet = (f"DilatedPattern([{short}, {2 * short}, {length}], [1, 2, 4])",)
    mixed = {"key_convolution": 3}
    far = {**mixed, "rope_theta": FAR_THETA}
    hybrid = {**mixed, "layer_rope_thetas": (1e4, 1e4, 0.0), "layer_scale_lengths": (0, 0, length // 64)}
    return {
        DENSE: Contestant((dense,), far, has_more_seeds=True),
        "dense, 1,024": Contestant((f"DilatedPattern([{short}], [1])",), mixed, is_short=True),
        "window of 128": Contestant((near,), mixed, has_more_seeds=True),
        "window of 1,024": Contestant((f"local_window({short - 1})",), mixed),
        "LongNet": Contestant(longnet, far),
        "LongNet + window": Contestant(
            (f"local_window({short // 2 - 1}) + DilatedPattern([{2 * short}, {length}], [2, 4])",), far
        ),
        "hybrid, dense far": Contestant((near, near, dense), hybrid, drawn, has_more_seeds=True),
        "hybrid, dilated far": Contestant(
            (near, near, dilated.format(""), near, near, dilated.format(", segment_shift=1")),
            hybrid,
            drawn,
            has_more_seeds=True,
        ),
        "hybrid, dense far, windows of 128": Contestant((near, near, dense), hybrid, is_of_made=True),
        "hybrid, dense far, head gates": Contestant(
            (near, near, dense), {**hybrid, "head_gates": True}, drawn, is_of_made=True
        ),
        "hybrid, dense far, rotary": Contestant(
            (near, near, dense), {**mixed, "layer_rope_thetas": (1e4, 1e4, FAR_THETA)}, drawn, is_of_made=True
        ),
        CONTENT: Contestant((near, near, first, near, near, second), hybrid, drawn, has_more_seeds=True),
    }


class Pair(NamedTuple):
    """A key with its value."""

    key: str
    value: str
    distance: int
    """Tokens since it stood in the text last; 0 if it has not."""


def made_pairs(seed: int, number: int) -> list[Pair]:
    """The pairs of a text. A key has one value in it, drawn evenly.

    Half of the pairs are new until all keys have come. The others come again: how recently they came, as a rank, is
    drawn evenly in its logarithm.
    """
    draws = random.Random(seed)
    fresh = draws.sample(KEYS, len(KEYS))
    value_of = {key: draws.choice(VALUES) for key in KEYS}
    recent: list[str] = []
    place: dict[str, int] = {}
    pairs = []
    for index in range(number):
        if len(recent) < LEAST_RANK or (fresh and draws.random() < 0.5):
            key = fresh.pop()
        else:
            rank = math.exp(draws.uniform(math.log(LEAST_RANK), math.log(len(recent))))
            key = recent.pop(-math.ceil(rank))
        pairs.append(Pair(key, value_of[key], 2 * (index - place.get(key, index))))
        recent.append(key)
        place[key] = index
    return pairs


def text_of(pairs: list[Pair]) -> str:
    """The text of the pairs: a space before every word, as in its tokens."""
    return "".join(f" {pair.key} {pair.value}" for pair in pairs)


def texts_of(text: Text, given: Hybrids) -> Iterator[tuple[str, str]]:
    """Names and texts."""
    if text == "code":
        yield from folder_texts(given.package)
        return
    for seed in range(given.documents):
        yield str(seed), text_of(made_pairs(seed, given.length * 9 // 16))


def vocab_of(text: Text, given: Hybrids) -> int:
    """Tokens of a text's tokenizer."""
    return given.vocab_size if text == "code" else MADE_VOCAB


def settings_of(contestant: Contestant, text: Text, seed: int, given: Hybrids) -> TrainSettings:
    """Settings with as many steps as match the operations of dense attention in ``--steps``."""

    def settings(one: Contestant, steps: int) -> TrainSettings:
        length = given.length // 8 if one.is_short else given.length
        windows = given.length // length
        model = LongNetConfig(
            vocab_size=vocab_of(text, given),
            embed_dim=given.width,
            ffn_dim=3 * given.width,
            num_layers=LAYERS,
            num_heads=HEADS,
            layer_patterns=one.patterns,
            **one.fields,
        )
        # Copying is learnt where a key is one of few. A step with the shortest windows has half as many tokens.
        stages = StageSettings(
            lengths=(given.length // 64, given.length // 8, given.length // 2, given.length),
            windows=(32, 8, 2, 1),
            fractions=(0.5, 0.25, 0.125, 0.125),
        )
        if one.is_short:
            stages = StageSettings(lengths=(length // 8, length), windows=(4, 1), fractions=(0.5, 0.5))
        return TrainSettings(
            model=model,
            data=(given.folder / text / "texts.jsonl",),
            tokenizer=given.folder / text / "tokenizer",
            cache=given.folder / "cache",
            context_length=length,
            batch_size=windows,
            stages=stages,
            random_local_windows=one.drawn,
            steps=steps,
            learning_rate=3e-3,
            muon_learning_rate=0.02,
            # Constant for 70 % of the steps: what is learnt late is learnt at the full rate.
            schedule="wsd",
            decay_fraction=0.3,
            warmup_fraction=0.05,
            seed=seed,
            threads=torch.get_num_threads(),
            precision="float32" if given.device == "cpu" else "bfloat16",
            device=given.device,
            log_steps=10,
            eval_steps=max(1, steps // 10),
            save_steps=max(1, steps // 20),
            eval_windows=4 * windows,
            final_eval_windows=8 * windows,
            quarter_files=1,
            sample_length=0,
        )

    budget = flops_of(settings(contestants(given.length)[DENSE], given.steps))
    a_thousand = settings(contestant, 1000)
    return settings(contestant, round(1000 * budget / flops_of(a_thousand)))


def flops_of(settings: TrainSettings, step: int | None = None) -> int:
    """Operations of a run, or of its first steps."""
    steps = settings.steps if step is None else step
    return settings.batch_size * training_flops(longnet_flops(settings.model), settings.stages_by_step, steps)


def slug(name: str) -> str:
    """Folder name of a contestant."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.replace(",", "").lower())


def held_out_curve(run: Path, settings: TrainSettings) -> list[tuple[int, float]]:
    """Operations and held-out bits per byte, for windows of the training length, at every evaluation."""
    points = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "eval_bits_per_byte" in entry:
            points.append((flops_of(settings, entry["step"]), entry["eval_bits_per_byte"]))
    return points


@contextmanager
def models_of(name: str) -> Iterator[None]:
    """Context in which models of transformers are made with the attention of the contestant."""
    own = causal_lm.LongNetLM
    if name == CONTENT:
        causal_lm.LongNetLM = ContentLM  # type: ignore[misc]
    try:
        yield
    finally:
        causal_lm.LongNetLM = own  # type: ignore[misc]


def result_of(text: Text, folder: Path, settings: TrainSettings, given: Hybrids) -> dict[str, Any]:
    """Train, or continue a training, and evaluate."""
    console, began = Console(), time.monotonic()
    hours = folder / "hours.json"
    outcome = train(settings, folder, console, may_resume=True)
    spent = (read_json(hours, **_READ)["hours"] if hours.exists() else 0.0) + (time.monotonic() - began) / 3600
    write_json(hours, {"hours": spent})
    if outcome.stopped_by is not None:
        raise SystemExit(128 + outcome.stopped_by)
    if not (folder / "eval.json").exists():
        told = EvalSettings(
            context_lengths=tuple(given.length // part for part in (8, 4, 2, 1)),
            windows=given.windows,
            recall_texts=given.recall_texts if text == "code" else 0,
            device=given.device,
            threads=torch.get_num_threads(),
        )
        evaluate_model(str(folder), told, None, console)
    found = read_json(folder / "eval.json", **_READ)
    return {
        "parameters": settings.model.num_parameters,
        "context_length": settings.context_length,
        "steps": settings.steps,
        "flops": flops_of(settings),
        "tokens": settings.batch_size * settings.stages_by_step.tokens_after(settings.steps),
        "hours": spent,
        "held_out_during_training": held_out_curve(folder, settings),
        **{key: found[key] for key in ("bits_per_byte", "by_position", "needle", "associations") if key in found},
        **({"recall": recall_of(folder, given)} if text == "made" else {}),
    }


def recall_of(folder: Path, given: Hybrids) -> list[dict[str, float]]:
    """Share of values predicted in texts that no model was trained on, by the distance to where they stood last."""
    opened = open_model(str(folder), given.device)
    counts: dict[int, list[bool]] = {}
    for seed in range(given.documents, given.documents + given.recall_texts):
        pairs = made_pairs(seed, given.length // 2)
        ids = torch.tensor(opened.tokens_of(text_of(pairs)))
        assert len(ids) == 2 * len(pairs)
        with torch.inference_mode():
            logits = opened.model(input_ids=ids[None].to(given.device)).logits[0, ::2]
        for pair, is_right in zip(pairs, (logits.argmax(-1).cpu() == ids[1::2]).tolist(), strict=True):
            if pair.distance:
                counts.setdefault(1 << (pair.distance.bit_length() - 1), []).append(is_right)
    return [
        {"from": low, "to": 2 * low - 1, "values": len(found), "right": sum(found) / len(found)}
        for low, found in sorted(counts.items())
    ]


def chart(results: dict[str, Any]) -> Figure:
    """Bits per byte by the tokens read, and recall by distance, without the ablations; a bar spans the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Text of 10 points in a width of 6.4 inches can be read on a phone too.
    figure = Figure(figsize=(6.4, 7.4), layout="constrained")
    FigureCanvasAgg(figure)
    by_length, by_distance = figure.subplots(2, 1)
    for number, name in enumerate(name for name, one in contestants().items() if not one.is_of_made):
        style = {"color": f"C{number}", "marker": "s" if name.startswith("hybrid") else "o", "markersize": 4}
        by_length.errorbar([], [], label=name, capsize=2, **style)
        for axes, text, points in ((by_length, "code", _bits_by_length), (by_distance, "made", _recall_by_distance)):
            runs = by_contestant(results, text).get(name, [])
            for_seeds = [points(one) for one in runs]
            if runs:
                x = [at for at, _ in for_seeds[0]]
                y = [[value for _, value in row] for row in for_seeds]
                mean = [sum(values) / len(values) for values in zip(*y, strict=True)]
                low = [m - min(values) for m, values in zip(mean, zip(*y, strict=True), strict=True)]
                high = [max(values) - m for m, values in zip(mean, zip(*y, strict=True), strict=True)]
                axes.errorbar(x, mean, yerr=(low, high), capsize=2, **style)
    for axes, across, up in (
        (by_length, "tokens read at most", "bits per byte of source code"),
        (by_distance, "distance in tokens, at least", "values recalled in made texts"),
    ):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _bits_by_length(result: dict[str, Any]) -> list[tuple[int, float]]:
    return sorted((int(length), bits) for length, bits in result["bits_per_byte"].items())


def _recall_by_distance(result: dict[str, Any]) -> list[tuple[int, float]]:
    return [(row["from"], row["right"]) for row in result["recall"]]


def draw(results: dict[str, Any], file: Path) -> None:
    """Write :func:`chart` as PNG."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as staged:
        chart(results).savefig(staged, dpi=140, format="png", pil_kwargs={"optimize": True})


def runs_of(given: Hybrids) -> list[tuple[Text, str, int]]:
    """Text, contestant and seed of every run that is asked for: seed 0 of all first."""
    texts: tuple[Text, ...] = ("code", "made") if given.text is None else (given.text,)
    known = contestants(given.length)
    names = given.only or tuple(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"--only takes names of contestants, {'; '.join(known)}: got {'; '.join(unknown)}")
    return [
        (text, name, seed)
        for seed in given.seeds or (0, 1, 2)
        for text in texts
        for name in names
        if given.only or text == "made" or not known[name].is_of_made
        if given.seeds or seed == 0 or (text == "code" and known[name].has_more_seeds)
    ]


def measure(given: Hybrids) -> dict[str, Any]:
    """Do the runs without results one after the other; the file holds those that are done after each.

    Returns:
        the results by text, contestant and seed, each with its machine and code.
    """
    assert given.output is not None
    results: dict[str, Any] = {}
    if given.output.exists():
        results = json.loads(given.output.read_text(encoding="utf-8"))
    for text, name, seed in runs_of(given):
        key = f"{text}: {name}: {seed}"
        settings = settings_of(contestants(given.length)[name], text, seed, given)
        if key in results:
            if results[key]["flops"] != flops_of(settings):
                raise SystemExit(
                    f"{given.output} has {key} with {results[key]['flops']:,} operations, and these settings take "
                    f"{flops_of(settings):,}; name another --output"
                )
            continue
        print(f"{key}: {settings.steps} steps, {flops_of(settings) / 1e12:.0f} * 10^12 operations", flush=True)
        prepare(given.folder / text, texts_of(text, given), vocab_of(text, given))
        with models_of(name):
            own = given.folder / text / digest("training") / f"{slug(name)}-{seed}"
            found = result_of(text, own, settings, given)
        results[key] = {"machine": origin(module_command()), "code": code("training"), **found}
        order = [f"{text}: {name}: {seed}" for text, name, seed in runs_of(Hybrids())]
        results = {key: results[key] for key in [*order, *results] if key in results}
        write_json(given.output, results)
    draw(results, given.picture)
    return results


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        tiny = {
            "text": "made",
            "length": 512,
            "steps": 8,
            "only": (CONTENT,),
            "seeds": (0,),
            "folder": Path(scratch),
            "package": "torch.nn",
            "documents": 40,
            "width": 36,
            "vocab_size": 512,
            "windows": 1,
            "recall_texts": 1,
            "picture": Path(scratch) / "hybrids.png",
        }
        run(Hybrids, measure, text=__doc__, name="hybrids", group=None, tiny=tiny)
