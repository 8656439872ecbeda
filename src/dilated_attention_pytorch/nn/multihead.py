"""Multi-head attention modules under a pattern: drop-ins for ``torch.nn.MultiheadAttention(batch_first=True)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.legacy.keywords import answers_old_keywords
from dilated_attention_pytorch.ops import Scores
from dilated_attention_pytorch.ops.validation import check_positive, check_size, check_switch
from dilated_attention_pytorch.patterns import DilatedPattern, Pattern
from dilated_attention_pytorch.patterns.dilated import OffsetRule, Tail

from .dilated_attention import DilatedAttention, PatternAttention
from .linear import project
from .masks import check_causal, check_no_weights, ignored_keys


class MultiheadPatternAttention(nn.Module):
    """Multi-head attention under a pattern: ``out_proj(norm(attention(q_proj(query), k_proj(key), v_proj(value))))``.

    ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` are ``nn.Linear`` modules. A state dict of
    ``torch.nn.MultiheadAttention`` loads as it is: ``in_proj_weight`` and ``in_proj_bias`` hold the rows of query, key
    and value one after the other, ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight`` those of each. With
    ``num_kv_heads`` the key and value parts are narrower.

    Args:
        embed_dim: width E of query and output; ``num_heads`` divides it.
        num_heads: number of query heads H.
        pattern: attention pattern, see :func:`attend`.
        dropout: probability of dropping a merged attention probability, in training only.
        bias: whether the projections have biases.
        kdim, vdim: widths of key and value; None = E.
        num_kv_heads: number of key/value heads G, which divides H (grouped-query attention); None = H.
        sub_layernorm: a LayerNorm over the concatenated heads before the output projection (MAGNETO, arXiv
            2210.06423, section 2.1).
        layernorm_eps: epsilon of that LayerNorm.
        gain: Xavier gain of the value and output projections; MAGNETO's ``sqrt(log(2 L))`` for a decoder of L layers.
        softmax_scale: scale of the scores; None = ``1 / sqrt(E / H)``.
        impl: see :func:`attend`.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: sizes do not divide, or an argument is of the wrong type or out of range.

    >>> attention = MultiheadPatternAttention(256, 8, local_window(127) + strided_blocks(8))
    >>> x = torch.randn(2, 1000, 256)
    >>> out, weights = attention(x, x, x, is_causal=True)
    >>> out.shape, weights
    (torch.Size([2, 1000, 256]), None)
    """

    # Attributes that nn.TransformerEncoderLayer reads. The last two disable its fused fast path, which would compute
    # dense attention directly from the parameters.
    batch_first = True
    _qkv_same_embed_dim = False
    in_proj_bias = None

    @answers_old_keywords
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: Pattern,
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
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, number in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            check_size(name, number)
        for name, width in (("kdim", kdim), ("vdim", vdim)):
            if width is not None:
                check_size(name, width)
        for name, switch in (("bias", bias), ("sub_layernorm", sub_layernorm)):
            check_switch(name, switch)
        check_positive("layernorm_eps", layernorm_eps)
        check_positive("gain", gain)
        if embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim: got {num_heads} heads and embed_dim {embed_dim}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads: got {num_kv_heads} of {num_heads} heads")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.gain = gain
        self.attention = PatternAttention(pattern, dropout, softmax_scale=softmax_scale, impl=impl)
        kv_width = num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(self.kdim, kv_width, bias=bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(self.vdim, kv_width, bias=bias, device=device, dtype=dtype)
        self.inner_layernorm = (
            nn.LayerNorm(embed_dim, eps=layernorm_eps, device=device, dtype=dtype) if sub_layernorm else None
        )
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform projections, value and output with MAGNETO's gain; biases zero."""
        projections = (self.q_proj, self.k_proj, self.v_proj, self.out_proj)
        for projection, gain in zip(projections, (1.0, 1.0, self.gain, self.gain), strict=True):
            nn.init.xavier_uniform_(projection.weight, gain=gain)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.inner_layernorm is not None:
            self.inner_layernorm.reset_parameters()

    @property
    def pattern(self) -> Pattern:
        """The attention pattern."""
        return self.attention.pattern

    def _project_in(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query heads ``[B, N, H, D]`` and key and value heads ``[B, M, G, D]``."""
        # -1, since under tensor parallelism the projections hold only this rank's heads.
        q, k, v = (
            project(projection, x).unflatten(-1, (-1, self.head_dim))
            for projection, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        return q, k, v

    def _project_out(self, heads: Tensor, gates: Tensor | None = None) -> Tensor:
        """Concatenate heads ``[B, N, H, D]``, normalise them if ``sub_layernorm``, project: ``[B, N, E]``.

        ``gates [B, N, H]`` multiply the heads before the projection.
        """
        joined = heads.flatten(-2)
        if self.inner_layernorm is not None:
            joined = self.inner_layernorm(joined)
        if gates is not None:
            joined = (joined.unflatten(-1, (-1, self.head_dim)) * gates.unsqueeze(-1)).flatten(-2)
        return project(self.out_proj, joined)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # State dicts of nn.MultiheadAttention, and of this module before its projections were modules.
        projections = {"q_proj": self.q_proj, "k_proj": self.k_proj, "v_proj": self.v_proj}
        for name in projections:
            if f"{prefix}{name}_weight" in state_dict:
                state_dict[f"{prefix}{name}.weight"] = state_dict.pop(f"{prefix}{name}_weight")
        widths = [projection.out_features for projection in projections.values()]
        for kind in ("weight", "bias"):
            fused = state_dict.pop(f"{prefix}in_proj_{kind}", None)
            if fused is None:
                continue
            if fused.shape[0] != sum(widths):
                error_msgs.append(
                    f"size mismatch for {prefix}in_proj_{kind}: its {fused.shape[0]} rows must be the {widths} of "
                    "query, key and value"
                )
                continue
            # Copies: under assign=True the parts would share memory, which safetensors does not save.
            for name, part in zip(projections, fused.split(widths), strict=True):
                state_dict[f"{prefix}{name}.{kind}"] = part.clone()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
        scores: Scores | None = None,
    ) -> tuple[Tensor, None]:
        """Attend as ``torch.nn.MultiheadAttention`` does, batch first.

        Args:
            query: ``[B, N, E]``.
            key, value: ``[B, M, kdim]`` and ``[B, M, vdim]``.
            key_padding_mask: ``[B, M]``, bool with True = ignore, or float with -inf = ignore and 0 elsewhere.
            need_weights: must be False: the N x M weights are never formed.
            attn_mask: None or the square causal mask, which is equivalent to ``is_causal=True``.
            average_attn_weights: ignored, as PyTorch does when weights are not requested.
            is_causal: a query attends only to keys at or before its own position.
            cu_seqlens: int32 boundaries of packed documents, see :func:`attend`.
            scores: a cap, biases and sinks, see :class:`~dilated_attention_pytorch.ops.Scores`.

        Returns:
            ``(out [B, N, E], None)``.

        Raises:
            NotImplementedError: ``need_weights`` or another mask was requested.
            TypeError, ValueError: wrong dimensions, dtypes or shapes.
        """
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if not isinstance(x, Tensor):
                raise TypeError(
                    f"{name} must be a tensor [batch, sequence, {width}], got {x!r}; self-attention is "
                    "attention(x, x, x)"
                )
            if x.dim() != 3 or x.shape[-1] != width:
                raise ValueError(f"{name} must be [batch, sequence, {width}], got shape {tuple(x.shape)}")
        check_no_weights(need_weights)
        if attn_mask is not None:
            check_causal(attn_mask, query.shape[1], key.shape[1])
            is_causal = True
        q, k, v = self._project_in(query, key, value)
        heads = self.attention(
            q,
            k,
            v,
            is_causal,
            cu_seqlens=cu_seqlens,
            key_padding_mask=ignored_keys(key_padding_mask),
            scores=scores,
            heads_first=False,
        )
        return self._project_out(heads), None


class MultiheadDilatedAttention(MultiheadPatternAttention):
    """Multi-head dilated attention: :class:`MultiheadPatternAttention` under a :class:`DilatedPattern`.

    Args:
        embed_dim: width E of query and output; ``num_heads`` divides it.
        num_heads: number of query heads H.
        segment_lengths, dilation_rates: the pattern, see :class:`DilatedPattern`.
        offset_rule, tail, segment_shift: see :class:`DilatedPattern`.
        dropout, bias, kdim, vdim, num_kv_heads, sub_layernorm, layernorm_eps, gain, softmax_scale, impl, device, dtype:
            as in :class:`MultiheadPatternAttention`.

    Raises:
        TypeError, ValueError: sizes do not divide, or a pattern argument is of the wrong type or out of range.

    >>> attention = MultiheadDilatedAttention(256, 8, [128, 512], [1, 4])
    >>> x = torch.randn(2, 1000, 256)
    >>> out, weights = attention(x, x, x, is_causal=True)
    >>> out.shape, weights
    (torch.Size([2, 1000, 256]), None)
    """

    attention: DilatedAttention

    @answers_old_keywords
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        attention = DilatedAttention(
            segment_lengths,
            dilation_rates,
            dropout,
            softmax_scale=softmax_scale,
            offset_rule=offset_rule,
            tail=tail,
            segment_shift=segment_shift,
            impl=impl,
        )
        super().__init__(
            embed_dim,
            num_heads,
            attention.pattern,
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
        self.attention = attention

    @property
    def pattern(self) -> DilatedPattern:
        """The attention pattern."""
        return self.attention.pattern

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """The segment lengths w_i, in positions."""
        return self.attention.segment_lengths

    @property
    def dilation_rates(self) -> tuple[int, ...]:
        """The dilation rates r_i."""
        return self.attention.dilation_rates
