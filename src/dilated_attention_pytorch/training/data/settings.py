"""What a run is told of its data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..run_settings import RunSettings, check_choice, check_number

Packing = Literal["windows", "documents"]


@dataclass(kw_only=True, slots=True)
class DataSettings(RunSettings):
    """How texts become tokens, and tokens batches.

    Raises:
        ValueError: a number out of range, or settings that do not go together.
    """

    tokenizer: Path | None = None
    """A tokenizer.json, or a folder that holds one, of a byte-level tokenizer, such as `dilated-attention tokenizer`
    makes; its tokens are the model's (--model.vocab-size). Without it: one token a byte."""
    cache: Path | None = None
    """Folder where texts are kept as tokens: made once for the same files and tokenizer, and mapped into memory.
    Without it: beside a tokenizer the user's cache folder; bytes are read into memory."""
    weights: tuple[float, ...] = ()
    """One for each of data: in which proportions batches are drawn from them. Without it they are one text, of which
    every byte is as likely as any other."""
    packing: Packing = "windows"
    """"windows": context_length tokens of the text from anywhere, across documents. "documents": rows of whole
    documents, none of which sees another; positions restart in each, and every document is read once an epoch."""
    max_tokens: int = 0
    """With packing "documents": a batch holds documents of like length, in all at most so many tokens, instead of
    batch_size rows. 0: rows."""
    max_batch_size: int = 0
    """With max_tokens: documents of a batch at most; 0 for any number."""
    workers: int = 0
    """Processes that load batches ahead; 0: the training process loads them. What is loaded is the same."""

    def __post_init__(self) -> None:
        RunSettings.__post_init__(self)
        for name in ("max_tokens", "max_batch_size", "workers"):
            check_number(self, name, least=0)
        check_choice(self, "packing", get_args(Packing))
        self.tokenizer = None if self.tokenizer is None else Path(self.tokenizer)
        self.cache = None if self.cache is None else Path(self.cache)
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
        """Values of settings that leave the choice to the run."""
        return {**RunSettings.left_open(self), "cache": None}

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as values that JSON holds."""
        values = {**RunSettings.to_dict(self), "weights": list(self.weights)}
        for name in ("tokenizer", "cache"):
            path = values[name]
            values[name] = None if path is None else str(path.absolute())
        return values
