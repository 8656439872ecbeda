"""Autoregressive generation with :class:`LongNetLM`: cached, and naive for reference."""

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
    """Reference for :func:`generate`: run the model on the whole sequence for every token, without a cache."""
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
    """Continue prompts and yield each token as it is sampled. The model should be in eval mode.

    Over several ranks (a ``cache`` with a share), every rank must make this call with the same arguments and consume
    equally many tokens; all ranks yield the same tokens, which equal those of a single process up to rounding. The
    ranks read the first prompt together, each its rows, in one call. Later tokens run on every rank, each on its part
    of the cache.

    Args:
        model: the model.
        prompt_ids: integer ``[B, N]`` on the model's device, N at least 1.
        max_new_tokens: number of tokens to yield.
        temperature: divisor of the logits; 0 = greedy.
        top_k: sample among the k most likely tokens.
        top_p: nucleus sampling: sample among the most likely tokens with this total probability, at least one.
        generator: source of randomness; None = PyTorch's global generator.
        chunk_size: tokens of the prompt per prefill call, which bounds the memory of the prefill. Ignored for a prompt
            that several ranks read together.
        cache: state of the tokens before ``prompt_ids``, updated in place: it then holds all tokens but the last one
            yielded, so the ``prompt_ids`` of a next call begin with that token. None = a new cache.

    Yields:
        integer ``[B]``: the next token of every sequence.

    Raises:
        ValueError: an argument is out of range; raised by the call itself. Errors that involve the cache or differing
            ranks are raised with the first token.

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
    state = LongNetCache(model.config) if cache is None else cache

    def tokens() -> Iterator[Tensor]:
        token: Tensor | None = None
        for _ in range(max_new_tokens):
            # no_grad only within a step: between two tokens the caller's own mode holds.
            with torch.no_grad():
                if token is None:
                    logits = model.logits(read_prompt(model, prompt_ids, state, chunk_size))
                else:
                    logits = model(token.unsqueeze(1), cache=state)[:, -1]
                token = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
                if state.share is not None:
                    # Sampled on every rank, so that generators stay in step; rank 0's token is used.
                    token = state.share.agreed(token)
            yield token

    return tokens()


@torch.no_grad()
def read_prompt(model: LongNetLM, prompt_ids: Tensor, cache: LongNetCache, chunk_size: int = 4096) -> Tensor:
    """Prefill ``cache`` with ``prompt_ids [B, N]``; returns the hidden state ``[B, E]`` of the last token.

    With a shared empty cache, all ranks read the prompt in one call, each its rows; otherwise ``chunk_size`` tokens at
    a time.
    """
    share, length = cache.share, prompt_ids.shape[1]
    if share is not None:
        share.check_same(prompt_ids)
        if cache.get_seq_length() == 0:
            hidden = model.hidden_states(share.rows(prompt_ids), cache=cache, sequence_length=length)
            return share.row_at(hidden, length - 1, length)
    for chunk in prompt_ids.split(chunk_size, dim=1):
        # A copy, as a view would keep the rows of a chunk while the next is read.
        last = model.hidden_states(chunk, cache=cache)[:, -1].clone()
    return last


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample a token ``[B]`` from ``softmax(logits / temperature)``, logits ``[B, V]``, after top-k, then top-p."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    # After subtracting the maximum no score overflows float32, however small the temperature; the maximum is 0.
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
        above[:, 0] = False  # the most likely token stays, even if top_p rounds to 0 in float32
        scores = scores.masked_fill(above.scatter(1, order, above), float("-inf"))
    return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator).squeeze(1)
