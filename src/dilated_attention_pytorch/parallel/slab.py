"""One rank's computation with its own rows and with received rows of keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.masks import ScoreTerms
from dilated_attention_pytorch.kernels.products import LOG2_E, Result
from dilated_attention_pytorch.ops import tiles
from dilated_attention_pytorch.ops.call import Call, Implementation
from dilated_attention_pytorch.ops.device import Triton
from dilated_attention_pytorch.ops.extremes import has_large_scores, largest_norm
from dilated_attention_pytorch.ops.host import contiguous_rows
from dilated_attention_pytorch.ops.merge import merge_in_place, without_infinities
from dilated_attention_pytorch.ops.partials import TermGradients, Work
from dilated_attention_pytorch.ops.remote import (
    Dropout,
    Positions,
    RemoteKeys,
    add_key_gradients,
    block_view,
    merge_keys,
    positions_of,
    work_of,
)
from dilated_attention_pytorch.patterns import Pattern, PatternSum
from dilated_attention_pytorch.patterns.blocks import BlockPattern
from dilated_attention_pytorch.plan.layout import Run
from dilated_attention_pytorch.plan.seen_rows import SeenRows, SlabPair, seen_rows
from dilated_attention_pytorch.plan.shards import Rectangle, ShardedCall, ShardPart, shard_parts
from dilated_attention_pytorch.precision import accumulation_dtype

from .shipment import message_length, unpack
from .slab_keys import add_to_blocks, keys_of_slab


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a call, the same on every rank."""

    call: ShardedCall
    scale: float
    impl: Implementation
    dropout_p: float
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """Rows of keys available on this rank, and the queries that attend to them."""

    runs: tuple[Run, ...]
    """The runs of the shard that the rows belong to."""
    seen: SeenRows
    keys: list[RemoteKeys]
    """The rows of every block."""


class Slab:
    """This rank's rows of one call.

    Args:
        options: options of the call.
        runs: rows of the whole sequence that this rank holds.
        query, key, value: those rows, ``[B, N, H, D]`` and ``[B, N, G, D]``; the last stride is 1, and keys and values
            are zero where ``is_ignored``.
        is_ignored: bool ``[B, N]``, True = padding; None without padding.
        seed: dropout seed, int64; None without dropout.
        distance_bias: ``[H, 2 T - 1]`` for all distances -(T - 1) to T - 1 in the whole sequence of T rows, in the
            accumulation dtype; None without one.
    """

    def __init__(
        self,
        options: Options,
        runs: tuple[Run, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_ignored: Tensor | None,
        seed: Tensor | None,
        distance_bias: Tensor | None,
    ) -> None:
        self.options = options
        self.runs = runs
        self.query = query
        self.key = key
        self.value = value
        self.is_ignored = is_ignored
        self.seed = seed
        self.distance_bias = distance_bias
        self.of_terms = TermGradients(None if distance_bias is None else torch.zeros_like(distance_bias))
        """The gradient of the bias by distance, from this rank's queries."""
        self.dtype = accumulation_dtype(query.dtype)
        """Dtype of the merge and of sums over ranks."""
        self.rest: Tensor | None = None
        """The second part of the log-sum-exp if scores are large, see :class:`Result`."""
        self._shard_parts = tuple(shard_parts(options.call, runs))
        self._rules = PatternSum(tuple(map(BlockPattern, options.call.pattern.rules)))

    def own_seen_keys(self) -> SeenKeys:
        """Pairs between different runs of this rank, with keys as views."""
        seen = seen_rows(self.options.call, self.runs, self.runs)
        mask = None if self.is_ignored is None else self.is_ignored.unsqueeze(-1).expand(-1, -1, self.key.shape[2])
        keys = [
            RemoteKeys(
                block_view(self.key, block),
                block_view(self.value, block),
                None if mask is None else block_view(mask, block),
            )
            for block in seen.blocks
        ]
        return SeenKeys(self.runs, seen, keys)

    def forward_within(self) -> tuple[Tensor, Tensor]:
        """Attention within every run, as the initial value of the merge; ``out`` in the accumulation dtype."""
        query, is_large = self.query, self._is_large(self.key)
        if len(self._shard_parts) == 1 and not is_large:
            (shard_part,) = self._shard_parts
            out, lse = self.options.impl.forward(self._call_within(shard_part), is_prepared=True)
            return out.to(self.dtype), lse
        out = torch.empty((*query.shape[:3], self.value.shape[3]), dtype=self.dtype, device=query.device)
        lse = torch.empty(query.shape[:3], dtype=self.dtype, device=query.device)
        if is_large:
            self._make_pair(lse)
        for shard_part in self._shard_parts:
            rows = slice(*shard_part.rows)
            call = self._call_within(shard_part)
            of_rest = None if self.rest is None else torch.zeros_like(self.rest[:, rows])
            out[:, rows], lse[:, rows] = (
                self.options.impl.forward(call, is_prepared=True) if of_rest is None else tiles.forward(call, of_rest)
            )
            if self.rest is not None and of_rest is not None:
                self.rest[:, rows] = of_rest
        return out, lse

    def _is_large(self, *keys: Tensor) -> bool:
        """Whether scores of this rank's queries with these keys may be large."""
        if isinstance(self.options.impl, Triton):
            return False
        score = self._query_norm * max(map(largest_norm, keys), default=0.0) * self.options.scale
        score = min(score, self.options.softcap) if self.options.softcap else score
        return has_large_scores(score + self._largest_bias, 1.0, 1.0)

    @functools.cached_property
    def _largest_bias(self) -> float:
        """A negative one cannot make the log-sum-exp large, unless a row sees far keys alone."""
        return 0.0 if self.distance_bias is None else max(0.0, float(self.distance_bias.max()))

    @functools.cached_property
    def _query_norm(self) -> float:
        return largest_norm(self.query)

    def _make_pair(self, lse: Tensor) -> None:
        """Represent the log-sum-exp as a pair from now on."""
        if self.rest is None:
            lse.mul_(LOG2_E)
            self.rest = torch.zeros_like(lse)

    def merge(self, seen_keys: SeenKeys, out: Tensor, lse: Tensor) -> None:
        """Merge this rank's attention to rows of keys into ``out`` and ``lse``."""
        # Once the log-sum-exp is a pair it stays one, whatever the size of later scores.
        if self._is_large(*(keys.key for keys in seen_keys.keys)):
            self._make_pair(lse)
        rest = self.rest
        for rectangle in seen_keys.seen.rectangles:
            merge_keys(self._work(seen_keys, rectangle), out, lse, rest)
        for pair in seen_keys.seen.slab_pairs:
            rows = slice(*pair.queries)
            call = self._call_of_pair(seen_keys, pair)
            if rest is None:
                merge_in_place(
                    out[:, rows], lse[:, rows], None, Result(*self.options.impl.forward(call, is_prepared=True))
                )
            else:
                of_rest = torch.zeros_like(rest[:, rows])
                part = Result(*tiles.forward(call, of_rest), of_rest)
                merge_in_place(out[:, rows], lse[:, rows], rest[:, rows], part)

    def finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """``out`` in the query's dtype and the log-sum-exp, after all merges."""
        return out.to(self.query.dtype), lse if self.rest is None else (lse + self.rest) / LOG2_E

    def backward_within(
        self, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value from attention within every run, in the accumulation dtype."""
        tensors = (self.query, self.key, self.value)
        is_one = len(self._shard_parts) == 1
        grads = [] if is_one else [torch.empty(x.shape, dtype=self.dtype, device=x.device) for x in tensors]
        for shard_part in self._shard_parts:
            rows = slice(*shard_part.rows)
            parts = self._slab_gradients(rows, out, lse, grad_out, grad_lse, self._call_within(shard_part))
            if is_one:
                return parts[0].to(self.dtype), parts[1].to(self.dtype), parts[2].to(self.dtype)
            # Free each part after copying it; for a single run the parts are half the size of the result.
            remaining = list(parts)
            del parts
            for grad in grads:
                grad[:, rows] = remaining.pop(0)
        return grads[0], grads[1], grads[2]

    def _slab_gradients(
        self,
        rows: slice,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, ...]:
        """Gradients of query, key and value of one call for some of the rows; that of its bias by distance is added."""
        of_grad_lse = None if grad_lse is None else grad_lse[:, rows]
        if self.rest is None:
            merged = (grad_out[:, rows], of_grad_lse, out[:, rows], lse[:, rows])
            grads = self.options.impl.backward(call, *merged, is_prepared=True)
        else:
            of_rest = self.rest[:, rows]
            grads = tiles.backward(
                call, out[:, rows], lse[:, rows], contiguous_rows(grad_out[:, rows]), of_grad_lse, of_rest
            )
        if self.of_terms.distance_bias is not None:
            self._by_distance(self.of_terms.distance_bias, call).add_(grads[3])
        return grads[:3]

    def gradients(self, seen_keys: SeenKeys, state: Backward, grad_query: Tensor) -> Tensor:
        """Add the keys' contribution to the query gradient; returns the gradients of keys and values as a message.

        In the layout of :func:`pack` and in the accumulation dtype.
        """
        blocks = seen_keys.seen.blocks
        length = message_length(blocks, self.key, self.value, is_padded=False)
        message = torch.zeros(length, dtype=self.dtype, device=self.key.device)
        self._add_gradients(
            seen_keys, state, grad_query, unpack(message, blocks, self.key, self.value, is_padded=False)
        )
        return message

    def add_own_gradients(self, state: Backward, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> None:
        """Add the gradients of pairs between different runs of this rank."""
        seen_keys = self.own_seen_keys()
        grads = [RemoteKeys(*(block_view(x, block) for x in (grad_key, grad_value))) for block in seen_keys.seen.blocks]
        self._add_gradients(seen_keys, state, grad_query, grads)

    def _add_gradients(self, seen_keys: SeenKeys, state: Backward, grad_query: Tensor, grads: list[RemoteKeys]) -> None:
        for rectangle in seen_keys.seen.rectangles:
            into = _heads_of(grads[rectangle.block], rectangle)
            add_key_gradients(
                self._work(seen_keys, rectangle),
                grad_query,
                into,
                state.out,
                state.lse,
                self.rest,
                state.grad_out,
                state.grad_lse,
                self.of_terms,
            )
        for pair in seen_keys.seen.slab_pairs:
            rows = slice(*pair.queries)
            of_query, of_key, of_value = self._slab_gradients(
                rows,
                state.out,
                state.merged_lse,
                state.grad_out,
                state.grad_lse,
                self._call_of_pair(seen_keys, pair),
            )
            grad_query[:, rows] += of_query
            add_to_blocks(pair, seen_keys.seen.blocks, grads, of_key, of_value)

    def state(self, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Backward:
        """The state that the gradients need, for any rows of keys."""
        return Backward(out, without_infinities(lse), lse, grad_out, grad_lse)

    def _work(self, seen_keys: SeenKeys, rectangle: Rectangle) -> Work:
        options = self.options
        return work_of(
            self.query,
            rectangle.queries,
            _heads_of(seen_keys.keys[rectangle.block], rectangle),
            ratio=self.query.shape[2] // self.key.shape[2],
            scale=options.scale,
            impl=options.impl,
            dropout=None if self.seed is None else Dropout(self.seed, options.dropout_p),
            positions=self._positions(seen_keys, rectangle),
            terms=self._terms(),
        )

    def _call_within(self, shard_part: ShardPart) -> Call:
        """The call of one part of the shard."""
        rows = slice(*shard_part.rows)
        seed = self.seed
        if seed is not None and self.options.call.documents is not None:
            # Positions restart in every document, but the dropout draws must not.
            seed = seed + 1 + self._absolute_row(self.runs, shard_part.rows[0])
        boundaries = None if shard_part.boundaries is None else torch.tensor(shard_part.boundaries, dtype=torch.int32)
        return self._call(
            self.query[:, rows],
            self.key[:, rows],
            self.value[:, rows],
            self.options.call.pattern,
            (shard_part.position, shard_part.position),
            cu_seqlens=boundaries,
            key_padding_mask=None if self.is_ignored is None else self.is_ignored[:, rows],
            dropout_seed=seed,
        )

    def _call_of_pair(self, seen_keys: SeenKeys, pair: SlabPair) -> Call:
        """The call of a pair of slabs."""
        key, value, is_ignored = keys_of_slab(pair, seen_keys.seen.blocks, seen_keys.keys, self.key.shape[2])
        seed = self.seed
        if seed is not None and self.options.call.documents is not None:
            # As for shard parts, offset by the document's first row; no shard part draws for these pairs.
            seed = seed + 1 + self._absolute_row(self.runs, pair.queries[0]) - pair.query_position
        return self._call(
            self.query[:, slice(*pair.queries)],
            key,
            value,
            self._rules,
            (pair.query_position, pair.key_position),
            key_padding_mask=is_ignored,
            dropout_seed=seed,
        )

    def _call(
        self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, positions: tuple[int, int], **tensors: Any
    ) -> Call:
        options = self.options
        call = Call(
            query,
            key,
            value,
            pattern=pattern,
            is_causal=options.call.is_causal,
            scale=options.scale,
            query_offset=positions[0],
            key_offset=positions[1],
            dropout_p=options.dropout_p,
            softcap=options.softcap,
            impl=options.impl,
            **tensors,
        )
        if self.distance_bias is None:
            return call
        return call._replace(distance_bias=self._by_distance(self.distance_bias, call))

    @staticmethod
    def _by_distance(of_sequence: Tensor, call: Call) -> Tensor:
        """The part ``[H, N + M - 1]`` of a call of a tensor ``[H, 2 T - 1]`` of the whole sequence, as a view."""
        num_queries, num_keys = call.query.shape[1], call.key.shape[1]
        first = of_sequence.shape[1] // 2 + call.key_offset - call.first_query - num_queries + 1
        return of_sequence.narrow(1, first, num_queries + num_keys - 1)

    def _terms(self) -> ScoreTerms | None:
        if self.distance_bias is None:
            return ScoreTerms(self.options.softcap, None, 0, None) if self.options.softcap else None
        return ScoreTerms(self.options.softcap, self.distance_bias, -(self.distance_bias.shape[1] // 2), None)

    def _positions(self, seen_keys: SeenKeys, rectangle: Rectangle) -> Positions | None:
        if self.seed is None and self.distance_bias is None:
            return None
        queries, keys, offset = rectangle.queries, seen_keys.seen.blocks[rectangle.block], self.options.call.offset
        first = keys.row + rectangle.first_head * keys.skew
        keys = replace(keys, row=0, num_heads=queries.num_heads)
        return Positions(
            self._absolute_row(self.runs, queries.row) + offset - queries.row,
            positions_of(keys, self._absolute_row(seen_keys.runs, first) + offset).to(self.query.device),
        )

    @staticmethod
    def _absolute_row(runs: Sequence[Run], row: int) -> int:
        """Row index in the whole sequence of row ``row`` of the shard with these runs."""
        for start, stop in runs:
            if row < stop - start:
                return start + row
            row -= stop - start
        raise AssertionError("the row is not of this shard")


@dataclass(frozen=True, slots=True)
class Backward:
    """Merged output and log-sum-exp, their gradients, and the values derived from them for the kernels."""

    out: Tensor
    lse: Tensor
    """+inf in rows without a key."""
    merged_lse: Tensor
    """-inf in rows without a key."""
    grad_out: Tensor
    grad_lse: Tensor | None


def _heads_of(keys: RemoteKeys, rectangle: Rectangle) -> RemoteKeys:
    heads = slice(rectangle.first_head, rectangle.first_head + rectangle.queries.num_heads)
    hidden = None if keys.hidden is None else keys.hidden[:, :, heads]
    return RemoteKeys(keys.key[:, :, heads], keys.value[:, :, heads], hidden)
