"""Drawn calls of ``attend``: shapes, patterns, slabs, packing and padding that nobody chose."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from torch import Tensor

from dilated_attention_pytorch import DilatedPattern, Pattern, PatternSum
from oracle import Groups, dense_counts

SWEEP = os.environ.get("HYPOTHESIS_PROFILE") == "sweep"

# Hypothesis also draws numbers that it finds in the modules imported so far, so what is drawn would depend on which
# tests ran before in the same process. It has no setting for it; this is how it decides which modules to look at.
assert callable(providers.is_local_module_file), "Hypothesis has changed: is a draw the same in every run?"
providers.is_local_module_file = lambda _: False
SEGMENTS = st.one_of(st.integers(1, 140), st.integers(1, 12), st.sampled_from([2, 4, 8, 16, 64]))
LENGTHS = st.one_of(st.sampled_from([1, 2, 7, 31, 63, 64, 65, 100, 127]), st.integers(1, 130))


@dataclass(frozen=True)
class Sizes:
    """How large the drawn calls are."""

    lengths: st.SearchStrategy[int]
    batch: int
    kv_heads: int
    head_dims: tuple[int, ...]
    groups: int = 4
    summands: tuple[int, ...] = (1, 1, 2, 3)
    segments: st.SearchStrategy[int] = SEGMENTS


DENSE = Sizes(LENGTHS, 3, 6, (1, 2, 5, 8, 16))


def examples(number: int, *, is_shrunk: bool = True) -> settings:
    """That many draws, the same in every run; ten times as many and new ones in the sweep.

    Without ``is_shrunk`` a failing draw is shown as it is: where one call takes a second, shrinking takes minutes.
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
    """One call, and what the oracle needs to know of it."""

    batch: int
    num_queries: int
    num_keys: int
    kv_heads: int
    ratio: int
    head_dim: int
    summands: tuple[Groups, ...]
    seed: int
    is_causal: bool
    scale: float | None
    options: dict[str, Tensor | int] = field(default_factory=dict)

    @property
    def pattern(self) -> Pattern:
        """The drawn pattern: the sum of the summands."""
        patterns = tuple(
            DilatedPattern(
                list(g.lengths), list(g.rates), offset_rule=g.offset_rule, tail=g.tail, segment_shift=list(g.shift)
            )
            for g in self.summands
        )
        return patterns[0] if len(patterns) == 1 else PatternSum(patterns)

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value, and weights of out and lse in a loss; some not contiguous."""
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
                groups, self.num_queries, self.num_keys, self.kv_heads,
                query_offset=self.options.get("query_offset", 0), key_offset=self.options.get("key_offset", 0),
                boundaries=None if boundaries is None else boundaries.tolist(), is_causal=self.is_causal,
                padding=self.options.get("key_padding_mask"), batch=self.batch,
            )
            for groups in self.summands
        ]  # fmt: skip
        counts, phantoms = zip(*parts, strict=True)
        return torch.stack(counts).sum(0), torch.stack(phantoms).sum(0)


@st.composite
def groups(draw: st.DrawFn, tail: str, sizes: Sizes) -> Groups:
    """One dilated pattern. Equal rates and small lengths are common: groups whose rows interleave are the hard ones."""
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
    """Any call that ``attend`` accepts, within sizes that a dense oracle does in milliseconds."""
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
        batch=batch, num_queries=num_queries, num_keys=num_keys, kv_heads=draw(st.integers(1, sizes.kv_heads)),
        ratio=draw(st.sampled_from([1, 1, 2, 3])), head_dim=draw(st.sampled_from(sizes.head_dims)),
        summands=summands, seed=seed, is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, 0.7, -0.3])), options=options,
    )  # fmt: skip
