"""Associative recall at 4,096 tokens: adaptive blocks, 8 of 64 per query, and a local window of equal cost.

    python -m benchmarks.recall

A text consists of pairs of a key and a value token, scattered over noise. Its last 64 tokens are keys that occurred
before; at each of them the model must predict the key's value. Both models are one causal attention layer between a
convolution of two tokens and a feed-forward layer, and differ in what the attention sees: the question's own block of
64 and 7 blocks that it chooses, or the last 512 positions. They are trained on the same texts, in stages from dense and
short to sparse and long, and compared on unseen texts.

Queries and keys are normalised, and a score is at most ``temperature``. For adaptive blocks it is low: one key alone
cannot win against all others, so that the loss depends on the gates and trains the scorer. For the window it is high,
with which it learns to recall what it sees.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilated_attention_pytorch import attend, local_window
from dilated_attention_pytorch.nn import AdaptiveBlockAttention
from dilated_attention_pytorch.training.recall import KEYS, NOISE, QUESTIONS, VALUES, Texts, draw

from .study import Study, run

Contestant = Literal["adaptive", "window"]

WIDTH, HEAD_DIM = 64, 32
BLOCK, KEPT = 64, 8
LENGTH = 4096
TEMPERATURES: dict[Contestant, float] = {"adaptive": 3.0, "window": 8.0}
RATE, SCORER_RATE = 3e-3, 3e-2


class Stage(NamedTuple):
    """Training steps on texts of one kind."""

    length: int
    pairs: int
    texts: int
    """Number of texts per step."""
    steps: int


STAGES = [Stage(192, 64, 32, 250), Stage(512, 32, 16, 200), Stage(1024, 16, 16, 150), Stage(LENGTH, 32, 8, 1400)]


@dataclass(frozen=True, kw_only=True)
class RecallStudy(Study):
    """Settings."""

    seeds: tuple[int, ...] = (0, 1)
    """A model of each kind is trained for each."""
    held_out: int = 64
    """Texts that the models are compared on."""


class Recall(nn.Module):
    """Token embedding, convolution of two tokens, one causal attention head, feed-forward, logits of values."""

    def __init__(self, contestant: Contestant) -> None:
        super().__init__()
        self.scale = TEMPERATURES[contestant]
        self.embedding = nn.Embedding(KEYS + VALUES + NOISE, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 2, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.in_proj = nn.Linear(WIDTH, 3 * HEAD_DIM)
        self.out_proj = nn.Linear(HEAD_DIM, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )
        self.head = nn.Linear(WIDTH, VALUES)
        self.adaptive = (
            AdaptiveBlockAttention(
                1, HEAD_DIM, blocks_per_query=KEPT, block_size=BLOCK, query_block_size=1, softmax_scale=self.scale
            )
            if contestant == "adaptive"
            else None
        )

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual stream, and query, key and value ``[texts, length, 1, HEAD_DIM]``."""
        x = self.embedding(tokens)
        x = self.norm(x + self.convolution(functional.pad(x, (0, 0, 1, 0)).mT).mT)
        q, k, v = self.in_proj(x).unflatten(-1, (3, 1, HEAD_DIM)).unbind(2)
        return x, functional.normalize(q, dim=-1), functional.normalize(k, dim=-1), v

    def forward(self, tokens: Tensor, first: int = -QUESTIONS) -> Tensor:
        """Logits ``[texts, rows, VALUES]`` of the rows from ``first`` on; others are not needed."""
        x, q, k, v = self.project(tokens)
        start = first % tokens.shape[1]
        if self.adaptive is None:
            window = local_window(KEPT * BLOCK - 1)
            seen = attend(q[:, start:], k, v, window, is_causal=True, scale=self.scale, query_offset=start)
        else:
            seen = self.adaptive(q[:, start:], k, v, True, query_offset=start)
        x = x[:, start:] + self.out_proj(seen.flatten(-2))
        return self.head(x + self.feed_forward(x))

    def choices(self, tokens: Tensor) -> Tensor:
        """The blocks that every question attends to, ``[texts, QUESTIONS, KEPT]``."""
        assert self.adaptive is not None
        _, q, k, _ = self.project(tokens)
        start = tokens.shape[1] - QUESTIONS
        return self.adaptive.select(q[:, start:], k, True, query_offset=start).blocks[:, 0]


@torch.no_grad()
def check(generator: torch.Generator) -> float:
    """Largest float64 difference between questions alone and in the whole text; 1 if the future affects the past."""
    model = Recall("adaptive").double()
    tokens = draw(1, 1024, 15, generator).tokens
    whole = model(tokens, 0)
    changed = tokens.clone()
    changed[:, 700:] = torch.randint(KEYS, (1, 324), generator=generator)
    if not torch.equal(model(changed, 0)[:, :700], whole[:, :700]):
        return 1.0
    return float((model(tokens) - whole[:, -QUESTIONS:]).abs().max())


@dataclass(frozen=True, slots=True)
class Score:
    """Results of a trained model on unseen texts of 4,096 tokens."""

    contestant: Contestant
    seed: int
    accuracy: float
    in_reach: float
    """Fraction of questions whose answer lies in what the model sees."""
    density: float
    """Fraction of question-key pairs that are computed."""
    least_scorer_gradient: float | None
    """Smallest norm over the scorer's parameters of the first step's gradient."""
    seconds: float
    """Seconds of training."""


@torch.no_grad()
def evaluate(model: Recall, texts: Texts) -> tuple[float, float]:
    """Fraction of questions answered correctly, and of those whose answer is in reach."""
    answered, reached = [], []
    for tokens, answers, positions in zip(*(part.split(8) for part in texts), strict=True):
        answered.append(model(tokens).argmax(-1) == answers)
        if model.adaptive is None:
            row = torch.arange(tokens.shape[1] - QUESTIONS, tokens.shape[1])
            reached.append(positions > row - KEPT * BLOCK)
        else:
            reached.append((model.choices(tokens) == positions.unsqueeze(-1) // BLOCK).any(-1))
    return float(torch.cat(answered).double().mean()), float(torch.cat(reached).double().mean())


def train(model: Recall, stages: list[Stage], generator: torch.Generator) -> Iterator[tuple[int, Stage, float]]:
    """Step number, stage and loss of every step; learning rates decay to a twentieth over the last third."""
    scorer = [] if model.adaptive is None else list(model.adaptive.scorer.parameters())
    of_scorer = {id(parameter) for parameter in scorer}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in of_scorer]
    groups = [{"params": rest, "lr": RATE}, *([{"params": scorer, "lr": SCORER_RATE}] if scorer else [])]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    total = sum(stage.steps for stage in stages)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 0.05 + 0.95 * 3 * (total - step) / total)
    )
    step = 0
    for stage in stages:
        for _ in range(stage.steps):
            texts = draw(stage.texts, stage.length, stage.pairs, generator)
            loss = functional.cross_entropy(model(texts.tokens).flatten(0, 1), texts.answers.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            yield step, stage, float(loss.detach())


def scored(contestant: Contestant, seed: int, stages: list[Stage], held_out: Texts) -> Score:
    """Train one model and score it."""
    torch.manual_seed(seed)
    model = Recall(contestant)
    begin = time.perf_counter()
    least: float | None = None
    few = Texts(*(part[:16] for part in held_out))
    for step, stage, loss in train(model, stages, torch.Generator().manual_seed(seed)):
        if step == 1 and model.adaptive is not None:
            gradients = [parameter.grad for parameter in model.adaptive.scorer.parameters()]
            least = min(0.0 if grad is None else float(grad.norm()) for grad in gradients)
        if step % 50 == 0:
            accuracy, in_reach = evaluate(model, few)
            print(
                f"{contestant} seed {seed} step {step:4} on {stage.length:4} tokens: loss {loss:.3f}; at {LENGTH} "
                f"tokens {accuracy:.3f} answered, {in_reach:.3f} in reach",
                flush=True,
            )
    seconds = time.perf_counter() - begin
    accuracy, in_reach = evaluate(model, held_out)
    density = KEPT * BLOCK / LENGTH
    return Score(contestant, seed, accuracy, in_reach, density, least, seconds)


def measure(given: RecallStudy) -> dict[str, Any]:
    """Train and score both models for every seed.

    Raises:
        SystemExit: a question alone and in its text differ.
    """
    difference = check(torch.Generator().manual_seed(0))
    if difference > 1e-12:
        raise SystemExit(f"not trained, because a question alone and in its text differ by {difference:.1e}")
    stages = [stage._replace(steps=1) for stage in STAGES[:1]] if given.tiny else STAGES
    # Different from every training seed.
    held_out = draw(given.held_out, LENGTH, STAGES[-1].pairs, torch.Generator().manual_seed(1 << 40))
    scores = []
    contestants: tuple[Contestant, ...] = ("adaptive", "window")
    for seed, contestant in itertools.product(given.seeds, contestants):
        scores.append(asdict(scored(contestant, seed, stages, held_out)))
        print(scores[-1], flush=True)
    return {
        "length": LENGTH,
        "block_size": BLOCK,
        "blocks_per_query": KEPT,
        "query_block_size": 1,
        "questions_of_a_text": QUESTIONS,
        "pairs_of_a_text": STAGES[-1].pairs,
        "held_out_texts": given.held_out,
        "temperatures": TEMPERATURES,
        "learning_rates": {"model": RATE, "scorer": SCORER_RATE},
        "stages": [stage._asdict() for stage in stages],
        "largest_difference_float64": difference,
        "scores": scores,
    }


if __name__ == "__main__":
    run(RecallStudy, measure, text=__doc__, name="recall", group="models", tiny={"seeds": (0,), "held_out": 1})
