"""Parameter-free attention modules: any pattern, and the dilated pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from dilated_attention_pytorch.kernels.select import Impl, check_impl
from dilated_attention_pytorch.legacy.keywords import answers_old_keywords
from dilated_attention_pytorch.ops import Scores, attend
from dilated_attention_pytorch.ops.validation import check_dropout, check_order, check_scale
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern
from dilated_attention_pytorch.patterns.dilated import OffsetRule, Tail


class PatternAttention(nn.Module):
    """Attention over projected heads under any pattern, including block-sparse ones: :func:`attend` as a module.

    Args:
        pattern: attention pattern: windows, blocks, global tokens, dilated patterns and their sums.
        dropout: probability of dropping a merged attention probability, in training only.
        softmax_scale: scale of the scores; None = ``1 / sqrt(D)``.
        impl: see :func:`attend`.

    Raises:
        TypeError: ``pattern`` is not a :class:`Pattern`.
        ValueError: ``dropout`` is not in [0, 1), ``softmax_scale`` not finite, or ``impl`` unknown.

    >>> from dilated_attention_pytorch.nn import PatternAttention
    >>> attention = PatternAttention(local_window(127, 0) + global_tokens(4))
    >>> q = k = v = torch.randn(2, 1000, 8, 64)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([2, 1000, 8, 64])
    """

    @answers_old_keywords
    def __init__(
        self,
        pattern: Pattern,
        dropout: float = 0.0,
        *,
        softmax_scale: float | None = None,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        check_dropout("dropout", dropout)
        check_scale("softmax_scale", softmax_scale)
        check_impl(impl)
        if not isinstance(pattern, Pattern):
            raise TypeError(
                "pattern must be a pattern such as local_window(127) + global_tokens(4), "
                f"got {pattern!r} of type {type(pattern).__name__}"
            )
        self.pattern = pattern
        self.dropout = dropout
        self.softmax_scale = softmax_scale
        self.impl: Impl = impl

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        query_offset: int = 0,
        key_offset: int = 0,
        cu_seqlens: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        scores: Scores | None = None,
        heads_first: bool | None = None,
    ) -> Tensor:
        """Query ``[B, N, H, D]``, key ``[B, M, G, D]``, value ``[B, M, G, Dv]``, result ``[B, N, H, Dv]``.

        See :func:`attend`.
        """
        return self._function_for(query, heads_first)(
            query,
            key,
            value,
            self.pattern,
            is_causal=is_causal,
            scale=self.softmax_scale,
            query_offset=query_offset,
            key_offset=key_offset,
            cu_seqlens=cu_seqlens,
            key_padding_mask=key_padding_mask,
            dropout_p=self.dropout if self.training else 0.0,
            scores=scores,
            heads_first=heads_first,
            impl=self.impl,
        )

    def _function_for(self, query: Tensor, heads_first: bool | None) -> Callable[..., Tensor]:
        """The function that computes a call: :func:`attend`, or one with its arguments."""
        return attend

    def extra_repr(self) -> str:
        return f"pattern={self.pattern}, dropout={self.dropout}"


class DilatedAttention(PatternAttention):
    """Multi-scale dilated attention over projected heads (LongNet, arXiv 2307.02486): see :func:`attend`.

    Args:
        segment_lengths: segment lengths w_i, in positions.
        dilation_rates: dilation rates r_i, one for every segment length and none larger than it.
        dropout: probability of dropping a merged attention probability, in training only.
        softmax_scale: scale of the scores; None = ``1 / sqrt(D)``.
        offset_rule, tail, segment_shift: see :class:`DilatedPattern`.
        impl: see :func:`attend`.

    Raises:
        TypeError, ValueError: a pattern argument is of the wrong type or range, see :class:`DilatedPattern`; a rate
            exceeds its segment length (the two lists may be swapped); or ``dropout`` is not in [0, 1).

    >>> from dilated_attention_pytorch.nn import DilatedAttention
    >>> attention = DilatedAttention([128, 512], [1, 4])
    >>> q = k = v = torch.randn(2, 1000, 8, 64)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([2, 1000, 8, 64])
    """

    pattern: DilatedPattern

    @answers_old_keywords
    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        *,
        softmax_scale: float | None = None,
        offset_rule: OffsetRule = "modulo",
        tail: Tail = "ragged",
        segment_shift: int | Sequence[int] = 0,
        impl: Impl = "auto",
    ) -> None:
        pattern = DilatedPattern(
            segment_lengths, dilation_rates, offset_rule=offset_rule, tail=tail, segment_shift=segment_shift
        )
        check_order(pattern.segment_lengths, pattern.dilation_rates)
        super().__init__(pattern, dropout, softmax_scale=softmax_scale, impl=impl)

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """The segment lengths w_i, in positions."""
        return tuple(self.pattern.segment_lengths)

    @property
    def dilation_rates(self) -> tuple[int, ...]:
        """The dilation rates r_i."""
        return tuple(self.pattern.dilation_rates)

    def extra_repr(self) -> str:
        return (
            f"segment_lengths={list(self.segment_lengths)}, dilation_rates={list(self.dilation_rates)}, "
            f"dropout={self.dropout}"
        )
