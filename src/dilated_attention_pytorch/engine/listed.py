"""Attention of query blocks to listed key blocks: by native kernels, or gathered and computed a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dilated_attention_pytorch.kernels import native, products
from dilated_attention_pytorch.kernels.dropout import keep_factors
from dilated_attention_pytorch.kernels.masks import Masks
from dilated_attention_pytorch.kernels.products import KeepFactors
from dilated_attention_pytorch.precision import accumulation_dtype

from .extremes import has_large_scores, largest_norm
from .merge import without_infinities

_ELEMENTS_AT_ONCE = 1 << 19
"""Elements of gathered keys, and of scores, at a time on a CPU; they fit into its caches."""
_ELEMENTS_ELSEWHERE = 1 << 26
"""The same for other devices, which need more work per operation."""
_MOST_GATE = 2.0**100
"""Bound of log-gates relative to the scale: the native kernels divide gates by the scale, which must not overflow."""


class Inputs(NamedTuple):
    """Validated operands of one call; the scale is positive, and padded keys and values are zero."""

    query: Tensor
    key: Tensor
    value: Tensor
    blocks: Tensor
    log_gates: Tensor | None
    key_padding_mask: Tensor | None
    dropout_seed: Tensor | None
    block_size: int
    query_block_size: int
    is_causal: bool
    scale: float
    query_offset: int
    dropout_p: float
    impl: str = "aten"
    """Either "aten", which is matrix products, or "native"."""

    @property
    def dtype(self) -> torch.dtype:
        """The accumulation dtype."""
        return accumulation_dtype(self.query.dtype)

    @property
    def num_padded_keys(self) -> int:
        """Number of keys, padded to whole blocks; at least one block."""
        return max(1, -(-self.key.shape[1] // self.block_size)) * self.block_size

    def by_query_block(self, tensor: Tensor, fill: float = 0.0) -> Tensor:
        """``[B, N, H(, D)]`` as ``[problems, 1, rows * ratio(, D)]``, a problem per query block and key/value head."""
        heads = self.key.shape[2]
        after = (0, 0) * (tensor.dim() - 2)
        padded = functional.pad(tensor, (*after, 0, -tensor.shape[1] % self.query_block_size), value=fill)
        split = padded.unflatten(2, (heads, -1)).unflatten(1, (-1, self.query_block_size))
        return split.movedim(3, 1).flatten(3, 4).flatten(0, 2).unsqueeze(1)

    def from_query_block(self, problems: Tensor) -> Tensor:
        """Inverse of :meth:`by_query_block`: ``[B, N, H(, D)]``, contiguous."""
        batch, rows, num_heads = self.query.shape[:3]
        heads, num_blocks = self.blocks.shape[1:3]
        shape = (batch, heads, num_blocks, self.query_block_size, num_heads // heads, *problems.shape[3:])
        return problems.view(shape).movedim(1, 3).flatten(3, 4).flatten(1, 2)[:, :rows].contiguous()

    def by_key_block(self, tensor: Tensor) -> Tensor:
        """``[B, M, G, D]`` as ``[B * G * blocks, block_size * D]``, padded with zeros after the last row."""
        padded = functional.pad(tensor, (0, 0, 0, 0, 0, self.num_padded_keys - tensor.shape[1]))
        return padded.transpose(1, 2).flatten(0, 1).unflatten(1, (-1, self.block_size)).flatten(0, 1).flatten(1)

    def from_key_block(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Inverse of :meth:`by_key_block`: ``[B, M, G, D]``, contiguous, converted to ``dtype``."""
        batch, rows, heads = self.key.shape[:3]
        whole = stored.view(batch, heads, self.num_padded_keys, stored.shape[1] // self.block_size)
        return whole[:, :, :rows].transpose(1, 2).to(dtype).contiguous()

    def hidden_keys(self) -> Tensor:
        """bool ``[B * blocks, block_size]``: True for padded keys and for positions after the last row."""
        batch, rows = self.key.shape[:2]
        hidden = self.key_padding_mask
        if hidden is None:
            hidden = torch.zeros(batch, rows, dtype=torch.bool, device=self.key.device)
        return functional.pad(hidden, (0, self.num_padded_keys - rows), value=True).view(-1, self.block_size)


class _Chunk(NamedTuple):
    """A range of problems with their keys and the bias of their scores."""

    problems: slice
    key_rows: Tensor
    """Row indices into :meth:`Inputs.by_key_block`, ``[problems * k]``."""
    bias: Tensor
    """Log-gates, -inf where a key is not visible: ``[problems, 1, rows * ratio, k * block_size]``."""
    keep_factors: KeepFactors | None

    def gather(self, stored: Tensor, block_size: int) -> Tensor:
        """The problems' keys from a result of :meth:`Inputs.by_key_block`: ``[problems, 1, k * block_size, D]``."""
        taken = stored.index_select(0, self.key_rows)
        return taken.view(self.problems.stop - self.problems.start, 1, -1, stored.shape[1] // block_size)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add one row for every key of every problem."""
        total.index_add_(0, self.key_rows, part.reshape(len(self.key_rows), -1))


def _chunks(inputs: Inputs) -> Iterator[_Chunk]:
    size, rows, device = inputs.block_size, inputs.query_block_size, inputs.query.device
    heads, width = inputs.key.shape[2:]
    ratio = inputs.query.shape[2] // heads
    hidden = inputs.hidden_keys()
    num_key_blocks = hidden.shape[0] // max(1, inputs.key.shape[0])
    num_query_blocks, listed = inputs.blocks.shape[2:]
    blocks = inputs.blocks.reshape(-1, listed)
    log_gates = None if inputs.log_gates is None else inputs.log_gates.reshape(-1, listed)
    limit = _ELEMENTS_AT_ONCE if device.type == "cpu" else _ELEMENTS_ELSEWHERE
    step = max(1, limit // (listed * size * max(width, rows * ratio)))
    within = torch.arange(size, device=device)
    for start in range(0, blocks.shape[0], step):
        some = slice(start, min(start + step, blocks.shape[0]))
        problem = torch.arange(some.start, some.stop, device=device)
        of_sequence = problem // (num_query_blocks * heads)
        chosen = blocks[some]
        safe = chosen.clamp(min=0)
        bias = torch.zeros(chosen.shape, dtype=inputs.dtype, device=device)
        if log_gates is not None:
            bias = log_gates[some].to(inputs.dtype)
        unseen = hidden[(of_sequence * num_key_blocks).unsqueeze(1) + safe] | (chosen < 0).unsqueeze(-1)
        bias = bias.unsqueeze(-1).masked_fill(unseen, float("-inf")).flatten(1)[:, None, None]
        position = (safe.unsqueeze(-1) * size + within).flatten(1)[:, None, None]
        row = (problem % num_query_blocks * rows).unsqueeze(1) + torch.arange(rows, device=device)
        row = (row + inputs.query_offset)[:, :, None, None]
        if inputs.is_causal:
            bias = bias.masked_fill(position > row, float("-inf"))
        kept: KeepFactors | None = None
        if inputs.dropout_seed is not None:
            head = (problem // num_query_blocks % heads).unsqueeze(1) * ratio + torch.arange(ratio, device=device)
            factors = keep_factors(
                inputs.dropout_seed,
                of_sequence[:, None, None, None],
                head[:, None, :, None],
                row,
                position,
                inputs.dropout_p,
                inputs.dtype,
            )
            kept = _of_score_block(factors.flatten(1, 2).unsqueeze(1))
        bias = bias.expand(-1, rows, ratio, -1).flatten(1, 2).unsqueeze(1)
        first = (problem // num_query_blocks * num_key_blocks).unsqueeze(1)
        yield _Chunk(some, (first + safe).flatten(), bias, kept)


def _of_score_block(factors: Tensor) -> KeepFactors:
    return lambda block: block.of_queries(factors)


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output in the query's dtype and log-sum-exp in the accumulation dtype."""
    if not _fits_native(inputs):
        out, lse, _ = _forward_by_products(inputs, is_pair=False)
        return out, lse
    out = torch.zeros(inputs.query.shape, dtype=inputs.query.dtype)
    lse = torch.full(inputs.query.shape[:3], float("-inf"), dtype=inputs.dtype)
    native.merge_listed(_lists(inputs), _for_native(inputs), out, lse)
    return out, lse


def backward(
    inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and log-gates.

    The gradient of a log-gate is the sum of the score gradients over the rows and keys of its block.
    """
    is_large = _has_large_scores(inputs)
    if is_large or not _fits_native(inputs):
        rest: Tensor | None = None
        if is_large:
            # Probabilities sum to 1 only if the log-sum-exp is computed from the same scores: both are recomputed here.
            out, lse, rest = _forward_by_products(inputs, is_pair=True)
        return _backward_by_products(inputs, out, lse, rest, grad_out, grad_lse)
    lists, operands = _lists(inputs), _for_native(inputs)
    of_query, of_key, of_value = (torch.zeros(x.shape, dtype=inputs.dtype) for x in operands[:3])
    merged = native.Merged(out, lse, grad_out, grad_lse)
    of_units = native.add_listed_gradients(lists, operands, merged, (of_query, of_key, of_value))
    of_gates = lists.by_block(of_units) if of_units is not None else lse.new_zeros(inputs.blocks.shape)
    storage = inputs.query.dtype
    return of_query.to(storage), of_key.to(storage), of_value.to(storage), of_gates


def _fits_native(inputs: Inputs) -> bool:
    return inputs.impl == "native" and _largest_gate(inputs) < _MOST_GATE * inputs.scale


def _largest_gate(inputs: Inputs) -> float:
    """Magnitude of the largest finite log-gate on the CPU; 0 if there is none, and on other devices."""
    gates = inputs.log_gates
    if gates is None or gates.numel() == 0 or gates.device.type != "cpu":
        return 0.0
    return float(gates.abs().masked_fill(~gates.isfinite(), 0.0).max())


def _has_large_scores(inputs: Inputs) -> bool:
    """Whether scores with their gates may be so large that one log-sum-exp loses the smaller terms."""
    score = largest_norm(inputs.query) * largest_norm(inputs.key) * inputs.scale
    return has_large_scores(score + _largest_gate(inputs), 1.0, 1.0)


def _for_native(inputs: Inputs) -> native.Operands:
    masks = Masks(inputs.key_padding_mask, inputs.dropout_seed, inputs.dropout_p, inputs.query_offset)
    ratio = inputs.query.shape[2] // inputs.key.shape[2]
    return native.Operands(inputs.query, inputs.key, inputs.value, masks, ratio, inputs.scale)


def _lists(inputs: Inputs) -> native.Listed:
    return native.listed(
        inputs.blocks,
        inputs.log_gates,
        block_size=inputs.block_size,
        query_block_size=inputs.query_block_size,
        is_causal=inputs.is_causal,
        query_offset=inputs.query_offset,
    )


def _forward_by_products(inputs: Inputs, *, is_pair: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output and log-sum-exp; with ``is_pair``, the latter is a pair, see :class:`.products.Result`."""
    queries = inputs.by_query_block(inputs.query)
    keys, values = inputs.by_key_block(inputs.key), inputs.by_key_block(inputs.value)
    out = torch.empty_like(queries)
    lse = torch.empty(queries.shape[:3], dtype=inputs.dtype, device=queries.device)
    rest = torch.empty_like(lse) if is_pair else None
    for chunk in _chunks(inputs):
        some = chunk.problems
        result = products.forward(
            queries[some],
            chunk.gather(keys, inputs.block_size),
            chunk.gather(values, inputs.block_size),
            chunk.bias,
            chunk.keep_factors,
            is_causal=False,
            scale=inputs.scale,
            is_pair=is_pair,
        )
        out[some], lse[some] = result.out.to(out.dtype), result.lse
        if rest is not None and result.rest is not None:
            rest[some] = result.rest
    pair = None if rest is None else inputs.from_query_block(rest)
    return inputs.from_query_block(out), inputs.from_query_block(lse), pair


def _backward_by_products(
    inputs: Inputs, out: Tensor, lse: Tensor, rest: Tensor | None, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    delta = (grad_out.to(inputs.dtype) * out.to(inputs.dtype)).sum(-1)
    if grad_lse is not None:
        delta -= grad_lse
    lses, rests = _logs(inputs, lse, rest)
    queries, grads, deltas = (inputs.by_query_block(x) for x in (inputs.query, grad_out, delta))
    keys, values = inputs.by_key_block(inputs.key), inputs.by_key_block(inputs.value)
    grad_queries = torch.empty_like(queries)
    grad_keys, grad_values = (torch.zeros(x.shape, dtype=inputs.dtype, device=x.device) for x in (keys, values))
    grad_gates = torch.zeros(inputs.blocks.shape, dtype=inputs.dtype, device=queries.device)
    gates_of_problem = grad_gates.view(-1, grad_gates.shape[-1])
    for chunk in _chunks(inputs):
        some = chunk.problems
        of_query, of_key, of_value, of_bias = products.backward(
            grads[some],
            queries[some],
            chunk.gather(keys, inputs.block_size),
            chunk.gather(values, inputs.block_size),
            lses[some],
            None if rests is None else rests[some],
            deltas[some],
            chunk.bias,
            chunk.keep_factors,
            is_causal=False,
            scale=inputs.scale,
            needs_bias=True,
        )
        assert of_bias is not None
        grad_queries[some] = of_query.to(grad_queries.dtype)
        chunk.add(grad_keys, of_key)
        chunk.add(grad_values, of_value)
        gates_of_problem[some] = of_bias.squeeze(1).unflatten(1, (-1, inputs.block_size)).sum(-1)
    storage = inputs.key.dtype
    return (
        inputs.from_query_block(grad_queries),
        inputs.from_key_block(grad_keys, storage),
        inputs.from_key_block(grad_values, storage),
        grad_gates,
    )


def _logs(inputs: Inputs, lse: Tensor, rest: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The log-sum-exp by query block, +inf for rows without a key and for padding rows."""
    of_rest = None if rest is None else inputs.by_query_block(rest)
    return inputs.by_query_block(without_infinities(lse), float("inf")), of_rest


def weighted_sum(
    inputs: Inputs,
    lse: Tensor,
    values: Tensor | None,
    factors: Sequence[tuple[Tensor | None, Tensor | None, Tensor | None]],
    axis: str,
) -> Tensor:
    """Sum of ``P f`` times values for every query or key, or sum of ``P f`` for every listed block.

    P are the probabilities, with dropout if the inputs have it, and f is the product of the factors, each ``left [B, N,
    H, width]`` times rows of ``right [B, M, G, width]`` plus ``gates`` shaped like the blocks; None terms are left out.
    The result is in the accumulation dtype. ``inputs.value`` is not read.
    """
    rest: Tensor | None = None
    if _has_large_scores(inputs):
        _, lse, rest = _forward_by_products(inputs, is_pair=True)
    lses, rests = _logs(inputs, lse, rest)
    queries, keys, size = inputs.by_query_block(inputs.query), inputs.by_key_block(inputs.key), inputs.block_size
    sides = [
        (
            None if left is None else inputs.by_query_block(left),
            None if right is None else inputs.by_key_block(right),
            None if gates is None else gates.reshape(-1, gates.shape[-1]),
        )
        for left, right, gates in factors
    ]
    of_rows: Tensor | None = None
    if values is not None:
        of_rows = inputs.by_key_block(values) if axis == "queries" else inputs.by_query_block(values)
    width = 0 if values is None else values.shape[3]
    shape = {"queries": (*queries.shape[:3], width), "keys": (keys.shape[0], size * width)}
    total = torch.zeros(shape.get(axis, inputs.blocks.shape), dtype=inputs.dtype, device=lse.device)
    for chunk in _chunks(inputs):
        some = chunk.problems
        of_chunk = [
            (
                None if left is None else left[some],
                None if right is None else chunk.gather(right, size),
                None if gates is None else gates[some].repeat_interleave(size, dim=1).unsqueeze(1),
            )
            for left, right, gates in sides
        ]
        of_values = of_rows
        if of_values is not None:
            of_values = chunk.gather(of_values, size) if axis == "queries" else of_values[some]
        part = products.weighted_sum(
            queries[some],
            chunk.gather(keys, size),
            lses[some],
            None if rests is None else rests[some],
            of_values,
            of_chunk,
            chunk.bias,
            chunk.keep_factors,
            is_causal=False,
            scale=inputs.scale,
            of_keys=axis != "queries",
        )
        if axis == "queries":
            total[some] = part
        elif axis == "keys":
            chunk.add(total, part)
        else:
            total.view(-1, total.shape[-1])[some] = part.flatten(1).unflatten(1, (-1, size)).sum(-1)
    if axis == "queries":
        return inputs.from_query_block(total)
    return inputs.from_key_block(total, inputs.dtype) if axis == "keys" else total
