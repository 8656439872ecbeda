"""The key/value cache: bounded, because a row that no later token can see is dropped."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dilated_attention_pytorch.ops import attend_with_lse
from dilated_attention_pytorch.ops.merge import AttentionOutput, merge
from dilated_attention_pytorch.patterns import Pattern

from .config import LongNetConfig
from .ledger import Ledger, LedgerStep
from .padding import Run, group_rows, positions_of
from .reading import Stored, merge_pieces, merge_stretches
from .share import CacheShare


@dataclass(slots=True)
class _Cohort:
    """Sequences of the batch that have seen the same number of tokens: one ledger per pattern serves them all."""

    rows: list[int]
    ledgers: dict[Pattern, Ledger]
    storage: dict[int, Stored] = field(default_factory=dict)
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

    With a ``share`` the cache stays sharded over the ranks of a mesh, each of which holds about its part of the rows.
    Every rank makes the same calls with the same tokens and gets the same result; only a prompt may be read with its
    rows dealt out, see :meth:`LongNetLM.hidden_states`. What the cache tells of itself is then of this rank.

    Args:
        config: the model's configuration.
        share: the ranks that hold the rows together, such as ``parallel.RankShare(mesh)``; this process alone holds
            all without it.

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

    def __init__(self, config: LongNetConfig, *, share: CacheShare | None = None) -> None:
        assert config.num_kv_heads is not None
        self.patterns: tuple[Pattern, ...] = tuple(config.pattern(layer) for layer in range(config.num_layers))
        self.num_kv_heads = config.num_kv_heads
        self.share = share
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
            self._cohorts = [self._new_cohort(batch_size, device)]
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
            return CacheStep(self.patterns, slabs, positions.clamp_(min=0), self.share)
        return CacheStep(self.patterns, slabs, positions_of(runs, num_columns, seen, device), self.share)

    def prompt_step(self, batch_size: int, num_rows: int, sequence_length: int, device: torch.device) -> PromptStep:
        """Begin a call of the model with this rank's rows of a text's first ``sequence_length`` tokens.

        Returns:
            the positions of these rows, and the attention that every layer is to use once, in order.

        Raises:
            ValueError: the cache has no share, or the rows are not those that it deals to this rank.
            NotImplementedError: the cache has seen tokens.
        """
        if self.share is None:
            raise ValueError(
                f"sequence_length is for a cache that ranks share, got sequence_length {sequence_length} with a cache "
                "without a share: make it with LongNetCache(config, share=...), or pass all tokens"
            )
        if self._num_columns:
            raise NotImplementedError(
                f"sequence_length is for the first tokens of a text, and this cache has seen {self._num_columns} "
                "columns: pass later tokens whole on every rank, without sequence_length"
            )
        positions = self.share.positions(sequence_length, device)
        if positions.shape[0] != num_rows:
            raise ValueError(
                f"of {sequence_length} tokens this rank has {positions.shape[0]} rows, got input_ids with {num_rows}: "
                "pass share.rows(all_input_ids)"
            )
        cohort = self._new_cohort(batch_size, device)
        steps = {pattern: ledger.advance(sequence_length) for pattern, ledger in cohort.ledgers.items()}
        places = {pattern: ledger.places_by_rank() for pattern, ledger in cohort.ledgers.items()}
        cohort.seen = self._num_columns = sequence_length
        self._cohorts = [cohort]
        return PromptStep(self.patterns, _Slab(cohort, (0, sequence_length), 0, steps), positions, self.share, places)

    def _new_cohort(self, batch_size: int, device: torch.device) -> _Cohort:
        rank, num_ranks = (0, 1) if self.share is None else (self.share.rank, self.share.size)
        ledgers: dict[Pattern, Ledger] = {
            pattern: Ledger(pattern, self.num_kv_heads, device, rank=rank, num_ranks=num_ranks)
            for pattern in self.patterns
        }
        return _Cohort(list(range(batch_size)), ledgers)


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
    share: CacheShare | None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
        """Causal attention of new rows to the stored rows and to each other; then the storage takes the new rows."""
        assert not dropout_p
        assert not torch.is_grad_enabled()
        pattern = self.patterns[layer]
        if len(self.slabs) == 1:
            slab = self.slabs[0]
            # Without padding there is nothing to pick out.
            if slab.columns == (0, query.shape[1]) and slab.cohort.rows == list(range(query.shape[0])):
                return _attend_slab(slab, layer, pattern, query, key, value, self.share)
        out = torch.zeros_like(query)
        for slab in self.slabs:
            start, stop = slab.columns
            rows = torch.tensor(slab.cohort.rows, device=query.device)
            q, k, v = (tensor[rows, start:stop] for tensor in (query, key, value))
            out[rows, start:stop] = _attend_slab(slab, layer, pattern, q, k, v, self.share)
        return out


@dataclass(slots=True)
class PromptStep:
    """One call of the model with this rank's rows of a prompt."""

    patterns: tuple[Pattern, ...]
    slab: _Slab
    positions: Tensor
    """Absolute positions of this rank's rows, ``[N]``."""
    share: CacheShare
    places: dict[Pattern, list[Tensor]]
    """Flat places ``position * G + head`` of the rows to store, rank by rank."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
        """Causal attention over the ranks; then the rows alive go to the ranks that store them."""
        assert not dropout_p
        assert not torch.is_grad_enabled()
        pattern, cohort = self.patterns[layer], self.slab.cohort
        out = self.share.attend(query, key, value, pattern, cohort.seen)
        dealt = self.share.deal(torch.cat([key, value], dim=-1), self.places[pattern], cohort.seen)
        keys, values = dealt.split([key.shape[-1], value.shape[-1]], dim=-1)
        step, ledger = self.slab.steps[pattern], cohort.ledgers[pattern]
        cohort.storage[layer] = _insert(None, (keys, values), step, ledger)
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


def _attend_slab(
    slab: _Slab, layer: int, pattern: Pattern, query: Tensor, key: Tensor, value: Tensor, share: CacheShare | None
) -> Tensor:
    step, ledger = slab.steps[pattern], slab.cohort.ledgers[pattern]
    stored = slab.cohort.storage.get(layer)
    within: AttentionOutput | None = None
    if step.is_token:
        stored = _insert(stored, _picked(key, value, step), step, ledger)
    else:
        within = attend_with_lse(
            query, key, value, pattern, is_causal=True, query_offset=slab.offset, key_offset=slab.offset
        )
    if within is None or share is not None:
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(query.shape, dtype=dtype, device=query.device)
        lse = torch.full(query.shape[:3], float("-inf"), dtype=dtype, device=query.device)
    else:
        out, lse = within
    if step.pieces:
        assert stored is not None
        out = out.to(lse.dtype)
        merge_pieces(step.pieces, query, stored, out, lse)
    if step.stretches:
        assert stored is not None
        out = out.to(lse.dtype)
        merge_stretches(step.stretches, pattern, slab.offset, query, stored, out, lse)
    if share is not None and (step.is_token or slab.offset):
        # Also where this rank holds nothing that the slab sees: another may.
        out, lse = share.merge(AttentionOutput(out, lse))
    if share is not None and within is not None:
        # What the slab's rows see of each other is the same on every rank, so it counts once.
        out, lse = merge([(out, lse), (within.out.to(lse.dtype), within.lse)])
    if step.keep is not None:
        assert stored is not None
        stored = (_compact(stored[0], step.keep), _compact(stored[1], step.keep))
    if not step.is_token:
        stored = _insert(stored, _picked(key, value, step), step, ledger)
    assert stored is not None
    slab.cohort.storage[layer] = stored
    return out.to(query.dtype)


def _compact(stored: Tensor, keep: Tensor) -> Tensor:
    """The storage with the rows that stay only, as large as before."""
    compacted = torch.empty_like(stored)
    compacted.flatten(1, 2)[:, : keep.shape[0]] = stored.flatten(1, 2).index_select(1, keep)
    return compacted


def _picked(key: Tensor, value: Tensor, step: LedgerStep) -> Stored:
    """Of a slab's keys and values ``[B, rows, G, D]`` those to be stored, ``[B, places, D]``."""
    rows = key.flatten(1, 2), value.flatten(1, 2)
    return rows if step.source is None else (rows[0].index_select(1, step.source), rows[1].index_select(1, step.source))


def _insert(stored: Stored | None, rows: Stored, step: LedgerStep, ledger: Ledger) -> Stored:
    """The storage with keys and values ``[B, places, D]`` more, at the step's target; larger if they need it."""
    slots = 0 if stored is None else stored[0].shape[1]
    if stored is None or step.num_slots > slots:
        grown = min(ledger.max_slots(), step.num_slots + step.num_slots // 2)
        key, value = (new.new_empty(new.shape[0], grown, ledger.num_kv_heads, new.shape[2]) for new in rows)
        if stored is not None:
            key[:, :slots], value[:, :slots] = stored
        stored = key, value
    for tensor, new in zip(stored, rows, strict=True):
        tensor.flatten(1, 2).index_copy_(1, step.target, new)
    return stored
