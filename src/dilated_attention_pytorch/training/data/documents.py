"""Packed documents: no attention or loss across document boundaries, positions restart in each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from dilated_attention_pytorch.models.token_loss import IGNORED

from ..corpus import Text
from ..windows import Window, evenly_spread

if TYPE_CHECKING:
    import numpy as np


class PackedRows(Dataset[Window]):
    """Full rows of consecutive documents.

    Row i is a function of ``(seed, i)`` alone: documents are shuffled in every epoch and split
    into rows of equal length. A document cut by the end of a row continues in the next row as a separate document.
    Every token except a last incomplete row is read once per epoch.

    Args:
        text: the documents; at least ``context_length`` tokens.
        context_length: tokens per row.
        num_rows: number of rows, over as many epochs as needed.
        seed: seed of the order; None = the order of the text.
    """

    def __init__(self, text: Text, context_length: int, num_rows: int, *, seed: int | None) -> None:
        self.text = text
        self.context_length = context_length
        self.num_rows = num_rows
        self.seed = seed
        self._lengths = document_lengths(text)
        self._per_epoch = len(text) // context_length
        self._epoch = -1
        self._order = self._ends = self._lengths

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Window:
        parts = self._parts_of(index)
        return packed([self.text.tokens(start, start + length).to(torch.int64) for start, length in parts])

    def lengths_in(self, index: int) -> list[int]:
        """Length in tokens of every document of row ``index``."""
        return [length for _, length in self._parts_of(index)]

    def _parts_of(self, index: int) -> list[tuple[int, int]]:
        """Start in the text and number of tokens of each document (or part of one) of a row."""
        epoch, row = divmod(index, self._per_epoch)
        self._arrange(epoch)
        first = row * self.context_length
        place, left = int(self._ends.searchsorted(first, side="right")), self.context_length
        parts = []
        while left:
            document = int(self._order[place])
            before = max(0, first - int(self._ends[place] - self._lengths[document]))
            taken = min(left, int(self._lengths[document]) - before)
            parts.append((int(self.text.file_starts[document]) + before, taken))
            place, left = place + 1, left - taken
        return parts

    def _arrange(self, epoch: int) -> None:
        """Draw the order of an epoch and compute the ends of its documents."""
        if epoch != self._epoch:
            self._order = order_of_epoch(len(self._lengths), self.seed, epoch)
            self._ends = self._lengths[self._order].cumsum()
            self._epoch = epoch


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
