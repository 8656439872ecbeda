"""The bounded key/value cache: rows that no later token can attend to are dropped."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilated_attention_pytorch.ops import attend_with_lse
from dilated_attention_pytorch.ops.merge import AttentionOutput, merge
from dilated_attention_pytorch.ops.scores import Scores, finished
from dilated_attention_pytorch.patterns import Pattern

from .cache_index import CacheIndex, CacheIndexStep
from .config import LongNetConfig
from .padding import Run, group_rows, positions_of
from .reading import Stored, merge_key_ranges, merge_visible_keys

if TYPE_CHECKING:
    from dilated_attention_pytorch.parallel import RankShare


@dataclass(slots=True)
class _RowGroup:
    """Sequences of the batch that have seen equally many tokens, and so share one cache index per pattern."""

    rows: list[int]
    cache_indices: dict[Pattern, CacheIndex]
    storage: dict[int, Stored] = field(default_factory=dict)
    seen: int = 0

    def select(self, picked: Sequence[int], rows: list[int]) -> _RowGroup:
        """The sequences ``picked`` (repeats allowed) as rows ``rows`` of the batch, with the same cache indices."""
        if list(picked) == list(range(len(self.rows))):
            return _RowGroup(rows, self.cache_indices, self.storage, self.seen)
        storage = {}
        for layer, tensors in self.storage.items():
            index = torch.tensor(picked, device=tensors[0].device)
            storage[layer] = tuple(tensor.index_select(0, index) for tensor in tensors)
        return _RowGroup(rows, self.cache_indices, storage, self.seen)


class ForwardOnlyCache:
    """A cache that drops rows, and so cannot roll back tokens, as transformers asks about it."""

    __slots__ = ()

    is_compileable = False
    """Read by transformers: shapes change between steps."""
    is_croppable = False
    """Read by transformers: dropped rows cannot be restored."""

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, as transformers does after rejected candidates; only 0 is possible.

        Raises:
            NotImplementedError: ``tokens_to_remove`` is not 0.
        """
        refuse_removal(type(self).__name__, tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Called by transformers before it rolls back tokens, as assisted generation and prompt lookup do.

        Raises:
            NotImplementedError: always.
        """
        refuse_removal(type(self).__name__, 1)


class LongNetCache(ForwardOnlyCache):
    """Keys and values that later tokens can still attend to, per layer and sequence of a batch.

    A key/value head holds at most ``sum_i ceil(min(w_i, t) / r_i)`` rows after t tokens, and a row that several
    dilation groups select is stored once, so memory is bounded in the sequence length. :meth:`LongNetLM.forward` fills
    the cache, one token or more at a time; results equal those of one call on the whole sequence. Inference only: no
    gradients.

    With a ``share``, the rows are sharded over the ranks of a mesh. Every rank makes the same calls with the same
    tokens and gets the same result; only a prompt may be passed sharded, see :meth:`LongNetLM.hidden_states`. Row
    counts and bytes then refer to this rank.

    Args:
        config: the model's configuration.
        share: the ranks that shard the rows, such as ``parallel.RankShare(mesh)``; None = this process holds all.

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

    # Without __dict__: exporters that copy the attributes of objects refuse a cache instead of changing parts of it.
    __slots__ = ("_last_keys", "_num_columns", "_row_groups", "num_kv_heads", "patterns", "share")

    def __init__(self, config: LongNetConfig, *, share: RankShare | None = None) -> None:
        assert config.num_kv_heads is not None
        self._begin(tuple(config.pattern(layer) for layer in range(config.num_layers)), config.num_kv_heads, share)

    def _begin(self, patterns: tuple[Pattern, ...], num_kv_heads: int, share: RankShare | None) -> None:
        self.patterns = patterns
        self.num_kv_heads = num_kv_heads
        self.share = share
        self._row_groups: list[_RowGroup] = []
        self._last_keys: dict[int, Tensor] = {}
        self._num_columns = 0

    @property
    def batch_size(self) -> int:
        """Number of sequences in the batch; 0 before the first call."""
        return sum(len(row_group.rows) for row_group in self._row_groups)

    @property
    def tokens_seen(self) -> list[int]:
        """Number of real tokens seen, per sequence of the batch."""
        seen = [0] * self.batch_size
        for row_group in self._row_groups:
            for row in row_group.rows:
                seen[row] = row_group.seen
        return seen

    def get_seq_length(self) -> int:
        """Number of ``input_ids`` columns seen, padding included; transformers slices its inputs by it."""
        return self._num_columns

    def rows_per_head(self, layer: int) -> list[list[int]]:
        """Number of stored rows of a layer, per sequence of the batch and key/value head."""
        rows: list[list[int]] = [[] for _ in range(self.batch_size)]
        for row_group in self._row_groups:
            for row in row_group.rows:
                rows[row] = row_group.cache_indices[self.patterns[layer]].rows_per_head
        return rows

    def positions(self, layer: int, row: int, head: int) -> list[int]:
        """Stored positions of one layer, sequence and key/value head, ascending."""
        row_group = next(row_group for row_group in self._row_groups if row in row_group.rows)
        return row_group.cache_indices[self.patterns[layer]].positions(head)

    @property
    def num_bytes(self) -> int:
        """Allocated bytes of keys and values."""
        stored = [
            tensor for row_group in self._row_groups for tensors in row_group.storage.values() for tensor in tensors
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*stored, *self._last_keys.values()))

    def reset(self) -> None:
        """Forget all tokens."""
        self._begin(self.patterns, self.num_kv_heads, self.share)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch ``repeats`` times in a row."""
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` of the batch; see :meth:`reorder_cache`."""
        self.reorder_cache(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch for beam search: row b becomes the former row ``beam_idx[b]``; rows may repeat or drop out.

        Args:
            beam_idx: integer ``[new batch size]``.

        Raises:
            ValueError: an index is out of range.
        """
        wanted = beam_idx.tolist()
        if any(not 0 <= old < self.batch_size for old in wanted):
            raise ValueError(f"beam_idx must be rows of the batch, 0 to {self.batch_size - 1}, got {wanted}")
        row_groups = []
        for row_group in self._row_groups:
            index_of = {row: index for index, row in enumerate(row_group.rows)}
            rows = [new for new, old in enumerate(wanted) if old in index_of]
            if rows:
                row_groups.append(row_group.select([index_of[wanted[new]] for new in rows], rows))
        self._row_groups = row_groups
        for layer, keys in self._last_keys.items():
            self._last_keys[layer] = keys.index_select(0, beam_idx.to(keys.device))

    def step(self, batch_size: int, num_columns: int, runs: Sequence[Run] | None, device: torch.device) -> CacheStep:
        """Start a model call with ``[batch_size, num_columns]`` more tokens, of which only those in ``runs`` are real.

        Returns:
            the positions of the new rows, and the attention callable, to be called once per layer in order.

        Raises:
            ValueError: the batch size differs from earlier calls.
        """
        if not self._row_groups:
            self._row_groups = [self._new_row_group(batch_size, device)]
        if batch_size != self.batch_size:
            raise ValueError(
                f"the cache holds a batch of {self.batch_size} sequences, got input_ids with {batch_size}; use a new "
                "LongNetCache for another batch, or reorder_cache() for other rows of this one"
            )
        if runs is None:
            runs = [(0, num_columns)] * batch_size
        seen = self.tokens_seen
        self._row_groups = [part for row_group in self._row_groups for part in _split(row_group, runs)]
        slabs = []
        for row_group in self._row_groups:
            start, stop = runs[row_group.rows[0]]
            if start < stop:
                steps = {
                    pattern: cache_index.advance(stop - start)
                    for pattern, cache_index in row_group.cache_indices.items()
                }
                slabs.append(_Slab(row_group, (start, stop), row_group.seen, steps))
                row_group.seen += stop - start
        self._num_columns += num_columns
        if len(self._row_groups) == 1:
            positions = torch.arange(num_columns, device=device) + (seen[0] - runs[0][0])
            positions.clamp_(min=0)
        else:
            positions = positions_of(runs, num_columns, seen, device)
        return CacheStep(self.patterns, slabs, positions, runs, self._last_keys, self.share)

    def prompt_step(self, batch_size: int, num_rows: int, sequence_length: int, device: torch.device) -> PromptStep:
        """Start a model call with this rank's rows of a prompt of ``sequence_length`` tokens.

        Returns:
            the positions of these rows, and the attention callable, to be called once per layer in order.

        Raises:
            ValueError: the cache has no share, or the number of rows is not this rank's.
            NotImplementedError: the cache is not empty.
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
        row_group = self._new_row_group(batch_size, device)
        steps = {
            pattern: cache_index.advance(sequence_length) for pattern, cache_index in row_group.cache_indices.items()
        }
        stored_indices = {
            pattern: cache_index.indices_by_rank() for pattern, cache_index in row_group.cache_indices.items()
        }
        row_group.seen = self._num_columns = sequence_length
        self._row_groups = [row_group]
        return PromptStep(
            self.patterns,
            _Slab(row_group, (0, sequence_length), 0, steps),
            positions,
            self._last_keys,
            self.share,
            stored_indices,
        )

    def _new_row_group(self, batch_size: int, device: torch.device) -> _RowGroup:
        rank, num_ranks = (0, 1) if self.share is None else (self.share.rank, self.share.size)
        cache_indices: dict[Pattern, CacheIndex] = {
            pattern: CacheIndex(pattern, self.num_kv_heads, device, rank=rank, num_ranks=num_ranks)
            for pattern in self.patterns
        }
        return _RowGroup(list(range(batch_size)), cache_indices)


def refuse_removal(name: str, tokens: int) -> None:
    """Raise ``NotImplementedError`` unless ``tokens`` is 0."""
    if tokens:
        raise NotImplementedError(
            f"a {name} cannot roll back tokens, because dropped rows cannot be restored: assisted "
            "generation, prompt lookup and contrastive search need a cache that keeps every row, such as a "
            "transformers model's own"
        )


@dataclass(slots=True)
class _Slab:
    """New rows of a row group: their columns, the position of the first row, and the cache indices' steps."""

    row_group: _RowGroup
    columns: Run
    offset: int
    steps: dict[Pattern, CacheIndexStep]


@dataclass(slots=True)
class CacheStep:
    """One model call with a cache."""

    patterns: tuple[Pattern, ...]
    slabs: list[_Slab]
    positions: Tensor
    """Absolute positions of the new rows, ``[N]`` or ``[B, N]``."""
    runs: Sequence[Run]
    """Column range of each sequence's new rows."""
    last_keys: dict[int, Tensor]
    """Per layer whose keys are made of several rows, the projected keys of each sequence's last ones, ``[B, count, G,
    D]``; 0 before its first."""
    share: RankShare | None

    def previous_keys(self, count: int, layer: int, key: Tensor) -> tuple[Tensor, ...]:
        """The keys of the 1 to ``count`` rows before each new row; the last ones are stored for the next call."""
        before = self.last_keys.get(layer)
        if before is None:
            before = key.new_zeros(key.shape[0], count, *key.shape[2:])
        # Each sequence's last keys and its new ones, without the padding before them: [B, count + N, G, D].
        columns = torch.arange(count + key.shape[1], device=key.device)
        starts, stops = torch.tensor(self.runs, device=key.device).unbind(dim=1)
        moved = torch.where(columns >= count, columns + starts[:, None], columns).clamp_(max=columns.shape[0] - 1)
        sequences = torch.arange(key.shape[0], device=key.device)[:, None]
        rows = torch.cat([before, key], dim=1)[sequences, moved]
        self.last_keys[layer] = rows[sequences, (stops - starts)[:, None] + columns[:count]]
        back = (columns[count:] - starts[:, None]).clamp_(min=count)  # the row itself
        return tuple(rows[sequences, back - distance] for distance in range(1, count + 1))

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float,
        scores: Scores | None = None,
    ) -> Tensor:
        """Causal attention of new rows to stored and new rows; then the new rows are stored.

        ``scores`` are those of the layer in every call, without a bias of keys.
        """
        assert not dropout_p
        assert not torch.is_grad_enabled()
        assert scores is None or (scores.key_bias is None and scores.coordinates is None)
        pattern = self.patterns[layer]
        if len(self.slabs) == 1:
            slab = self.slabs[0]
            # Without padding no rows need selecting.
            if slab.columns == (0, query.shape[1]) and slab.row_group.rows == list(range(query.shape[0])):
                return _attend_slab(slab, layer, pattern, query, key, value, self.share, scores)
        out = query.new_zeros(*query.shape[:3], value.shape[3])
        for slab in self.slabs:
            start, stop = slab.columns
            rows = torch.tensor(slab.row_group.rows, device=query.device)
            q, k, v = (tensor[rows, start:stop] for tensor in (query, key, value))
            out[rows, start:stop] = _attend_slab(slab, layer, pattern, q, k, v, self.share, scores)
        return out


@dataclass(slots=True)
class PromptStep:
    """One model call with this rank's rows of a prompt."""

    patterns: tuple[Pattern, ...]
    slab: _Slab
    positions: Tensor
    """Absolute positions of this rank's rows, ``[N]``."""
    last_keys: dict[int, Tensor]
    """See :class:`CacheStep`."""
    share: RankShare
    stored_indices: dict[Pattern, list[Tensor]]
    """Flat indices ``position * G + head`` of the rows to store, per rank."""

    def previous_keys(self, count: int, layer: int, key: Tensor) -> tuple[Tensor, ...]:
        """The keys of the 1 to ``count`` positions before each row of this rank; every rank stores the last ones."""
        length = self.slab.row_group.seen
        self.last_keys[layer] = self.share.last_rows(key, count, length)
        return self.share.previous_rows(key, count, length)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
        """Causal attention over all ranks; then each retained row is sent to the rank that stores it."""
        assert not dropout_p
        assert not torch.is_grad_enabled()
        pattern, row_group = self.patterns[layer], self.slab.row_group
        out = self.share.attend(query, key, value, pattern, row_group.seen)
        dealt = self.share.deal(torch.cat([key, value], dim=-1), self.stored_indices[pattern], row_group.seen)
        keys, values = dealt.split([key.shape[-1], value.shape[-1]], dim=-1)
        step, cache_index = self.slab.steps[pattern], row_group.cache_indices[pattern]
        row_group.storage[layer] = _insert(None, (keys, values), step, cache_index)
        return out


def _split(row_group: _RowGroup, runs: Sequence[Run]) -> list[_RowGroup]:
    """Split a row group by the columns of its sequences' new tokens."""
    groups = group_rows([runs[row] for row in row_group.rows]).values()
    if len(groups) == 1:
        return [row_group]
    parts = [
        row_group.select(stored_indices, [row_group.rows[index_of] for index_of in stored_indices])
        for stored_indices in groups
    ]
    for part in parts[1:]:  # their cache indices diverge from here on
        part.cache_indices = copy.deepcopy(part.cache_indices)
    return parts


def _attend_slab(
    slab: _Slab,
    layer: int,
    pattern: Pattern,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    share: RankShare | None,
    scores: Scores | None,
) -> Tensor:
    sinks = None if scores is None else scores.sinks
    scores = None if scores is None else replace(scores, sinks=None)
    rows: Stored = (key, value)
    if scores is not None and scores.is_by_distance:
        positions = torch.arange(key.shape[1], device=key.device) + slab.offset
        rows = (*rows, positions.view(1, -1, 1, 1).expand(*key.shape[:3], 1))
    step, cache_index = slab.steps[pattern], slab.row_group.cache_indices[pattern]
    stored = slab.row_group.storage.get(layer)
    within: AttentionOutput | None = None
    if step.is_token:
        stored = _insert(stored, _picked(rows, step), step, cache_index)
    else:
        within = attend_with_lse(
            query,
            key,
            value,
            pattern,
            is_causal=True,
            query_offset=slab.offset,
            key_offset=slab.offset,
            scores=scores,
            heads_first=False,
        )
    if within is None or share is not None:
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros((*query.shape[:3], value.shape[3]), dtype=dtype, device=query.device)
        lse = torch.full(query.shape[:3], float("-inf"), dtype=dtype, device=query.device)
    else:
        out, lse = within
    if step.visible_keys:
        assert stored is not None
        out = out.to(lse.dtype)
        merge_visible_keys(step, query, stored, out, lse, offset=slab.offset, scores=scores)
    if step.key_ranges:
        assert stored is not None
        out = out.to(lse.dtype)
        merge_key_ranges(step.key_ranges, pattern, slab.offset, query, stored, out, lse, scores)
    if share is not None and (step.is_token or slab.offset):
        # A collective: all ranks take part, even one whose stored rows are not visible to the slab.
        out, lse = share.merge(AttentionOutput(out, lse))
    if share is not None and within is not None:
        # Attention within the slab is the same on every rank, so it is merged once, after the others.
        out, lse = merge([(out, lse), (within.out.to(lse.dtype), within.lse)])
    if step.keep is not None:
        assert stored is not None
        stored = tuple(_compact(tensor, step.keep) for tensor in stored)
    if not step.is_token:
        stored = _insert(stored, _picked(rows, step), step, cache_index)
    assert stored is not None
    slab.row_group.storage[layer] = stored
    out, _ = finished(out, lse, sinks, None)
    return out.to(query.dtype)


def _compact(stored: Tensor, keep: Tensor) -> Tensor:
    """The storage with only the rows to keep, same capacity."""
    compacted = torch.empty_like(stored)
    compacted.flatten(1, 2)[:, : keep.shape[0]] = stored.flatten(1, 2).index_select(1, keep)
    return compacted


def _picked(rows: Stored, step: CacheIndexStep) -> Stored:
    """The rows of a slab, ``[B, rows, G, D]`` each, that are stored, ``[B, stored_indices, D]``."""
    flat = tuple(tensor.flatten(1, 2) for tensor in rows)
    return flat if step.source is None else tuple(tensor.index_select(1, step.source) for tensor in flat)


def grown_slots(slots: int, needed: int, most: int) -> int:
    """New capacity for ``needed`` slots: unchanged if they fit, else 1.5 times ``needed``, at most ``most``.

    >>> grown_slots(0, 100, 1000), grown_slots(150, 140, 1000), grown_slots(150, 900, 1000)
    (150, 150, 1000)
    """
    return slots if needed <= slots else min(most, needed + needed // 2)


def _insert(stored: Stored | None, rows: Stored, step: CacheIndexStep, cache_index: CacheIndex) -> Stored:
    """The storage with the new rows at the step's target indices; reallocated if its capacity is too small."""
    slots = 0 if stored is None else stored[0].shape[1]
    if stored is None or step.num_slots > slots:
        grown = grown_slots(slots, step.num_slots, cache_index.max_slots())
        larger = tuple(new.new_empty(new.shape[0], grown, cache_index.num_kv_heads, new.shape[2]) for new in rows)
        for tensor, before in zip(larger, stored or (), strict=False):
            tensor[:, :slots] = before
        stored = larger
    for tensor, new in zip(stored, rows, strict=True):
        tensor.flatten(1, 2).index_copy_(1, step.target, new)
    return stored
