"""Length-bucketed batches of documents under a token budget."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from ..corpus import Text
from ..windows import Window
from .documents import document_lengths, order_of_epoch, packed

if TYPE_CHECKING:
    import numpy as np

_PER_DOUBLING = 4
"""Buckets per factor of two in length: the longest document of a bucket is at most 1.19 times its shortest."""


class BucketedBatches(Dataset[Window]):
    """Batches of whole documents, packed without padding; documents do not attend to each other.

    Documents longer than ``context_length`` are split into parts that count as documents; parts of a single token,
    which contain no prediction, are dropped. The assignment of documents to batches
    and the order of the batches are drawn anew in every epoch: batch i is a function of ``(seed, i)`` alone. A
    bucket's batch size is what would fit if all documents were as long as its longest, so the number of
    batches per epoch is constant, and no batch exceeds ``max_tokens``.

    Args:
        text: the documents.
        context_length: maximum document length in tokens.
        max_tokens: maximum tokens per batch, at least ``context_length``.
        max_batch_size: maximum documents per batch; 0 = unlimited.
        num_batches: number of batches, over as many epochs as needed.
        seed: seed of the draws.
    """

    def __init__(
        self, text: Text, context_length: int, *, max_tokens: int, max_batch_size: int, num_batches: int, seed: int
    ) -> None:
        import numpy as np

        self.text = text
        self.max_tokens, self.max_batch_size = max_tokens, max_batch_size
        self.num_batches = num_batches
        self.seed = seed
        self._starts, self._lengths = _parts(text, context_length)
        levels = np.floor(_PER_DOUBLING * np.log2(self._lengths)).astype(np.int64)
        self._buckets = [np.flatnonzero(levels == level) for level in np.unique(levels)]
        self._sizes = [self._room(int(self._lengths[bucket].max())) for bucket in self._buckets]
        counts = [math.ceil(len(bucket) / size) for bucket, size in zip(self._buckets, self._sizes, strict=True)]
        self._ends = np.cumsum(counts)
        self._epoch = -1
        self._members: list[np.ndarray[Any, Any]] = []
        self._order = self._ends

    def _room(self, longest: int) -> int:
        documents = self.max_tokens // longest
        return min(documents, self.max_batch_size) if self.max_batch_size else documents

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Window:
        members = self._members_of(index)
        parts = zip(self._starts[members].tolist(), self._lengths[members].tolist(), strict=True)
        return packed([self.text.tokens(first, first + length).to(torch.int64) for first, length in parts])

    def lengths_in(self, index: int) -> list[int]:
        """Length in tokens of every document of batch ``index``."""
        lengths: list[int] = self._lengths[self._members_of(index)].tolist()
        return lengths

    def _members_of(self, index: int) -> np.ndarray[Any, Any]:
        epoch, place = divmod(index, int(self._ends[-1]))
        self._arrange(epoch)
        batch = int(self._order[place])
        level = int(self._ends.searchsorted(batch, side="right"))
        first = (batch - (int(self._ends[level - 1]) if level else 0)) * self._sizes[level]
        return self._members[level][first : first + self._sizes[level]]

    def _arrange(self, epoch: int) -> None:
        """Draw the batches of an epoch: the members of every bucket and the order of the batches."""
        if epoch != self._epoch:
            drawn = [order_of_epoch(len(bucket), self.seed, epoch) for bucket in self._buckets]
            self._members = [bucket[order] for bucket, order in zip(self._buckets, drawn, strict=True)]
            self._order = order_of_epoch(int(self._ends[-1]), self.seed, epoch)
            self._epoch = epoch


def _parts(text: Text, context_length: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Starts and lengths of the documents; documents longer than the context are split."""
    import numpy as np

    lengths = document_lengths(text)
    counts = -(-lengths // context_length)
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(counts.cumsum() - counts, counts)
    starts = text.file_starts.numpy()[document] + number * context_length
    lengths = np.minimum(lengths[document] - number * context_length, context_length)
    return starts[lengths > 1], lengths[lengths > 1]
