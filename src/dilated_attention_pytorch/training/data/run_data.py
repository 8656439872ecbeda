"""The data of a run: tokenized texts, training batches and evaluation samples."""

from __future__ import annotations

import bisect
import itertools
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, default_collate

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.estimate.flops import documents_flops, longnet_flops, training_flops
from dilated_attention_pytorch.folders import cache_folder
from dilated_attention_pytorch.machine import require
from dilated_attention_pytorch.models.token_loss import IGNORED

from ..checkpoint import SETTINGS_NAME
from ..manifest import read_sealed, sums, verify_sums
from ..measures import WorkDone
from ..process_group import all_or_none, from_first, is_first_process
from .corpus import CORPUS_KEYS, Corpus, Text, corpus_figures, read_corpus
from .documents import BucketedBatches, DocumentSamples, PackedRows, as_one_row, held_out_rows
from .sources import Say, Sources, parts_of
from .token_cache import cached_corpus, open_corpus
from .tokenizer import BYTES, TOKENIZER_NAME, BytePairs, Tokenizer, byte_lengths, bytes_of, load_tokenizer
from .windows import EvaluationWindows, StagedBatches, Window, evenly_spread, joined, long_files

if TYPE_CHECKING:
    from ..settings import TrainSettings

_PROMPT_LENGTH = 24
"""Maximum number of characters of a prompt."""

Collate = Callable[[list[Window]], Window]


def read_tokenizer(settings: TrainSettings, folder: Path | None = None) -> Tokenizer:
    """The tokenizer of a run, from its settings or from the ``folder`` of a resumed run.

    Raises:
        RunError: it cannot be loaded, or its vocabulary size differs from the model's.
    """
    if settings.tokenizer is None:
        return BYTES
    require(f"--tokenizer {settings.tokenizer}", ("tokenizers",), "train")
    what = f"--tokenizer {settings.tokenizer}"
    loaded = load_tokenizer(settings.tokenizer) if folder is None else load_tokenizer(folder, f"--resume {folder}")
    if loaded.vocab_size != settings.model.vocab_size:
        raise RunError(
            f"{what} has {loaded.vocab_size:,} tokens and the model {settings.model.vocab_size:,}; "
            f"leave --model.vocab-size out, or set it to {loaded.vocab_size}"
        )
    return loaded


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Copy the tokenizer into a run folder; returns its entries of the run's record (none for bytes)."""
    return {"tokenizer": sums(folder, tokenizer.save(folder))} if isinstance(tokenizer, BytePairs) else {}


def verify_tokenizer(folder: Path, record: dict[str, Any]) -> None:
    """Raise :class:`RunError` unless the tokenizer of a run folder is unchanged."""
    if "tokenizer" in record:
        remedy = f"restore the file, or copy the run's --tokenizer to {folder / TOKENIZER_NAME} again"
        verify_sums(folder, record["tokenizer"], what="broken tokenizer", remedy=remedy)


def tokenizer_of(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model with vocabulary size ``vocab_size`` in a run folder.

    Raises:
        RunError: it is missing, or its vocabulary size differs.
    """
    if not (folder / TOKENIZER_NAME).is_file():
        if vocab_size == BYTES.vocab_size:
            return BYTES
        raise RunError(
            f"{folder} holds a model of {vocab_size} tokens, not of the 256 bytes, and no {TOKENIZER_NAME}; copy the "
            "tokenizer that it was trained with into the folder"
        )
    if (folder / SETTINGS_NAME).is_file():
        remedy = "restore the file from a copy, or remove it"
        verify_tokenizer(folder, read_sealed(folder / SETTINGS_NAME, what="broken run folder", remedy=remedy))
    tokenizer = load_tokenizer(folder, f"the tokenizer of {folder}")
    if tokenizer.vocab_size != vocab_size:
        raise RunError(
            f"{folder / TOKENIZER_NAME} has {tokenizer.vocab_size} tokens and the model {vocab_size}; copy the two of "
            "one run into the folder"
        )
    return tokenizer


def read_data(settings: TrainSettings, tokenizer: Tokenizer, say: Say | None) -> RunData:
    """Read the texts of a run, after process group initialisation: the first process writes the token cache.

    Raises:
        RunError: see :func:`.corpus.read_corpus` and :func:`.token_cache.cached_corpus`.
    """
    parts = parts_of(settings.data, is_mixture=bool(settings.data_weights))
    speaks = say if is_first_process() else None
    if tokenizer is BYTES and settings.cache is None:
        corpora = [read_corpus(part, text_field=settings.text_field, say=speaks) for part in parts]
        return RunData(tuple(corpora), settings, tokenizer)
    require("tokens on the disk", ("numpy",), "train")
    folder = settings.cache or cache_folder() / "tokens"
    caches = from_first(
        lambda: [cached_corpus(Sources(part, settings.text_field, speaks), tokenizer, folder, speaks) for part in parts]
    )
    opened: list[Corpus] = []
    all_or_none(lambda: opened.extend(map(open_corpus, caches)))
    return RunData(tuple(opened), settings, tokenizer)


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    corpora: tuple[Corpus, ...]
    """One per weight, or a single one."""
    settings: TrainSettings
    """Settings of the run."""
    tokenizer: Tokenizer
    """Tokenizer of the run."""

    @cached_property
    def figures(self) -> dict[str, int]:
        """Size of the text: for a mixture the sums, and a checksum of all sources."""
        figures = [corpus_figures(corpus) for corpus in self.corpora]
        if len(figures) == 1:
            return figures[0]
        checksums = [of_source[CORPUS_KEYS[-1]] for of_source in figures]
        joined = {name: sum(of_source[name] for of_source in figures) for name in figures[0]}
        return joined | {CORPUS_KEYS[-1]: zlib.crc32(repr(checksums).encode())}

    @property
    def skipped(self) -> Counter[str]:
        """Number of skipped files and records, by reason."""
        return sum((corpus.skipped for corpus in self.corpora), Counter())

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes per token of the training text."""
        return self.figures["training_bytes"] / sum(len(corpus.training) for corpus in self.corpora)

    @property
    def byte_lengths(self) -> Tensor | None:
        """Bytes of every token if losses must be weighted by them; None if every token is one byte."""
        is_plain = self.tokenizer is BYTES and self.settings.packing == "windows"
        return None if is_plain else byte_lengths(self.tokenizer)

    @property
    def unit(self) -> str:
        """What a token is, as a word."""
        return "bytes" if self.tokenizer is BYTES else "tokens"

    @property
    def collate(self) -> Collate:
        """Collate function of training samples."""
        return joined if self.settings.packing == "windows" else as_one_row

    @property
    def collate_held_out(self) -> Collate:
        """Collate function of held-out samples."""
        return default_collate if self.settings.packing == "windows" else as_one_row

    def check(self) -> None:
        """Raise :class:`RunError` unless there is text for at least one training window and for evaluation."""
        length, unit = self.settings.context_length, self.unit
        for number, corpus in enumerate(self.corpora):
            source = f" {self.settings.data[number]}" if self.settings.data_weights else ""
            size = len(corpus.training)
            if size < length:
                raise RunError(
                    f"--data{source} holds {size:,} {unit} of training text, fewer than one window of "
                    f"--context-length {length}; give more text, or a --context-length of at most {size}"
                )
            least = length if self.settings.data_weights else 8
            if len(corpus.held_out) < least:
                raise RunError(
                    f"--data{source} leaves {len(corpus.held_out)} {unit} to evaluate on, and at least {least} are "
                    "needed; give more text"
                )

    def training(self, samples_per_step: int) -> Dataset[Window]:
        """The training data: batches of windows, rows of documents, or whole batches of documents."""
        members = [self._samples(corpus.training, samples_per_step) for corpus in self.corpora]
        weights, seed = self.settings.data_weights, self.settings.seed
        return Mixture(members, weights, seed=seed) if weights else members[0]

    def _samples(self, text: Text, per_step: int) -> StagedBatches | DocumentSamples:
        settings = self.settings
        number = settings.steps * per_step
        if settings.max_tokens:
            return BucketedBatches(
                text,
                settings.context_length,
                max_tokens=settings.max_tokens,
                max_batch_size=settings.max_batch_size,
                num_batches=number,
                seed=settings.seed,
            )
        if settings.packing == "documents":
            return PackedRows(text, settings.context_length, number, seed=settings.seed)
        return StagedBatches(
            text,
            settings.stages_by_step,
            batches_per_step=per_step,
            seed=settings.seed,
            file_start_fraction=settings.file_start_fraction,
        )

    def work(self, training: Any, samples_per_step: int) -> WorkDone:
        """The work of the optimizer steps over :meth:`training`; bytes from the mean bytes per token."""
        flops, stages = longnet_flops(self.settings.model), self.settings.stages_by_step
        first = training.members[0] if isinstance(training, Mixture) else training
        if isinstance(first, StagedBatches):
            return WorkDone(
                tokens_after=first.tokens_after,
                bytes_after=lambda step: first.tokens_after(step) * self.bytes_per_token,
                flops_after=lambda step: samples_per_step * training_flops(flops, stages, step),
            )
        of_text = cache(lambda patterns, length: documents_flops(flops.under(patterns), [length]))
        sums = [(0, 0)]

        def after(step: int) -> tuple[int, int]:
            while len(sums) <= step:
                tokens, operations = sums[-1]
                of_length = partial(of_text, stages.patterns_at(len(sums) - 1))
                for index in range((len(sums) - 1) * samples_per_step, len(sums) * samples_per_step):
                    drawn = training.member_of(index) if isinstance(training, Mixture) else training
                    lengths = drawn.lengths_in(index)
                    tokens, operations = tokens + sum(lengths), operations + sum(map(of_length, lengths))
                sums.append((tokens, operations))
            return sums[step]

        return WorkDone(
            tokens_after=lambda step: after(step)[0],
            bytes_after=lambda step: after(step)[0] * self.bytes_per_token,
            flops_after=lambda step: after(step)[1],
        )

    def describe(self, training: Any, samples_per_step: int) -> str:
        """Description of the tokens per step."""
        first = training.members[0] if isinstance(training, Mixture) else training
        if isinstance(first, StagedBatches):
            return first.describe(self.unit)
        most = f"at most {self.settings.max_tokens * samples_per_step:,}"
        number = most if self.settings.max_tokens else f"{self.settings.context_length * samples_per_step:,}"
        return f"each of {number} {self.unit} of whole documents"

    def evaluation(self) -> Evaluation:
        """Held-out windows or rows; for a mixture, from each source in proportion."""
        settings = self.settings
        weights = settings.data_weights or (1.0,)
        members = [
            self._held_out(corpus.held_out, max(1, int(settings.final_eval_windows * weight / sum(weights))))
            for corpus, weight in zip(self.corpora, weights, strict=True)
        ]
        return Evaluation(members, self.tokenizer)

    def _held_out(self, text: Text, most: int) -> list[Window] | EvaluationWindows:
        if self.settings.packing == "windows":
            return EvaluationWindows(text, self.settings.context_length, most)
        return held_out_rows(text, self.settings.context_length, most)

    def prompt(self) -> str:
        """The beginning of a text like these, to sample from: of a held-out file, or of a function in Python."""
        if not self.settings.data:
            return "def main("
        held_out = self.corpora[0].held_out
        beginning = bytes_of(self.tokenizer, held_out.tokens(1, min(len(held_out), 1 + _PROMPT_LENGTH)))
        text = beginning.decode(errors="ignore").lstrip()[:_PROMPT_LENGTH]
        line = "".join(itertools.takewhile(str.isprintable, text))
        # A whole line, or what comes before the last space of a part of one.
        return line.rpartition(" ")[0] or line if len(line) == _PROMPT_LENGTH else line

    def long_files(self) -> list[Tensor]:
        """Beginnings of held-out files that are at least as long as the context."""
        most = self.settings.quarter_files
        length = self.settings.context_length
        files = [file for corpus in self.corpora for file in long_files(corpus.held_out, length, most)]
        return [files[index] for index in evenly_spread(len(files), most)]


class Evaluation(ConcatDataset[Window]):
    """Held-out samples, concatenated over the sources.

    Args:
        members: samples of each source.
        tokenizer: converts tokens to bytes.
    """

    def __init__(self, members: Sequence[Any], tokenizer: Tokenizer) -> None:
        super().__init__(members)
        self.tokenizer = tokenizer

    def spread(self, count: int) -> list[int]:
        """Indices of ``count`` evenly spaced samples."""
        return evenly_spread(len(self), count)

    def predicted(self) -> bytes:
        """The bytes that the samples predict, in order."""
        labels = [self[index]["labels"][1:] for index in range(len(self))]
        return bytes_of(self.tokenizer, torch.cat([row[row != IGNORED] for row in labels]))


_Member = TypeVar("_Member", bound=Dataset[Window])


class Mixture(Dataset[Window], Generic[_Member]):
    """Sample i is sample i of a member that is drawn from ``(seed, i)`` according to the weights.

    Args:
        members: equally long, one per source.
        weights: positive, one per member; normalised.
        seed: seed of the draws.
    """

    def __init__(self, members: Sequence[_Member], weights: Sequence[float], *, seed: int) -> None:
        self.members = members
        self.seed = seed
        self._sums = list(itertools.accumulate(weights))

    def __len__(self) -> int:
        return len(self.members[0])  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Window:
        return self.member_of(index)[index]

    def member_of(self, index: int) -> _Member:
        """The member of sample ``index``."""
        # The suffix makes these draws independent of those within the members.
        drawn = random.Random(f"{self.seed}:{index}:source").random() * self._sums[-1]
        return self.members[min(bisect.bisect(self._sums, drawn), len(self.members) - 1)]
