"""Execution of one call: its plan tile by tile, each tile accumulated and rounded separately."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels import native
from dilated_attention_pytorch.kernels.masks import Masks
from dilated_attention_pytorch.planning.plan import Call, Plan, Tile, plan, tile_size
from dilated_attention_pytorch.precision import accumulation_dtype

from .backward import add_gradients
from .forward import add_weighted, merge_partials
from .merge import without_infinities
from .operands import Operand, Role, Rows
from .work import Work

_NO_BOUND = 1 << 62


@dataclass(frozen=True, slots=True)
class Inputs:
    """Operands and parameters of one call.

    Already validated: last dimensions are contiguous, the scale is positive, and padded keys and values are zero.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    call: Call
    scale: float
    key_padding_mask: Tensor | None
    dropout_seed: Tensor | None
    dropout_p: float
    impl: str = "aten"
    """"aten" or "native". Scores that are too large for one log-sum-exp are computed by matrix products."""

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """The dtype of the log-sum-exp and of sums."""
        return accumulation_dtype(self.query.dtype)

    def plan(self, *, is_backward: bool = False) -> Plan:
        """The call's plan, with tiles bounded so that temporaries are small compared with the operands.

        The native kernels have no temporaries except accumulators of low-precision results; without these, the plan
        is a single tile.
        """
        call, (batch, *_, head_dim) = self.call, self.query.shape
        rows = batch * max(call.num_queries * call.num_heads, call.num_keys * call.num_kv_heads)
        size = tile_size(rows, head_dim, self.query.element_size())
        if self.impl != "native":
            return plan(call, size)
        is_small = not is_backward and batch * call.num_queries * call.num_heads <= size
        return plan(call, _NO_BOUND if is_small or self.query.dtype == torch.float32 else size, bands="whole")


@dataclass(frozen=True, slots=True)
class _Portion:
    """A tile of a plan for a range of sequences of the batch."""

    inputs: Inputs
    tile: Tile
    batch: tuple[int, int]

    def work(self) -> Work:
        inputs, hidden, call = self.inputs, self.inputs.key_padding_mask, self.inputs.call
        masks = Masks(
            None if hidden is None else self.of_batch(hidden),
            inputs.dropout_seed,
            inputs.dropout_p,
            call.query_offset,
            call.key_offset,
        )
        return Work(
            self.tile.partials,
            self.of_batch(inputs.query),
            self.of_batch(inputs.key),
            self.of_batch(inputs.value),
            call.num_heads // call.num_kv_heads,
            inputs.scale,
            inputs.impl,
            masks,
            self.batch[0],
        )

    def of_batch(self, tensor: Tensor) -> Tensor:
        """The portion's sequences of a tensor."""
        return tensor if self.batch == (0, tensor.shape[0]) else tensor[slice(*self.batch)]

    def region(self, tensor: Tensor, rows: Rows) -> Tensor:
        """The tile's rows and heads of a full tensor."""
        start, stop = self.tile.query_rows if rows is Rows.QUERY else self.tile.key_rows
        call = self.inputs.call
        ratio = call.num_heads // call.num_kv_heads if rows is Rows.QUERY else 1
        first, last = (head * ratio for head in self.tile.kv_heads)
        return self.of_batch(tensor)[:, start:stop, first:last]

    def accumulator(self, tensor: Tensor, rows: Rows, role: Role) -> Operand:
        """``tensor`` itself if it can accumulate in its own dtype, else zeros for the tile's part of it."""
        dtype = self.inputs.accumulation_dtype
        is_native = self.inputs.impl == "native"
        # If every partial is the first to touch its query rows, nothing is accumulated.
        is_written_once = rows is Rows.QUERY and all(
            partial.is_first and (not is_native or (role is Role.MERGED_INTO and native.is_written_once(partial)))
            for partial in self.tile.partials
        )
        if tensor.dtype == dtype or is_written_once:
            return Operand(self.of_batch(tensor), rows, role)
        zeros = torch.zeros_like(self.region(tensor, rows), dtype=dtype, memory_format=torch.contiguous_format)
        first_row = (self.tile.query_rows if rows is Rows.QUERY else self.tile.key_rows)[0]
        return Operand(zeros, rows, role, first_row, self.tile.kv_heads[0])

    def store(self, operand: Operand, tensor: Tensor) -> None:
        """Round an accumulator into the tile's part of the full tensor; no-op if it accumulated there already."""
        if operand.tensor.dtype != tensor.dtype:
            self.region(tensor, operand.rows).copy_(operand.tensor)


def _portions(inputs: Inputs, *, is_backward: bool = False) -> Iterator[_Portion]:
    steps = inputs.plan(is_backward=is_backward)
    for tile in steps.tiles:
        for start in range(0, inputs.call.batch_size, steps.batch_step):
            yield _Portion(inputs, tile, (start, min(start + steps.batch_step, inputs.call.batch_size)))


def _for_kernels(inputs: Inputs, rest: Tensor | None) -> Inputs:
    """The call, computed by matrix products if the log-sum-exp is a pair."""
    return inputs if rest is None else replace(inputs, impl="aten")


def forward(inputs: Inputs, rest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output in the query's dtype and log-sum-exp in the accumulation dtype.

    ``rest``, zeros shaped like the log-sum-exp, is for large scores: everything is computed by matrix products, and
    ``(lse, rest)`` becomes a pair, see :class:`.products.Result`.
    """
    query = inputs.query
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.full(query.shape[:3], float("-inf"), dtype=inputs.accumulation_dtype, device=query.device)
    for portion in _portions(_for_kernels(inputs, rest)):
        accumulator = portion.accumulator(out, Rows.QUERY, Role.MERGED_INTO)
        of_rest = None if rest is None else portion.of_batch(rest)
        merge_partials(portion.work(), accumulator, portion.of_batch(lse), of_rest)
        portion.store(accumulator, out)
    return out, lse


def backward(
    inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, rest: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from the merged output and log-sum-exp alone.

    With ``rest``, ``(lse, rest)`` is the pair computed by :func:`forward`.
    """
    operands = ((inputs.query, Rows.QUERY), (inputs.key, Rows.KEY), (inputs.value, Rows.KEY))
    of_query, of_key, of_value = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x, _ in operands)
    lse = without_infinities(lse)
    for portion in _portions(_for_kernels(inputs, rest), is_backward=True):
        accumulators = (
            portion.accumulator(of_query, Rows.QUERY, Role.ADDED_TO),
            portion.accumulator(of_key, Rows.KEY, Role.ADDED_TO),
            portion.accumulator(of_value, Rows.KEY, Role.ADDED_TO),
        )
        some = (None if x is None else portion.of_batch(x) for x in (rest, grad_lse))
        of_rest, of_grad_lse = some
        add_gradients(
            portion.work(),
            accumulators,
            portion.of_batch(out),
            portion.of_batch(lse),
            of_rest,
            portion.of_batch(grad_out),
            of_grad_lse,
        )
        for accumulator, grad in zip(accumulators, (of_query, of_key, of_value), strict=True):
            portion.store(accumulator, grad)
    return of_query, of_key, of_value


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

    P are the merged probabilities ``c exp(s - lse)``, with dropout if the inputs have it, and f is the product of the
    ``factors``: ``left [B, N, H, width]`` times rows of ``right [B, M, G, width]``. With ``of_keys`` the values belong
    to the queries and the result is ``sum_p P[p, t] f[p, t] values[p]`` for every key t. With ``rest``,
    ``(lse, rest)`` is the pair computed by :func:`forward`.
    """
    shape = (*(inputs.key if of_keys else inputs.query).shape[:3], values.shape[3])
    total = torch.zeros(shape, dtype=inputs.accumulation_dtype, device=values.device)
    lse = without_infinities(lse)
    for portion in _portions(replace(inputs, impl="aten")):
        add_weighted(
            portion.work(),
            portion.of_batch(total),
            portion.of_batch(lse),
            None if rest is None else portion.of_batch(rest),
            portion.of_batch(values),
            [(portion.of_batch(left), portion.of_batch(right)) for left, right in factors],
            of_keys=of_keys,
        )
    return total
