"""Text windows as tensors: random ones for training, fixed ones for evaluation."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from dilated_attention_pytorch.models.token_loss import IGNORED

from ..stages import Stages
from .corpus import Text

Window = dict[str, Tensor]


class TrainingWindows(Dataset[Window]):
    """Random windows; window i is drawn from ``(seed, i)`` alone, so a resumed run sees the same windows."""

    def __init__(
        self, text: Text, context_length: int, num_windows: int, *, seed: int, file_start_fraction: float
    ) -> None:
        self.text = text
        self.context_length = context_length
        self.num_windows = num_windows
        self.seed = seed
        self.file_start_fraction = file_start_fraction

    def __len__(self) -> int:
        return self.num_windows

    def __getitem__(self, index: int) -> Window:
        draw = random.Random(f"{self.seed}:{index}")
        last = len(self.text) - self.context_length
        if draw.random() < self.file_start_fraction:
            start = min(int(self.text.file_starts[draw.randrange(len(self.text.file_starts))]), last)
        else:
            start = draw.randrange(last + 1)
        return _window(self.text.tokens(start, start + self.context_length))


class StagedBatches(Dataset[Window]):
    """Training batches whose windows depend on the stage of the run.

    Batch i is drawn from ``(seed, i)`` alone.

    Args:
        text: text to draw windows from, at least as long as the longest.
        stages: stages of the run.
        batches_per_step: batches per optimizer step.
        seed: seed of the draws.
        file_start_fraction: see :class:`TrainingWindows`.
    """

    def __init__(
        self, text: Text, stages: Stages, *, batches_per_step: int, seed: int, file_start_fraction: float = 0.0
    ) -> None:
        self.stages = stages
        self.batches_per_step = batches_per_step
        self._most_windows = max(stages.windows)
        # Window indices are unique over all batches, whatever the stages.
        num_windows = len(self) * self._most_windows
        self._windows = [
            TrainingWindows(text, length, num_windows, seed=seed, file_start_fraction=file_start_fraction)
            for length in stages.lengths
        ]

    def __len__(self) -> int:
        return self.stages.ends[-1] * self.batches_per_step

    def __getitem__(self, index: int) -> Window:
        stage = self.stages.at(index // self.batches_per_step)
        windows, first = self._windows[stage], index * self._most_windows
        return default_collate([windows[first + row] for row in range(self.stages.windows[stage])])

    def tokens_after(self, step: int) -> int:
        """Number of tokens in the first ``step`` optimizer steps."""
        return self.stages.tokens_after(step) * self.batches_per_step

    def describe(self, unit: str) -> str:
        """Description of the tokens (called ``unit``) per step and of the window lengths."""
        firsts = (0, *self.stages.ends)
        parts = [
            f"{self.tokens_after(first + 1) - self.tokens_after(first):,} {unit}"
            + (f" in windows of {length:,} from step {first + 1:,}" if len(self.stages.lengths) > 1 else "")
            for first, length in zip(firsts, self.stages.lengths, strict=False)
        ]
        return "each of " + ", then ".join(parts)


def joined(batches: Sequence[Window]) -> Window:
    """Concatenate the windows of several batches of one length."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


class EvaluationWindows(Dataset[Window]):
    """Consecutive windows that overlap by one token, so that every token except the first is predicted once.

    If there are more than ``most_windows``, that many, evenly spaced.
    """

    def __init__(self, text: Text, context_length: int, most_windows: int) -> None:
        self.text = text
        self.length = min(context_length, len(text))
        total = (len(text) - 1) // (self.length - 1)
        self.starts = [index * (self.length - 1) for index in evenly_spread(total, most_windows)]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Window:
        start = self.starts[index]
        return _window(self.text.tokens(start, start + self.length))


class WindowShare(Dataset[Window]):
    """The windows of one of ``num_shares`` data-parallel groups: every ``num_shares``-th, starting with ``share``.

    All shares have equal length: if the windows do not divide evenly, the last of a share may have no labels.
    """

    def __init__(self, windows: Dataset[Window], num_windows: int, share: int, num_shares: int) -> None:
        self.windows = windows
        self.num_windows = num_windows
        self.share = share
        self.num_shares = num_shares

    def __len__(self) -> int:
        return -(-self.num_windows // self.num_shares)

    def __getitem__(self, index: int) -> Window:
        number = index * self.num_shares + self.share
        if number < self.num_windows:
            return self.windows[number]
        window = self.windows[0]
        return {**window, "labels": torch.full_like(window["labels"], IGNORED)}


def one_batch(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate function: training samples are batches already; an evaluation window becomes a batch of one."""
    (item,) = items
    return item if item["input_ids"].dim() == 2 else {name: tensor[None] for name, tensor in item.items()}


def evenly_spread(total: int, count: int) -> list[int]:
    """``count`` evenly spaced numbers below ``total``; all if there are fewer."""
    count = min(count, total)
    return [index * total // count for index in range(count)]


def _window(data: Tensor) -> Window:
    tokens = data.to(torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def long_files(text: Text, context_length: int, most_files: int) -> list[Tensor]:
    """Separator and first ``context_length`` tokens of evenly spaced files that are at least that long."""
    lengths = torch.diff(text.file_starts, append=torch.tensor([len(text)])) - 1
    indices = torch.nonzero(lengths >= context_length).flatten().tolist()
    chosen = [indices[number] for number in evenly_spread(len(indices), most_files)]
    return [text.file(index)[: context_length + 1].to(torch.int64) for index in chosen]
