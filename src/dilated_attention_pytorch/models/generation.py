"""Generation from a :class:`LongNetLM`, token by token: with the cache, and the naive way beside it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .cache import LongNetCache
from .longnet import LongNetLM


@torch.no_grad()
def generate_naive(
    model: LongNetLM,
    prompt_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """What :func:`generate` computes, said plainly: run the model on everything so far, for every token."""
    ids = prompt_ids
    for _ in range(max_new_tokens):
        logits = model(ids)[:, -1]
        token = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        yield token
        ids = torch.cat([ids, token.unsqueeze(1)], dim=1)


def generate(
    model: LongNetLM,
    prompt_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    chunk_size: int = 4096,
    cache: LongNetCache | None = None,
) -> Iterator[Tensor]:
    """Continue prompts, yielding each token as soon as it is drawn. The model should be in eval mode.

    Over several ranks (a ``cache`` with a share) every rank makes this call with the same arguments, yields the same
    tokens, those of a process alone up to rounding, and is to take equally many. The ranks read a text's first prompt
    together, each its rows, at once; every later token is run on every rank, on its part of the cache.

    Args:
        model: the model.
        prompt_ids: integer ``[B, N]`` on the model's device, N at least 1.
        max_new_tokens: how many tokens to yield.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: draw among the k likeliest tokens only.
        top_p: draw among the likeliest tokens that together reach this probability, at least one.
        generator: source of randomness; PyTorch's global one without it.
        chunk_size: the prompt is read this many tokens at a time, which bounds the memory of reading it. A prompt that
            ranks read together is read at once, as each has its part of the rows only.
        cache: what the model has seen before ``prompt_ids``, brought up to date: all tokens but the last that was
            yielded, so that ``prompt_ids`` of a next call begin with that one. A new cache without it.

    Yields:
        integer ``[B]``: the next token of every sequence.

    Raises:
        ValueError: an argument is out of range. Raised by the call, before anything is computed; what does not fit
            the cache, or differs between the ranks, is raised with the first token.

    >>> from dilated_attention_pytorch.models import LongNetConfig, LongNetLM, generate
    >>> config = LongNetConfig(
    ...     embed_dim=32, num_layers=2, num_heads=4, segment_lengths=[16, 64], dilation_rates=[1, 4]
    ... )
    >>> model = LongNetLM(config).eval()
    >>> tokens = list(generate(model, torch.randint(256, (2, 100)), 5, temperature=0.0))
    >>> len(tokens), tokens[0].shape
    (5, torch.Size([2]))
    """
    if prompt_ids.dim() != 2 or prompt_ids.shape[1] < 1:
        raise ValueError(
            f"prompt_ids must be [batch, sequence] with at least one token, got shape {tuple(prompt_ids.shape)}"
        )
    if max_new_tokens < 0 or chunk_size < 1:
        raise ValueError(
            "max_new_tokens must be at least 0 and chunk_size at least 1: "
            f"got max_new_tokens {max_new_tokens} and chunk_size {chunk_size}"
        )
    if temperature < 0.0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0.0 < top_p <= 1.0):
        raise ValueError(
            "temperature must be at least 0, top_k at least 1 and top_p above 0 and at most 1: "
            f"got temperature {temperature}, top_k {top_k} and top_p {top_p}"
        )
    cache = LongNetCache(model.config) if cache is None else cache
    return _generate(model, prompt_ids, max_new_tokens, temperature, top_k, top_p, generator, chunk_size, cache)


def _generate(
    model: LongNetLM,
    prompt_ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
    chunk_size: int,
    cache: LongNetCache,
) -> Iterator[Tensor]:
    token: Tensor | None = None
    for _ in range(max_new_tokens):
        # Gradients are off inside a step only: between two tokens the caller's own mode holds.
        with torch.no_grad():
            if token is None:
                logits = model.logits(read_prompt(model, prompt_ids, cache, chunk_size))
            else:
                logits = model(token.unsqueeze(1), cache=cache)[:, -1]
            token = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            if cache.share is not None:
                # Drawn on every rank, so that the generators stay in step, and taken from one.
                token = cache.share.agreed(token)
        yield token


@torch.no_grad()
def read_prompt(model: LongNetLM, prompt_ids: Tensor, cache: LongNetCache, chunk_size: int = 4096) -> Tensor:
    """Bring ``cache`` up to date with ``prompt_ids [B, N]``: the hidden state ``[B, E]`` of the last token.

    The first prompt of a cache that ranks share is read at once, every rank its rows; else ``chunk_size`` tokens at a
    time.
    """
    share, length = cache.share, prompt_ids.shape[1]
    if share is not None:
        share.check_same(prompt_ids)
        if cache.get_seq_length() == 0:
            hidden = model.hidden_states(share.rows(prompt_ids), cache=cache, sequence_length=length)
            return share.row_at(hidden, length - 1, length)
    for chunk in prompt_ids.split(chunk_size, dim=1):
        hidden = model.hidden_states(chunk, cache=cache)
    return hidden[:, -1]


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a token ``[B]`` from ``softmax(logits / temperature)``, ``logits [B, V]``, cut to top_k, then to top_p."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    # Less their largest, no score leaves float32, however small the temperature: the likeliest stay 0.
    scores = logits.float()
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None and top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if top_p is not None:
        ordered, order = scores.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        above = before >= top_p
        above[:, 0] = False  # the likeliest stays, also where top_p is 0 in float32
        scores = scores.masked_fill(above.scatter(1, order, above), float("-inf"))
    return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator).squeeze(1)
