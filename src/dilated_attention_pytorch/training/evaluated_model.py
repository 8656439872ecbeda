"""Models to evaluate, from a run folder or from transformers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from dilated_attention_pytorch.errors import RunError

from .checkpoint import CONFIG_NAME, SETTINGS_NAME
from .data.corpus import Text, read_corpus
from .data.run_data import read_data, tokenizer_of
from .data.sources import Say
from .data.tokenizer import Tokenizer, byte_lengths
from .pretrained import check_same_model, check_source, load_config, load_model, load_tokenizer, num_bytes, tokenized
from .record import recorded, train_settings
from .settings import TrainSettings
from .trained_model import model_folder, verify_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_REMEDY = "name the --output of a `train` or `extend` command, or a model of transformers"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedModel:
    """A causal language model ready for evaluation."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    """Tokenizer of a transformers model; None if its tokens are bytes."""
    own_length: int
    """Context length in training, in tokens."""
    vocab_size: int
    """Vocabulary size."""
    run: tuple[TrainSettings, Tokenizer] | None = None
    """Settings and tokenizer of the `train` run, if it has one."""
    data: tuple[Path, ...] = ()
    """Data of the `extend` run; empty for the default, and where unknown."""
    text_field: str = "text"
    """Text field of that run's records."""
    weights: str = ""
    """Name of the folder that holds the weights."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Newer checkpoints that were skipped, with reasons."""

    def tokens_of(self, text: str) -> Sequence[int]:
        """Tokenize a piece of text."""
        if self.run is not None:
            return [int(token) for token in self.run[1].encode([text.encode()])[0]]
        if self.tokenizer is None:
            return list(text.encode())
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise :class:`RunError` unless all ``tokens``, int64 ``[N]``, are in the vocabulary."""
        largest = int(tokens.max())
        if largest >= self.vocab_size:
            raise RunError(
                f"the text holds token {largest:,} and the model knows {self.vocab_size:,} tokens (vocab_size in "
                f"{CONFIG_NAME}); put the tokenizer that it was trained with into its folder"
            )

    @property
    def reads_documents(self) -> bool:
        """Whether it was trained on packed documents."""
        return self.run is not None and self.run[0].packing == "documents"

    def num_bytes(self, tokens: Tensor) -> int:
        """Number of bytes of text in ``tokens``; a separator counts as one."""
        if self.run is None:
            return num_bytes(tokens, self.tokenizer)
        return int(byte_lengths(self.run[1])[tokens].sum())

    def held_out(self, data: Sequence[Path], text_field: str, say: Say) -> tuple[list[Text], Sequence[float]]:
        """Held-out tokens of each source, and the sources' weights.

        Args:
            data: other text than the training data; empty for the training data.
            text_field: its text field; empty for the run's.
            say: called with progress messages.

        Raises:
            RunError: the text cannot be read.
        """
        if self.run is None:
            corpus = read_corpus(data or self.data, text_field=text_field or self.text_field, say=say)
            return [tokenized(corpus.held_out, self.tokenizer)], (1.0,)
        settings, tokenizer = self.run
        settings = replace(settings, text_field=text_field or settings.text_field)
        if data:
            settings = replace(settings, data=tuple(data), data_weights=())
        corpora = read_data(settings, tokenizer, say).corpora
        return [corpus.held_out for corpus in corpora], settings.data_weights or (1.0,)


def open_model(name: str, device: str) -> EvaluatedModel:
    """Load the model of a run folder (of an unfinished run, its newest checkpoint), or a transformers model.

    Args:
        name: folder, or a name on the hub.
        device: "cpu" or "cuda".

    Raises:
        RunError: it does not exist, or is damaged.
    """
    from dilated_attention_pytorch.integrations import register
    from dilated_attention_pytorch.models import causal_lm  # noqa: F401 - registers LongNet with transformers

    run = Path(name)
    if not (run / SETTINGS_NAME).exists():
        check_source(name, name)
        return _open(name, name, name, device, own_length=None)
    register()
    with recorded(run, name, _REMEDY) as record:
        settings = train_settings(record)
        if settings is None:
            values = record["settings"]
            own_length, data = int(values["context_length"]), tuple(map(Path, values["data"]))
            text_field = str(values.get("text_field", "text"))
            check = functools.partial(check_same_model, name, {**record["model"]})
    if settings is not None:
        folder, rejected = model_folder(run)
        trained = settings, tokenizer_of(run, settings.model.vocab_size)
        opened = _open(name, str(folder), None, device, own_length=settings.context_length)
        return replace(opened, run=trained, weights=folder.name, rejected=rejected)
    folder, rejected = model_folder(run, check)
    opened = _open(name, str(folder), name, device, own_length=own_length)
    return replace(opened, data=data, text_field=text_field, weights=folder.name, rejected=rejected)


def _open(
    what: str, folder: str, tokenizer_folder: str | None, device: str, *, own_length: int | None
) -> EvaluatedModel:
    verify_files(Path(folder))
    config = load_config(what, folder)
    text = config.get_text_config()
    attention = None if getattr(text, "dilated_attention", None) is None else "dilated"
    if own_length is None:
        segments = getattr(text, "segment_lengths", None)
        own_length = max(segments) if segments else getattr(text, "max_position_embeddings", None)
    if own_length is None:
        raise RunError(
            f"{what}: {config.model_type} has no max_position_embeddings, so its length is not known; set it in "
            "config.json to the length that the model was trained on"
        )
    tokenizer = None if tokenizer_folder is None else load_tokenizer(what, tokenizer_folder, config)
    model = load_model(what, folder, device, attention=attention)
    return EvaluatedModel(
        model=model.eval(), tokenizer=tokenizer, own_length=own_length, vocab_size=int(text.vocab_size)
    )
