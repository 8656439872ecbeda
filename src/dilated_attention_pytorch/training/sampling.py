"""Text from a model of bytes, character by character as it comes."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .corpus import SEPARATOR
from .settings import SampleSettings

if TYPE_CHECKING:
    from dilated_attention_pytorch.models import LongNetLM


def sample_text(model: LongNetLM, prompt: str, settings: SampleSettings) -> Iterator[str]:
    """What follows ``prompt`` at the beginning of a file, until the file ends or the length is reached.

    Args:
        model: a model of bytes; set to evaluation.
        prompt: the beginning of the text.
        settings: how bytes are drawn, and how many.

    Yields:
        the text in pieces: one for every byte that completes a character; bytes that are no UTF-8 as U+FFFD.
    """
    from dilated_attention_pytorch.models import generate

    model.eval()
    device = model.embedding.weight.device
    generator = torch.Generator(device)
    if settings.seed is None:
        generator.seed()
    else:
        generator.manual_seed(settings.seed)
    tokens = torch.tensor([[SEPARATOR, *prompt.encode(errors="surrogateescape")]], device=device)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in generate(
        model, tokens, settings.max_new_tokens, temperature=settings.temperature, top_k=settings.top_k,
        top_p=settings.top_p, generator=generator,
    ):  # fmt: skip
        byte = int(token)
        if byte == SEPARATOR:
            break
        text = decoder.decode(bytes([byte]))
        if text:
            yield text
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest
