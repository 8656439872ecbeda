"""Text from a transformers model under a pattern, as `extend` writes it."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, TextStreamer
from transformers.generation.streamers import BaseStreamer

from dilated_attention_pytorch.errors import RunError
from dilated_attention_pytorch.integrations import BoundedCache

from .checkpoint import CONFIG_NAME, SETTINGS_NAME
from .data.sources import SEPARATOR
from .evaluated_model import EvaluatedModel
from .manifest import read_json
from .pretrained import load_config, separator_of
from .record import recorded
from .settings import SampleSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OF_LONGNET = "longnet-dilated"
_REMEDY = "name the --output of a `train` or `extend` command"


def is_of_transformers(folder: Path) -> bool:
    """Whether a folder holds another model than a LongNet: a run of `extend`, or a saved model with a pattern.

    Raises:
        RunError: it holds a model without a pattern, or a record that cannot be read.
    """
    if (folder / SETTINGS_NAME).exists():
        with recorded(folder, str(folder), _REMEDY) as record:
            return "kind" in record
    if not (folder / CONFIG_NAME).is_file():
        return False
    kind = read_json(folder / CONFIG_NAME, what=str(folder), remedy=_REMEDY).get("model_type")
    if kind == _OF_LONGNET:
        return False
    if getattr(load_config(str(folder), folder).get_text_config(), "dilated_attention", None) is None:
        raise RunError(
            f"{folder} holds a model of type {kind!r} without a pattern; {_REMEDY}, or a model saved with a pattern "
            "(set_pattern), or sample from this one with the generate of transformers"
        )
    return True


def write_text_after(
    prompt: str,
    opened: EvaluatedModel,
    settings: SampleSettings,
    write: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Continue ``prompt``, taken as the beginning of a file, until the file ends or the length is reached.

    Args:
        prompt: the beginning of the text.
        opened: the model and its tokenizer.
        settings: sampling settings and length.
        write: called with the text in pieces.
        say: called with the reason if the model has to keep all keys and values (:class:`BoundedCache`).

    Raises:
        RunError: the prompt is not text.
    """
    model, tokenizer = opened.model, opened.tokenizer
    if tokenizer is None:
        separator: int | None = SEPARATOR
        tokens = list(prompt.encode(errors="surrogateescape"))
        streamer: BaseStreamer = _Bytes(write)
    else:
        separator = separator_of(tokenizer)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RunError(f"the prompt is not UTF-8 text ({error}); convert it (iconv -f LATIN1 -t UTF-8)") from error
        tokens = list(opened.tokens_of(prompt))
        streamer = _Words(tokenizer, write)
    assert separator is not None
    ends = {separator, separator if tokenizer is None or tokenizer.eos_token_id is None else tokenizer.eos_token_id}
    sampled = {"temperature": settings.temperature, "top_k": settings.top_k or 0, "top_p": settings.top_p or 1.0}
    config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=settings.temperature > 0,
        eos_token_id=sorted(ends),
        pad_token_id=separator,
        **(sampled if settings.temperature > 0 else {}),
    )
    torch.seed() if settings.seed is None else torch.manual_seed(settings.seed)
    given = torch.tensor([[separator, *tokens]], device=model.device)
    try:
        cache = {"past_key_values": BoundedCache(model.config)}
    except NotImplementedError as error:
        say(f"all keys and values are kept: {error}")
        cache = {}
    generate: Any = model.generate
    with torch.no_grad():
        generate(given, attention_mask=torch.ones_like(given), generation_config=config, streamer=streamer, **cache)


class _Words(TextStreamer):
    """Passes text on when its last word is complete."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


class _Bytes(BaseStreamer):
    """Passes text on whose tokens are its bytes, when a character is complete; invalid UTF-8 becomes U+FFFD."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
        elif int(value) != SEPARATOR:
            self._write(self._decoder.decode(bytes([int(value)])))

    def end(self) -> None:
        self._write(self._decoder.decode(b"", final=True))
