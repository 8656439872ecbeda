"""Streaming text generation from a model."""

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
    """Continue ``prompt``, taken as the beginning of a file, until the file ends or the length is reached.

    Args:
        model: the model; put into eval mode.
        prompt: the beginning of the text.
        settings: sampling settings and length.
        tokenizer: the model's tokenizer.

    Yields:
        the text in pieces, one for every token that completes a character; invalid UTF-8 becomes U+FFFD.

    Raises:
        RunError: the tokenizer cannot encode the prompt.
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
        model,
        tokens,
        settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        generator=generator,
    ):
        if int(token) == tokenizer.separator:
            break
        text = decoder.decode(tokenizer.token_bytes[int(token)])
        if text:
            yield text
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest
