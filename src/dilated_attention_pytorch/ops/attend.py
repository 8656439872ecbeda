"""The functional API: ``attend``, ``attend_with_lse`` and ``dilated_attention``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dilated_attention_pytorch.kernels.dropout import drawn_seed
from dilated_attention_pytorch.kernels.select import Impl, implementation_of
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern
from dilated_attention_pytorch.patterns.dilated import OffsetRule, Tail
from dilated_attention_pytorch.precision import cast_by_autocast

from . import operators  # noqa: F401 - registers the operators that derivatives and compilers call
from .call import WATCHERS, Call
from .host import with_positive_scale
from .implementations import IMPLEMENTATIONS
from .merge import AttentionOutput
from .scores import Scores, finished, with_scores
from .validation import check_call, sequence_first


def attend_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    query_offset: int | Tensor = 0,
    key_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scores: Scores | None = None,
    heads_first: bool | None = None,
    impl: Impl = "auto",
) -> AttentionOutput:
    """:func:`attend` that also returns the log-sum-exp, for exact merging. Both outputs have exact gradients.

    ``L[p] = log sum_t c[p, t] exp(s[p, t])``, -inf for a row without a key. Arguments and errors are those of
    :func:`attend`. With dropout, ``lse`` is computed before dropout.

    Returns:
        ``AttentionOutput(out [B, N, H, D], lse [B, N, H])``; ``lse`` is float32, float64 for float64 inputs.

    >>> q = k = v = torch.randn(1, 100, 4, 8)
    >>> out, lse = attend_with_lse(q, k, v, DilatedPattern([16, 64], [1, 4]))
    >>> out.shape, lse.shape
    (torch.Size([1, 100, 4, 8]), torch.Size([1, 100, 4]))
    """
    call = Call(
        *sequence_first(query, key, value, heads_first),
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        pattern=pattern,
        is_causal=is_causal,
        scale=scale,
        query_offset=query_offset,
        key_offset=key_offset,
        dropout_p=dropout_p,
        impl=impl,
    )
    check_call(call)
    if scores is not None:
        call = with_scores(call, scores)
    for watch in WATCHERS:
        watch(call)
    if dropout_p > 0.0:
        call = call._replace(dropout_seed=drawn_seed(query.device))
    out, lse = attend_checked(call)
    return AttentionOutput(out.transpose(1, 2), lse.transpose(1, 2)) if heads_first else AttentionOutput(out, lse)


def attend_checked(call: Call) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a checked call: choose the implementation, then run it."""
    query, key, value = cast_by_autocast(call.query, call.key, call.value)
    assert call.pattern is not None
    is_fused = call.dropout_seed is call.distance_bias is call.key_bias is None and call.softcap == 0.0
    impl = IMPLEMENTATIONS[implementation_of(call.impl, query, value, call.pattern, is_fused=is_fused)]
    if isinstance(call.query_offset, Tensor) and not impl.takes_offset_tensor:
        raise NotImplementedError(
            f'impl="{impl.name}" plans a call on the host and needs the value of query_offset, got a tensor: pass '
            'query_offset as an integer, or a CUDA tensor with tensors that impl="triton" computes'
        )
    query, scale = with_positive_scale(query, call.scale)
    call = call._replace(query=query, key=key, value=value, scale=scale, impl=impl)
    if call.sinks is None and call.shift is None:
        return impl.attend(call)
    return finished(*impl.attend(call._replace(sinks=None, shift=None)), call.sinks, call.shift, is_own=True)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    query_offset: int | Tensor = 0,
    key_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scores: Scores | None = None,
    heads_first: bool | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attention under a pattern: one softmax over ``s + log c``, exact in output and gradient.

    ``O[p] = sum_t c[p, t] exp(s[p, t]) v[t] / sum_t c[p, t] exp(s[p, t])`` with ``s = scale * q . k`` and the
    pattern's count c for the key/value head that serves the query head (LongNet, arXiv 2307.02486; unlike there, the
    gradient includes the merge weights). A row without keys has output 0 and zero gradient. Limits on the magnitude of
    inputs, and how each implementation propagates NaN and infinity: docs/definition.md, "Numbers of any size" and
    "What is not finite".

    Args:
        query: ``[B, N, H, D]``, float16, bfloat16, float32 or float64. Any strides.
        key, value: ``[B, M, G, D]`` and ``[B, M, G, Dv]`` of the same dtype and device; the number G of key/value heads
            divides H, and query head h is served by key/value head ``h // (H / G)``.
        pattern: attention pattern, e.g. :class:`DilatedPattern`; patterns add with ``+``.
        is_causal: a query attends only to keys at or before its own position.
        scale: scale of the scores; None = ``1 / sqrt(D)``.
        query_offset, key_offset: absolute positions of the first query row and the first key row, so that a shard,
            a prefill chunk or a decoding step gets the right segments and residues. ``query_offset`` may also be an
            int64 scalar tensor on query's device; the host does not read it, so one captured CUDA graph can decode a
            whole sequence. Rows of the key/value buffer after the current position may then hold any values. Valid
            values are 0 to ``key_offset + M - N``; others are clamped. A tensor requires ``is_causal=True`` and
            ``impl="triton"`` (``"reference"`` synchronises to read the value), and excludes gradients,
            ``cu_seqlens``, dropout and ``tail="zero_padded"``.
        cu_seqlens: int32 ``[documents + 1]`` row boundaries of packed documents, the same for every sequence of the
            batch. Each document is its own sequence starting at position 0. On query's device, or on the CPU (checked,
            then copied). ``impl="triton"`` does not synchronise to check boundaries on the device; rows outside every
            document then attend to nothing.
        key_padding_mask: bool ``[B, M]``, True = ignore, exactly as if the key were absent.
        dropout_p: probability of dropping each merged probability ``c exp(s - L)``; the others are scaled by
            ``1 / (1 - p)``. The seed is drawn from PyTorch's random state.
        scores: a cap, biases and sinks, see :class:`Scores`.
        heads_first: True for tensors, and a result, ``[B, H, N, D]`` as in ``scaled_dot_product_attention``. None, like
            False, means ``[B, N, H, D]``, but is refused where more than 64 heads, each with its own key/value head,
            come with fewer rows than heads; one row, the first token of a text, is computed.
        impl: ``"auto"``, ``"triton"`` (this package's kernels, NVIDIA and AMD GPUs), ``"native"`` (this package's
            kernels, x86-64 CPUs), ``"aten"`` (PyTorch's fused kernels on CPUs and CUDA devices, its matrix products
            elsewhere) or ``"reference"`` (dense, any device). All agree up to rounding.
            ``"auto"`` is ``"triton"`` on an NVIDIA GPU, where a check found it right, and ``"native"`` on a CPU where
            it can run and no measurement found ``"aten"`` faster; else ``"aten"``;
            :func:`~dilated_attention_pytorch.ops.implementation` changes that for all calls of a context.

    Returns:
        ``[B, N, H, Dv]`` in the query's dtype, contiguous (its transpose with ``heads_first``). Under autocast, inputs
        other than float64 are cast first.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, shape, dtype, device or range.
        NotImplementedError: the named implementation does not support this call; the message gives the reason and
            an alternative.

    >>> q = torch.randn(2, 1000, 8, 64)
    >>> k = v = torch.randn(2, 1000, 2, 64)
    >>> attend(q, k, v, DilatedPattern([128, 512], [1, 4]), is_causal=True).shape
    torch.Size([2, 1000, 8, 64])
    """
    return attend_with_lse(
        query,
        key,
        value,
        pattern,
        is_causal=is_causal,
        scale=scale,
        query_offset=query_offset,
        key_offset=key_offset,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        dropout_p=dropout_p,
        scores=scores,
        heads_first=heads_first,
        impl=impl,
    ).out


def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    *,
    offset_rule: OffsetRule = "modulo",
    tail: Tail = "ragged",
    segment_shift: int | Sequence[int] = 0,
    is_causal: bool = False,
    scale: float | None = None,
    query_offset: int | Tensor = 0,
    key_offset: int = 0,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scores: Scores | None = None,
    heads_first: bool | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """:func:`attend` under ``DilatedPattern(segment_lengths, dilation_rates, ...)``.

    Arguments, result and errors are those of :func:`attend` and :class:`DilatedPattern`.

    >>> q = k = v = torch.randn(1, 4096, 8, 64)
    >>> dilated_attention(q, k, v, [512, 2048], [1, 4], is_causal=True).shape
    torch.Size([1, 4096, 8, 64])
    """
    pattern = DilatedPattern(
        segment_lengths, dilation_rates, offset_rule=offset_rule, tail=tail, segment_shift=segment_shift
    )
    return attend(
        query,
        key,
        value,
        pattern,
        is_causal=is_causal,
        scale=scale,
        query_offset=query_offset,
        key_offset=key_offset,
        cu_seqlens=cu_seqlens,
        key_padding_mask=key_padding_mask,
        dropout_p=dropout_p,
        scores=scores,
        heads_first=heads_first,
        impl=impl,
    )
