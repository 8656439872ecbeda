"""Partials of a call with their kernel, views and masks, and the passes over them.

Attention is merged, gradients and weighted sums are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels import native, products
from dilated_attention_pytorch.kernels.dropout import keep_factors
from dilated_attention_pytorch.kernels.masks import Masks, ScoreTerms
from dilated_attention_pytorch.kernels.partial import PRODUCTS, Kernel, MergedViews, PartialCall
from dilated_attention_pytorch.kernels.products import LOG2_E, BlockTerms, KeepFactors, Result, ScoreBlock
from dilated_attention_pytorch.plan.block_lists import AnyPartial, BlockLists
from dilated_attention_pytorch.plan.gathered import Gathered
from dilated_attention_pytorch.plan.geometry import Partial
from dilated_attention_pytorch.plan.planner import Tile
from dilated_attention_pytorch.precision import accumulation_dtype

from .call import Implementation
from .gathered import gathered_views
from .lists import listed_views
from .merge import merge_in_place
from .operands import Name, Operand, Operands, Role, Rows
from .views import PartialViews, strided_views

_LARGEST_BIAS = 1 << 22  # elements of a bias that is materialized
_OF_BIAS: tuple[Literal["grad_gates", "grad_key_bias"], ...] = ("grad_gates", "grad_key_bias")


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
    impl: Implementation
    masks: Masks
    """Masks of these sequences only."""
    first_sequence: int = 0
    """Index of the first of these sequences in the batch."""
    tile: Tile | None = None
    """The rows and heads that the partials cover; None = those of the single partial."""
    is_remote: bool = False
    """Whether keys and values belong to the single partial alone: ``[B, rows, heads, D]``."""
    seen_rows: Tensor | None = None
    """Rows of remote keys that the queries see, see :class:`.remote.RemoteKeys`."""
    terms: ScoreTerms | None = None
    """Terms of the scores, of these sequences only."""

    @property
    def dtype(self) -> torch.dtype:
        """The accumulation dtype."""
        return accumulation_dtype(self.query.dtype)

    @property
    def rows_of_keys(self) -> Rows:
        """Row space of the keys: remote or local."""
        return Rows.REMOTE if self.is_remote else Rows.KEY

    def for_native(self, partial: AnyPartial) -> native.Operands:
        """The operands of a partial in the format of the native kernels."""
        masks, hidden = self.masks, self.masks.hidden
        if hidden is not None and hidden.dim() == 2:
            hidden = hidden.unsqueeze(-1).expand(-1, -1, self.key.shape[2])
        positions = [masks.query_offset, masks.key_offset, self.first_sequence]
        options = (hidden, masks.seed, masks.dropout_p, positions, self.scale)
        terms = None
        if self.terms is not None:
            line, origin = None, 0
            if self.terms.distance_bias is not None:
                of_partial, origin = self.line(partial, self.terms.distance_bias)
                line = of_partial.contiguous()
            first_query = masks.query_offset - masks.key_offset
            terms = native.Terms(
                self.terms.softcap, line, origin, self.terms.key_bias, self.terms.coordinates, first_query
            )
        operands = (self.query, self.key, self.value, self.ratio, options, self.is_remote, self.seen_rows)
        return native.Operands(*operands, terms)

    def line(self, partial: AnyPartial, distance_bias: Tensor) -> tuple[Tensor, int]:
        """The part of a tensor ``[H, distances]`` that a partial over local keys reads, as a view ``[H, n]``.

        The query at position i and key j, in steps of the partial, have ``[h, origin + j - i]``; also returns origin.
        With coordinates, all of it.
        """
        assert self.terms is not None
        assert not self.is_remote
        if self.terms.coordinates is not None:
            return distance_bias, 0
        nearest = self.masks.key_offset - self.masks.query_offset - self.terms.first_distance
        if isinstance(partial, BlockLists):
            return distance_bias, nearest
        if isinstance(partial, Gathered):
            return distance_bias, nearest + partial.first_key
        ahead = partial.num_queries - 1
        first = nearest + partial.key_row - partial.query_row - ahead * partial.step
        count = partial.num_queries + partial.num_keys - 1
        return distance_bias[:, first :: partial.step][:, :count], ahead

    def kernel(self, partial: AnyPartial, *, is_pair: bool, has_lse_gradient: bool = False) -> Kernel | None:
        """The kernel that computes a partial over views; None for the native kernels, in place.

        Args:
            partial: the partial.
            is_pair: whether the log-sum-exp is a pair because scores are large, see :class:`.products.Result`.
            has_lse_gradient: whether the log-sum-exp has a gradient.
        """
        is_in_place, terms = self.impl.is_in_place, self.terms
        if is_pair or (self.masks.seed is not None and (self.is_remote or not is_in_place)):
            return PRODUCTS
        if terms is not None and (not is_in_place or (self.is_remote and terms.is_by_distance)):
            return PRODUCTS
        if isinstance(partial, BlockLists):  # whose gates may have gradients
            return None if is_in_place and native.takes_gates(partial.log_gates, self.scale) else PRODUCTS
        if is_in_place:
            return None
        if has_lse_gradient:
            return PRODUCTS
        has_bias = self.masks.hidden is not None or (isinstance(partial, Partial) and partial.band is not None)
        return self.impl.kernel(self.query, has_bias=has_bias)

    def of_batch(self, tensor: Tensor) -> Tensor:
        """These sequences of a tensor of the whole batch."""
        size = self.query.shape[0]
        return tensor if size == tensor.shape[0] else tensor[self.first_sequence : self.first_sequence + size]

    def region(self, tensor: Tensor, rows: Rows) -> Tensor:
        """The tile's rows and heads of a full tensor."""
        assert self.tile is not None
        start, stop = self.tile.query_rows if rows is Rows.QUERY else self.tile.key_rows
        ratio = self.ratio if rows is Rows.QUERY else 1
        first, last = (head * ratio for head in self.tile.kv_heads)
        return self.of_batch(tensor)[:, start:stop, first:last]

    def accumulator(self, tensor: Tensor, rows: Rows, role: Role) -> Operand:
        """``tensor`` itself if it can accumulate in its own dtype, else zeros for the tile's part of it."""
        dtype = accumulation_dtype(self.query.dtype)
        if tensor.dtype == dtype or (rows is Rows.QUERY and self._writes_once(role)):
            return Operand(self.of_batch(tensor), rows, role)
        assert self.tile is not None
        zeros = torch.zeros_like(self.region(tensor, rows), dtype=dtype, memory_format=torch.contiguous_format)
        first_row = (self.tile.query_rows if rows is Rows.QUERY else self.tile.key_rows)[0]
        return Operand(zeros, rows, role, first_row, self.tile.kv_heads[0])

    def _writes_once(self, role: Role) -> bool:
        """Whether every partial is the first to touch its query rows, so that nothing is accumulated."""
        is_in_place = self.impl.is_in_place
        return all(
            partial.is_first and (not is_in_place or (role is Role.MERGED_INTO and native.is_written_once(partial)))
            for partial in self.partials
        )

    def store(self, operand: Operand, tensor: Tensor) -> None:
        """Round an accumulator in another dtype into the tile's part of the full tensor."""
        self.region(tensor, operand.rows).copy_(operand.tensor)

    def operands(self) -> Operands:
        """Query, key and value; if present, the bias of hidden keys and the indices of pairs for dropout."""
        found: Operands = {
            "query": Operand(self.query),
            "key": Operand(self.key, self.rows_of_keys),
            "value": Operand(self.value, self.rows_of_keys),
        }
        masks, terms, device = self.masks, self.terms, self.query.device
        of_keys, of_queries = self.key.shape[:3], self.query.shape[:3]
        bias = None if terms is None else terms.key_bias
        if masks.hidden is not None:
            hidden = masks.hidden.unsqueeze(-1).expand(of_keys) if masks.hidden.dim() == 2 else masks.hidden
            bias = hidden.new_zeros(masks.hidden.shape, dtype=self.dtype) if bias is None else bias
            bias = (bias.unsqueeze(-1) if bias.dim() == 2 else bias).masked_fill(hidden, float("-inf"))
        if bias is not None:
            found["key_bias"] = Operand(bias, self.rows_of_keys)
        if masks.seed is not None or (terms is not None and terms.is_by_distance):
            sequences = torch.arange(of_queries[0], device=device) + self.first_sequence
            found["sequences"] = Operand(sequences.view(-1, 1, 1).expand(of_queries))
            found["heads"] = Operand(torch.arange(of_queries[2], device=device).expand(of_queries))
            rows = torch.arange(of_queries[1], device=device) * masks.query_step + masks.query_offset
            found["query_positions"] = Operand(rows.view(-1, 1).expand(of_queries))
            keys = masks.key_positions
            if keys is None:
                assert not self.is_remote
                keys = (torch.arange(of_keys[1], device=device) + masks.key_offset).view(-1, 1)
            found["key_positions"] = Operand(keys.expand(of_keys), self.rows_of_keys)
        if terms is not None and terms.coordinates is not None:
            assert not self.is_remote
            places = terms.coordinates.mT.unsqueeze(2)  # [B, M, 1, 2]
            of_rows = places.narrow(1, masks.query_offset - masks.key_offset, of_queries[1])
            found["query_coordinates"] = Operand(of_rows.expand(*of_queries, 2))
            found["key_coordinates"] = Operand(places.expand(*of_keys, 2), self.rows_of_keys)
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

    def partial_call(self, partial: AnyPartial, views: PartialViews) -> PartialCall:
        """What a kernel over views computes the partial from."""
        bias, factors = self.bias(partial, views), self.keep_factors(views)
        terms = None if self.terms is None else self.terms_of(views)
        operands = views["query"], views["key"], views["value"]
        return PartialCall(*operands, bias, factors, terms, is_causal(partial), self.scale)

    def terms_of(self, views: PartialViews, grad_distance_bias: Tensor | None = None) -> BlockTerms | None:
        """Terms of the scores of a partial over views; None without any but a bias of keys.

        ``grad_distance_bias [H, distances]``: the gradient of the bias by distance is added to it.
        """
        terms = self.terms
        if terms is None or not (terms.is_by_distance or terms.softcap):
            return None
        if not terms.is_by_distance:
            return BlockTerms(terms.softcap)

        def places(block: ScoreBlock) -> tuple[Tensor, Tensor]:
            """Query heads, and distances of all pairs."""
            heads, rows = (block.of_queries(views[name]).unsqueeze(-1) for name in ("heads", "query_positions"))
            return heads, block.of_keys(views["key_positions"]).unsqueeze(-2) - rows

        if terms.distance_bias is None:
            assert terms.bias_at is not None
            assert grad_distance_bias is None
            bias_at = terms.bias_at
            return BlockTerms(terms.softcap, lambda block: bias_at(*places(block)))
        if terms.coordinates is not None:
            return _terms_in_the_plane(terms.softcap, terms.distance_bias, views, grad_distance_bias)
        distance_bias, last = terms.distance_bias.reshape(-1), terms.distance_bias.shape[1] - 1

        def index(block: ScoreBlock) -> Tensor:
            heads, distances = places(block)
            # Rows that fill up a block lie at any distance, and count for nothing.
            return heads * (last + 1) + (distances - terms.first_distance).clamp_(0, last)

        def add_gradient(block: ScoreBlock, grad_scores: Tensor) -> None:
            assert grad_distance_bias is not None
            grad_distance_bias.view(-1).index_add_(0, index(block).flatten(), grad_scores.flatten())

        return BlockTerms(
            terms.softcap,
            lambda block: distance_bias[index(block)],
            None if grad_distance_bias is None else add_gradient,
        )

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


def _terms_in_the_plane(softcap: float, of_a_unit: Tensor, views: PartialViews, grad: Tensor | None) -> BlockTerms:
    """Terms with the bias ``of_a_unit [H, 1]`` times the distance of two coordinates; its gradient is added to."""

    def heads(block: ScoreBlock) -> Tensor:
        return block.of_queries(views["heads"])  # [problems, rows]

    def distance(block: ScoreBlock) -> Tensor:
        rows, keys = block.of_queries(views["query_coordinates"]), block.of_keys(views["key_coordinates"])
        x, y = ((rows[..., axis].unsqueeze(-1) - keys[..., axis].unsqueeze(-2)).square_() for axis in (0, 1))
        return x.add_(y).sqrt_().nan_to_num_(0.0)

    def add_gradient(block: ScoreBlock, grad_scores: Tensor) -> None:
        assert grad is not None
        of_rows = (grad_scores * distance(block)).sum(-1)
        grad.view(-1).index_add_(0, heads(block).flatten(), of_rows.flatten())

    return BlockTerms(
        softcap,
        lambda block: of_a_unit.view(-1)[heads(block)].unsqueeze(-1) * distance(block),
        None if grad is None else add_gradient,
    )


class TermGradients(NamedTuple):
    """Gradients that are added to: of the bias by distance ``[H, distances]`` and by key ``[B, M, G]``, in the
    accumulation dtype; None where the call has none."""

    distance_bias: Tensor | None = None
    key_bias: Tensor | None = None


def merge_partials(work: Work, out: Operand, lse: Tensor, rest: Tensor | None = None) -> None:
    """Merge the partials' attention into ``out`` and ``lse``; ``lse`` is -inf where nothing was merged yet.

    With ``rest``, ``(lse, rest)`` is a pair, see :class:`Result`.
    """
    merged_into: Operands = {"query": Operand(work.query), "out": out, "lse": Operand(lse, role=Role.MERGED_INTO)}
    if rest is not None:
        merged_into["rest"] = Operand(rest, role=Role.MERGED_INTO)
    operands: Operands = {}
    for partial in work.partials:
        if partial.zero_pad_keys:
            for views in work.views(partial, merged_into):
                _merge_zero_pad_keys(views, partial.zero_pad_keys)
            continue
        kernel = work.kernel(partial, is_pair=rest is not None)
        if kernel is None:
            of_out = native.Origin(out.first_row, out.first_head)
            native.merge_partial(partial, work.for_native(partial), out.tensor, lse, of_out=of_out)
            continue
        assert work.seen_rows is None, "only the native kernels read listed rows"
        operands = operands or {**work.operands(), **merged_into}
        for views in work.views(partial, operands):
            result = kernel.forward(work.partial_call(partial, views), rest is not None)
            if not partial.is_first:
                merge_in_place(views["out"], views["lse"], views.get("rest"), result)
                continue
            views.overwrite("out", result.out)
            views.overwrite("lse", result.lse)
            if result.rest is not None:
                views.overwrite("rest", result.rest)


def _merge_zero_pad_keys(views: PartialViews, count: int) -> None:
    """Merge keys of score 0 and value 0."""
    lse, rest = views["lse"], views.get("rest")
    of_keys = torch.full_like(lse, float(count)).log_()
    out = torch.zeros((), dtype=lse.dtype, device=lse.device)
    if rest is None:
        merge_in_place(views["out"], lse, None, Result(out, of_keys))
    else:
        merge_in_place(views["out"], lse, rest, Result(out, torch.zeros_like(rest), of_keys * LOG2_E))


def add_gradients(
    work: Work,
    grads: Sequence[Operand],
    grad_gates: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    of_terms: TermGradients | None = None,
) -> None:
    """Add the partials' gradients of query, key and value to ``grads``, those of log-gates to ``grad_gates``, and those
    of the terms of the scores to ``of_terms``.

    ``out [B, N, H, D]`` and ``lse [B, N, H]`` are merged over all partials of all calls; ``lse`` is +inf in rows
    without a key. With ``rest``, ``(lse, rest)`` is a pair, see :class:`.products.Result`. Sums are in the accumulation
    dtype.
    """
    of_terms = of_terms or TermGradients()
    names: tuple[Name, ...] = ("grad_query", "grad_key", "grad_value")
    own: Operands = {
        "out": Operand(out),
        "lse": Operand(lse, fill=float("inf")),
        "grad_out": Operand(grad_out),
        **dict(zip(names, grads, strict=True)),
    }
    if grad_gates is not None:
        own["grad_gates"] = Operand(grad_gates, Rows.BLOCKS, Role.ADDED_TO)
    if of_terms.key_bias is not None:
        own["grad_key_bias"] = Operand(of_terms.key_bias, work.rows_of_keys, Role.ADDED_TO)
    if rest is not None:
        own["rest"] = Operand(rest)
    if grad_lse is not None:
        own["grad_lse"] = Operand(grad_lse)
    assert work.seen_rows is None, "rows of a cache are read without a gradient"
    operands: Operands = {}
    for partial in work.partials:
        if partial.zero_pad_keys:
            continue
        kernel = work.kernel(partial, is_pair=rest is not None, has_lse_gradient=grad_lse is not None)
        if kernel is None:
            of_native, grad_line = work.for_native(partial), None
            if of_terms.distance_bias is not None:
                assert of_native.terms is not None
                assert of_native.terms.line is not None
                grad_line = torch.zeros_like(of_native.terms.line)
            native.add_gradients(
                partial,
                of_native,
                native.Merged(out, lse, grad_out, grad_lse),
                [grad.tensor for grad in grads],
                grad_gates,
                grad_line=grad_line,
                grad_key_bias=of_terms.key_bias,
                of_grad_query=native.Origin(grads[0].first_row, grads[0].first_head),
                of_grad_keys=native.Origin(grads[1].first_row, grads[1].first_head),
            )
            if of_terms.distance_bias is not None and grad_line is not None:
                work.line(partial, of_terms.distance_bias)[0].add_(grad_line)
            continue
        operands = operands or {**work.operands(), **own}
        for views in work.views(partial, operands):
            merged = MergedViews(
                views["grad_out"], views.get("grad_lse"), views["out"], views["lse"], views.get("rest")
            )
            call = work.partial_call(partial, views)._replace(terms=work.terms_of(views, of_terms.distance_bias))
            needs_bias = grad_gates is not None or of_terms.key_bias is not None
            *parts, of_bias = kernel.backward(call, merged, needs_bias)
            for name, part in zip(names, parts, strict=True):
                assert part is not None
                views.add(name, part)
            if of_bias is not None:
                for grad in _OF_BIAS:
                    if grad in own:
                        views.add(grad, of_bias)


def add_weighted(
    work: Work,
    total: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    values: Tensor | None,
    factors: Sequence[tuple[Tensor | None, Tensor | None, Tensor | None]],
    *,
    axis: str,
) -> None:
    """Add ``sum P f values`` over the partials to ``total``, see :func:`.tiles.weighted_sum` for the arguments."""
    by_key = work.rows_of_keys
    rows_of = {"queries": (Rows.QUERY, by_key), "keys": (by_key, Rows.QUERY), "blocks": (Rows.BLOCKS, Rows.QUERY)}
    of_total, of_values = rows_of[axis]
    operands = {
        **work.operands(),
        "lse": Operand(lse, fill=float("inf")),
        "total": Operand(total, of_total, Role.ADDED_TO),
    }
    if values is not None:
        operands["values"] = Operand(values, of_values)
    if rest is not None:
        operands["rest"] = Operand(rest)
    for index, (left, right, gates) in enumerate(factors):
        if left is not None and right is not None:
            operands["left", index], operands["right", index] = Operand(left), Operand(right, by_key)
        if gates is not None:
            operands["gates", index] = Operand(gates, Rows.BLOCKS)
    for partial in work.partials:
        if partial.zero_pad_keys:
            continue
        for views in work.views(partial, operands):
            part = products.weighted_sum(
                views["query"],
                views["key"],
                views["lse"],
                views.get("rest"),
                views.get("values"),
                [
                    (views.get(("left", index)), views.get(("right", index)), views.get(("gates", index)))
                    for index in range(len(factors))
                ],
                work.bias(partial, views),
                work.keep_factors(views),
                work.terms_of(views),
                is_causal=is_causal(partial),
                scale=work.scale,
                of_keys=axis != "queries",
            )
            views.add("total", part)


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
