"""Attention to key blocks that are chosen per query block at run time, each with its own gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dilated_attention_pytorch.engine import listed
from dilated_attention_pytorch.engine.extremes import backward_around, forward_around
from dilated_attention_pytorch.kernels.select import Impl, default_of, select
from dilated_attention_pytorch.patterns import local_window
from dilated_attention_pytorch.precision import accumulation_dtype

from .autocast import cast_by_autocast, without_autocast
from .derivatives import attend_operands, gradients, refuse_tangents
from .merge import AttentionOutput
from .prepare import as_rows, with_scale, without_padding
from .validation import check_block_numbers, check_blocks, check_call, check_size, sequence_first
from .weighted_sum import Axis, Factor, Operands, Operators, factors_of

BlocksImpl = Literal["auto", "native", "aten"]
_IMPLS: tuple[str, ...] = get_args(BlocksImpl)
_LEAST_NATIVE_BLOCK = 16
"""Smallest key block for which "auto" selects "native", whose kernels multiply that many keys at a time."""
_ANY_PATTERN = local_window(0)


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    log_gates: Tensor | None = None,
    *,
    block_size: int,
    query_block_size: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    query_offset: int = 0,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    heads_first: bool | None = None,
    impl: BlocksImpl = "auto",
) -> AttentionOutput:
    """Attention to listed key blocks with gates: one softmax over ``s + log g``, exact in output and gradient.

    With ``blocks[b, g, i, j]`` the j-th key block that query block i sees and ``e`` its log-gate,

        O[p] = sum_j sum_(t in block j) exp(s[p, t] + e[j]) v[t] / sum_j sum_(t in block j) exp(s[p, t] + e[j]),

    ``s = scale * q . k``, and L[p] is the logarithm of the denominator. A block that is listed twice counts twice.
    Gradients reach query, key, value and the log-gates, from both outputs, so that the result merges exactly with
    other partials (:func:`merge`). Scores are never held for more than a few query blocks. It is one operator of
    ``torch.library``, traced by ``torch.compile(fullgraph=True)``.

    Args:
        query: ``[B, N, H, D]``, float16, bfloat16, float32 or float64.
        key, value: ``[B, M, G, D]`` of the same dtype and device; G divides H, and the query heads of a key/value head
            share its blocks.
        blocks: int64 ``[B, G, ceil(N / query_block_size), k]``: numbers of key blocks, -1 for none.
        log_gates: floating ``[B, G, ceil(N / query_block_size), k]``; None = every gate is 1.
        block_size: positions of a key block; the last one may be ragged.
        query_block_size: rows of a query block; None = ``block_size``.
        is_causal: a query attends only to keys at or before its own position, whatever blocks are listed.
        scale: scale of the scores; None = ``1 / sqrt(D)``.
        query_offset: absolute position of the first query row; the first key row is position 0.
        key_padding_mask: bool ``[B, M]``, True = ignore, exactly as if the key were absent.
        dropout_p: as in :func:`attend`; ``lse`` is computed before dropout.
        heads_first: as in :func:`attend`.
        impl: ``"native"`` (kernels of this package, x86-64 CPUs; heads up to 256 wide, not in float64), ``"aten"``
            (matrix products of PyTorch, any device) or ``"auto"``: ``"native"`` where that can run and a key block has
            16 positions or more, else ``"aten"``. Both agree up to rounding. The first call that needs the native
            kernels compiles them, also under ``"auto"``. Derivatives other than the gradient are products under both.

    Returns:
        ``AttentionOutput(out [B, N, H, D], lse [B, N, H])``; a row that sees no key has 0 and -inf.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, shape, dtype, device or range. Block numbers are
            checked on the CPU; a device reports one that is out of range itself.
        NotImplementedError: ``impl="native"`` cannot compute this call; the message says why.

    >>> from dilated_attention_pytorch.ops import attend_blocks
    >>> q = k = v = torch.randn(1, 100, 2, 8)
    >>> blocks = torch.tensor([0, 6]).expand(1, 2, 7, 2)
    >>> attend_blocks(q, k, v, blocks, block_size=16).out.shape
    torch.Size([1, 100, 2, 8])
    """
    query, key, value = sequence_first(query, key, value, heads_first)
    check_call(
        query,
        key,
        value,
        _ANY_PATTERN,
        is_causal=is_causal,
        scale=scale,
        query_offset=query_offset,
        key_offset=0,
        cu_seqlens=None,
        key_padding_mask=key_padding_mask,
        dropout_p=dropout_p,
    )
    query_block_size = block_size if query_block_size is None else query_block_size
    check_size("block_size", block_size)
    check_size("query_block_size", query_block_size)
    check_blocks(query, key, blocks, log_gates, query_block_size)
    query, key, value = cast_by_autocast(query, key, value)
    chosen = _chosen(impl, query, block_size)
    seed = torch.randint(2**62, (), device=query.device) if dropout_p > 0.0 else None
    query, scale = with_scale(query, scale)
    operators = _BlockOperators(scale, block_size, query_block_size, is_causal, query_offset, dropout_p, chosen)
    operands = Operands(query, key, log_gates, blocks, key_padding_mask, seed)
    out, lse = attend_operands(operators, value, operands)
    return AttentionOutput(out.transpose(1, 2), lse.transpose(1, 2)) if heads_first else AttentionOutput(out, lse)


def _chosen(impl: Impl, query: Tensor, block_size: int) -> str:
    asked = default_of(impl)
    if asked not in _IMPLS:
        raise ValueError(f"impl of listed blocks must be one of {', '.join(map(repr, _IMPLS))}, got {asked!r}")
    if asked == "aten" or (asked == "auto" and block_size < _LEAST_NATIVE_BLOCK):
        return "aten"
    chosen = select(asked, query.device, query.dtype, query.shape[-1])
    return chosen if chosen == "native" else "aten"


_OPTIONS = (
    "Tensor blocks, Tensor? log_gates, Tensor? key_padding_mask, Tensor? dropout_seed, SymInt block_size, "
    "SymInt query_block_size, bool is_causal, float scale, SymInt query_offset, float dropout_p"
)
_ARGUMENTS = f"Tensor query, Tensor key, Tensor value, {_OPTIONS}, str impl"
"""The fields of :class:`.listed.Inputs`, as arguments of the operators."""


def _prepared(arguments: listed.Inputs) -> listed.Inputs:
    query, key, value = arguments[:3]
    key, value = (as_rows(without_padding(x, arguments.key_padding_mask)) for x in (key, value))
    return listed.Inputs(as_rows(query), key, value, *arguments[3:])


@dataclass(frozen=True, slots=True)
class _Selected:
    """The computation of a call, see :mod:`.extremes`."""

    inputs: listed.Inputs

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return listed.forward(self.inputs._replace(query=query, key=key, value=value))

    def backward(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor, ...]:
        query, key, value = operands
        inputs = self.inputs._replace(query=query, key=key, value=value)
        return listed.backward(inputs, as_rows(out), lse, as_rows(grad_out), grad_lse)

    def unweighted(self) -> _Selected:
        # A row sees a block iff its gate is not -inf; a small gate would hide that it does.
        gates = self.inputs.log_gates
        if gates is not None:
            gates = torch.zeros_like(gates).masked_fill(gates == float("-inf"), float("-inf"))
        return _Selected(self.inputs._replace(dropout_seed=None, log_gates=gates))

    def gradients_of(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The gradient of a log-gate depends on all rows of its query block."""
        of_blocks = (self.inputs.by_query_block(rows.float()) > 0).flatten(1).any(1)
        return (of_blocks.view(self.inputs.blocks.shape[:3]).unsqueeze(-1),)


def _forward(*operands: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; see :func:`attend_blocks`."""
    arguments = listed.Inputs(*operands)
    refuse_tangents(*operands[:3], arguments.log_gates)
    check_block_numbers(arguments.blocks, arguments.key.shape[1], arguments.block_size)
    inputs = _prepared(arguments)
    with without_autocast(inputs.query.device.type):
        return forward_around(_Selected(inputs), inputs.query, inputs.key, inputs.value)


def _gradients(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, *operands: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and log-gates from the merged output and log-sum-exp."""
    arguments = listed.Inputs(*operands)
    refuse_tangents(*operands[:3], arguments.log_gates, grad_out, grad_lse)
    inputs = _prepared(arguments)
    with without_autocast(inputs.query.device.type):
        tensors = (inputs.query, inputs.key, inputs.value)
        *grads, grad_gates = backward_around(_Selected(inputs), tensors, out, lse, grad_out, grad_lse)
    gate_dtype = lse.dtype if inputs.log_gates is None else inputs.log_gates.dtype
    return grads[0], grads[1], grads[2], grad_gates.to(gate_dtype)


_attend_blocks = torch.library.custom_op(
    "dilated_attention_pytorch::attend_blocks", _forward, mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
_attend_blocks_backward = torch.library.custom_op(
    "dilated_attention_pytorch::attend_blocks_backward",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.custom_op(
    "dilated_attention_pytorch::weighted_block_sum",
    mutates_args=(),
    schema=f"(str axis, Tensor? values, Tensor?[] factors, Tensor lse, Tensor query, Tensor key, {_OPTIONS}) -> Tensor",
)
def _weighted_sum(
    axis: str,
    values: Tensor | None,
    factors: list[Tensor | None],
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    *options: Any,
) -> Tensor:
    """A weighted sum per query, key or block, in the accumulation dtype; see :mod:`.weighted_sum`."""
    inputs = _prepared(listed.Inputs(query, key, key, *options))
    of_pairs, key_padding_mask = factors_of(factors), inputs.key_padding_mask
    if key_padding_mask is not None:
        of_pairs = [
            f if f.right is None else f._replace(right=without_padding(f.right, key_padding_mask)) for f in of_pairs
        ]
        if axis == "queries" and values is not None:
            values = without_padding(values, key_padding_mask)
    with without_autocast(query.device.type):
        return listed.weighted_sum(inputs, lse, values, of_pairs, axis)


@_attend_blocks.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(query.dtype)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return out, torch.empty(query.shape[:3], dtype=dtype, device=query.device)


@_attend_blocks_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    log_gates: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
    gate_dtype = lse.dtype if log_gates is None else log_gates.dtype
    return grads[0], grads[1], grads[2], torch.empty(blocks.shape, dtype=gate_dtype, device=query.device)


@_weighted_sum.register_fake
def _(
    axis: str,
    values: Tensor | None,
    factors: list[Tensor | None],
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    blocks: Tensor,
    *_: Any,
) -> Tensor:
    if values is None:
        return lse.new_empty(blocks.shape)
    return lse.new_empty((*(query if axis == "queries" else key).shape[:3], values.shape[3]))


@dataclass(frozen=True, slots=True)
class _BlockOperators(Operators):
    """The operators of one call of :func:`attend_blocks`."""

    scale: float
    block_size: int
    query_block_size: int
    is_causal: bool
    query_offset: int
    dropout_p: float
    impl: str

    def compute(self, operands: Operands, value: Tensor) -> tuple[Tensor, Tensor]:
        return _forward(*self._arguments(operands, value))

    def compute_gradients(
        self, operands: Operands, value: Tensor, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        grads = _gradients(grad_out, grad_lse, out, lse, *self._arguments(operands, value))
        return grads[:3] if operands.log_gates is None else grads

    def forward(self, operands: Operands, value: Tensor) -> tuple[Tensor, Tensor]:
        return _attend_blocks(*self._arguments(operands, value))

    def backward(
        self, operands: Operands, value: Tensor, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        grads = tuple(_attend_blocks_backward(grad_out, grad_lse, out, lse, *self._arguments(operands, value)))
        return grads[:3] if operands.log_gates is None else grads

    def weighted_sum(
        self, axis: Axis, operands: Operands, lse: Tensor, values: Tensor | None, factors: Sequence[Factor]
    ) -> Tensor:
        query, key, _, *others = self._tensors(operands, operands.key)
        flat = [tensor for factor in factors for tensor in factor]
        return _weighted_sum(axis, values, flat, lse, query, key, *others, *self._options)

    def _arguments(self, operands: Operands, value: Tensor) -> tuple[Any, ...]:
        return *self._tensors(operands, value), *self._options, self.impl

    def _tensors(self, operands: Operands, value: Tensor) -> tuple[Any, ...]:
        query, key, log_gates, blocks, key_padding_mask, dropout_seed = operands
        return query, key, value, blocks, log_gates, key_padding_mask, dropout_seed

    @property
    def _options(self) -> tuple[Any, ...]:
        return (self.block_size, self.query_block_size, self.is_causal, self.scale, self.query_offset, self.dropout_p)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    block_size, query_block_size, is_causal, scale, *rest = inputs[7:]
    query, key, value, blocks, log_gates, *others = inputs[:7]
    ctx.save_for_backward(query, key, value, log_gates, blocks, *others, *output)  # the order of derivatives.Attend
    ctx.operators = _BlockOperators(scale, block_size, query_block_size, is_causal, *rest)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, *others, out, lse = ctx.saved_tensors
    operands = Operands(query, key, *others)
    *grads, grad_gates = gradients(ctx.operators, value, operands, grad_out, grad_lse, out, lse)
    return (*grads, None, grad_gates, *(None for _ in range(9)))


_attend_blocks.register_autograd(_backward, setup_context=_setup_context)


def _num_pairs(operands: tuple[Any, ...]) -> int:
    """Number of query-key pairs that are computed: all of every list, including -1 and keys after a query."""
    query, _, _, blocks, _, _, _, block_size, query_block_size, *_ = operands
    return blocks.numel() * block_size * query_block_size * query.shape[2] // blocks.shape[1]


@register_flop_formula(torch.ops.dilated_attention_pytorch.attend_blocks, get_raw=True)
def _attend_flops(*operands: Any, out_val: Any = None, **_: Any) -> int:
    """Two matrix products: 4 D operations per pair."""
    return 4 * operands[0].shape[-1] * _num_pairs(operands)


@register_flop_formula(torch.ops.dilated_attention_pytorch.attend_blocks_backward, get_raw=True)
def _attend_backward_flops(*operands: Any, out_val: Any = None, **_: Any) -> int:
    """Five matrix products, including the recomputation of the scores."""
    return 10 * operands[4].shape[-1] * _num_pairs(operands[4:])


@register_flop_formula(torch.ops.dilated_attention_pytorch.weighted_block_sum, get_raw=True)
def _weighted_sum_flops(*operands: Any, out_val: Any = None, **_: Any) -> int:
    """The scores, the factors and the sum: two operations per pair and column."""
    values, factors, query = operands[1], operands[2], operands[4]
    columns = query.shape[-1] + (0 if values is None else values.shape[-1])
    columns += sum(left.shape[-1] for left in factors[::3] if left is not None)
    return 2 * columns * _num_pairs((query, query, query, *operands[6:]))
