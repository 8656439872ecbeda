"""Windows of a text as tensors: drawn ones to train on, fixed ones to evaluate on."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from .corpus import Text

Window = dict[str, Tensor]
IGNORED = -100
"""The label that no loss counts."""


class TrainingWindows(Dataset[Window]):
    """Window i is drawn by ``(seed, i)`` alone, so a run that is taken up again sees what it would have seen."""

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
        return _window(self.text.data[start : start + self.context_length])


class StagedBatches(Dataset[Window]):
    """Batches for training whose windows grow: each stage has an equal part of the optimizer steps.

    Batch i is drawn by ``(seed, i)`` alone.

    Args:
        text: to draw windows from, at least as long as the longest.
        stages: the window's length in each stage.
        steps: optimizer steps in all.
        batches_per_step: batches of an optimizer step.
        batch_tokens: a batch has as many windows as so many tokens make, at least one.
        seed: of the draws.
    """

    def __init__(
        self, text: Text, stages: Sequence[int], *, steps: int, batches_per_step: int, batch_tokens: int, seed: int
    ) -> None:
        self.stages = tuple(stages)
        self.steps = steps
        self.batches_per_step = batches_per_step
        self.batch_tokens = batch_tokens
        self._most_windows = max(1, batch_tokens // min(stages))
        # No two batches draw the same window, whatever the stages.
        num_windows = steps * batches_per_step * self._most_windows
        self._windows = [
            TrainingWindows(text, length, num_windows, seed=seed, file_start_fraction=0.0) for length in stages
        ]

    def __len__(self) -> int:
        return self.steps * self.batches_per_step

    def __getitem__(self, index: int) -> Window:
        windows = self._windows[self.stage_of(index // self.batches_per_step)]
        first = index * self._most_windows
        return default_collate([windows[first + row] for row in range(self._windows_in(windows.context_length))])

    def _windows_in(self, length: int) -> int:
        return max(1, self.batch_tokens // length)

    def stage_of(self, step: int) -> int:
        """The stage of an optimizer step, both from 0."""
        return step * len(self.stages) // self.steps

    def tokens_after(self, step: int) -> int:
        """Tokens in the first ``step`` optimizer steps."""
        lengths = [self.stages[self.stage_of(done)] for done in range(step)]
        return sum(self._windows_in(length) * length for length in lengths) * self.batches_per_step


class EvaluationWindows(Dataset[Window]):
    """Windows that follow each other and share one byte, so that every byte but the first is predicted once.

    Where there are more than ``most_windows``, so many of them, evenly spread.
    """

    def __init__(self, text: Text, context_length: int, most_windows: int) -> None:
        self.text = text
        self.length = min(context_length, len(text))
        whole = (len(text) - 1) // (self.length - 1)
        self.starts = [place * (self.length - 1) for place in _spread(whole, most_windows)]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Window:
        start = self.starts[index]
        return _window(self.text.data[start : start + self.length])

    def predicted(self) -> bytes:
        """The bytes that the windows predict, in their order."""
        return b"".join(self.text.data[start + 1 : start + self.length].numpy().tobytes() for start in self.starts)

    def spread(self, count: int) -> list[int]:
        """The indices of ``count`` windows, evenly spread."""
        return _spread(len(self), count)


class WindowShare(Dataset[Window]):
    """The windows that one of ``num_shares`` groups of processes reads: every ``num_shares``-th, from ``share`` on.

    All shares are equally long: where the windows do not divide, the last of a share is one without labels.
    """

    def __init__(self, windows: Dataset[Window], num_windows: int, share: int, num_shares: int) -> None:
        self.windows = windows
        self.num_windows = num_windows
        self.share = share
        self.num_shares = num_shares

    def __len__(self) -> int:
        return -(-self.num_windows // self.num_shares)

    def __getitem__(self, index: int) -> Window:
        place = index * self.num_shares + self.share
        if place < self.num_windows:
            return self.windows[place]
        window = self.windows[0]
        return {**window, "labels": torch.full_like(window["labels"], IGNORED)}


def _spread(total: int, count: int) -> list[int]:
    count = min(count, total)
    return [place * total // count for place in range(count)]


def _window(data: Tensor) -> Window:
    tokens = data.to(torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def long_files(text: Text, context_length: int, most_files: int) -> list[Tensor]:
    """The separator and the first ``context_length`` bytes of evenly spread files that are at least that long."""
    lengths = torch.diff(text.file_starts, append=torch.tensor([len(text)])) - 1
    indices = torch.nonzero(lengths >= context_length).flatten().tolist()
    chosen = [indices[place] for place in _spread(len(indices), most_files)]
    return [text.file(index)[: context_length + 1].to(torch.int64) for index in chosen]
