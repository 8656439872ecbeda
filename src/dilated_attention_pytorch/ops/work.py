"""Partials of one call with their kernel, operand views and masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels import native
from dilated_attention_pytorch.kernels import partial as kernels
from dilated_attention_pytorch.kernels.dropout import keep_factors
from dilated_attention_pytorch.kernels.masks import Masks
from dilated_attention_pytorch.kernels.products import KeepFactors, ScoreBlock
from dilated_attention_pytorch.planning.block_lists import AnyPartial, BlockLists
from dilated_attention_pytorch.planning.gathered import Gathered
from dilated_attention_pytorch.planning.geometry import Partial
from dilated_attention_pytorch.precision import accumulation_dtype

from .gathered import gathered_views
from .lists import listed_views
from .operands import Operand, Operands, Rows
from .views import PartialViews, strided_views

_LARGEST_BIAS = 1 << 22  # elements of a bias that is materialized


@dataclass(frozen=True, slots=True)
class Work:
    """Partials for some sequences of the batch; ``query``, ``key`` and ``value`` hold these sequences only."""

    partials: Sequence[AnyPartial]
    query: Tensor
    key: Tensor
    value: Tensor
    ratio: int
    """Query heads per key/value head."""
    scale: float
    """Scale of the scores, positive."""
    impl: str
    """One of "native", "aten" and, for remote keys only, "triton"."""
    masks: Masks
    """Masks of these sequences only."""
    first_sequence: int = 0
    """Index of the first of these sequences in the batch."""
    is_remote: bool = False
    """Whether keys and values belong to the single partial alone: ``[B, rows, heads, D]``."""
    seen_rows: Tensor | None = None
    """Rows of remote keys that the queries see, see :class:`.remote.RemoteKeys`."""

    @property
    def dtype(self) -> torch.dtype:
        """The accumulation dtype."""
        return accumulation_dtype(self.query.dtype)

    @property
    def rows_of_keys(self) -> Rows:
        """Row space of the keys: remote or local."""
        return Rows.REMOTE if self.is_remote else Rows.KEY

    def for_native(self) -> native.Operands:
        """The operands in the format of the native kernels."""
        operands = (self.query, self.key, self.value, self.masks, self.ratio, self.scale)
        return native.Operands(*operands, self.first_sequence, self.is_remote, self.seen_rows)

    def kernel(self, partial: AnyPartial, *, is_pair: bool, has_lse_gradient: bool = False) -> kernels.Kernel:
        """The kernel that computes a partial."""
        is_listed = isinstance(partial, BlockLists)
        if isinstance(partial, BlockLists) and not native.takes_gates(partial.log_gates, self.scale):
            return "products"
        has_bias = self.masks.hidden is not None or (isinstance(partial, Partial) and partial.band is not None)
        return kernels.kernel_of(
            self.impl,
            self.query,
            has_bias=has_bias,
            is_dropped=self.masks.seed is not None,
            is_pair=is_pair,
            is_remote=self.is_remote,
            has_lse_gradient=has_lse_gradient,
            is_listed=is_listed,
        )

    def operands(self) -> Operands:
        """Query, key and value; if present, the bias of hidden keys and the indices of pairs for dropout."""
        found: Operands = {
            "query": Operand(self.query),
            "key": Operand(self.key, self.rows_of_keys),
            "value": Operand(self.value, self.rows_of_keys),
        }
        masks, device = self.masks, self.query.device
        of_keys, of_queries = self.key.shape[:3], self.query.shape[:3]
        if masks.hidden is not None:
            bias = masks.hidden.new_zeros(masks.hidden.shape, dtype=self.dtype).masked_fill_(
                masks.hidden, float("-inf")
            )
            bias = bias.unsqueeze(-1).expand(of_keys) if bias.dim() == 2 else bias
            found["key_bias"] = Operand(bias, self.rows_of_keys)
        if masks.seed is not None:
            sequences = torch.arange(of_queries[0], device=device) + self.first_sequence
            found["sequences"] = Operand(sequences.view(-1, 1, 1).expand(of_queries))
            found["heads"] = Operand(torch.arange(of_queries[2], device=device).expand(of_queries))
            rows = torch.arange(of_queries[1], device=device) + masks.query_offset
            found["query_positions"] = Operand(rows.view(-1, 1).expand(of_queries))
            keys = masks.key_positions
            if keys is None:
                keys = (torch.arange(of_keys[1], device=device) + masks.key_offset).view(-1, 1)
            found["key_positions"] = Operand(keys.expand(of_keys), self.rows_of_keys)
        return found

    def views(self, partial: AnyPartial, operands: Operands) -> Iterator[PartialViews]:
        """Every operand as ``[problems, problems, rows(, D)]``, in one or more steps that cover all problems."""
        size = self.query.shape[0]
        if isinstance(partial, Gathered):
            yield from gathered_views(partial, size, self.ratio, operands)
            return
        if isinstance(partial, BlockLists):
            yield from listed_views(partial, self.ratio, operands)
            return
        for views in strided_views(partial, size, self.ratio, operands):
            if partial.band is None or "key_bias" not in operands:
                yield views
            else:  # in steps, so that the bias of all problems of a step stays small
                yield from views.split(max(1, _LARGEST_BIAS // _num_scores(partial, views["query"].shape[1])))

    def bias(self, partial: AnyPartial, views: PartialViews) -> Tensor | None:
        """Bias of the scores, 0 or -inf, ``[problems, problems, queries, keys]``; None without masks."""
        query, of_keys, bias = views["query"], views.get("key_bias"), views.get("bias")
        if isinstance(partial, Partial) and partial.band is not None:
            bias = _band_bias(partial.band, partial.num_queries, partial.num_keys, self.dtype, query.device)
            bias = bias.expand(*query.shape[:2], -1, -1)
        if of_keys is not None:
            # With strides other than 1, the fused CPU kernel materializes the bias for every query row.
            of_keys = of_keys.contiguous().unsqueeze(2)
            bias = of_keys.expand(-1, -1, query.shape[2], -1) if bias is None else bias + of_keys
        return bias

    def keep_factors(self, views: PartialViews) -> KeepFactors | None:
        """Dropout factors of a block of scores; None without dropout."""
        masks = self.masks
        if masks.seed is None:
            return None
        seed = masks.seed

        def factors(block: ScoreBlock) -> Tensor:
            sequences, heads, rows = (
                block.of_queries(views[name]).unsqueeze(-1) for name in ("sequences", "heads", "query_positions")
            )
            keys = block.of_keys(views["key_positions"]).unsqueeze(-2)
            return keep_factors(seed, sequences, heads, rows, keys, masks.dropout_p, self.dtype)

        return factors


def is_zero_padding(partial: AnyPartial) -> bool:
    """Whether a partial stands for keys of score 0 and value 0."""
    return isinstance(partial, Partial) and partial.zero_pad_keys > 0


def is_causal(partial: AnyPartial) -> bool:
    """Whether the i-th query of a partial sees its first i + 1 keys."""
    return isinstance(partial, Partial) and partial.is_causal


def _num_scores(partial: Partial, problems: int) -> int:
    return partial.num_queries * partial.num_keys * problems


def _band_bias(
    band: tuple[int, int], num_queries: int, num_keys: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """0 where query i sees key j, else -inf, ``[num_queries, num_keys]``."""
    distance = torch.arange(1 - num_queries, num_keys, device=device)
    is_hidden = (distance < band[0]) | (distance > band[1])
    of_distance = torch.zeros(distance.shape, dtype=dtype, device=device).masked_fill_(is_hidden, float("-inf"))
    # Row i begins at distance -i. The fused CPU kernel materializes a flipped view for every problem.
    return of_distance.unfold(0, num_keys, 1).flip(0).contiguous()
