"""The key/value cache: bounded, because a row that no later token can see is dropped."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dilated_attention_pytorch.ops import attend_with_lse
from dilated_attention_pytorch.ops.merge import merge_in_place
from dilated_attention_pytorch.ops.rows import attend_rows
from dilated_attention_pytorch.patterns import Pattern

from .config import LongNetConfig
from .ledger import Ledger, LedgerStep, Piece
from .padding import Run, group_rows, positions_of

_Stored = tuple[Tensor, Tensor]
"""Keys and values of one layer, ``[sequences, slots, G, D]``."""


@dataclass(slots=True)
class _Cohort:
    """Sequences of the batch that have seen the same number of tokens: one ledger per pattern serves them all."""

    rows: list[int]
    ledgers: dict[Pattern, Ledger]
    storage: dict[int, _Stored] = field(default_factory=dict)
    seen: int = 0

    def select(self, picked: Sequence[int], rows: list[int]) -> _Cohort:
        """Its ``picked`` sequences (which may repeat) as rows ``rows`` of the batch, with the same ledgers."""
        if list(picked) == list(range(len(self.rows))):
            return _Cohort(rows, self.ledgers, self.storage, self.seen)
        storage = {}
        for layer, tensors in self.storage.items():
            index = torch.tensor(picked, device=tensors[0].device)
            keys, values = (tensor.index_select(0, index) for tensor in tensors)
            storage[layer] = (keys, values)
        return _Cohort(rows, self.ledgers, storage, self.seen)


class LongNetCache:
    """Keys and values that a later token can still see, for every layer and sequence of a batch.

    A key/value head holds at most ``sum_i ceil(min(w_i, t) / r_i)`` rows after t tokens, a row that several dilation
    groups see once, so memory stops growing with the text. It is filled by :meth:`LongNetLM.forward`, with one token or
    any number at a time; the result is that of the whole text in one call. For inference: it has no gradient.

    Args:
        config: the model's configuration.

    >>> from dilated_attention_pytorch.models import LongNetCache, LongNetConfig, LongNetLM
    >>> config = LongNetConfig(
    ...     embed_dim=32, num_layers=2, num_heads=4, segment_lengths=[16, 64], dilation_rates=[1, 4]
    ... )
    >>> model, cache = LongNetLM(config).eval(), LongNetCache(config)
    >>> with torch.no_grad():
    ...     logits = model(torch.randint(256, (1, 1000)), cache=cache)
    >>> cache.tokens_seen, cache.rows_per_head(0)  # of 1000 rows: 8, and every fourth of the 32 before them
    ([1000], [[16, 16, 16, 16]])
    """

    is_compileable = False
    """Read by transformers: shapes change from step to step."""

    def __init__(self, config: LongNetConfig) -> None:
        assert config.num_kv_heads is not None
        self.patterns = tuple(config.pattern(layer) for layer in range(config.num_layers))
        self.num_kv_heads = config.num_kv_heads
        self._cohorts: list[_Cohort] = []
        self._num_columns = 0

    @property
    def batch_size(self) -> int:
        """Sequences in the batch; 0 before the first call."""
        return sum(len(cohort.rows) for cohort in self._cohorts)

    @property
    def tokens_seen(self) -> list[int]:
        """Real tokens seen, for each sequence of the batch."""
        seen = [0] * self.batch_size
        for cohort in self._cohorts:
            for row in cohort.rows:
                seen[row] = cohort.seen
        return seen

    def get_seq_length(self) -> int:
        """Columns of ``input_ids`` seen, padding included: transformers slices its inputs by it."""
        return self._num_columns

    def rows_per_head(self, layer: int) -> list[list[int]]:
        """Rows held in a layer, for each sequence of the batch and key/value head."""
        rows: list[list[int]] = [[] for _ in range(self.batch_size)]
        for cohort in self._cohorts:
            for row in cohort.rows:
                rows[row] = cohort.ledgers[self.patterns[layer]].rows_per_head
        return rows

    def positions(self, layer: int, row: int, head: int) -> list[int]:
        """The positions held for one layer, sequence and key/value head, ascending."""
        cohort = next(cohort for cohort in self._cohorts if row in cohort.rows)
        return cohort.ledgers[self.patterns[layer]].positions(head)

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values allocated."""
        return sum(
            tensor.numel() * tensor.element_size()
            for cohort in self._cohorts
            for tensors in cohort.storage.values()
            for tensor in tensors
        )

    def reorder(self, indices: Tensor) -> None:
        """Row b of the batch becomes what row ``indices[b]`` was (beam search); rows may repeat or drop out.

        Args:
            indices: integer ``[new batch size]``.

        Raises:
            ValueError: an index is not a row of the batch.
        """
        wanted = indices.tolist()
        if any(not 0 <= old < self.batch_size for old in wanted):
            raise ValueError(f"indices must be rows of the batch, 0 to {self.batch_size - 1}, got {wanted}")
        cohorts = []
        for cohort in self._cohorts:
            place = {row: index for index, row in enumerate(cohort.rows)}
            rows = [new for new, old in enumerate(wanted) if old in place]
            if rows:
                cohorts.append(cohort.select([place[wanted[new]] for new in rows], rows))
        self._cohorts = cohorts

    def step(self, batch_size: int, num_columns: int, runs: Sequence[Run] | None, device: torch.device) -> CacheStep:
        """Begin a call of the model with ``[batch_size, num_columns]`` more tokens, real in ``runs`` only.

        Returns:
            the positions of the new rows, and the attention that every layer is to use once, in order.

        Raises:
            ValueError: the batch size is not that of the calls before.
        """
        if not self._cohorts:
            ledgers: dict[Pattern, Ledger] = {
                pattern: Ledger(pattern, self.num_kv_heads, device) for pattern in self.patterns
            }
            self._cohorts = [_Cohort(list(range(batch_size)), ledgers)]
        if batch_size != self.batch_size:
            raise ValueError(
                f"the cache holds a batch of {self.batch_size} sequences, got input_ids with {batch_size}; use a new "
                "LongNetCache for another batch, or reorder() for other rows of this one"
            )
        if runs is None:
            runs = [(0, num_columns)] * batch_size
        seen = self.tokens_seen
        self._cohorts = [part for cohort in self._cohorts for part in _split(cohort, runs)]
        slabs = []
        for cohort in self._cohorts:
            start, stop = runs[cohort.rows[0]]
            if start < stop:
                steps = {pattern: ledger.advance(stop - start) for pattern, ledger in cohort.ledgers.items()}
                slabs.append(_Slab(cohort, (start, stop), cohort.seen, steps))
                cohort.seen += stop - start
        self._num_columns += num_columns
        if len(self._cohorts) == 1:
            positions = torch.arange(num_columns, device=device) + (seen[0] - runs[0][0])
            return CacheStep(self.patterns, slabs, positions.clamp_(min=0))
        return CacheStep(self.patterns, slabs, positions_of(runs, num_columns, seen, device))


@dataclass(slots=True)
class _Slab:
    """New rows of a cohort: their columns, the position of the first, and what the ledgers say."""

    cohort: _Cohort
    columns: Run
    offset: int
    steps: dict[Pattern, LedgerStep]


@dataclass(slots=True)
class CacheStep:
    """One call of the model with a cache."""

    patterns: tuple[Pattern, ...]
    slabs: list[_Slab]
    positions: Tensor
    """Absolute positions of the new rows, ``[N]`` or ``[B, N]``."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
        """Causal attention of new rows to the stored rows and to each other; then the storage takes the new rows."""
        assert not dropout_p
        assert not torch.is_grad_enabled()
        pattern = self.patterns[layer]
        if len(self.slabs) == 1:
            slab = self.slabs[0]
            # Without padding there is nothing to pick out.
            if slab.columns == (0, query.shape[1]) and slab.cohort.rows == list(range(query.shape[0])):
                return _attend_slab(slab, layer, pattern, query, key, value)
        out = torch.zeros_like(query)
        for slab in self.slabs:
            start, stop = slab.columns
            rows = torch.tensor(slab.cohort.rows, device=query.device)
            q, k, v = (tensor[rows, start:stop] for tensor in (query, key, value))
            out[rows, start:stop] = _attend_slab(slab, layer, pattern, q, k, v)
        return out


def _split(cohort: _Cohort, runs: Sequence[Run]) -> list[_Cohort]:
    """A cohort as cohorts whose sequences get the same number of new tokens in the same columns."""
    groups = group_rows([runs[row] for row in cohort.rows]).values()
    if len(groups) == 1:
        return [cohort]
    parts = [cohort.select(places, [cohort.rows[place] for place in places]) for places in groups]
    for part in parts[1:]:  # from here on their ledgers differ
        part.ledgers = copy.deepcopy(part.ledgers)
    return parts


def _attend_slab(slab: _Slab, layer: int, pattern: Pattern, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    step = slab.steps[pattern]
    stored = slab.cohort.storage.get(layer)
    max_slots = slab.cohort.ledgers[pattern].max_slots()
    if step.is_token:
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(query.shape, dtype=dtype, device=query.device)
        lse = torch.full(query.shape[:3], float("-inf"), dtype=dtype, device=query.device)
        stored = _insert(stored, key, value, step, max_slots)
    else:
        out, lse = attend_with_lse(
            query, key, value, pattern, is_causal=True, query_offset=slab.offset, key_offset=slab.offset
        )
    if step.pieces:
        assert stored is not None
        out = out.to(lse.dtype)
        _merge_pieces(step.pieces, query, stored, out, lse)
    if step.keep is not None:
        assert stored is not None
        stored = (_compact(stored[0], step.keep), _compact(stored[1], step.keep))
    if not step.is_token:
        stored = _insert(stored, key, value, step, max_slots)
    assert stored is not None
    slab.cohort.storage[layer] = stored
    return out.to(query.dtype)


def _merge_pieces(pieces: list[Piece], query: Tensor, stored: _Stored, out: Tensor, lse: Tensor) -> None:
    """Merge what ``query`` sees of the stored rows into ``out`` and ``lse``, piece by piece."""
    num_kv_heads = stored[0].shape[2]
    grouped = [tensor.unflatten(2, (num_kv_heads, -1)) for tensor in (query, out, lse)]
    flat = [tensor.flatten(1, 2) for tensor in stored]
    for piece in pieces:
        queries, piece_out, piece_lse = (tensor[:, piece.rows, piece.heads] for tensor in grouped)
        keys, values = (rows.index_select(1, piece.places).unflatten(1, (piece.num_keys, -1)) for rows in flat)
        part = attend_rows(queries.flatten(2, 3), keys, values)
        merge_in_place(
            piece_out, piece_lse, part.out.view(piece_out.shape), part.lse.to(lse.dtype).view(piece_lse.shape)
        )


def _compact(stored: Tensor, keep: Tensor) -> Tensor:
    """The storage with the rows that stay only, as large as before."""
    compacted = torch.empty_like(stored)
    compacted.flatten(1, 2)[:, : keep.shape[0]] = stored.flatten(1, 2).index_select(1, keep)
    return compacted


def _insert(stored: _Stored | None, key: Tensor, value: Tensor, step: LedgerStep, max_slots: int) -> _Stored:
    """The storage with the slab's rows ``[B, rows, G, D]`` that are to be stored; larger if they need it."""
    slots = 0 if stored is None else stored[0].shape[1]
    if stored is None or step.num_slots > slots:
        grown = min(max_slots, step.num_slots + step.num_slots // 2)
        larger = (
            key.new_empty(key.shape[0], grown, *key.shape[2:]), value.new_empty(value.shape[0], grown, *value.shape[2:])
        )  # fmt: skip
        if stored is not None:
            for old, new in zip(stored, larger, strict=True):
                new[:, :slots] = old
        stored = larger
    for tensor, slab in zip(stored, (key, value), strict=True):
        rows = slab.flatten(1, 2)
        tensor.flatten(1, 2).index_copy_(
            1, step.target, rows if step.source is None else rows.index_select(1, step.source)
        )
    return stored
