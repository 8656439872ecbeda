"""Slots that a key/value cache has allocated before and after every call, without its keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dilated_attention_pytorch.models.cache import grown_slots
from dilated_attention_pytorch.models.cache_index import CacheIndex
from dilated_attention_pytorch.patterns import Pattern

MOST_CALLS = 4096
"""Number of calls simulated one by one; for longer generations, only the last ones, with a full storage."""


class Call(NamedTuple):
    """One call of the model with a cache."""

    seen: int
    """Tokens before the call."""
    num_new: int


def calls_of(prompt: int, num_new: int, chunk: int) -> Iterator[Call]:
    """The calls of a generation: the prompt in chunks, then every new token but the last, which nothing reads.

    >>> [call.num_new for call in calls_of(10, 3, 4)]
    [4, 4, 2, 1, 1]
    """
    for start in range(0, prompt, chunk):
        yield Call(start, min(chunk, prompt - start))
    for token in range(num_new - 1):
        yield Call(prompt + token, 1)


class Mark(NamedTuple):
    """A call that may need the most memory, with a layer's slots under every pattern before and after it."""

    call: Call
    before: Mapping[Pattern, int]
    after: Mapping[Pattern, int]


def mark_of(patterns: Sequence[Pattern], num_kv_heads: int, call: Call) -> Mark:
    """Slots before and after a call, if one call before it has stored all earlier tokens.

    Args:
        patterns: different patterns of the layers.
        num_kv_heads: key/value heads of a layer.
        call: the call.
    """
    before, after = {}, {}
    for pattern in patterns:
        cache_index = CacheIndex(pattern, num_kv_heads, torch.device("cpu"))
        stored = cache_index.advance(call.seen).num_slots if call.seen else 0
        before[pattern] = grown_slots(0, stored, cache_index.max_slots())
        stored = cache_index.advance(call.num_new).num_slots
        after[pattern] = grown_slots(before[pattern], stored, cache_index.max_slots())
    return Mark(call, before, after)


@dataclass(frozen=True, slots=True)
class Walk:
    """Allocated slots of a cache through a generation."""

    slots: Mapping[Pattern, int]
    """Slots of a layer under each pattern, allocated at the end."""
    is_bound: bool
    """Whether ``slots`` is an upper bound, since there were too many calls to simulate."""
    marks: tuple[Mark, ...]
    """Calls that may need the most memory."""


@dataclass(slots=True)
class _Marks:
    """The call of every kind with the largest storage, and among those the one with the most rows in it."""

    of_kind: dict[str, tuple[tuple[int, int], Mark]] = field(default_factory=dict)

    def note(self, kind: str, rank: tuple[int, int], mark: Mark) -> None:
        if kind not in self.of_kind or rank >= self.of_kind[kind][0]:
            self.of_kind[kind] = (rank, mark)

    def all(self) -> tuple[Mark, ...]:
        return tuple({mark.call: mark for _, mark in self.of_kind.values()}.values())


def walk(patterns: Sequence[Pattern], num_kv_heads: int, prompt: int, num_new: int, chunk: int) -> Walk:
    """Simulate the cache of a generation with integers alone.

    Args:
        patterns: different patterns of the layers.
        num_kv_heads: key/value heads of a layer.
        prompt, num_new, chunk: tokens of the prompt, new tokens, and tokens of the prompt that are read at a time.
    """
    cache_indices = {pattern: CacheIndex(pattern, num_kv_heads, torch.device("cpu")) for pattern in patterns}
    slots = dict.fromkeys(patterns, 0)
    if -(-prompt // chunk) + num_new > MOST_CALLS:
        return _bound(cache_indices, prompt, num_new, chunk)
    marks = _Marks()
    for call in calls_of(prompt, num_new, chunk):
        before, stored = dict(slots), sum(max(cache_index.rows_per_head) for cache_index in cache_indices.values())
        kept = 0
        for pattern, cache_index in cache_indices.items():
            step = cache_index.advance(call.num_new)
            kept += 0 if step.keep is None else step.keep.numel()
            slots[pattern] = grown_slots(slots[pattern], step.num_slots, cache_index.max_slots())
        is_grown = slots != before
        kind = "token" if call.num_new == 1 else "chunk" if call.num_new == min(chunk, prompt) else "rest"
        rank, mark = (sum(slots.values()), stored), Mark(call, before, dict(slots))
        marks.note(kind, rank, mark)
        if is_grown:
            marks.note(f"{kind} that grows", rank, mark)
        if kept:
            marks.note(f"{kind} that drops rows and moves the others", (rank[0], kept), mark)
    return Walk(slots, is_bound=False, marks=marks.all())


def _bound(cache_indices: Mapping[Pattern, CacheIndex], prompt: int, num_new: int, chunk: int) -> Walk:
    """Upper bound for a long text: storages are full, or hold 1.5 times as many rows as there are tokens."""
    tokens = prompt + num_new - 1
    most = {
        pattern: min(cache_index.max_slots(), tokens + tokens // 2) for pattern, cache_index in cache_indices.items()
    }
    marks = [Mark(Call(max(0, prompt - chunk), min(chunk, prompt)), most, most)]
    if num_new > 1:
        marks.append(Mark(Call(tokens - 1, 1), most, most))
    return Walk(most, is_bound=True, marks=tuple(marks))
