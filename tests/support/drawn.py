"""Random calls of ``attend``: shapes, patterns, slabs, packing and padding, drawn by Hypothesis."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from torch import Tensor

from dilated_attention_pytorch import (
    DilatedPattern,
    Pattern,
    from_block_mask,
    global_tokens,
    hierarchical,
    local_window,
    per_head,
    random_blocks,
    strided_blocks,
)
from dilated_attention_pytorch.patterns import PatternSum
from support.oracle import Groups, Rule, dense_counts

SWEEP = os.environ.get("HYPOTHESIS_PROFILE") == "sweep"

# Hypothesis also draws constants that it finds in the modules imported so far, so examples would depend on the tests
# that ran earlier in the same process. It has no setting for this; the function below selects the modules.
assert callable(providers.is_local_module_file), "Hypothesis has changed: is a draw the same in every run?"
providers.is_local_module_file = lambda _: False
SEGMENTS = st.one_of(st.integers(1, 140), st.integers(1, 12), st.sampled_from([2, 4, 8, 16, 64]))
LENGTHS = st.one_of(st.sampled_from([1, 2, 7, 31, 63, 64, 65, 100, 127]), st.integers(1, 130))


@dataclass(frozen=True)
class Sizes:
    """Sizes of random calls."""

    lengths: st.SearchStrategy[int]
    batch: int
    kv_heads: int
    head_dims: tuple[int, ...]
    groups: int = 4
    summands: tuple[int, ...] = (1, 1, 2, 3)
    segments: st.SearchStrategy[int] = SEGMENTS
    ratios: tuple[int, ...] = (1, 1, 2, 3, 8)


DENSE = Sizes(LENGTHS, 3, 6, (1, 2, 5, 8, 16))


def examples(number: int, *, is_shrunk: bool = True) -> settings:
    """Settings for ``number`` examples, the same in every run; ten times as many, and new ones, in the sweep.

    Without ``is_shrunk`` a failing example is reported unshrunk: if a call takes a second, shrinking takes minutes.
    """
    return settings(
        max_examples=number * 10 if SWEEP else number,
        phases=tuple(Phase) if is_shrunk else (Phase.generate,),
        derandomize=not SWEEP,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@dataclass
class DrawnCall:
    """One call, with the parameters that the oracle needs."""

    batch: int
    num_queries: int
    num_keys: int
    kv_heads: int
    ratio: int
    head_dim: int
    summands: tuple[Groups | Rule, ...]
    seed: int
    is_causal: bool
    scale: float | None
    options: dict[str, Tensor | int] = field(default_factory=dict)

    @property
    def pattern(self) -> Pattern:
        """The random pattern: the sum of the summands."""
        patterns = tuple(pattern_of(summand) for summand in self.summands)
        return patterns[0] if len(patterns) == 1 else PatternSum(patterns)

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value, and the weights of out and lse in a loss; some tensors are not contiguous."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(rows: int, heads: int) -> Tensor:
            shape = (
                (self.batch, heads, rows, self.head_dim) if self.seed % 2 else (self.batch, rows, heads, self.head_dim)
            )
            x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            return x.transpose(1, 2) if self.seed % 2 else x

        heads = self.kv_heads * self.ratio
        q, k, v = draw(self.num_queries, heads), draw(self.num_keys, self.kv_heads), draw(self.num_keys, self.kv_heads)
        if self.seed % 5 == 0:  # the last dimension strided
            k = k.transpose(-1, -2).contiguous().transpose(-1, -2)
        grad_out = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(dtype)
        grad_lse = torch.randn(q.shape[:3], generator=generator, dtype=torch.float64)
        return q, k, v, grad_out, grad_lse

    def counts(self) -> tuple[Tensor, Tensor]:
        boundaries = self.options.get("cu_seqlens")
        parts = [
            dense_counts(
                groups,
                self.num_queries,
                self.num_keys,
                self.kv_heads,
                query_offset=self.options.get("query_offset", 0),
                key_offset=self.options.get("key_offset", 0),
                boundaries=None if boundaries is None else boundaries.tolist(),
                is_causal=self.is_causal,
                padding=self.options.get("key_padding_mask"),
                batch=self.batch,
            )
            for groups in self.summands
        ]
        counts, zero_pad_keys = zip(*parts, strict=True)
        return torch.stack(counts).sum(0), torch.stack(zero_pad_keys).sum(0)


def pattern_of(summand: Groups | Rule) -> Pattern:
    """The pattern with the parameters given to the oracle."""
    if isinstance(summand, Groups):
        return DilatedPattern(
            list(summand.lengths),
            list(summand.rates),
            offset_rule=summand.offset_rule,
            tail=summand.tail,
            segment_shift=list(summand.shift),
        )
    index, number = summand.of_heads
    if number > 1:  # the other heads do not have it
        nothing = from_block_mask(torch.zeros(1, 1, 1, dtype=torch.bool), 1 << 20)
        return per_head(
            [pattern_of(replace(summand, of_heads=(0, 1))) if i == index else nothing for i in range(number)]
        )
    match summand.name, summand.numbers:
        case "window", numbers:
            return local_window(*numbers)
        case "global", numbers:
            return global_tokens(numbers[0], beyond=numbers[1] if len(numbers) > 1 else None)
        case "strided", (stride, size):
            return strided_blocks(stride, block_size=size)
        case "hierarchical", (near, levels, factor, size):
            return hierarchical(near, levels=levels, factor=factor, block_size=size)
        case "random", (some, out_of, seed, size):
            return random_blocks(some / out_of, seed=seed, block_size=size)
    return from_block_mask(torch.tensor(summand.mask), summand.numbers[-1])


@st.composite
def groups(draw: st.DrawFn, tail: str, sizes: Sizes) -> Groups:
    """Draw a dilated pattern. Equal rates and short segments are common: interleaved groups are the hard case."""
    num_groups = draw(st.integers(1, sizes.groups))

    def numbers(*choices: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.one_of(*choices), min_size=num_groups, max_size=num_groups)))

    return Groups(
        numbers(sizes.segments),
        numbers(st.integers(1, 13), st.integers(1, 2)),
        draw(st.sampled_from(["modulo", "block"])),
        tail,
        tuple(draw(st.one_of(st.just([0]), st.lists(st.integers(0, 150), min_size=1, max_size=3)))),
    )


@st.composite
def calls(draw: st.DrawFn, *, with_padding: bool = True, sizes: Sizes = DENSE) -> DrawnCall:
    """Draw any call that ``attend`` accepts, of a size that the dense oracle computes in milliseconds."""
    kind = draw(st.sampled_from(["whole", "whole", "slabs", "packed", "zero_padded"]))
    num_queries = num_keys = draw(sizes.lengths)
    options: dict[str, Tensor | int] = {}
    batch = draw(st.integers(1, sizes.batch))
    if kind == "slabs":
        num_keys = draw(sizes.lengths)
        options = {"query_offset": draw(st.integers(0, 300)), "key_offset": draw(st.integers(0, 300))}
    if kind == "packed":
        inner = draw(st.lists(st.integers(0, num_queries), max_size=4))
        options["cu_seqlens"] = torch.tensor([0, *sorted(inner), num_queries], dtype=torch.int32)
    seed = draw(st.integers(0, 2**31))
    if with_padding and kind != "zero_padded" and draw(st.integers(0, 2)) == 0:
        generator = torch.Generator().manual_seed(seed)
        options["key_padding_mask"] = torch.rand(batch, num_keys, generator=generator) < draw(st.floats(0.0, 1.0))
    tail = "zero_padded" if kind == "zero_padded" else "ragged"
    summands = tuple(draw(groups(tail, sizes)) for _ in range(draw(st.sampled_from(sizes.summands))))
    return DrawnCall(
        batch=batch,
        num_queries=num_queries,
        num_keys=num_keys,
        kv_heads=draw(st.integers(1, sizes.kv_heads)),
        ratio=draw(st.sampled_from(sizes.ratios)),
        head_dim=draw(st.sampled_from(sizes.head_dims)),
        summands=summands,
        seed=seed,
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, 0.7, -0.3, 0.0])),
        options=options,
    )


@st.composite
def rules(draw: st.DrawFn, num_positions: int, num_kv_heads: int) -> Rule:
    """Draw a window, global tokens or a block rule, defined for the given number of positions."""
    name = draw(st.sampled_from(["window", "global", "strided", "hierarchical", "random", "random", "mask", "mask"]))
    size = draw(st.one_of(st.integers(1, 40), st.sampled_from([8, 16, 32])))
    mask: tuple[tuple[tuple[bool, ...], ...], ...] = ()
    if name == "window":
        numbers: tuple[int, ...] = draw(st.tuples(st.integers(0, 150), st.one_of(st.just(0), st.integers(0, 60))))
    elif name == "global":
        numbers = (draw(st.integers(1, 30)), *draw(st.lists(st.integers(0, 150), max_size=1)))
    elif name == "strided":
        numbers = (draw(st.integers(1, 6)), size)
    elif name == "hierarchical":
        numbers = (draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(2, 3)), size)
    elif name == "random":
        some, out_of = draw(st.sampled_from([(1, 2), (1, 3), (2, 3), (1, 4), (3, 5), (1, 10), (1, 1)]))
        numbers = (some, out_of, draw(st.integers(0, 2**63 - 1)), size)
    else:
        blocks = -(-num_positions // size)
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        heads, share = draw(st.sampled_from([1, num_kv_heads])), draw(st.sampled_from([0.1, 0.3, 0.5, 0.9, 1.0]))
        drawn = torch.rand(heads, max(1, blocks), max(1, blocks), generator=generator) < share
        mask, numbers = tuple(tuple(map(tuple, head)) for head in drawn.tolist()), (size,)
    parts = draw(st.sampled_from([1, 1, 1, 2, 3]))
    return Rule(name, numbers, (draw(st.integers(0, parts - 1)), parts), mask)


@st.composite
def block_calls(draw: st.DrawFn, *, with_padding: bool = True, sizes: Sizes = DENSE) -> DrawnCall:
    """Draw a call whose pattern is a sum of rules, with or without the dilated patterns of :func:`calls`."""
    call = draw(calls(with_padding=with_padding, sizes=sizes))
    end = max(
        call.num_queries + int(call.options.get("query_offset", 0)),
        call.num_keys + int(call.options.get("key_offset", 0)),
    )
    ruled = tuple(draw(rules(end, call.kv_heads)) for _ in range(draw(st.sampled_from([1, 1, 2, 3]))))
    return replace(call, summands=(*(call.summands if draw(st.booleans()) else ()), *ruled))
