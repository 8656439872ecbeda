"""Attention to key blocks that are chosen per query block at run time, each with its own gate."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from dilated_attention_pytorch.kernels.dropout import drawn_seed
from dilated_attention_pytorch.kernels.select import Impl, default_of, select
from dilated_attention_pytorch.precision import cast_by_autocast

from .call import WATCHERS, Call
from .host import with_positive_scale
from .implementations import IMPLEMENTATIONS
from .merge import AttentionOutput
from .scores import Scores, finished, with_scores
from .validation import check_call, sequence_first

BlocksImpl = Literal["auto", "native", "aten"]
_IMPLS: tuple[str, ...] = get_args(BlocksImpl)
_LEAST_NATIVE_BLOCK = 16
"""Smallest key block for which "auto" selects "native", whose kernels multiply that many keys at a time."""


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
    scores: Scores | None = None,
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
        scores: as in :func:`attend`; gates are added after the cap.
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
    query_block_size = block_size if query_block_size is None else query_block_size
    call = Call(
        query,
        key,
        value,
        log_gates,
        blocks=blocks,
        key_padding_mask=key_padding_mask,
        block_sizes=(block_size, query_block_size),
        is_causal=is_causal,
        scale=scale,
        query_offset=query_offset,
        dropout_p=dropout_p,
    )
    check_call(call)
    if scores is not None:
        call = with_scores(call, scores)
    for watch in WATCHERS:
        watch(call)
    query, key, value = cast_by_autocast(query, key, value)
    chosen = IMPLEMENTATIONS[_chosen(impl, query, value, block_size)]
    seed = drawn_seed(query.device) if dropout_p > 0.0 else None
    query, scale = with_positive_scale(query, scale)
    call = call._replace(query=query, key=key, value=value, dropout_seed=seed, scale=scale, impl=chosen)
    out, lse = finished(*chosen.attend(call._replace(sinks=None, shift=None)), call.sinks, call.shift, is_own=True)
    return AttentionOutput(out.transpose(1, 2), lse.transpose(1, 2)) if heads_first else AttentionOutput(out, lse)


def _chosen(impl: Impl, query: Tensor, value: Tensor, block_size: int) -> str:
    asked = default_of(impl)
    if asked not in _IMPLS:
        raise ValueError(f"impl of listed blocks must be one of {', '.join(map(repr, _IMPLS))}, got {asked!r}")
    # Without asking for the Triton kernels, which do not compute listed blocks.
    if asked == "aten" or (asked == "auto" and (block_size < _LEAST_NATIVE_BLOCK or query.is_cuda)):
        return "aten"
    chosen = select(asked, query.device, query.dtype, max(query.shape[-1], value.shape[-1]))
    return chosen if chosen == "native" else "aten"
