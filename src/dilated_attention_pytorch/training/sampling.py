"""Text from a model, character by character as it comes."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .data.tokenizer import BYTES, Tokenizer
from .settings import SampleSettings

if TYPE_CHECKING:
    from dilated_attention_pytorch.models import LongNetLM


def sample_text(model: LongNetLM, prompt: str, settings: SampleSettings, tokenizer: Tokenizer = BYTES) -> Iterator[str]:
    """What follows ``prompt`` at the beginning of a file, until the file ends or the length is reached.

    Args:
        model: the model; set to evaluation.
        prompt: the beginning of the text.
        settings: how tokens are drawn, and how many.
        tokenizer: what its tokens are.

    Yields:
        the text in pieces: one for every token that completes a character; bytes that are no UTF-8 as U+FFFD.

    Raises:
        RunError: the prompt is no text that the tokenizer takes.
    """
    from dilated_attention_pytorch.models import generate

    model.eval()
    device = model.embedding.weight.device
    generator = torch.Generator(device)
    if settings.seed is None:
        generator.seed()
    else:
        generator.manual_seed(settings.seed)
    (prompt_ids,) = tokenizer.encode([prompt.encode(errors="surrogateescape")])
    tokens = torch.tensor([[tokenizer.separator, *prompt_ids.tolist()]], device=device)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in generate(
        model, tokens, settings.max_new_tokens, temperature=settings.temperature, top_k=settings.top_k,
        top_p=settings.top_p, generator=generator,
    ):  # fmt: skip
        if int(token) == tokenizer.separator:
            break
        text = decoder.decode(tokenizer.pieces[int(token)])
        if text:
            yield text
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest
