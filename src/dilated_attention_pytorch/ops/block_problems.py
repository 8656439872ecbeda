"""Problems of some query rows and a list of key blocks: by native kernels, or gathered and computed a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dilated_attention_pytorch.kernels import native
from dilated_attention_pytorch.kernels.blockwise import LOG2_E, has_large_scores, largest_norm
from dilated_attention_pytorch.kernels.dropout import keep_factors

from .weighted_sum import Factor

_ELEMENTS_AT_ONCE = 1 << 19
"""Elements of gathered keys, and of scores, at a time on a CPU: what its caches hold."""
_ELEMENTS_ELSEWHERE = 1 << 26
"""The same for devices that want more work at a time."""
_MOST_GATE = 2.0**100
"""Log-gates up to this many times the scale are numbers for the native kernels, which divide them by it."""


class Inputs(NamedTuple):
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
    is_native: bool = False
    """Whether the package's own CPU kernels compute it, where no score or gate is too large for them."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scores and sums."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def num_padded_keys(self) -> int:
        """Keys in whole blocks, at least one."""
        return max(1, -(-self.key.shape[1] // self.block_size)) * self.block_size

    def by_query_block(self, tensor: Tensor, fill: float = 0.0) -> Tensor:
        """``[B, N, H(, D)]`` as ``[problems, rows * ratio(, D)]``; a problem is a query block of a key/value head."""
        heads = self.key.shape[2]
        tensor = tensor.unsqueeze(-1) if tensor.dim() == 3 else tensor
        padded = functional.pad(tensor, (0, 0, 0, 0, 0, -tensor.shape[1] % self.query_block_size), value=fill)
        split = padded.unflatten(2, (heads, -1)).unflatten(1, (-1, self.query_block_size))
        return split.permute(0, 3, 1, 2, 4, 5).flatten(3, 4).flatten(0, 2)

    def from_query_block(self, problems: Tensor) -> Tensor:
        """What :meth:`by_query_block` made, as ``[B, N, H, D]``, contiguous."""
        batch, rows, num_heads = self.query.shape[:3]
        heads, num_blocks = self.blocks.shape[1:3]
        ratio = num_heads // heads
        split = problems.view(batch, heads, num_blocks, self.query_block_size, ratio, problems.shape[-1])
        return split.permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)[:, :rows].contiguous()

    def by_key_block(self, tensor: Tensor) -> Tensor:
        """``[B, M, G, D]`` as ``[B * G * blocks, block_size * D]``, zeros after the last row."""
        padded = functional.pad(tensor, (0, 0, 0, 0, 0, self.num_padded_keys - tensor.shape[1]))
        return padded.transpose(1, 2).flatten(0, 1).unflatten(1, (-1, self.block_size)).flatten(0, 1).flatten(1)

    def from_key_block(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """What :meth:`by_key_block` made, as ``[B, M, G, D]``, contiguous and in that dtype."""
        batch, rows, heads = self.key.shape[:3]
        width = stored.shape[1] // self.block_size
        whole = stored.view(batch, heads, self.num_padded_keys, width)
        return whole[:, :, :rows].transpose(1, 2).to(dtype).contiguous()

    def hidden_keys(self) -> Tensor:
        """bool ``[B * blocks, block_size]``: positions after the last row, and padded ones."""
        batch, rows = self.key.shape[:2]
        hidden = self.key_padding_mask
        if hidden is None:
            hidden = torch.zeros(batch, rows, dtype=torch.bool, device=self.key.device)
        return functional.pad(hidden, (0, self.num_padded_keys - rows), value=True).view(-1, self.block_size)


class _Chunk(NamedTuple):
    """Some problems: where they lie, their keys, and what is added to their scores."""

    problems: slice
    key_rows: Tensor
    """Rows of :meth:`Inputs.by_key_block`, ``[problems * k]``."""
    bias: Tensor
    """Log-gates, -inf where a key is not seen: ``[problems, rows or 1, 1, k * block_size]``."""
    keep: Tensor | None
    """Dropout factors, ``[problems, rows, ratio, k * block_size]``."""


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
        keep = None
        if inputs.dropout_seed is not None:
            head = (problem // num_query_blocks % heads).unsqueeze(1) * ratio + torch.arange(ratio, device=device)
            keep = keep_factors(
                inputs.dropout_seed, of_sequence[:, None, None, None], head[:, None, :, None], row, position,
                inputs.dropout_p, inputs.dtype,
            )  # fmt: skip
        first = (problem // num_query_blocks * num_key_blocks).unsqueeze(1)
        yield _Chunk(some, (first + safe).flatten(), bias, keep)


def _scores(inputs: Inputs, chunk: _Chunk, queries: Tensor, keys: Tensor) -> Tensor:
    """Scores with the log-gates in units of log 2, ``[problems, rows * ratio, keys]``."""
    scores = (queries @ keys.mT).mul_(inputs.scale * LOG2_E)
    scores.unflatten(1, (inputs.query_block_size, -1)).add_(chunk.bias, alpha=LOG2_E)
    return scores


def _powers(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``2 ** (score - largest of the row)`` in place, the sums of the rows, and the largest; 0 without any key."""
    highest = scores.amax(dim=-1, keepdim=True)
    highest.masked_fill_(highest == float("-inf"), 0.0)
    powers = scores.sub_(highest).exp2_()
    return powers, powers.sum(dim=-1, keepdim=True), highest


def _gather(stored: Tensor, chunk: _Chunk, width: int, dtype: torch.dtype) -> Tensor:
    problems = chunk.problems.stop - chunk.problems.start
    return stored.index_select(0, chunk.key_rows).view(problems, -1, width).to(dtype)


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output in the query's dtype and log-sum-exp in the dtype of the sums."""
    if not _fits_native(inputs):
        return _forward_by_products(inputs)
    query, key, value, masks = _native_operands(inputs)
    out = torch.zeros(query.shape, dtype=query.dtype)
    lse = torch.full(query.shape[:3], float("-inf"), dtype=inputs.dtype)
    native.merge_listed(_lists(inputs), query, key, value, out, lse, masks, scale=inputs.scale)
    return out, lse


def backward(
    inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and log-gates."""
    if not _fits_native(inputs):
        return _backward_by_products(inputs, out, grad_out, grad_lse)
    if _has_large_scores(inputs):
        # Of the very probabilities that the gradient is of.
        out, _ = _forward_by_products(inputs)
        return _backward_by_products(inputs, out, grad_out, grad_lse)
    query, key, value, masks = _native_operands(inputs)
    lists = _lists(inputs)
    totals = [torch.zeros(x.shape, dtype=inputs.dtype) for x in (query, key, value)]
    of_units = native.add_listed_gradients(
        lists, _rows_contiguous(grad_out), query, key, value, _rows_contiguous(out), lse, grad_lse,
        (totals[0], totals[1], totals[2]), masks, scale=inputs.scale,
    )  # fmt: skip
    grads = [total.to(x.dtype) for total, x in zip(totals, (query, key, value), strict=True)]
    of_gates = inputs.blocks.new_zeros(inputs.blocks.shape, dtype=inputs.dtype)
    return grads[0], grads[1], grads[2], of_gates if of_units is None else lists.by_block(of_units)


def _fits_native(inputs: Inputs) -> bool:
    return inputs.is_native and _largest_gate(inputs) < _MOST_GATE * inputs.scale


def _largest_gate(inputs: Inputs) -> float:
    """The size of the largest finite log-gate; 0 without any."""
    gates = inputs.log_gates
    if gates is None or gates.numel() == 0:
        return 0.0
    return float(gates.abs().masked_fill(~gates.isfinite(), 0.0).max())


def _has_large_scores(inputs: Inputs) -> bool:
    """Whether scores with their gates may be so large that one log-sum-exp loses what follows it."""
    score = largest_norm(inputs.query) * largest_norm(inputs.key) * abs(inputs.scale)
    return has_large_scores(score + _largest_gate(inputs), 1.0, 1.0, inputs.query.dtype)


def _native_operands(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, native.Masks]:
    masks = native.Masks(inputs.key_padding_mask, inputs.dropout_seed, inputs.dropout_p, inputs.query_offset)
    return _rows_contiguous(inputs.query), _rows_contiguous(inputs.key), _rows_contiguous(inputs.value), masks


def _lists(inputs: Inputs) -> native.Listed:
    return native.listed(
        inputs.blocks, inputs.log_gates, block_size=inputs.block_size, query_block_size=inputs.query_block_size,
        is_causal=inputs.is_causal, query_offset=inputs.query_offset,
    )  # fmt: skip


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor, whose last dimension the kernels read as if its stride were 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _forward_by_products(inputs: Inputs) -> tuple[Tensor, Tensor]:
    dtype, width = inputs.dtype, inputs.query.shape[-1]
    queries = inputs.by_query_block(inputs.query)
    keys, values = inputs.by_key_block(inputs.key), inputs.by_key_block(inputs.value)
    out = torch.empty_like(queries)
    lse = torch.empty(*queries.shape[:2], 1, dtype=dtype, device=queries.device)
    for chunk in _chunks(inputs):
        scores = _scores(inputs, chunk, queries[chunk.problems].to(dtype), _gather(keys, chunk, width, dtype))
        probabilities, total, highest = _powers(scores)
        torch.add(total.log(), highest, alpha=1 / LOG2_E, out=lse[chunk.problems])
        if chunk.keep is not None:
            probabilities.unflatten(1, (inputs.query_block_size, -1)).mul_(chunk.keep)
        product = probabilities @ _gather(values, chunk, width, dtype)
        out[chunk.problems] = product.div_(total.clamp_(min=torch.finfo(dtype).tiny)).to(out.dtype)
    return inputs.from_query_block(out), inputs.from_query_block(lse).squeeze(-1)


def _backward_by_products(
    inputs: Inputs, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dS = P (keep dP - delta)``, ``delta = rowsum(dO O) - dL``.

    The gradient of a log-gate is the sum of dS over the rows and keys of its block. A problem holds all keys of its
    rows, so that their probabilities are summed anew: a log-sum-exp in one number is too coarse where scores are large.
    """
    dtype, width, rows_of_block = inputs.dtype, inputs.query.shape[-1], inputs.query_block_size
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1)
    if grad_lse is not None:
        delta -= grad_lse
    deltas = inputs.by_query_block(delta)
    queries, grads = inputs.by_query_block(inputs.query), inputs.by_query_block(grad_out)
    keys, values = inputs.by_key_block(inputs.key), inputs.by_key_block(inputs.value)
    grad_queries = torch.empty_like(queries)
    grad_keys, grad_values = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (keys, values))
    grad_gates = torch.zeros(inputs.blocks.shape, dtype=dtype, device=queries.device)
    gates_of_problem = grad_gates.view(-1, grad_gates.shape[-1])
    for chunk in _chunks(inputs):
        some = chunk.problems
        rows, grad_rows = queries[some].to(dtype), grads[some].to(dtype)
        gathered = _gather(keys, chunk, width, dtype)
        probabilities, total, _ = _powers(_scores(inputs, chunk, rows, gathered))
        probabilities.div_(total.clamp_(min=torch.finfo(dtype).tiny))
        grad_scores = grad_rows @ _gather(values, chunk, width, dtype).mT
        dropped = probabilities
        if chunk.keep is not None:
            grad_scores.unflatten(1, (rows_of_block, -1)).mul_(chunk.keep)
            dropped = (probabilities.unflatten(1, (rows_of_block, -1)) * chunk.keep).flatten(1, 2)
        grad_values.index_add_(0, chunk.key_rows, (dropped.mT @ grad_rows).view(len(chunk.key_rows), -1))
        grad_scores.sub_(deltas[some]).mul_(probabilities)
        gates_of_problem[some] = grad_scores.sum(1).unflatten(1, (-1, inputs.block_size)).sum(-1)
        grad_scores.mul_(inputs.scale)
        grad_queries[some] = (grad_scores @ gathered).to(grad_queries.dtype)
        grad_keys.index_add_(0, chunk.key_rows, (grad_scores.mT @ rows).view(len(chunk.key_rows), -1))
    storage = inputs.key.dtype
    return (
        inputs.from_query_block(grad_queries), inputs.from_key_block(grad_keys, storage),
        inputs.from_key_block(grad_values, storage), grad_gates,
    )  # fmt: skip


def weighted_sum(inputs: Inputs, lse: Tensor, values: Tensor | None, factors: Sequence[Factor], axis: str) -> Tensor:
    """The sum of ``P f`` times values for every query or key, or of ``P f`` for every listed block.

    P are the probabilities, dropped if the inputs have dropout, and f is the product of the factors; in the dtype of
    sums. ``inputs.value`` is not read.
    """
    dtype, rows_of_block = inputs.dtype, inputs.query_block_size
    has_none = inputs.by_query_block(lse, float("-inf")) == float("-inf")
    queries, keys = inputs.by_query_block(inputs.query), inputs.by_key_block(inputs.key)
    sides = [
        (
            None if left is None else inputs.by_query_block(left),
            None if right is None else inputs.by_key_block(right),
            None if gates is None else gates.reshape(-1, gates.shape[-1]),
        )
        for left, right, gates in factors
    ]
    of_queries = inputs.by_query_block(values) if axis == "keys" and values is not None else None
    of_keys = inputs.by_key_block(values) if axis == "queries" and values is not None else None
    width = 0 if values is None else values.shape[3]
    shape = {"queries": (*queries.shape[:2], width), "keys": (keys.shape[0], inputs.block_size * width)}
    total = torch.zeros(shape.get(axis, inputs.blocks.shape), dtype=dtype, device=lse.device)
    for chunk in _chunks(inputs):
        some = chunk.problems
        gathered = _gather(keys, chunk, inputs.query.shape[-1], dtype)
        # As in the gradient, summed anew; rows after the last, and those without a key, have no probability.
        weights, total_of_row, _ = _powers(_scores(inputs, chunk, queries[some].to(dtype), gathered))
        weights.div_(total_of_row.clamp_(min=torch.finfo(dtype).tiny)).masked_fill_(has_none[some], 0.0)
        if chunk.keep is not None:
            weights.unflatten(1, (rows_of_block, -1)).mul_(chunk.keep)
        for left, right, gates in sides:
            factor = None
            if left is not None and right is not None:
                factor = left[some].to(dtype) @ _gather(right, chunk, left.shape[-1], dtype).mT
            if gates is not None:
                of_keys_of_block = gates[some].to(dtype).repeat_interleave(inputs.block_size, dim=1).unsqueeze(1)
                factor = of_keys_of_block if factor is None else factor + of_keys_of_block
            weights = weights if factor is None else weights * factor
        if of_keys is not None:
            total[some] = weights @ _gather(of_keys, chunk, width, dtype)
        elif of_queries is not None:
            parts = weights.mT @ of_queries[some].to(dtype)
            total.index_add_(0, chunk.key_rows, parts.view(len(chunk.key_rows), -1))
        else:
            total.view(-1, total.shape[-1])[some] = weights.sum(1).unflatten(1, (-1, inputs.block_size)).sum(-1)
    if axis == "queries":
        return inputs.from_query_block(total)
    return inputs.from_key_block(total, dtype) if axis == "keys" else total
