"""Packed documents, in rows or under a token budget: no attention or loss across boundaries, positions restart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from dilated_attention_pytorch.models.token_loss import IGNORED

from .corpus import Text
from .windows import Window, evenly_spread

if TYPE_CHECKING:
    import numpy as np


_PER_DOUBLING = 4
"""Buckets per factor of two in length: the longest document of a bucket is at most 1.19 times its shortest."""


class DocumentSamples(Dataset[Window]):
    """Packed samples, over as many epochs as needed: sample i is a function of ``(seed, i)`` alone.

    Args:
        text: the documents.
        num_samples: number of samples.
        per_epoch: samples per epoch.
        seed: seed of the order, which is drawn in every epoch; None = the order of the text.
    """

    def __init__(self, text: Text, num_samples: int, per_epoch: int, seed: int | None) -> None:
        self.text = text
        self.num_samples = num_samples
        self.per_epoch = per_epoch
        self.seed = seed
        self._epoch = -1

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Window:
        parts = self._parts_of(index)
        return packed([self.text.tokens(start, start + length).to(torch.int64) for start, length in parts])

    def lengths_in(self, index: int) -> list[int]:
        """Length in tokens of every document of sample ``index``."""
        return [length for _, length in self._parts_of(index)]

    def _parts_of(self, index: int) -> list[tuple[int, int]]:
        """Start in the text and number of tokens of each document (or part of one) of a sample."""
        epoch, position = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            self._arrange(epoch)
            self._epoch = epoch
        return self._parts_at(position)

    def _arrange(self, epoch: int) -> None:
        """Draw the order of an epoch."""
        raise NotImplementedError

    def _parts_at(self, position: int) -> list[tuple[int, int]]:
        """The parts of the sample at ``position`` of the epoch."""
        raise NotImplementedError


class PackedRows(DocumentSamples):
    """Full rows of consecutive documents.

    Documents are shuffled in every epoch and split into rows of equal length. A document cut by the end of a row
    continues in the next row as a separate document. Every token except a last incomplete row is read once per epoch.

    Args:
        text: the documents; at least ``context_length`` tokens.
        context_length: tokens per row.
        num_rows: number of rows.
        seed: see :class:`DocumentSamples`.
    """

    def __init__(self, text: Text, context_length: int, num_rows: int, *, seed: int | None) -> None:
        super().__init__(text, num_rows, len(text) // context_length, seed)
        self.context_length = context_length
        self._lengths = document_lengths(text)
        self._order = self._ends = self._lengths

    def _arrange(self, epoch: int) -> None:
        self._order = order_of_epoch(len(self._lengths), self.seed, epoch)
        self._ends = self._lengths[self._order].cumsum()

    def _parts_at(self, position: int) -> list[tuple[int, int]]:
        first = position * self.context_length
        number, left = int(self._ends.searchsorted(first, side="right")), self.context_length
        parts = []
        while left:
            document = int(self._order[number])
            before = max(0, first - int(self._ends[number] - self._lengths[document]))
            taken = min(left, int(self._lengths[document]) - before)
            parts.append((int(self.text.file_starts[document]) + before, taken))
            number, left = number + 1, left - taken
        return parts


class BucketedBatches(DocumentSamples):
    """Batches of whole documents of similar length under a token budget, packed without padding.

    Documents longer than ``context_length`` are split into parts that count as documents; parts of a single token,
    which contain no prediction, are dropped. The assignment of documents to batches and the order of the batches are
    drawn anew in every epoch. A bucket's batch size is what would fit if all documents were as long as its longest, so
    the number of batches per epoch is constant, and no batch exceeds ``max_tokens``.

    Args:
        text: the documents.
        context_length: maximum document length in tokens.
        max_tokens: maximum tokens per batch, at least ``context_length``.
        max_batch_size: maximum documents per batch; 0 = unlimited.
        num_batches: number of batches.
        seed: see :class:`DocumentSamples`.
    """

    def __init__(
        self, text: Text, context_length: int, *, max_tokens: int, max_batch_size: int, num_batches: int, seed: int
    ) -> None:
        import numpy as np

        self._starts, self._lengths = _split_documents(text, context_length)
        levels = np.floor(_PER_DOUBLING * np.log2(self._lengths)).astype(np.int64)
        self._buckets = [np.flatnonzero(levels == level) for level in np.unique(levels)]
        self._sizes = [max_tokens // int(self._lengths[bucket].max()) for bucket in self._buckets]
        if max_batch_size:
            self._sizes = [min(size, max_batch_size) for size in self._sizes]
        counts = [math.ceil(len(bucket) / size) for bucket, size in zip(self._buckets, self._sizes, strict=True)]
        self._ends = np.cumsum(counts)
        super().__init__(text, num_batches, int(self._ends[-1]), seed)
        self._members: list[np.ndarray[Any, Any]] = []
        self._order = self._ends

    def _arrange(self, epoch: int) -> None:
        drawn = [order_of_epoch(len(bucket), self.seed, epoch) for bucket in self._buckets]
        self._members = [bucket[order] for bucket, order in zip(self._buckets, drawn, strict=True)]
        self._order = order_of_epoch(self.per_epoch, self.seed, epoch)

    def _parts_at(self, position: int) -> list[tuple[int, int]]:
        batch = int(self._order[position])
        level = int(self._ends.searchsorted(batch, side="right"))
        first = (batch - (int(self._ends[level - 1]) if level else 0)) * self._sizes[level]
        members = self._members[level][first : first + self._sizes[level]]
        return list(zip(self._starts[members].tolist(), self._lengths[members].tolist(), strict=True))


def _split_documents(text: Text, context_length: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Starts and lengths of the documents; documents longer than the context are split."""
    import numpy as np

    lengths = document_lengths(text)
    counts = -(-lengths // context_length)
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(counts.cumsum() - counts, counts)
    starts = text.file_starts.numpy()[document] + number * context_length
    lengths = np.minimum(lengths[document] - number * context_length, context_length)
    return starts[lengths > 1], lengths[lengths > 1]


def held_out_rows(text: Text, context_length: int, most: int) -> list[Window]:
    """Rows of documents in the order of the text; if there are more than ``most``, that many, evenly spaced."""
    length = min(context_length, len(text))
    rows = PackedRows(text, length, len(text) // length, seed=None)
    return [rows[index] for index in evenly_spread(len(rows), most)]


def document_lengths(text: Text) -> np.ndarray[Any, Any]:
    """int64 ``[documents]``: number of tokens, including the separator."""
    return torch.diff(text.file_starts, append=torch.tensor([len(text)])).numpy()


def order_of_epoch(count: int, seed: int | None, epoch: int) -> np.ndarray[Any, Any]:
    """int64 ``[count]``: a permutation drawn from ``(seed, epoch)``; the identity if the seed is None."""
    import numpy as np

    if seed is None:
        return np.arange(count)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch)))).permutation(count)


def packed(documents: Sequence[Tensor]) -> Window:
    """Documents ``[n]`` each as one row: tokens and labels ``[N]``, boundaries int32 ``[documents + 1]``."""
    tokens = torch.cat([*documents])
    lengths = torch.tensor([len(document) for document in documents])
    ends = lengths.cumsum(0)
    labels = tokens.clone()
    labels[ends - lengths] = IGNORED  # the first token of a document is not predicted
    return {"input_ids": tokens, "labels": labels, "cu_seqlens": functional.pad(ends, (1, 0)).to(torch.int32)}


def documents_of(row: Window) -> list[Tensor]:
    """The tokens of each document of a packed row."""
    ends = row["cu_seqlens"].tolist()
    return [row["input_ids"][first:after] for first, after in pairwise(ends)]


def as_one_row(rows: Sequence[Window]) -> Window:
    """Rows of packed documents as a batch of one row, with the boundaries of all of them in ``cu_seqlens``."""
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    before = (lengths.cumsum(0) - lengths).to(torch.int32)
    ends = [row["cu_seqlens"][1:] + offset for row, offset in zip(rows, before, strict=True)]
    joined = {name: torch.cat([row[name] for row in rows])[None] for name in ("input_ids", "labels")}
    return {**joined, "cu_seqlens": functional.pad(torch.cat(ends), (1, 0))}
