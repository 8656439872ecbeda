"""Data settings of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..run_settings import MOST_WORKERS, RunSettings, check_choice, check_number, check_text

Packing = Literal["windows", "documents"]


@dataclass(kw_only=True, slots=True)
class DataSettings(RunSettings):
    """Tokenization and batching of the texts.

    Raises:
        ValueError: a value is out of range, or settings contradict each other.
    """

    tokenizer: Path | None = None
    """tokenizer.json of a byte-level tokenizer, or a folder that contains one, as `dilated-attention tokenizer`
    writes; --model.vocab-size must be its number of tokens. Default: one token per byte."""
    cache: Path | None = None
    """Folder for cached tokens: computed once per files and tokenizer, and memory-mapped.
    Default: with a tokenizer, the user's cache folder; bytes are read into memory."""
    weights: tuple[float, ...] = ()
    """One weight per source in data: proportions of the batches. Default: all sources form one text, in
    which every byte is equally likely."""
    packing: Packing = "windows"
    """"windows": context_length consecutive tokens from anywhere in the text, across documents. "documents": rows of
    whole documents that do not attend to each other; positions restart in each, and every document is read once per
    epoch."""
    max_tokens: int = 0
    """With packing "documents": batches of documents of similar length with at most this many tokens, instead of
    batch_size rows. 0: rows."""
    max_batch_size: int = 0
    """With max_tokens: maximum documents per batch; 0 = unlimited."""
    workers: int = 0
    """Processes that load batches ahead; 0: the training process loads them. The batches do not depend on it."""

    def __post_init__(self) -> None:
        RunSettings.__post_init__(self)
        for name in ("max_tokens", "max_batch_size"):
            check_number(self, name, least=0)
        check_number(self, "workers", least=0, most=MOST_WORKERS)
        check_choice(self, "packing", get_args(Packing))
        self.tokenizer = None if self.tokenizer is None else Path(self.tokenizer)
        self.cache = None if self.cache is None else Path(self.cache)
        for name in ("tokenizer", "cache"):
            check_text(self, name)
        self.weights = tuple(self.weights)
        if self.weights and len(self.weights) != len(self.data):
            raise ValueError(
                f"weights must be one for each of data, got {len(self.weights)} for {len(self.data)}; leave them out "
                "to take all as one text"
            )
        for weight in self.weights:
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
                raise ValueError(f"weights must be finite numbers above 0, got {weight!r}")
        if self.max_tokens and self.packing != "documents":
            raise ValueError(
                'max_tokens counts the tokens of whole documents: add packing "documents", or leave it out'
            )
        if self.max_batch_size and not self.max_tokens:
            raise ValueError("max_batch_size bounds the batches that max_tokens makes; add that, or leave it out")

    def left_open(self) -> dict[str, Any]:
        """Settings whose value means that the run chooses."""
        return {**RunSettings.left_open(self), "cache": None}

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON-serialisable values."""
        values = {**RunSettings.to_dict(self), "weights": list(self.weights)}
        for name in ("tokenizer", "cache"):
            path = values[name]
            values[name] = None if path is None else str(path.absolute())
        return values
