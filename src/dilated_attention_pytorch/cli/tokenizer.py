"""The command ``dilated-attention tokenizer``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import tyro

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.machine import require
from dilated_attention_pytorch.output import check_new_file, write_text


@dataclass(kw_only=True, slots=True)
class Tokenizer:
    """Train a byte-level BPE tokenizer on the training text of `train`.

    Held-out documents are left out. Tokens are the 256 bytes, <|endoftext|> between documents, and merges by frequency.
    Every text is the concatenation of its tokens, so losses in bits per byte stay exact.

        dilated-attention tokenizer texts/ --vocab-size 8192 --output-file tokenizer.json
    """

    data: tyro.conf.Positional[tuple[Path, ...]] = ()
    """As for `train`: text files, folders, JSONL, Parquet, folders saved by datasets; default: the source of the
    running Python's standard library."""
    vocab_size: int
    """Number of tokens, at least 257."""
    output_file: Path
    """File to write, in the format of tokenizers and transformers. It must not exist."""
    text_field: str = "text"
    """Field or column of records that holds the text."""
    mixture: bool = False
    """The data are for a run with --data-weights, which holds out a part of each source."""

    def run_command(self) -> None:
        """Train and write the tokenizer.

        Raises:
            RunError: invalid data, vocabulary size or output file; raised before anything is written.
        """
        require("training a tokenizer", ("tokenizers", "numpy"), "train")
        from dilated_attention_pytorch.training.data.sources import Sources, parts_of
        from dilated_attention_pytorch.training.data.tokenizer import check_vocab_size, train_tokenizer

        check_new_file(self.output_file)
        check_vocab_size(self.vocab_size)
        if self.mixture and not self.data:
            raise RunError("--mixture is for the data of a run with --data-weights; name them, or leave it out")
        sources = [Sources(part, self.text_field, print) for part in parts_of(self.data, is_mixture=self.mixture)]
        for part in sources:
            part.survey()
        texts = chain.from_iterable(part.texts_to_train_on() for part in sources)
        tokenizer = train_tokenizer(texts, self.vocab_size)
        write_text(self.output_file, tokenizer.text)
        num_bytes = sum(part.num_bytes for part in sources)
        words = ["dilated-attention", "train", "--tokenizer", str(self.output_file)]
        if self.data:
            words += ["--data", *map(str, self.data)]
        if self.mixture:
            words += ["--data-weights", *["1"] * len(self.data)]
        if self.text_field != "text":
            words += ["--text-field", self.text_field]
        print(
            f"{shlex.quote(str(self.output_file))}: {tokenizer.vocab_size:,} tokens, from what is not held out of "
            f"{num_bytes:,} bytes of text; train with it:\n  {shlex.join(words)}"
        )
