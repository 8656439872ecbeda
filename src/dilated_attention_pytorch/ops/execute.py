"""A plan carried out: tile by tile, every partial on strided views, merged or summed where it belongs. No checks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels import aten, blockwise, native
from dilated_attention_pytorch.kernels.dropout import keep_factors
from dilated_attention_pytorch.planning import Bands, Call, Gathered, Partial, Plan, Tile, plan

from .gathered import gathered_views
from .merge import merge_in_place, merge_pairs_in_place
from .operand import Operand, Role, Views

_LARGEST_BIAS = 1 << 22  # elements of a bias that is no view
_TILE_FLOOR = 1 << 20  # elements; smaller tiles gain no memory worth having and cost calls


@dataclass(frozen=True, slots=True)
class Inputs:
    """The operands of one call and what it computes of them. Checked before; last dimensions are contiguous."""

    query: Tensor
    key: Tensor
    value: Tensor
    call: Call
    scale: float
    key_padding_mask: Tensor | None
    dropout_seed: Tensor | None
    dropout_p: float
    is_native: bool = False
    """Whether the package's own CPU kernels compute partials, where no scores are too large for them."""

    @property
    def accumulation_dtype(self) -> torch.dtype:
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def has_bias(self) -> bool:
        """Whether masked scores are computed: a row can then look as if it saw keys of score :data:`aten.MASKED`."""
        bands = (rule.band(is_causal=self.call.is_causal) for rule in self.call.pattern.rules)
        return self.key_padding_mask is not None or any(before is not None for before, _ in bands)

    @property
    def has_products(self) -> bool:
        """Whether few query rows are computed by matrix products in the forward pass."""
        return self.query.device.type == "cpu" and self.query.dtype != torch.bfloat16

    def plan(self, *, is_native: bool = False) -> Plan:
        """The call's plan, tiles bounded so that temporaries stay a small part of the operands."""
        bands: Bands = "whole" if is_native else "products" if self.has_products else "fused"
        rows = max(self.query.shape[1] * self.query.shape[2], self.key.shape[1] * self.key.shape[2])
        # Low precision holds three float32 accumulators of a tile beside the kernel's three gradients.
        parts = 24 if self.query.dtype == self.accumulation_dtype else 48
        tile_elements = max(rows * self.query.shape[0] * self.query.shape[3] // parts, _TILE_FLOOR)
        return plan(self.call, max(1, tile_elements // self.query.shape[3]), bands=bands)


def _views(partial: Partial, batch: int, ratio: int, operands: list[Operand]) -> Iterator[Views]:
    """Every operand as ``[problems, problems, rows(, D)]`` of a partial; more axes than two are looped over."""
    sizes = [batch, *(axis.size for axis in partial.axes), ratio]
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    inner, outer = order[:2], order[2:]
    prepared = []
    for operand in operands:
        tensor, query_heads = operand.tensor, ratio if operand.by_query else 1
        of_batch, of_row, of_head = tensor.stride()[:3]
        strides = [
            of_batch,
            *(axis.rows * of_row + axis.heads * query_heads * of_head for axis in partial.axes),
            of_head if operand.by_query else 0,
        ]
        row, count = operand.rows_of(partial)
        head = (partial.head - operand.first_head) * query_heads
        start = tensor.storage_offset() + row * of_row + head * of_head
        size = (sizes[inner[0]], sizes[inner[1]], count, *tensor.shape[3:])
        stride = (strides[inner[0]], strides[inner[1]], partial.step * of_row, *(1 for _ in tensor.shape[3:]))
        prepared.append((tensor, size, stride, start, [strides[index] for index in outer]))
    for place in itertools.product(*(range(sizes[index]) for index in outer)):
        yield Views([
            tensor.as_strided(size, stride, start + sum(i * s for i, s in zip(place, steps, strict=True)))
            for tensor, size, stride, start, steps in prepared
        ])  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Work:
    """One tile for some sequences of the batch: slices of tensors as operands."""

    inputs: Inputs
    tile: Tile
    batch: tuple[int, int]
    scratch: blockwise.Scratch
    is_native: bool

    @property
    def size(self) -> int:
        return self.batch[1] - self.batch[0]

    @property
    def ratio(self) -> int:
        return self.inputs.call.num_heads // self.inputs.call.num_kv_heads

    def whole(self, tensor: Tensor, *, by_query: bool, role: Role = Role.READ) -> Operand:
        """A full tensor, used where it lies."""
        return Operand(tensor[self.batch[0] : self.batch[1]], 0, 0, by_query, role)

    def keys(self, tensor: Tensor) -> Operand:
        """A full tensor of keys or values to read; where bands read rows again and again, head by head in one piece."""
        is_read_once = self.is_native or tensor.device.type != "cpu"
        if is_read_once or not any(_band_of(partial) for partial in self.tile.partials):
            return self.whole(tensor, by_query=False)
        pieces = self.region(tensor, by_query=False).transpose(1, 2).contiguous().transpose(1, 2)
        return Operand(pieces, self.tile.key_rows[0], self.tile.kv_heads[0], by_query=False)

    def is_slow_backward(self, partial: Partial | Gathered) -> bool:
        """Whether matrix products are faster than a fused kernel for the gradients of a partial."""
        if isinstance(partial, Gathered):
            return any(
                aten.is_slow(self.inputs.query, alike.num_queries * self.ratio, is_backward=True)
                for alike in partial.lists
            )
        return aten.is_slow(self.inputs.query, partial.num_queries, is_backward=True)

    def has_bias(self, partial: Partial | Gathered) -> bool:
        """Whether anything is added to the scores of a partial."""
        return _band_of(partial) is not None or self.inputs.key_padding_mask is not None

    @property
    def is_written_once(self) -> bool:
        """No two partials of the tile touch a query row: nothing is accumulated there."""
        return all(
            partial.is_first and (not self.is_native or native.is_written_once(partial))
            for partial in self.tile.partials
        )

    def region(self, tensor: Tensor, *, by_query: bool) -> Tensor:
        """The tile's rows and heads of a full tensor."""
        rows = self.tile.query_rows if by_query else self.tile.key_rows
        heads_per_kv_head = self.ratio if by_query else 1
        first, last = (head * heads_per_kv_head for head in self.tile.kv_heads)
        return tensor[self.batch[0] : self.batch[1], rows[0] : rows[1], first:last]

    def accumulator(self, tensor: Tensor, *, by_query: bool, role: Role) -> Operand:
        """``tensor`` itself if it can accumulate in its own dtype, else zeros for the tile's part of it."""
        dtype = self.inputs.accumulation_dtype
        is_added_to = self.is_native and role is Role.ADDED_TO
        if tensor.dtype == dtype or (by_query and self.is_written_once and not is_added_to):
            return self.whole(tensor, by_query=by_query, role=role)
        rows = self.tile.query_rows if by_query else self.tile.key_rows
        zeros = torch.zeros_like(
            self.region(tensor, by_query=by_query), dtype=dtype, memory_format=torch.contiguous_format
        )
        return Operand(zeros, rows[0], self.tile.kv_heads[0], by_query, role)

    def accumulated(self, operand: Operand, tensor: Tensor) -> Tensor:
        """The tile's part of an accumulator of the full ``tensor``, to change in place."""
        return (
            operand.tensor if operand.tensor.dtype != tensor.dtype else self.region(tensor, by_query=operand.by_query)
        )

    def local(self, tensor: Tensor) -> Operand:
        """A tensor that holds the tile's query rows and heads only."""
        return Operand(tensor, self.tile.query_rows[0], self.tile.kv_heads[0], by_query=True)

    def store(self, operand: Operand, tensor: Tensor) -> None:
        """Round an accumulator into the tile's part of the full tensor; nothing to do where it lies there already."""
        if operand.tensor.dtype != tensor.dtype:
            self.region(tensor, by_query=operand.by_query).copy_(operand.tensor)

    def views(self, partial: Partial | Gathered, operands: list[Operand]) -> Iterator[Views]:
        """Every operand as ``[problems, problems, rows(, D)]``, once or several times until all problems are done."""
        if isinstance(partial, Gathered):
            return gathered_views(partial, self.size, self.ratio, operands, self.scratch)
        views = _views(partial, self.size, self.ratio, operands)
        if partial.band is None or self.inputs.key_padding_mask is None:
            return views
        return _few_at_a_time(views, partial.num_queries * partial.num_keys)

    def masks(self) -> native.Masks:
        """What the native kernels leave out."""
        inputs, some = self.inputs, slice(*self.batch)
        hidden = None if inputs.key_padding_mask is None else inputs.key_padding_mask[some]
        offsets = (inputs.call.query_offset, inputs.call.key_offset)
        return native.Masks(hidden, inputs.dropout_seed, inputs.dropout_p, *offsets, self.batch[0])

    def side_operands(self) -> list[Operand]:
        """Operands beside q, k and v: the bias of the key padding, then what places pairs for dropout, if any."""
        inputs, call = self.inputs, self.inputs.call
        operands = []
        if inputs.key_padding_mask is not None:
            bias = inputs.key_padding_mask.to(inputs.accumulation_dtype) * aten.MASKED
            operands.append(self.whole(bias.unsqueeze(-1).expand(-1, -1, call.num_kv_heads), by_query=False))
        if inputs.dropout_seed is not None:
            device = inputs.query.device
            shape = (call.batch_size, call.num_queries, call.num_heads)
            batches = torch.arange(call.batch_size, device=device).view(-1, 1, 1).expand(shape)
            heads = torch.arange(call.num_heads, device=device).expand(shape)
            rows = torch.arange(call.num_queries, device=device).view(-1, 1).expand(shape)
            keys = torch.arange(call.num_keys, device=device).view(-1, 1)
            keys = keys.expand(call.batch_size, call.num_keys, call.num_kv_heads)
            operands += [self.whole(tensor, by_query=True) for tensor in (batches, heads, rows)]
            operands.append(self.whole(keys, by_query=False))
        return operands

    def bias(self, partial: Partial | Gathered, query: Tensor, side: list[Tensor]) -> Tensor | None:
        """The bias of all scores, from the views of a query and of :meth:`side_operands`."""
        inputs, band = self.inputs, _band_of(partial)
        bias = None
        if band is not None:
            assert isinstance(partial, Partial)
            bias = _band_bias(band, query.shape[2], partial.num_keys, inputs.accumulation_dtype, query.device)
            bias = bias.expand(*query.shape[:2], -1, -1)
        if inputs.key_padding_mask is not None:
            # With strides other than 1 the CPU kernel writes the bias out for every query row.
            of_keys = side[0].contiguous().unsqueeze(2)
            bias = of_keys.expand(-1, -1, query.shape[2], -1) if bias is None else bias + of_keys
        return bias

    def biases(self, partial: Partial | Gathered, query: Tensor, side: list[Tensor]) -> list[blockwise.Bias]:
        """The same by runs of keys: of a band only the edges, where not every row sees every key."""
        inputs, band = self.inputs, _band_of(partial)
        found = []
        if band is not None:
            assert isinstance(partial, Partial)
            # Every row sees the keys from the first of the last row to the last of the first row.
            whole = max(0, query.shape[2] - 1 + band[0])
            whole_stop = max(whole, min(partial.num_keys, band[1] + 1))
            for start, stop in ((0, whole), (whole_stop, partial.num_keys)):
                if start < stop:
                    values = _edge_bias(
                        (band[0] - start, band[1] - start), query.shape[2], stop - start, inputs.accumulation_dtype,
                        query.device,
                    )  # fmt: skip
                    found.append(blockwise.Bias(values.expand(*query.shape[:2], -1, -1), start))
        if inputs.key_padding_mask is not None:
            found.append(blockwise.Bias(side[0].unsqueeze(2).expand(-1, -1, query.shape[2], -1)))
        return found

    def keep_factors(self, side: list[Tensor]) -> blockwise.KeepFactors | None:
        """Dropout factors from the views of :meth:`side_operands`, if there is dropout."""
        inputs = self.inputs
        seed = inputs.dropout_seed
        if seed is None:
            return None
        batches, heads, rows, keys = side[-4:]
        absolute_rows, absolute_keys = rows + inputs.call.query_offset, keys + inputs.call.key_offset

        def factors(place: blockwise.Place) -> Tensor:
            return keep_factors(
                seed, place.of_queries(batches).unsqueeze(-1), place.of_queries(heads).unsqueeze(-1),
                place.of_queries(absolute_rows).unsqueeze(-1), place.of_keys(absolute_keys).unsqueeze(-2),
                inputs.dropout_p, inputs.accumulation_dtype,
            )  # fmt: skip

        return factors


def _work(inputs: Inputs, *, is_native: bool = False) -> Iterator[_Work]:
    steps, scratch = inputs.plan(is_native=is_native), blockwise.Scratch()
    for tile in steps.tiles:
        for start in range(0, inputs.call.batch_size, steps.batch_step):
            batch = (start, min(start + steps.batch_step, inputs.call.batch_size))
            yield _Work(inputs, tile, batch, scratch, is_native)


def _few_at_a_time(views: Iterator[Views], scores_of_problem: int) -> Iterator[Views]:
    """The same problems in more steps, so that a bias of their scores stays small."""
    for whole in views:
        problems = whole.tensors[0].shape[:2]
        step = max(1, _LARGEST_BIAS // (scores_of_problem * problems[1]))
        for start in range(0, problems[0], step):
            yield Views([tensor[start : start + step] for tensor in whole.tensors])


def _band_of(partial: Partial | Gathered) -> tuple[int, int] | None:
    return partial.band if isinstance(partial, Partial) else None


def _is_causal(partial: Partial | Gathered) -> bool:
    return isinstance(partial, Partial) and partial.is_causal


def _is_phantom(partial: Partial | Gathered) -> bool:
    return isinstance(partial, Partial) and partial.phantoms > 0


def _bias_of_band(
    band: tuple[int, int], num_queries: int, num_keys: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """0 where query i sees key j, else :data:`aten.MASKED`, ``[num_queries, num_keys]``."""
    distance = torch.arange(1 - num_queries, num_keys, device=device)
    of_distance = ((distance < band[0]) | (distance > band[1])).to(dtype) * aten.MASKED
    # Row i begins at the distance -i. A flipped view has strides that the kernel writes out for every problem.
    return of_distance.unfold(0, num_keys, 1).flip(0).contiguous()


_band_bias = functools.lru_cache(maxsize=2)(_bias_of_band)  # all tiles but those at the ends have the same
_edge_bias = functools.lru_cache(maxsize=8)(_bias_of_band)  # the same triangles for almost all tiles


def _phantom_lse(lse: Tensor, partial: Partial) -> Tensor:
    return torch.full_like(lse, float(partial.phantoms)).log_()


def forward(inputs: Inputs, rest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output in the query's dtype and log-sum-exp in the accumulation dtype.

    ``rest``, zeros shaped like the log-sum-exp, is for large scores: all is computed by matrix products, and the two
    become a pair, see :func:`merge_pairs_in_place`.
    """
    query, dtype = inputs.query, inputs.accumulation_dtype
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.full(query.shape[:3], float("-inf"), dtype=dtype, device=query.device)
    is_native = inputs.is_native and rest is None
    is_bounded = rest is None and not is_native and _is_bounded(inputs)
    for work in _work(inputs, is_native=is_native):
        accumulator = work.accumulator(out, by_query=True, role=Role.MERGED_INTO)
        logs = [work.whole(x, by_query=True, role=Role.MERGED_INTO) for x in (lse, rest) if x is not None]
        _merge_partials(work, accumulator, logs, is_bounded)
        lse_region = work.region(lse, by_query=True)
        if inputs.has_bias and not is_native:
            dead = lse_region < aten.MASKED / 2
            if dead.device.type != "cpu" or dead.any():  # elsewhere looking would wait for the device
                lse_region.masked_fill_(dead, float("-inf"))
                work.accumulated(accumulator, out).masked_fill_(dead.unsqueeze(-1), 0.0)
        if inputs.dropout_seed is not None and not is_native:
            work.accumulated(accumulator, out).zero_()
            dropped = replace(accumulator, role=Role.ADDED_TO)
            of_rows = None if rest is None else work.whole(rest, by_query=True)
            _add_weighted(
                work, dropped, work.local(_without_infinities(lse_region)), inputs.value, rest=of_rows
            )  # fmt: skip
        work.store(accumulator, out)
    return out, lse


def _is_bounded(inputs: Inputs) -> bool | Tensor:
    """Queries ``[B, N, H]`` whose scores are known to be small, or whether all are; looked for where it saves time."""
    call = inputs.call
    if not inputs.has_products or not call.pattern.rules:
        return False
    bounds = blockwise.score_bounds(
        inputs.query, inputs.key, inputs.scale, is_causal=call.is_causal, offset=call.query_offset - call.key_offset
    )
    is_bounded = bounds <= blockwise.MOST_BOUNDED
    return bool(is_bounded.all()) or is_bounded


def _merge_partials(work: _Work, out: Operand, logs: list[Operand], is_bounded: bool | Tensor) -> None:
    """``logs``: the log-sum-exp, or the pair that it is where scores are large."""
    inputs, is_large = work.inputs, len(logs) == 2
    operands = [
        work.whole(inputs.query, by_query=True), work.keys(inputs.key), work.keys(inputs.value), out, *logs,
        *([work.whole(is_bounded, by_query=True)] if isinstance(is_bounded, Tensor) else []), *work.side_operands(),
    ]  # fmt: skip
    for partial in work.tile.partials:
        if work.is_native and not _is_phantom(partial):
            q, k, v = (operand.tensor for operand in operands[:3])
            native.merge_partial(
                partial, q, k, v, out.tensor, logs[0].tensor, work.masks(), ratio=work.ratio, scale=inputs.scale,
                of_out=native.Place(out.first_row, out.first_head),
            )  # fmt: skip
            continue
        for views in work.views(partial, operands):
            q, k, v, out_view, lse_view, *side = views.tensors
            rest = side.pop(0) if is_large else None
            of_queries = side.pop(0) if isinstance(is_bounded, Tensor) else is_bounded
            if _is_phantom(partial):
                assert isinstance(partial, Partial)
                phantom_lse = _phantom_lse(lse_view, partial)
                if rest is None:
                    merge_in_place(out_view, lse_view, None, phantom_lse)
                else:
                    phantom_pair = (torch.zeros_like(rest), phantom_lse * blockwise.LOG2_E)
                    merge_pairs_in_place(out_view, (lse_view, rest), None, phantom_pair)
                continue
            is_slow = is_large or aten.is_slow(q, q.shape[2], is_backward=False)
            if not is_slow and aten.is_fused(q, has_bias=work.has_bias(partial)):
                partial_out, partial_lse = aten.fused_forward(
                    q, k, v, work.bias(partial, q, side), is_causal=_is_causal(partial), scale=inputs.scale
                )
                if partial.is_first:
                    views.overwrite(3, partial_out)
                    views.overwrite(4, partial_lse)
                    continue
            else:
                results = (out_view, lse_view) if partial.is_first else None
                partial_rest = rest if rest is None or partial.is_first else torch.empty_like(rest)
                partial_out, partial_lse = blockwise.blockwise_forward(
                    q, k, v, work.biases(partial, q, side), is_causal=_is_causal(partial), scale=inputs.scale,
                    scratch=work.scratch, results=results, is_bounded=of_queries, rest=partial_rest,
                    is_dropped=is_large and inputs.dropout_seed is not None,
                )  # fmt: skip
                if partial.is_first:
                    continue
                if rest is not None:
                    assert partial_rest is not None
                    merge_pairs_in_place(out_view, (lse_view, rest), partial_out, (partial_lse, partial_rest))
                    continue
            merge_in_place(out_view, lse_view, partial_out, partial_lse.to(lse_view.dtype))


def weighted_sum(
    inputs: Inputs,
    lse: Tensor,
    values: Tensor,
    factors: Sequence[tuple[Tensor, Tensor]],
    rest: Tensor | None = None,
    *,
    of_keys: bool,
) -> Tensor:
    """``sum_t P[p, t] f[p, t] values[t]`` for every query p, in the accumulation dtype; ``inputs.value`` is not read.

    P are the merged probabilities ``c exp(s - lse)``, dropped if the inputs have dropout, and f is the product of the
    ``factors``: ``left [B, N, H, width]`` by rows of ``right [B, M, G, width]``. With ``of_keys`` the values are the
    queries' and the result is ``sum_p P[p, t] f[p, t] values[p]`` for every key t. With ``rest``, it and ``lse`` are
    the pair that :func:`forward` makes of them.
    """
    shape = (*(inputs.key if of_keys else inputs.query).shape[:3], values.shape[3])
    total = torch.zeros(shape, dtype=inputs.accumulation_dtype, device=values.device)
    lse = _without_infinities(lse)
    for work in _work(inputs):
        _add_weighted(
            work, work.whole(total, by_query=not of_keys, role=Role.ADDED_TO), work.whole(lse, by_query=True), values,
            factors, of_keys=of_keys, rest=None if rest is None else work.whole(rest, by_query=True),
        )  # fmt: skip
    return total


def _add_weighted(
    work: _Work,
    total: Operand,
    lse: Operand,
    values: Tensor,
    factors: Sequence[tuple[Tensor, Tensor]] = (),
    *,
    of_keys: bool = False,
    rest: Operand | None = None,
) -> None:
    inputs = work.inputs
    sides = [side for left, right in factors for side in (work.whole(left, by_query=True), work.keys(right))]
    operands = [
        work.whole(inputs.query, by_query=True), work.keys(inputs.key), total, lse,
        work.whole(values, by_query=True) if of_keys else work.keys(values), *sides,
        *([] if rest is None else [rest]), *work.side_operands(),
    ]  # fmt: skip
    for partial in work.tile.partials:
        if _is_phantom(partial):
            continue
        for views in work.views(partial, operands):
            q, k, _, lse_view, values_view, *others = views.tensors
            of_factors, side = others[: len(sides)], others[len(sides) :]
            rest_view = None if rest is None else side.pop(0)
            part = blockwise.blockwise_weighted_sum(
                q, k, lse_view, values_view, work.biases(partial, q, side), work.keep_factors(side),
                list(zip(of_factors[::2], of_factors[1::2], strict=True)), is_causal=_is_causal(partial),
                scale=inputs.scale, of_keys=of_keys, rest=rest_view,
            )  # fmt: skip
            views.add(2, part)


def _without_infinities(lse: Tensor) -> Tensor:
    """+inf for rows without a key: ``exp(s - lse)`` is then 0 there, and the row gets and gives no gradient."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def backward(
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from the merged output and log-sum-exp alone.

    With ``rest``, it and the log-sum-exp are the pair that :func:`forward` makes of them.
    """
    dtype = inputs.accumulation_dtype
    grads = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (inputs.query, inputs.key, inputs.value)]
    if inputs.has_bias or inputs.dropout_seed is not None:
        lse = _without_infinities(lse)
    is_native = inputs.is_native and rest is None
    for work in _work(inputs, is_native=is_native):
        accumulators = [
            work.accumulator(grad, by_query=index == 0, role=Role.ADDED_TO) for index, grad in enumerate(grads)
        ]
        if is_native:
            _add_native_gradients(work, accumulators, out, lse, grad_out, grad_lse)
            for accumulator, grad in zip(accumulators, grads, strict=True):
                work.store(accumulator, grad)
            continue
        is_fused = rest is None and inputs.dropout_seed is None and grad_lse is None
        needs_delta = not (is_fused and aten.is_fused(inputs.query, has_bias=inputs.has_bias))
        delta = None
        if needs_delta or any(map(work.is_slow_backward, work.tile.partials)):
            delta = _delta(work, out, grad_out, grad_lse, dtype)
        _add_gradients(work, accumulators, out, lse, grad_out, delta, rest, needs_delta=needs_delta)
        for accumulator, grad in zip(accumulators, grads, strict=True):
            work.store(accumulator, grad)
    return grads[0], grads[1], grads[2]


def _add_native_gradients(
    work: _Work, accumulators: list[Operand], out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> None:
    inputs, some = work.inputs, slice(*work.batch)
    grad_query, grad_key, grad_value = (accumulator.tensor for accumulator in accumulators)
    of_grad_query, of_grad_keys = (native.Place(one.first_row, one.first_head) for one in accumulators[:2])
    for partial in work.tile.partials:
        if _is_phantom(partial):
            continue
        native.add_gradients(
            partial, grad_out[some], inputs.query[some], inputs.key[some], inputs.value[some], out[some], lse[some],
            None if grad_lse is None else grad_lse[some], (grad_query, grad_key, grad_value), work.masks(),
            ratio=work.ratio, scale=inputs.scale, of_grad_query=of_grad_query, of_grad_keys=of_grad_keys,
        )  # fmt: skip


def _delta(work: _Work, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, dtype: torch.dtype) -> Operand:
    products = work.region(grad_out, by_query=True).to(dtype) * work.region(out, by_query=True).to(dtype)
    delta = products.sum(dim=-1)
    if grad_lse is not None:
        delta -= work.region(grad_lse, by_query=True)
    return work.local(delta)


def _add_gradients(
    work: _Work,
    accumulators: list[Operand],
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    delta: Operand | None,
    rest: Tensor | None,
    *,
    needs_delta: bool,
) -> None:
    """Add the gradients of one tile. ``needs_delta``: no partial has a fused backward, else some may want delta."""
    inputs = work.inputs
    operands = [
        *accumulators, work.whole(inputs.query, by_query=True), work.keys(inputs.key),
        work.keys(inputs.value), work.whole(grad_out, by_query=True), work.whole(lse, by_query=True),
        # The fused backward reads the output, the blockwise one its product with the gradient.
        work.whole(out, by_query=True), *([] if delta is None else [delta]),
        *([] if rest is None else [work.whole(rest, by_query=True)]), *work.side_operands(),
    ]  # fmt: skip
    for partial in work.tile.partials:
        if _is_phantom(partial):
            continue
        for views in work.views(partial, operands):
            _, _, _, q, k, v, grad_view, lse_view, out_view, *side = views.tensors
            delta_view = None if delta is None else side.pop(0)
            rest_view = None if rest is None else side.pop(0)
            if not needs_delta and not aten.is_slow(q, q.shape[2], is_backward=True):
                parts = aten.fused_backward(
                    grad_view, q, k, v, out_view, lse_view, work.bias(partial, q, side),
                    is_causal=_is_causal(partial), scale=inputs.scale,
                )  # fmt: skip
            else:
                assert delta_view is not None
                is_rounded = q.dtype == torch.bfloat16 and not needs_delta
                dtype = inputs.accumulation_dtype
                is_added = all(views.holds_sum(index, dtype) for index in range(3))
                parts = blockwise.blockwise_backward(
                    grad_view, q, k, v, lse_view, delta_view, work.biases(partial, q, side), work.keep_factors(side),
                    is_causal=_is_causal(partial), scale=inputs.scale,
                    product_dtype=q.dtype if is_rounded else None, scratch=work.scratch,
                    totals=views.tensors[:3] if is_added else None, rest=rest_view,
                )  # fmt: skip
                if is_added:
                    continue
            for index, part in enumerate(parts):
                views.add(index, part)
