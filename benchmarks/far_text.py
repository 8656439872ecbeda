"""What makes far text pay? Bits per token of texts in which far repetition saves a known number of bits.

    python -m benchmarks.far_text [--steps N] [--only NAME ...] [--folder FOLDER] [--tiny]

A text consists of random tokens in which passages repeat once, D tokens later, with D log-uniform. Nothing else can be
predicted. So the number of bits is known that a perfect copier reading L tokens needs, and hence what a longer L is
worth.

A small LongNet with shifted keys first learns to copy in windows of 128 tokens, on text that repeats itself within
them. From its weights, every contestant is trained on for the same number of operations, in windows of 1,024 tokens,
under its own patterns. It is evaluated by the number of tokens read, by distance, and by the distance modulo the rate.

Token p + 1 is copied from row j = p + 1 - D: with shifted keys, the key of row j is that of token j - 1, which equals
token p. A pattern allows this in one layer if query p of some head sees row j. The share of tokens for which this holds
("met") follows from the patterns alone and is reported beside the bits.

Running the command again resumes stopped trainings.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.benchmarks.results import module_command, origin, write_json
from dilated_attention_pytorch.models import LongNetConfig, LongNetLM
from dilated_attention_pytorch.models.token_loss import next_tokens, token_loss
from dilated_attention_pytorch.output import replacing
from dilated_attention_pytorch.training.flops import longnet_flops
from dilated_attention_pytorch.training.manifest import read_json

from .head_lags import lagged_attend
from .measured_code import digest
from .options import parse, parser_of, write_results
from .repeating_text import (
    ALIGNED,
    ANY,
    FEW,
    LONG,
    NEAR,
    OCTAVES,
    PASSAGE,
    RATE,
    VOCAB,
    Kind,
    Texts,
    by_distance,
    draw_texts,
    ideal_bits,
    in_pieces,
    octaves,
)

SHORT = 128
LENGTHS = (128, 256, 512, 1024)
WIDTH, LAYERS, HEADS = 64, 2, 4
ROPE_THETA = 1e12
"""Of the 8 rotary pairs of a head, 6 turn by about one radian or less over 1,024 tokens and can match by content."""
TEXTS = 4
"""Number of texts of 1,024 tokens per step, whole or cut into windows."""
MUON_RATE, ADAM_RATE = 0.03, 3e-3
HELD_OUT_SEED = 1 << 40
"""Larger than the seed of any training step."""
PICTURE = Path("docs/pictures/far_text.png")


class Contestant(NamedTuple):
    """The patterns of the two layers, the training windows, the kind of text, and the lag of each head in rows."""

    patterns: tuple[str, ...]
    window: int = LONG
    text: Kind = ANY
    lags: tuple[int, ...] = (0,) * HEADS

    @property
    def base(self) -> Contestant:
        """The model from whose weights this one is trained on."""
        text = NEAR._replace(vocab_size=self.text.vocab_size)
        return Contestant(("DilatedPattern([128], [1])",) * LAYERS, SHORT, text)

    @property
    def base_name(self) -> str:
        """Name of the base; equal for contestants with the same base."""
        return f"base {self.text.vocab_size}"


NEAR_WINDOW = "local_window(127)"
LONGNET = "DilatedPattern([128, 256, 1024], [1, 2, 4])"
DENSE = "DilatedPattern([1024], [1])"
HALF = "local_window(63) + DilatedPattern([1024], [2])"
CONTESTANTS = {
    "window": Contestant((NEAR_WINDOW, NEAR_WINDOW)),
    "LongNet": Contestant((LONGNET, LONGNET)),
    "LongNet, distances 4 m + 1": Contestant((LONGNET, LONGNET), text=ALIGNED),
    "dense, 1,024": Contestant((DENSE, DENSE)),
    "window, then dense": Contestant((NEAR_WINDOW, DENSE)),
    "dense, then window": Contestant((DENSE, NEAR_WINDOW)),
    "rate 2 with lags, then window": Contestant((HALF, NEAR_WINDOW), lags=(0, 0, 1, 1)),
    "dense, 256 kinds of token": Contestant((DENSE, DENSE), text=ANY._replace(vocab_size=FEW)),
}


def config_of(contestant: Contestant) -> LongNetConfig:
    """Configuration of the model; contestants with one vocabulary have equally many weights."""
    return LongNetConfig(
        vocab_size=contestant.text.vocab_size,
        embed_dim=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        rope_theta=ROPE_THETA,
        shifted_keys=True,
        layer_patterns=contestant.patterns,
    )


def model_of(contestant: Contestant) -> LongNetLM:
    """A new model; in its dilation groups, keys and values of each head are shifted by the head's lag."""
    if not any(contestant.lags):
        return LongNetLM(config_of(contestant))
    return LongNetLM(config_of(contestant), attention=functools.partial(lagged_attend, contestant.lags))


@functools.cache
def met_pairs(contestant: Contestant) -> Tensor:
    """Whether query p sees the row originally at position t in some head of a layer: bool ``[LONG, LONG]``."""
    rows, met = torch.arange(LONG), torch.zeros(LONG, LONG, dtype=torch.bool)
    for pattern in config_of(contestant).different_patterns:
        seen = pattern.counts(rows, rows, HEADS, is_causal=True) > 0
        for head, lag in enumerate(contestant.lags if pattern.groups else (0,) * HEADS):
            met[:, : LONG - lag] |= seen[head, :, lag:]
    return met if contestant.window == LONG else met & (rows[:, None] // contestant.window == rows // contestant.window)


def met_share(contestant: Contestant, texts: Texts) -> dict[str, float]:
    """Share of the tokens that can be copied whose source row the query sees in one layer, by octave of distance."""
    met, shares = met_pairs(contestant), {}
    texts_at, columns = texts.distances.nonzero(as_tuple=True)
    distances = texts.distances[texts_at, columns]
    found = met[columns - 1, columns - distances].double()
    for name, chosen in octaves(distances).items():
        shares[name] = float(found[chosen].mean())
    return shares


@dataclass(kw_only=True, slots=True)
class Training:
    """A model in training, with its optimizers and losses."""

    model: LongNetLM
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    losses: list[float] | None = None

    @staticmethod
    def of(contestant: Contestant, seed: int) -> Training:
        """A new training; the initial weights depend only on the seed."""
        torch.manual_seed(seed)
        model = model_of(contestant)
        inner = [weight for weight in model.blocks.parameters() if weight.dim() == 2]
        inside = {id(weight) for weight in inner}
        rest = [weight for weight in model.parameters() if id(weight) not in inside]
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(inner, lr=MUON_RATE, weight_decay=0.0),
            torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        return Training(model=model, optimizers=optimizers, losses=[])

    def save(self, file: Path) -> None:
        """Write the state atomically."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [one.state_dict() for one in self.optimizers],
            "step": self.step,
            "losses": self.losses,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as staged:
            torch.save(state, staged)

    def load(self, file: Path) -> None:
        """Read the state that :meth:`save` wrote."""
        state = torch.load(file)
        self.model.load_state_dict(state["model"])
        for one, saved in zip(self.optimizers, state["optimizers"], strict=True):
            one.load_state_dict(saved)
        self.step, self.losses = state["step"], state["losses"]


def train(name: str, contestant: Contestant, steps: int, arguments: argparse.Namespace, begin: Path | None) -> Training:
    """Train, or resume training; start from the weights in ``begin`` if given."""
    file = arguments.folder / f"{slug(name)}.pt"
    training = Training.of(contestant, arguments.seed)
    if file.exists():
        training.load(file)
    elif begin is not None:
        training.model.load_state_dict(torch.load(begin)["model"])
    assert training.losses is not None
    watched = draw_texts(2, HELD_OUT_SEED + 1, contestant.text)
    offset = 0 if begin is None else 1 << 20
    started = time.perf_counter()
    while training.step < steps:
        step = training.step
        rate = min(1.0, (step + 1) / (0.05 * steps), 2.5 * (steps - step) / steps)
        for optimizer, peak in zip(training.optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
            optimizer.zero_grad()
        tokens = draw_texts(TEXTS, offset + step, contestant.text).tokens.view(-1, contestant.window)
        loss = token_loss(training.model(tokens), next_tokens(tokens))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        for optimizer in training.optimizers:
            optimizer.step()
        training.step += 1
        training.losses.append(loss.item() / math.log(2))
        if training.step % arguments.log_steps == 0 or training.step == steps:
            training.save(file)
            found = by_distance(bits_of(training.model, watched.tokens), watched.distances)
            print(
                f"{name} step {training.step}/{steps}: {statistics.mean(training.losses[-arguments.log_steps :]):.3f} "
                f"bits, by octave {' '.join(f'{found[str(least)]:.2f}' for least in OCTAVES)}, "
                f"{time.perf_counter() - started:.0f} s",
                flush=True,
            )
    return training


@torch.no_grad()
def bits_of(model: LongNetLM, tokens: Tensor) -> Tensor:
    """Bits of every token except the first, ``[B, N - 1]``."""
    parts = []
    for some in tokens.split(max(1, TEXTS * LONG // tokens.shape[1])):
        told = model(some).log_softmax(-1)[:, :-1]
        parts.append(-told.gather(-1, some[:, 1:, None])[..., 0] / math.log(2))
    return torch.cat(parts)


def measure(model: LongNetLM, contestant: Contestant, number: int) -> dict[str, Any]:
    """Bits by tokens read, by distance and by remainder, and those of a perfect copier by tokens read."""
    texts = draw_texts(number, HELD_OUT_SEED, contestant.text)
    read, ideal = {}, {}
    for length in LENGTHS:
        pieces, _ = in_pieces(texts, length)
        read[str(length)] = float(bits_of(model, pieces.tokens).mean())
        ideal[str(length)] = ideal_bits(texts, length, contestant.text.vocab_size)
    windows, _ = in_pieces(texts, contestant.window)
    bits = torch.full(texts.tokens.shape, math.nan)
    bits.view(-1, contestant.window)[:, 1:] = bits_of(model, windows.tokens)
    known = ~bits.isnan()
    distances = texts.distances * known
    bits = bits.nan_to_num()[:, 1:]
    rest = bits[(distances[:, 1:] == 0) & known[:, 1:]]
    return {
        "bits_by_length": read,
        "ideal_bits_by_length": ideal,
        "bits_of_new": float(rest.mean()),
        "bits_by_octave": by_distance(bits, distances),
        "met_by_octave": met_share(contestant, texts),
        "bits_by_remainder": {
            str(one): by_distance(bits, distances, one)
            for one in range(RATE)
            if contestant.text.remainder in (None, one)
        },
    }


def bits_without_layers(file: Path, contestant: Contestant, number: int) -> dict[str, float]:
    """Bits of tokens that the base model can copy: with all layers, and with one layer limited to a token's own key."""
    texts = draw_texts(number, HELD_OUT_SEED, contestant.text)
    pieces, inside = in_pieces(texts, contestant.window)
    bits = {}
    for blind in (None, *range(LAYERS)):
        patterns = tuple("local_window(0)" if layer == blind else one for layer, one in enumerate(contestant.patterns))
        model = model_of(contestant._replace(patterns=patterns))
        model.load_state_dict(torch.load(file)["model"])
        bits["none" if blind is None else str(blind + 1)] = float(bits_of(model, pieces.tokens)[inside[:, 1:]].mean())
    return bits


def slug(name: str) -> str:
    """File name for the name of a contestant."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.replace(",", "").lower())


def flops_of_step(contestant: Contestant) -> int:
    """Operations of a training step, forward and backward."""
    windows = TEXTS * LONG // contestant.window
    return 3 * windows * longnet_flops(config_of(contestant)).of_text(contestant.window)


def draw(records: list[dict[str, Any]], file: Path) -> None:
    """Plot bits by tokens read and by distance, for texts of the default vocabulary."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    by_length, by_octave = figure.subplots(1, 2)
    ideal = next(record for record in records if record["text"]["remainder"] is None)["ideal_bits_by_length"]
    by_length.plot(LENGTHS, [ideal[str(length)] for length in LENGTHS], "k--", label="perfect copier")
    by_length.legend(fontsize=8)
    for record in records:
        if record["text"]["vocab_size"] != VOCAB:
            continue
        style = {"label": record["contestant"], "marker": "o", "markersize": 3}
        style |= {"linestyle": "-" if record["text"]["remainder"] is None else ":"}
        by_length.plot(LENGTHS, [record["bits_by_length"][str(length)] for length in LENGTHS], **style)
        by_octave.plot(OCTAVES, [record["bits_by_octave"][str(least)] for least in OCTAVES], **style)
    by_length.set(xlabel="tokens read at most", ylabel="bits per token, held-out")
    by_octave.set(xlabel="distance, from this to twice as many tokens", ylabel="bits per token that can be copied")
    for axes in (by_length, by_octave):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    by_octave.legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as staged:
        figure.savefig(staged, dpi=120, format="png")


def main() -> None:
    """Train and evaluate the contestants; print and write the results and the picture."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/far_text"),
        help="where the trainings are kept, a folder for each state of the code",
    )
    parser.add_argument("--base-steps", type=int, default=300, help="in windows of 128 tokens, for all")
    parser.add_argument("--steps", type=int, default=120, help="of dense, 1,024; the others take its operations")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--held-out", type=int, default=32, help="texts of 1,024 tokens")
    parser.add_argument("--log-steps", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--picture", type=Path, default=PICTURE)
    arguments = parse(parser, "far_text.json")
    if arguments.tiny:
        arguments.folder, arguments.picture = arguments.output.parent / "far_text", arguments.output.with_suffix(".png")
        arguments.only = arguments.only[:1]
        arguments.base_steps, arguments.steps, arguments.held_out = 1, 1, 1
    arguments.folder /= digest("models")
    torch.set_num_threads(arguments.threads)
    here = origin(module_command())
    budget = arguments.steps * flops_of_step(CONTESTANTS["dense, 1,024"])
    for name in arguments.only:
        file, contestant = arguments.folder / f"{slug(name)}.json", CONTESTANTS[name]
        if file.exists():
            continue
        train(contestant.base_name, contestant.base, arguments.base_steps, arguments, None)
        begin = arguments.folder / f"{slug(contestant.base_name)}.pt"
        steps = round(budget / flops_of_step(contestant))
        trained = train(name, contestant, steps, arguments, begin)
        record = {
            "contestant": name,
            **contestant._asdict(),
            "text": contestant.text._asdict(),
            "steps": steps,
            "tokens": steps * TEXTS * LONG,
            "flops": steps * flops_of_step(contestant),
            **measure(trained.model, contestant, arguments.held_out),
        }
        write_json(file, record)
        print(f"{name}: {record['bits_by_length']}, ideal {record['ideal_bits_by_length']}", flush=True)
    files = {name: arguments.folder / f"{slug(name)}.json" for name in CONTESTANTS}
    missing = [name for name, file in files.items() if not file.exists()]
    if missing:
        print(f"not measured yet: {', '.join(missing)}")
        return
    records = [read_json(file, what="benchmark", remedy="remove the file and begin anew") for file in files.values()]
    dense = CONTESTANTS["dense, 1,024"]
    sizes = {"parameters": config_of(dense).num_parameters, "width": WIDTH, "layers": LAYERS, "heads": HEADS}
    base = {
        "steps": arguments.base_steps,
        "flops": arguments.base_steps * flops_of_step(dense.base),
        "bits_of_copies_without_layer": bits_without_layers(
            arguments.folder / f"{slug(dense.base_name)}.pt", dense.base, arguments.held_out
        ),
    }
    write_results(
        arguments.output,
        "models",
        {
            "machine": here,
            **sizes,
            "rope_theta": ROPE_THETA,
            "passage": PASSAGE,
            "base": base,
            "seed": arguments.seed,
            "held_out_texts": arguments.held_out,
            "results": records,
        },
    )
    draw(records, arguments.picture)
    print(f"written: {arguments.output} and {arguments.picture}")


if __name__ == "__main__":
    main()
