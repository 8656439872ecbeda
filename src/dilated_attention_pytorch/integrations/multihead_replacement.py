"""A replacement for ``nn.MultiheadAttention`` that shares its parameters and attends under a pattern."""

from __future__ import annotations

from torch import Tensor, fx, nn
from torch.nn import functional

from dilated_attention_pytorch.kernels.select import Impl
from dilated_attention_pytorch.nn import PatternAttention
from dilated_attention_pytorch.nn.masks import check_causal, check_no_weights, ignored_keys
from dilated_attention_pytorch.patterns import Pattern

from .parts import NotReplaceable, as_leaf, check_parts

_IN_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")


class MultiheadReplacement(nn.Module):
    """``nn.MultiheadAttention``'s projections around one softmax over ``s + log c``, with c the pattern's counts.

    It holds the same parameter objects under the same names and in the same order, so state dicts are interchangeable
    and existing optimizers stay valid. :func:`replace_attention` installs it in a model.

    Args:
        replaced: the layer whose parameters, sizes, dropout and ``batch_first`` it takes over.
        pattern: attention pattern, see :func:`attend`.
        is_causal: make every call causal, whatever its own arguments.
        separate_keys: allow query and key to be different tensors of equal length, with row t of both at position t.
            Otherwise such a call raises, as it may be cross-attention, for which positions are not defined.
        impl: see :func:`attend`.

    Raises:
        NotReplaceable: a ValueError: the layer has features that would be lost: ``bias_k``, ``add_zero_attn``, a
            custom forward, parametrizations, hooks; or a ``kdim`` that needs ``separate_keys=True``.
        TypeError: ``replaced`` is not an ``nn.MultiheadAttention`` or ``pattern`` not a :class:`Pattern`.

    >>> from dilated_attention_pytorch.integrations import MultiheadReplacement
    >>> dense = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    >>> attention = MultiheadReplacement(dense, DilatedPattern([16, 64], [1, 4]))
    >>> attention.in_proj_weight is dense.in_proj_weight
    True
    >>> x = torch.randn(2, 100, 64)
    >>> out, weights = attention(x, x, x)
    >>> out.shape, weights
    (torch.Size([2, 100, 64]), None)
    """

    in_proj_weight: Tensor | None
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    in_proj_bias: Tensor | None
    out_proj: nn.Linear

    # nn.TransformerEncoderLayer's fused fast path would compute dense attention directly from the parameters.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        replaced: nn.MultiheadAttention,
        pattern: Pattern,
        *,
        is_causal: bool = False,
        separate_keys: bool = False,
        impl: Impl = "auto",
    ) -> None:
        if not isinstance(replaced, nn.MultiheadAttention):
            raise TypeError(f"replaced must be an nn.MultiheadAttention, got {type(replaced).__name__}")
        _check_replaceable(replaced, separate_keys)
        super().__init__()
        self.embed_dim, self.kdim, self.vdim = replaced.embed_dim, replaced.kdim, replaced.vdim
        self.num_heads, self.head_dim = replaced.num_heads, replaced.head_dim
        self.attention = PatternAttention(pattern, replaced.dropout, impl=impl)
        for name in _IN_PROJECTIONS:
            self.register_parameter(name, getattr(replaced, name))
        self.out_proj = replaced.out_proj
        self.batch_first = replaced.batch_first
        self.is_causal = is_causal
        self.separate_keys = separate_keys
        self.training = self.attention.training = replaced.training

    @property
    def pattern(self) -> Pattern:
        """The attention pattern."""
        return self.attention.pattern

    @property
    def dropout(self) -> float:
        """Attention dropout probability in training, under ``nn.MultiheadAttention``'s name."""
        return self.attention.dropout

    @dropout.setter
    def dropout(self, probability: float) -> None:
        self.attention.dropout = probability

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
    ) -> tuple[Tensor, None]:
        """Attend as ``torch.nn.MultiheadAttention`` does, with ``need_weights=False`` as the default.

        Args:
            query: ``[B, N, E]``, ``[N, B, E]`` without ``batch_first``, or ``[N, E]``.
            key, value: the same with kdim and vdim; ``key`` is ``query`` itself unless ``separate_keys``.
            key_padding_mask: ``[B, N]`` or ``[N]``, bool with True = ignore, or float with -inf = ignore, 0 elsewhere.
            need_weights: must be False: the N x N weights are never formed.
            attn_mask: None or the causal mask ``[N, N]``, which is equivalent to ``is_causal=True``.
            average_attn_weights: ignored, as PyTorch does when weights are not requested.
            is_causal: a query attends only to keys at or before its own position. Needs no mask.
            cu_seqlens: int32 boundaries of packed documents, see :func:`attend`.

        Returns:
            ``(out, None)``, ``out`` in the layout of ``query``. A query without keys gives the bias of
            ``out_proj``, not NaN.

        Raises:
            NotImplementedError: weights, another mask, nested tensors or cross-attention were requested.
            TypeError, ValueError: wrong dimensions, dtypes or shapes.
        """
        if isinstance(query, fx.Proxy):
            others = (key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return as_leaf(self, query, others, {"cu_seqlens": cu_seqlens})
        self._check_inputs(query, key, value)
        is_single = query.dim() == 2

        def with_batch_first(x: Tensor) -> Tensor:
            return x.unsqueeze(0) if is_single else x if self.batch_first else x.transpose(0, 1)

        # Keep identical tensors identical, so that one product projects all three.
        q = with_batch_first(query)
        k = q if key is query else with_batch_first(key)
        v = k if value is key else with_batch_first(value)
        if k.shape[1] != q.shape[1]:
            raise NotImplementedError(
                f"key must be as long as query, row t of both being position t: got {q.shape[1]} queries and "
                f"{k.shape[1]} keys, which is cross-attention; leave this layer out: let pattern be a function of the "
                "layer's name that returns None for it"
            )
        if is_single and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        check_no_weights(need_weights)
        if attn_mask is not None:
            check_causal(attn_mask, q.shape[1], k.shape[1])
            is_causal = True
        heads = self.attention(
            *self._project_in(q, k, v),
            self.is_causal or is_causal,
            cu_seqlens=cu_seqlens,
            key_padding_mask=ignored_keys(key_padding_mask),
            heads_first=False,
        )
        out = self.out_proj(heads.flatten(-2))
        return (out.squeeze(0) if is_single else out if self.batch_first else out.transpose(0, 1)), None

    def _project_in(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads ``[B, N, H, D]`` of each; one matrix product where query, key and value are the same tensor."""
        heads = (self.num_heads, self.head_dim)
        if query is key and key is value and self.in_proj_weight is not None:
            fused = functional.linear(query, self.in_proj_weight, self.in_proj_bias)
            q, k, v = (part.unflatten(-1, heads) for part in fused.chunk(3, dim=-1))
            return q, k, v
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is None
            else self.in_proj_weight.chunk(3)
        )
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            functional.linear(x, weight, bias).unflatten(-1, heads)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        return q, k, v

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        layout = "[batch, sequence, {}]" if self.batch_first else "[sequence, batch, {}]"
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if x.is_nested:
                raise NotImplementedError(
                    f"{name} must not be a nested tensor: pass padded rows with key_padding_mask; for an "
                    "nn.TransformerEncoder set use_nested_tensor = False, as replace_attention does"
                )
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != width:
                raise ValueError(
                    f"{name} must be {layout.format(width)}, or all three [sequence, width], got shape {tuple(x.shape)}"
                )
        if key is not query and not self.separate_keys:
            raise NotImplementedError(
                "key must be the same tensor as query: this may be cross-attention, where positions of query and key "
                "do not correspond; leave this layer out (let pattern be a function of the layer's name that returns "
                "None for it), or pass separate_keys=True to replace_attention if row t of both is position t"
            )

    def extra_repr(self) -> str:
        return f"batch_first={self.batch_first}, is_causal={self.is_causal}, separate_keys={self.separate_keys}"


def _check_replaceable(layer: nn.MultiheadAttention, separate_keys: bool) -> None:
    if type(layer).forward is not nn.MultiheadAttention.forward:
        raise NotReplaceable("it is a subclass of nn.MultiheadAttention with its own forward")
    if layer.bias_k is not None or layer.bias_v is not None:
        raise NotReplaceable("add_bias_kv gives it a key without a position")
    if layer.add_zero_attn:
        raise NotReplaceable("add_zero_attn gives it a key without a position")
    check_parts(layer, {"out_proj"}, set(_IN_PROJECTIONS))
    if not isinstance(layer.out_proj, nn.Linear):
        raise NotReplaceable(f"its out_proj is a {type(layer.out_proj).__name__}, not an nn.Linear")
    if not 0.0 <= layer.dropout < 1.0:
        raise NotReplaceable(f"its dropout is {layer.dropout}, which leaves nothing")
    if layer.kdim != layer.embed_dim and not separate_keys:
        raise NotReplaceable(
            f"its kdim {layer.kdim} is not its embed_dim {layer.embed_dim}, so its keys are another tensor than its "
            "queries: most likely cross-attention; separate_keys=True replaces it"
        )
