"""The oracle of the tests: docs/definition.md in dense float64. It imports nothing from the package."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """A pattern by its parameters: one dilated pattern's, or several with their counts added."""

    lengths: tuple[int, ...]
    rates: tuple[int, ...]
    offset_rule: str = "modulo"
    tail: str = "ragged"
    shift: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Rule:
    """A window, blocks or global tokens, by parameters; for key/value heads ``g mod of_heads[1] == of_heads[0]``."""

    name: str
    numbers: tuple[int, ...]
    of_heads: tuple[int, int] = (0, 1)
    mask: tuple[tuple[tuple[bool, ...], ...], ...] = ()

    def sees(self, g: int, p: int, t: int) -> bool:
        """Whether query position p sees key position t (``"window"``, ``"global"``), or block p block t."""
        match self.name, self.numbers:
            case "window", (before, after):
                return p - before <= t <= p + after
            case "global", (number,):
                return p < number or t < number
            case "global", (number, beyond):
                return (p < number or t < number) and abs(p - t) > beyond
            case "strided", (stride, _):
                return p % stride == t % stride
            case "hierarchical", (near, levels, factor, _):
                level = next((n for n in range(levels) if abs(p - t) < near * factor**n), None)
                return level is not None and (t + 1) % factor**level == 0
            case "random", (number, out_of, seed, _):
                mates = range(t // out_of * out_of, t // out_of * out_of + out_of)
                state = splitmix(splitmix(splitmix(seed) ^ g) ^ p)
                return t in sorted(mates, key=lambda j: (signed(splitmix(state ^ j)), j))[:number]
            case "mask", _:
                return self.mask[g % len(self.mask)][p][t]
        raise AssertionError(self)

    def counts(self, g: int, p: np.ndarray, t: np.ndarray) -> np.ndarray:
        """bool ``[queries, keys]`` for positions p and t."""
        if g % self.of_heads[1] != self.of_heads[0]:
            return np.zeros((len(p), len(t)), dtype=bool)
        size = 1 if self.name in ("window", "global") else self.numbers[-1]
        (p, p_place), (t, t_place) = (np.unique(x // size, return_inverse=True) for x in (p, t))
        seen = [[self.sees(g, i, j) for j in t.tolist()] for i in p.tolist()]
        return np.array(seen, dtype=bool).reshape(len(p), len(t))[p_place][:, t_place]


def splitmix(state: int) -> int:
    """One step of splitmix64 and its finaliser (Steele et al. 2014)."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def signed(number: int) -> int:
    """64 bits as a signed integer."""
    return number - 2**64 if number >= 2**63 else number


def dense_counts(
    groups: Groups | Rule,
    num_queries: int,
    num_keys: int,
    kv_heads: int,
    *,
    query_offset: int = 0,
    key_offset: int = 0,
    boundaries: list[int] | None = None,
    is_causal: bool = False,
    padding: Tensor | None = None,
    batch: int = 1,
) -> tuple[Tensor, Tensor]:
    """``c[b, g, p, t]`` and the zero-padding keys ``n[b, g, p]``, by evaluating the definition for every pair."""
    p, t = np.arange(num_queries) + query_offset, np.arange(num_keys) + key_offset
    document_of_p, document_of_t = np.zeros_like(p), np.zeros_like(t)
    length_of_p = np.full_like(p, num_queries)
    if boundaries is not None:
        document_of_p = document_of_t = np.searchsorted(boundaries, p, side="right") - 1
        starts, ends = np.array(boundaries)[document_of_p], np.array(boundaries)[document_of_p + 1]
        p, length_of_p = p - starts, ends - starts
        t = p
    counts = np.zeros((kv_heads, num_queries, num_keys), dtype=np.int64)
    zero_pad_keys = np.zeros((kv_heads, num_queries), dtype=np.int64)
    for g in range(kv_heads):
        if isinstance(groups, Rule):
            c = groups.counts(g, p, t) & (document_of_p[:, None] == document_of_t[None, :])
            counts[g] = c & (t[None, :] <= p[:, None]) if is_causal else c
            continue
        for w, r in zip(groups.lengths, groups.rates, strict=True):
            offset = g % r if groups.offset_rule == "modulo" else g // int(np.ceil(kv_heads / r))
            shift = groups.shift[g % len(groups.shift)]
            in_p, in_t = (p + shift) % w % r == offset, (t + shift) % w % r == offset
            same = (p[:, None] + shift) // w == (t[None, :] + shift) // w
            same &= document_of_p[:, None] == document_of_t[None, :]
            c = same & in_p[:, None] & in_t[None, :]
            if groups.tail == "zero_padded" and not is_causal:
                full = np.ceil(np.minimum(w, length_of_p) / r).astype(np.int64)
                zero_pad_keys[g] += np.where(in_p, full - c.sum(1), 0)
            counts[g] += c & (t[None, :] <= p[:, None]) if is_causal else c
    c = torch.from_numpy(counts).expand(batch, -1, -1, -1)
    if padding is not None:
        c = c * ~padding[:, None, None, :]
    return c, torch.from_numpy(zero_pad_keys).expand(batch, -1, -1)


@dataclass(frozen=True)
class Terms:
    """Terms of the scores, densely: ``cap(s) + bias``, and sinks in the denominator."""

    softcap: float | None = None
    bias: Tensor | None = None
    """``[B or 1, H, N, M]``"""
    sinks: Tensor | None = None
    """``[H]``"""


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    zero_pad_keys: Tensor,
    scale: float,
    keep: Tensor | None = None,
    terms: Terms = Terms(),
) -> tuple[Tensor, Tensor]:
    """``O`` and ``L`` by one softmax over ``s + log c``; a row without a key is 0 and -inf, with zero gradient."""
    ratio = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(ratio, 2) for x in (k, v))
    weights = torch.cat([counts, zero_pad_keys.unsqueeze(-1)], -1).repeat_interleave(ratio, 1)
    s = scale * torch.einsum("bnhd,bmhd->bhnm", q, k)
    if terms.softcap is not None:
        s = terms.softcap * torch.tanh(s / terms.softcap)
    if terms.bias is not None:
        s = s + terms.bias
    s = torch.cat([s, q.new_zeros(weights[..., :1].shape)], -1)
    if terms.sinks is not None:  # one more key, whose value is 0
        weights = torch.cat([weights, torch.ones_like(weights[..., :1])], -1)
        s = torch.cat([s, terms.sinks.view(-1, 1, 1).expand(s[..., :1].shape)], -1)
    s = torch.where(weights > 0, s + weights.clamp(min=1).to(s.dtype).log(), float("-inf"))
    dead = (weights == 0).all(-1)
    lse = torch.where(dead, 0.0, s.masked_fill(dead.unsqueeze(-1), 0.0).logsumexp(-1))
    # Not exp(s - lse), which is too coarse for scores of 1e16.
    p = torch.where(weights > 0, s.masked_fill(dead.unsqueeze(-1), 0.0).softmax(-1), 0.0)[..., : k.shape[1]]
    out = torch.einsum("bhnm,bmhd->bnhd", p if keep is None else p * keep, v)
    return out, lse.masked_fill(dead, float("-inf")).transpose(1, 2)
