"""Dilated attention modules that choose segments per input shape; their weights are independent of the choice."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.legacy.keywords import answers_old_keywords
from dilated_attention_pytorch.ops import Scores, attend
from dilated_attention_pytorch.ops.validation import sequence_first
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern
from dilated_attention_pytorch.patterns.dilated import OffsetRule, Tail
from dilated_attention_pytorch.selection import DynamicSegmentSelector, SegmentSelectionConfig
from dilated_attention_pytorch.tracing import constant_of_graph

from .dilated_attention import DilatedAttention
from .multihead import MultiheadDilatedAttention

_Lengths = tuple[tuple[int, ...], tuple[int, ...]]


class Configuration(NamedTuple):
    """Segment lengths w_i, in positions, and dilation rates r_i."""

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]


class DynamicDilatedAttention(DilatedAttention):
    """:class:`DilatedAttention` with segments that a :class:`DynamicSegmentSelector` chooses per input shape.

    The choice depends on the number of positions N (offsets included; the longer of query and key), batch size, heads,
    head dimension, dtype, device, ``is_causal``, and whether there are a padding mask and dropout. It is the same in
    training and evaluation. Free memory is read once per device, at the first call, so the same shape always gets the
    same segments. Packed documents get the segments of their row of N positions.

    Under ``torch.compile``, also with ``fullgraph=True``, the choice is made while tracing: one graph per shape.

    Args:
        selector_config: selection policy; None = the defaults.
        dropout, softmax_scale, offset_rule, tail, segment_shift, impl: as in :class:`DilatedAttention`.
        selector: a selector instead of a policy, to share choices between modules or to use a machine's tuning record.

    Raises:
        TypeError, ValueError: see :class:`DilatedAttention`; or both a policy and a selector were given. In a call: no
            segments fit the budgets, see :meth:`DynamicSegmentSelector.select`.

    >>> from dilated_attention_pytorch.nn import DynamicDilatedAttention
    >>> attention = DynamicDilatedAttention()
    >>> q = k = v = torch.randn(1, 1000, 8, 64)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([1, 1000, 8, 64])
    >>> len(attention.get_current_configuration().segment_lengths) > 0
    True
    """

    @answers_old_keywords
    def __init__(
        self,
        selector_config: SegmentSelectionConfig | None = None,
        dropout: float = 0.0,
        *,
        softmax_scale: float | None = None,
        offset_rule: OffsetRule = "modulo",
        tail: Tail = "ragged",
        segment_shift: int | Sequence[int] = 0,
        impl: Impl = "auto",
        selector: DynamicSegmentSelector | None = None,
    ) -> None:
        # Placeholder lengths; the other arguments are validated by the parent class.
        super().__init__(
            [1],
            [1],
            dropout,
            softmax_scale=softmax_scale,
            offset_rule=offset_rule,
            tail=tail,
            segment_shift=segment_shift,
            impl=impl,
        )
        if selector_config is not None and selector is not None:
            raise ValueError("a selector has its own policy: pass selector_config or selector, got both")
        if selector_config is not None and not isinstance(selector_config, SegmentSelectionConfig):
            raise TypeError(
                f"selector_config must be a SegmentSelectionConfig or None, got {selector_config!r} of type "
                f"{type(selector_config).__name__}"
            )
        if selector is not None and not isinstance(selector, DynamicSegmentSelector):
            raise TypeError(f"selector must be a DynamicSegmentSelector or None, got {type(selector).__name__}")
        self.selector = DynamicSegmentSelector(selector_config) if selector is None else selector
        self._current: _Lengths | None = None

    @property
    def pattern(self) -> DilatedPattern:
        """The pattern of the last call, see :meth:`get_current_configuration`."""
        return self._with(self.get_current_configuration())

    @pattern.setter
    def pattern(self, pattern: Pattern) -> None:
        # Set once, by the parent class: the options that all chosen patterns share.
        assert isinstance(pattern, DilatedPattern)
        self._options = pattern

    def _with(self, lengths: _Lengths) -> DilatedPattern:
        options = self._options
        return DilatedPattern(
            *lengths, offset_rule=options.offset_rule, tail=options.tail, segment_shift=options.segment_shift
        )

    def get_current_configuration(self) -> Configuration:
        """The segment lengths and dilation rates of the last call.

        Raises:
            RuntimeError: the module was not called yet.
        """
        if self._current is None:
            raise RuntimeError(
                "segments are chosen for the shape of a call, and there was none yet; call the module first, or use "
                "selector.select(sequence_length, batch_size, num_heads, head_dim, dtype, device)"
            )
        return Configuration(*self._current)

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """The segment lengths of the last call, see :meth:`get_current_configuration`."""
        return self.get_current_configuration().segment_lengths

    @property
    def dilation_rates(self) -> tuple[int, ...]:
        """The dilation rates of the last call, see :meth:`get_current_configuration`."""
        return self.get_current_configuration().dilation_rates

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
        """Query ``[B, N, H, D]``, key and value ``[B, M, G, D]``, result ``[B, N, H, D]``; see :func:`attend`."""
        pattern = self._options
        query, key, value = sequence_first(query, key, value, heads_first)
        if query.dim() == key.dim() == 4:  # attend rejects other shapes
            length = max(query_offset + query.shape[1], key_offset + key.shape[1])
            # index() turns symbolic sizes into integers.
            self._current = _decide(
                self,
                operator.index(length),
                operator.index(query.shape[0]),
                operator.index(query.shape[2]),
                operator.index(query.shape[3]),
                operator.index(key.shape[2]),
                query.dtype,
                query.device,
                is_causal,
                key_padding_mask is not None,
            )
            pattern = self._with(self._current)
        out = attend(
            query,
            key,
            value,
            pattern,
            is_causal=is_causal,
            scale=self.softmax_scale,
            query_offset=query_offset,
            key_offset=key_offset,
            cu_seqlens=cu_seqlens,
            key_padding_mask=key_padding_mask,
            dropout_p=self.dropout if self.training else 0.0,
            scores=scores,
            heads_first=False,
            impl=self.impl,
        )
        return out.transpose(1, 2) if heads_first else out

    def extra_repr(self) -> str:
        return f"{self.selector.config}, dropout={self.dropout}"


@constant_of_graph
def _decide(
    module: DynamicDilatedAttention,
    sequence_length: int,
    batch_size: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    is_causal: bool,
    is_padded: bool,
) -> _Lengths:
    options = module._options
    pattern = module.selector.select(
        # Empty inputs are valid; they get the segments for length 1.
        max(1, sequence_length),
        max(1, batch_size),
        num_heads,
        head_dim,
        dtype,
        device,
        num_kv_heads,
        is_causal=is_causal,
        is_padded=is_padded,
        has_dropout=module.dropout > 0.0,
        offset_rule=options.offset_rule,
        tail=options.tail,
        segment_shift=options.segment_shift,
    )
    return tuple(pattern.segment_lengths), tuple(pattern.dilation_rates)


class DynamicMultiheadDilatedAttention(MultiheadDilatedAttention):
    """:class:`MultiheadDilatedAttention` with :class:`DynamicDilatedAttention` inside.

    The parameters have the names and shapes of :class:`MultiheadDilatedAttention`, whatever the segments: state dicts
    are interchangeable, and the same weights work for any length.

    Args:
        embed_dim, num_heads: width E and number of query heads H.
        selector_config: selection policy; None = the defaults.
        selector: a selector instead of a policy, see :class:`DynamicDilatedAttention`.
        dropout, bias, kdim, vdim, num_kv_heads, sub_layernorm, layernorm_eps, gain, softmax_scale, offset_rule, tail,
            segment_shift, impl, device, dtype: as in :class:`MultiheadDilatedAttention`.

    Raises:
        TypeError, ValueError: see :class:`MultiheadDilatedAttention` and :class:`DynamicDilatedAttention`.

    >>> from dilated_attention_pytorch.nn import DynamicMultiheadDilatedAttention
    >>> attention = DynamicMultiheadDilatedAttention(256, 8)
    >>> x = torch.randn(2, 1000, 256)
    >>> attention(x, x, x, is_causal=True)[0].shape
    torch.Size([2, 1000, 256])
    """

    attention: DynamicDilatedAttention

    @answers_old_keywords
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        selector_config: SegmentSelectionConfig | None = None,
        dropout: float = 0.0,
        *,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        num_kv_heads: int | None = None,
        sub_layernorm: bool = False,
        layernorm_eps: float = 1e-5,
        gain: float = 1.0,
        softmax_scale: float | None = None,
        offset_rule: OffsetRule = "modulo",
        tail: Tail = "ragged",
        segment_shift: int | Sequence[int] = 0,
        impl: Impl = "auto",
        selector: DynamicSegmentSelector | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            [1],
            [1],
            dropout,
            bias=bias,
            kdim=kdim,
            vdim=vdim,
            num_kv_heads=num_kv_heads,
            sub_layernorm=sub_layernorm,
            layernorm_eps=layernorm_eps,
            gain=gain,
            device=device,
            dtype=dtype,
        )
        self.attention = DynamicDilatedAttention(
            selector_config,
            dropout,
            softmax_scale=softmax_scale,
            offset_rule=offset_rule,
            tail=tail,
            segment_shift=segment_shift,
            impl=impl,
            selector=selector,
        )

    def get_current_configuration(self) -> Configuration:
        """The segment lengths and dilation rates of the last call.

        Raises:
            RuntimeError: the module was not called yet.
        """
        return self.attention.get_current_configuration()
