"""What one rank computes with its own rows, and with rows of keys that come from elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.engine.extremes import has_large_scores, largest_norm
from dilated_attention_pytorch.engine.merge import clear_dead_rows, merge_in_place, without_infinities
from dilated_attention_pytorch.engine.remote import (
    Dropout,
    RemoteKeys,
    add_key_gradients,
    block_view,
    merge_keys,
    positions_of,
    work_of,
)
from dilated_attention_pytorch.engine.work import Work
from dilated_attention_pytorch.kernels.fused import MASKED
from dilated_attention_pytorch.kernels.products import LOG2_E, Result
from dilated_attention_pytorch.ops import library
from dilated_attention_pytorch.patterns import BlockPattern, PatternSum
from dilated_attention_pytorch.planning import (
    Exchange,
    Piece,
    Rectangle,
    Run,
    ShardedCall,
    SlabPair,
    exchange,
    pieces,
)
from dilated_attention_pytorch.precision import accumulation_dtype

from .shipment import message_length, unpack
from .slab_keys import add_to_blocks, keys_of_slab


@dataclass(frozen=True, slots=True)
class Options:
    """What a call computes, the same on every rank."""

    call: ShardedCall
    scale: float
    impl: str
    dropout_p: float


@dataclass(frozen=True, slots=True)
class Parcel:
    """Rows of keys that are at hand, and which queries of this rank see them."""

    runs: tuple[Run, ...]
    """The runs of the shard that the rows come from."""
    seen: Exchange
    keys: list[RemoteKeys]
    """The rows of every block."""


class Slab:
    """This rank's rows of one call.

    Args:
        options: what is computed.
        runs: the rows of the whole sequence that this rank holds.
        query, key, value: those rows, ``[B, N, H, D]`` and ``[B, N, G, D]``; the last stride is 1, and keys and values
            are zero where ``is_ignored``.
        is_ignored: bool ``[B, N]``, True = padding; None without padding.
        seed: of the dropout, int64; None without dropout.
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
    ) -> None:
        self.options = options
        self.runs = runs
        self.query = query
        self.key = key
        self.value = value
        self.is_ignored = is_ignored
        self.seed = seed
        self.dtype = accumulation_dtype(query.dtype)
        """Merging, and sums over ranks, are in this dtype."""
        self.rest: Tensor | None = None
        """Where scores are large the log-sum-exp is a pair, see :class:`Result`: the other part of it."""
        self._pieces = tuple(pieces(options.call, runs))
        self._rules_spec = PatternSum(tuple(map(BlockPattern, options.call.pattern.rules))).spec

    def own_parcel(self) -> Parcel:
        """What the runs of this rank see of each other, with keys where they lie."""
        seen = exchange(self.options.call, self.runs, self.runs)
        mask = None if self.is_ignored is None else self.is_ignored.unsqueeze(-1).expand(-1, -1, self.key.shape[2])
        keys = [
            RemoteKeys(
                block_view(self.key, block), block_view(self.value, block),
                None if mask is None else block_view(mask, block),
            )
            for block in seen.blocks
        ]  # fmt: skip
        return Parcel(self.runs, seen, keys)

    def forward_within(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of every run by itself, to be merged into; ``out`` in the accumulation dtype."""
        query, is_large = self.query, self._is_large(self.key)
        if len(self._pieces) == 1 and not is_large:
            (piece,) = self._pieces
            out, lse = library.attend_prepared(*self._operands(piece), *self._engine_options(piece))
            return out.to(self.dtype), lse
        out = torch.empty(query.shape, dtype=self.dtype, device=query.device)
        lse = torch.empty(query.shape[:3], dtype=self.dtype, device=query.device)
        if is_large:
            self._make_pair(lse)
        for piece in self._pieces:
            rows = slice(*piece.rows)
            operands = (*self._operands(piece), *self._engine_options(piece))
            if self.rest is None:
                out[:, rows], lse[:, rows] = library.attend_prepared(*operands)
            else:
                out[:, rows], lse[:, rows], self.rest[:, rows] = library.attend_pair(*operands[:-1])
        return out, lse

    def _is_large(self, *keys: Tensor) -> bool:
        """Whether scores of this rank's queries with these keys may be large."""
        if self.options.impl == "triton":
            return False
        largest = max(map(largest_norm, keys), default=0.0)
        return has_large_scores(self._query_norm, largest, self.options.scale, self.query.dtype)

    @functools.cached_property
    def _query_norm(self) -> float:
        return largest_norm(self.query)

    def _make_pair(self, lse: Tensor) -> None:
        """Have the log-sum-exp ``lse`` be a pair from now on."""
        if self.rest is None:
            lse.mul_(LOG2_E)
            self.rest = torch.zeros_like(lse)

    def merge(self, parcel: Parcel, out: Tensor, lse: Tensor) -> None:
        """Merge what this rank's queries see of a parcel into ``out`` and ``lse``."""
        # Once the log-sum-exp is a pair it stays one: what follows is computed with it, large or not.
        if self._is_large(*(keys.key for keys in parcel.keys)):
            self._make_pair(lse)
        rest = self.rest
        for rectangle in parcel.seen.rectangles:
            merge_keys(self._work(parcel, rectangle), out, lse, rest)
        for pair in parcel.seen.slab_pairs:
            rows = slice(*pair.queries)
            operands = (*self._pair_operands(parcel, pair), *self._pair_options(pair))
            of_rows = (out[:, rows], lse[:, rows], None if rest is None else rest[:, rows])
            part = library.attend_prepared(*operands) if rest is None else library.attend_pair(*operands[:-1])
            # Merging takes finite numbers: a row that sees nothing here weighs nothing.
            merge_in_place(*of_rows, Result(part[0], part[1].clamp_(min=MASKED), *part[2:]))

    def finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """``out`` in the query's dtype and the log-sum-exp, once all is merged.

        Rows that saw padding only become rows without a key.
        """
        clear_dead_rows(out, lse)
        return out.to(self.query.dtype), lse if self.rest is None else (lse + self.rest) / LOG2_E

    def backward_within(
        self, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value from every run by itself, in the accumulation dtype, to be added to."""
        tensors = (self.query, self.key, self.value)
        is_one = len(self._pieces) == 1
        grads = [] if is_one else [torch.empty(x.shape, dtype=self.dtype, device=x.device) for x in tensors]
        for piece in self._pieces:
            rows = slice(*piece.rows)
            operands = (*self._operands(piece), *self._engine_options(piece))
            parts = self._slab_gradients(rows, out, lse, grad_out, grad_lse, operands)
            if is_one:
                return parts[0].to(self.dtype), parts[1].to(self.dtype), parts[2].to(self.dtype)
            # Each is let go of once it is copied: of one run they are half as large as what they are copied to.
            remaining = list(parts)
            del parts
            for grad in grads:
                grad[:, rows] = remaining.pop(0)
        return grads[0], grads[1], grads[2]

    def _slab_gradients(
        self, rows: slice, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None,
        operands: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of query, key and value of one call for some of the rows."""
        of_rows = (grad_out[:, rows], None if grad_lse is None else grad_lse[:, rows], out[:, rows])
        if self.rest is None:
            return library.attend_backward_prepared(*of_rows, lse[:, rows], *operands)
        return library.attend_pair_backward(*of_rows, (lse[:, rows], self.rest[:, rows]), *operands[:-1])

    def gradients(self, parcel: Parcel, state: Backward, grad_query: Tensor) -> Tensor:
        """Add a parcel's part of the query's gradient; returns those of its keys and values as one message.

        It is laid out as by :func:`pack`, in the accumulation dtype.
        """
        batch, _, _, head_dim = self.key.shape
        blocks = parcel.seen.blocks
        length = message_length(blocks, batch, head_dim, is_padded=False)
        message = torch.zeros(length, dtype=self.dtype, device=self.key.device)
        self._add_gradients(parcel, state, grad_query, unpack(message, blocks, batch, head_dim, is_padded=False))
        return message

    def add_own_gradients(self, state: Backward, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> None:
        """Add the gradients of what the runs of this rank see of each other."""
        parcel = self.own_parcel()
        grads = [RemoteKeys(*(block_view(x, block) for x in (grad_key, grad_value))) for block in parcel.seen.blocks]
        self._add_gradients(parcel, state, grad_query, grads)

    def _add_gradients(self, parcel: Parcel, state: Backward, grad_query: Tensor, grads: list[RemoteKeys]) -> None:
        for rectangle in parcel.seen.rectangles:
            into = _heads_of(grads[rectangle.block], rectangle)
            add_key_gradients(
                self._work(parcel, rectangle), grad_query, into, state.out, state.lse, self.rest, state.grad_out,
                state.grad_lse,
            )  # fmt: skip
        for pair in parcel.seen.slab_pairs:
            rows = slice(*pair.queries)
            operands = (*self._pair_operands(parcel, pair), *self._pair_options(pair))
            of_query, of_key, of_value = self._slab_gradients(
                rows, state.out, state.merged_lse, state.grad_out, state.grad_lse, operands
            )
            grad_query[:, rows] += of_query
            add_to_blocks(pair, parcel.seen.blocks, grads, of_key, of_value)

    def state(self, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Backward:
        """What the gradients of every parcel are computed from."""
        return Backward(out, without_infinities(lse), lse, grad_out, grad_lse)

    def _work(self, parcel: Parcel, rectangle: Rectangle) -> Work:
        options = self.options
        return work_of(
            self.query, rectangle.queries, _heads_of(parcel.keys[rectangle.block], rectangle),
            ratio=self.query.shape[2] // self.key.shape[2], scale=options.scale, impl=options.impl,
            dropout=self._dropout(parcel, rectangle),
        )  # fmt: skip

    def _operands(self, piece: Piece) -> tuple[Tensor | None, ...]:
        rows = slice(*piece.rows)
        seed = self.seed
        if seed is not None and self.options.call.documents is not None:
            # Positions begin anew in every document: the draws must not.
            seed = seed + 1 + self._absolute_row(self.runs, piece.rows[0])
        boundaries = None if piece.boundaries is None else torch.tensor(piece.boundaries, dtype=torch.int32)
        return (
            self.query[:, rows], self.key[:, rows], self.value[:, rows], boundaries,
            None if self.is_ignored is None else self.is_ignored[:, rows], seed,
        )  # fmt: skip

    def _pair_operands(self, parcel: Parcel, pair: SlabPair) -> tuple[Tensor | None, ...]:
        key, value, is_ignored = keys_of_slab(pair, parcel.seen.blocks, parcel.keys, self.key.shape[2])
        seed = self.seed
        if seed is not None and self.options.call.documents is not None:
            # As for pieces, by the row at which the document begins: no piece draws for these pairs.
            seed = seed + 1 + self._absolute_row(self.runs, pair.queries[0]) - pair.query_position
        return self.query[:, slice(*pair.queries)], key, value, None, is_ignored, seed

    def _pair_options(self, pair: SlabPair) -> tuple[str, bool, float, int, int, float, str]:
        options = self.options
        return (
            self._rules_spec, options.call.is_causal, options.scale, pair.query_position, pair.key_position,
            options.dropout_p, options.impl,
        )  # fmt: skip

    def _engine_options(self, piece: Piece) -> tuple[str, bool, float, int, int, float, str]:
        options = self.options
        return (
            options.call.pattern.spec, options.call.is_causal, options.scale, piece.position, piece.position,
            options.dropout_p, options.impl,
        )  # fmt: skip

    def _dropout(self, parcel: Parcel, rectangle: Rectangle) -> Dropout | None:
        if self.seed is None:
            return None
        queries, keys, offset = rectangle.queries, parcel.seen.blocks[rectangle.block], self.options.call.offset
        first = keys.row + rectangle.first_head * keys.skew
        keys = replace(keys, row=0, num_heads=queries.num_heads)
        return Dropout(
            self.seed, self.options.dropout_p,
            self._absolute_row(self.runs, queries.row) + offset - queries.row,
            positions_of(keys, self._absolute_row(parcel.runs, first) + offset).to(self.query.device),
        )  # fmt: skip

    @staticmethod
    def _absolute_row(runs: Sequence[Run], row: int) -> int:
        """The row of the whole sequence that is ``row`` of the shard with these runs."""
        for start, stop in runs:
            if row < stop - start:
                return start + row
            row -= stop - start
        raise AssertionError("the row is not of this shard")


@dataclass(frozen=True, slots=True)
class Backward:
    """The merged output and log-sum-exp, their gradients, and what kernels take of them."""

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
